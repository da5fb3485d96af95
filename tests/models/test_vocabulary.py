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
from pipejax.models import gpt, llama, vocabulary
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


def over_devices(function, devices, vocab, out_specs, fill=0):
    """Runs (this device's rows of a table, *others) on all devices of a mesh, the table padded to equal shares."""

    def run(table, *others):
        padded = jnp.pad(table, [(0, -vocab % devices), (0, 0)], constant_values=fill)
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


def loss_and_gradients(vocab, devices, x, table, batch, fill=0):
    """(loss, gradients of x and of all rows) with the table cut over devices."""

    def device(rows, x, batch):
        def run(x, rows):
            return token_loss(x, rows, batch, vocab_size=vocab, axis="pipe")[0]

        loss, (dx, drows) = jax.value_and_grad(run, (0, 1))(x, rows)
        return (loss, dx), drows

    (loss, dx), dtable = over_devices(device, devices, vocab, (PartitionSpec(), ROWS), fill)(table, x, batch)
    return loss, (dx, dtable)


def test_what_stands_in_rows_that_are_no_tokens_does_not_count():
    """NaN, as such rows may hold while an optimizer is at fault, and targets without weight that are their numbers."""
    table, x, batch = make(13)
    batch["targets"] = jnp.where(batch["weights"] == 0, 13 + jnp.arange(SHAPE[1]) % 3, batch["targets"])
    batch["targets"] = batch["targets"].at[0, 0].set(-1)
    batch["weights"] = batch["weights"].at[0, 0].set(0)
    expected, wanted = jax.value_and_grad(plain_loss, (0, 1))(
        x, table, {**batch, "targets": jnp.where(batch["weights"] == 0, 0, batch["targets"])}
    )
    loss, (dx, dtable) = loss_and_gradients(13, 8, x, table, batch, fill=float("nan"))
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    np.testing.assert_allclose(dx, wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dtable[:13], wanted[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(dtable[13:], 0)


@pytest.mark.parametrize("devices", [None, 2, 8])
def test_lookup_of_what_is_no_token_gives_zeros_and_no_gradient(devices):
    table, tokens = make(13)[0], jnp.array([[-1, 13, 14, 15, 400, 3]])

    def run(rows, tokens):
        found, vjp = jax.vjp(lambda rows: lookup(rows, tokens, 13, jnp.float32, devices and "pipe"), rows)
        return found, vjp(jnp.ones_like(found))[0]

    mapped = run if devices is None else over_devices(run, devices, 13, (PartitionSpec(), ROWS), float("nan"))
    found, dtable = mapped(table, tokens)
    np.testing.assert_array_equal(found[0], jnp.zeros((6, HIDDEN)).at[5].set(table[3]))
    np.testing.assert_array_equal(dtable, jnp.zeros_like(dtable).at[3].set(1))


def test_the_cotangent_is_not_rounded():
    """In bf16 1 / 7 is 0.998 / 7, by which every gradient of a mean loss would be too small."""
    table, x, batch = make(13, jnp.bfloat16)

    def gradient(scale):
        return jax.grad(lambda x: token_loss(x, table, batch, vocab_size=13, axis=None)[0] * scale)(x)

    expected = gradient(1).astype(jnp.float32) / 7
    np.testing.assert_array_equal(gradient(1 / 7), expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_blocks_over_devices(devices, monkeypatch):
    """22 tokens in blocks of nearly equal size, the last one filled up."""
    monkeypatch.setattr(vocabulary, "BLOCK_LOGITS", 5 * -(-13 // devices))
    table, x, batch = make(13)
    loss, (dx, dtable) = loss_and_gradients(13, devices, x, table, batch)
    expected, wanted = jax.value_and_grad(plain_loss, (0, 1))(x, table, batch)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    np.testing.assert_allclose(dx, wanted[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dtable[:13], wanted[1], rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("devices", [None, 2])
def test_no_array_holds_all_logits(devices, monkeypatch):
    """Neither the loss nor its gradients keep more than a block of tokens by a device's share of the vocabulary."""
    vocab, tokens = 127, 4096
    rows = -(-vocab // (devices or 1))
    monkeypatch.setattr(vocabulary, "BLOCK_LOGITS", 256 * rows)
    table, x = jnp.zeros((vocab, 8)), jnp.zeros((1, tokens, 8))
    batch = {"targets": jnp.zeros((1, tokens), jnp.int32)}
    run = jax.value_and_grad(lambda x, table: token_loss(x, table, batch, vocab_size=vocab, axis=None)[0], (0, 1))
    if devices:
        run = functools.partial(loss_and_gradients, vocab, devices, batch=batch)
    shapes = {
        var.aval.shape for eqn in jaxprs.all_equations(jax.make_jaxpr(run)(x, table).jaxpr) for var in eqn.outvars
    }
    assert (256, rows) in shapes
    assert all(math.prod(shape) <= 256 * rows for shape in shapes if shape[-1:] in {(rows,), (vocab,)})


def test_three_products_in_all():
    """Logits, and the gradients of x and of the table: none is computed twice."""
    table, x, batch = make(13)
    run = jax.value_and_grad(lambda x, table: token_loss(x, table, batch, vocab_size=13, axis=None)[0], (0, 1))
    names = [eqn.primitive.name for eqn in jaxprs.all_equations(jax.make_jaxpr(run)(x, table).jaxpr)]
    assert names.count("dot_general") == 3


SIZES = {"vocab_size": 13, "hidden_size": HIDDEN, "num_heads": 2}
CONFIGS = {
    "gpt": functools.partial(gpt.Config, **SIZES, num_layers=1, max_length=SHAPE[1], dropout=0.3),
    "llama": functools.partial(llama.Config, **SIZES, num_kv_heads=1, mlp_size=16),
}


def model_part(model, role, dtype):
    module, config = {"gpt": gpt, "llama": llama}[model], CONFIGS[model](dtype=dtype)
    return pj.as_part(functools.partial(getattr(module, role), config), role.lower())


def apart(function, devices, params):
    """Runs (a part's parameters) -> (result, their gradients) on all devices; all results, and gradients of all."""

    def device(rows, others):
        result, (drows, dothers) = function({**others, "table": rows})
        return each((result, dothers)), drows

    def function(params, whole=function):
        result, grads = whole(params)
        return result, (grads.pop("table"), grads)

    others = {name: leaf for name, leaf in params.items() if name != "table"}
    return over_devices(device, devices, 13, (ROWS, ROWS))(params["table"], others)


def assert_each_close(actual, expected, dtype):
    """Every device's copy of a tree against the whole; the tolerance is of the leaf's largest value."""
    for mine, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        mine, wanted = np.asarray(mine, np.float32), np.asarray(wanted, np.float32)
        limit = (1e-5 if dtype == jnp.float32 else 2e-2) * max(np.abs(wanted).max(), 1e-3)
        assert mine.shape[1:] == wanted.shape
        np.testing.assert_array_less(np.abs(mine - wanted), limit)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("model", CONFIGS)
def test_heads_over_devices(model, devices, dtype):
    """Loss, and gradients of x, norm and table, against the whole head and against its logits with optax."""
    head = model_part(model, "Head", dtype)
    params, (_, x, batch) = head.init(jax.random.key(1)), make(13, dtype)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(2), leaf.shape), params)

    def with_gradients(function):
        return lambda params: (lambda out: ((out[0], out[1][1]), out[1][0]))(
            jax.value_and_grad(function, (0, 1))(params, x)
        )

    def plain(params, x):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            head.apply(params, None, x, method="logits"), batch["targets"]
        )
        return jnp.sum(losses * batch["weights"])

    cut = with_gradients(lambda params, x: head.apply(params, None, x, batch, axis="pipe")[0])
    (result, dothers), dtable = apart(cut, devices, params)
    for whole in (lambda params, x: head.apply(params, None, x, batch)[0], plain):
        wanted, dparams = with_gradients(whole)(params)
        assert_each_close(dtable[None, :13], dparams.pop("table"), dtype)
        assert_each_close((result, dothers), (wanted, dparams), dtype)
    np.testing.assert_array_equal(dtable[13:], 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("model", CONFIGS)
def test_embeddings_over_devices(model, devices, dtype):
    """With dropout: its masks are the same on all devices."""
    embed = model_part(model, "Embed", dtype)
    params, (_, dx, batch) = embed.init(jax.random.key(1)), make(13, dtype)

    def run(params, **axis):
        x, vjp = jax.vjp(lambda params: embed.apply(params, jax.random.key(5), batch, **axis), params)
        return x, vjp(dx)[0]

    (x, dothers), dtable = apart(functools.partial(run, axis="pipe"), devices, params)
    wanted, dparams = jax.jit(run)(params)
    assert x.dtype == wanted.dtype == dtype
    np.testing.assert_array_equal(x == 0, np.broadcast_to(wanted == 0, x.shape))
    assert_each_close(x, wanted, dtype)
    assert_each_close(dtable[None, :13], dparams.pop("table"), dtype)
    assert_each_close(dothers, dparams, dtype)
    np.testing.assert_array_equal(dtable[13:], 0)


def test_modules_say_what_is_split():
    config = gpt.Config(vocab_size=13, hidden_size=8, num_heads=2, num_layers=1, max_length=11)
    head = pj.as_part(functools.partial(gpt.Head, config), "head")
    assert head.split == pj.as_part(functools.partial(gpt.Embed, config), "embed").split == ("table",)
    assert pj.as_part(functools.partial(gpt.Block, config), "block").split == ()
