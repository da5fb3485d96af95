"""Lookup and loss, whole and cut by vocabulary over devices, against JAX's own derivative of the plain formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import pipejax as pj
from pipejax import jaxprs
from pipejax.models import gpt, vocabulary
from pipejax.models.vocabulary import lookup, token_loss

HIDDEN, SHAPE = 16, (2, 11)
KEYS = jax.random.split(jax.random.key(0), 6)
ROWS = PartitionSpec("pipe")


def make(vocab, dtype=jnp.float32):
    table = jax.random.normal(KEYS[0], (vocab, HIDDEN))
    x = jax.random.normal(KEYS[1], (*SHAPE, HIDDEN)).astype(dtype)
    batch = {
        "tokens": jax.random.randint(KEYS[2], SHAPE, 0, vocab),
        "targets": jax.random.randint(KEYS[3], SHAPE, 0, vocab),
        "weights": jnp.where(jax.random.uniform(KEYS[5], SHAPE) > 0.3, jax.random.uniform(KEYS[4], SHAPE), 0),
    }
    return table, x, batch


def plain_loss(x, table, batch):
    logits = jnp.einsum("bsh,vh->bsv", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"])


def over_devices(function, devices, vocab, out_specs):
    """Runs (this device's rows of a table, *others) on all devices of a mesh, the table padded to equal shares."""

    def run(table, *others):
        padded = jnp.pad(table, [(0, -vocab % devices), (0, 0)])
        specs = (ROWS, *(PartitionSpec() for _ in others))
        mapped = jax.shard_map(
            function, mesh=pj.make_mesh(pipe=devices), in_specs=specs, out_specs=out_specs, check_vma=False
        )
        return mapped(padded, *others)

    return jax.jit(run)


def each(value):
    """A replicated result as every device has it."""
    return jax.tree.map(lambda leaf: leaf[None], value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("devices", "vocab"), [(1, 13), (2, 13), (3, 21), (8, 37), (8, 3)])
def test_loss_over_devices(devices, vocab, dtype):
    table, x, batch = make(vocab, dtype)

    def device(rows, x, batch):
        run = functools.partial(token_loss, batch=batch, vocab_size=vocab, axis="pipe")
        loss, vjp, weight = jax.vjp(lambda x, rows: run(x, rows), x, rows, has_aux=True)
        dx, drows = vjp(jnp.float32(3))
        return each((loss, weight, dx)), drows

    (loss, weight, dx), dtable = over_devices(device, devices, vocab, (ROWS, ROWS))(table, x, batch)
    expected, (wanted_dx, wanted_dtable) = jax.value_and_grad(plain_loss, (0, 1))(x, table, batch)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5 if dtype == jnp.float32 else 2e-2)
    np.testing.assert_allclose(loss, np.full(devices, expected), rtol=2e-6)
    np.testing.assert_allclose(weight, np.full(devices, batch["weights"].sum()), rtol=1e-6)
    atol = 1e-5 if dtype == jnp.float32 else 3e-2
    for mine in np.asarray(dx.astype(jnp.float32)):  # the whole of it, on each device
        close(mine, 3 * wanted_dx.astype(jnp.float32), atol=atol)
    close(dtable[:vocab], 3 * wanted_dtable, atol=atol)
    assert not np.asarray(dtable[vocab:]).any()


@pytest.mark.parametrize(("devices", "vocab"), [(1, 13), (2, 13), (3, 21), (8, 37), (8, 3)])
def test_lookup_over_devices(devices, vocab):
    table, x, batch = make(vocab)
    tokens = batch["tokens"]

    def device(rows, dx, tokens):
        found, vjp = jax.vjp(lambda rows: lookup(rows, tokens, vocab, jnp.float32, "pipe"), rows)
        return each(found), vjp(dx)[0]

    found, dtable = over_devices(device, devices, vocab, (ROWS, ROWS))(table, x, tokens)
    for mine in found:
        np.testing.assert_array_equal(mine, table[tokens])
    wanted = jax.grad(lambda table: jnp.sum(table[tokens] * x))(table)
    np.testing.assert_allclose(dtable[:vocab], wanted, rtol=1e-6, atol=1e-6)
    assert not np.asarray(dtable[vocab:]).any()


@pytest.mark.parametrize("block_logits", [13, 5 * 13, 2**26])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_whole_table_in_blocks_of_any_size(block_logits, dtype, monkeypatch):
    monkeypatch.setattr(vocabulary, "BLOCK_LOGITS", block_logits)
    table, x, batch = make(13, dtype)
    run = functools.partial(token_loss, batch=batch, vocab_size=13, axis=None)
    (loss, weight), grads = jax.value_and_grad(run, (0, 1), has_aux=True)(x, table)
    expected, wanted = jax.value_and_grad(plain_loss, (0, 1))(x, table, batch)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    np.testing.assert_allclose(run(x, table)[0], expected, rtol=2e-6)  # the loss alone takes another way
    np.testing.assert_allclose(weight, batch["weights"].sum(), rtol=1e-6)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for mine, theirs in zip(grads, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), rtol=tolerance, atol=tolerance)


def test_without_weights_every_token_counts_once():
    table, x, batch = make(13)
    del batch["weights"]
    loss, weight = token_loss(x, table, batch, vocab_size=13, axis=None)
    expected = plain_loss(x, table, {**batch, "weights": jnp.ones(SHAPE)})
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    assert float(weight) == math.prod(SHAPE)


def test_no_array_holds_all_logits(monkeypatch):
    """Neither the loss nor its gradients keep more than a block of tokens by vocabulary."""
    vocab, tokens = 64, 4096
    monkeypatch.setattr(vocabulary, "BLOCK_LOGITS", 256 * vocab)
    table, x = jnp.zeros((vocab, 8)), jnp.zeros((1, tokens, 8))
    batch = {"targets": jnp.zeros((1, tokens), jnp.int32)}
    run = jax.value_and_grad(lambda x, table: token_loss(x, table, batch, vocab_size=vocab, axis=None)[0], (0, 1))
    shapes = {
        var.aval.shape for eqn in jaxprs.all_equations(jax.make_jaxpr(run)(x, table).jaxpr) for var in eqn.outvars
    }
    logits = [shape for shape in shapes if shape[-1:] == (vocab,)]
    assert (256, vocab) in logits
    assert all(math.prod(shape) <= 256 * vocab for shape in logits)


def test_three_products_in_all():
    """Logits, and the gradients of x and of the table: none is computed twice."""
    table, x, batch = make(13)
    run = jax.value_and_grad(lambda x, table: token_loss(x, table, batch, vocab_size=13, axis=None)[0], (0, 1))
    names = [eqn.primitive.name for eqn in jaxprs.all_equations(jax.make_jaxpr(run)(x, table).jaxpr)]
    assert names.count("dot_general") == 3


def test_modules_say_what_is_split():
    config = gpt.Config(vocab_size=13, hidden_size=8, num_heads=2, num_layers=1, max_length=11)
    head = pj.as_part(functools.partial(gpt.Head, config), "head")
    assert head.split == pj.as_part(functools.partial(gpt.Embed, config), "embed").split == ("table",)
    assert pj.as_part(functools.partial(gpt.Block, config), "block").split == ()
