"""GPT and Llama: what they compute, and what their blocks keep for the backward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipejax as pj
from pipejax.models import gpt, llama
from pipejax.models.llama import rotate
from pipejax.offload import activation_names
from pipejax.runtime.residuals import analyse

H, HEADS, LENGTH, VOCAB = 64, 4, 16, 32
CONFIGS = {
    "gpt": (gpt, gpt.Config(vocab_size=VOCAB, hidden_size=H, num_heads=HEADS, num_layers=2, max_length=LENGTH)),
    "llama": (llama, llama.Config(vocab_size=VOCAB, hidden_size=H, num_heads=HEADS, num_kv_heads=2, mlp_size=96)),
}
BATCH = {
    "tokens": jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCAB),
    "targets": jax.random.randint(jax.random.key(2), (2, LENGTH), 0, VOCAB),
}


def parts(model, **changes):
    module, config = CONFIGS[model]
    config = dataclasses.replace(config, **changes)
    return [
        pj.as_part(functools.partial(getattr(module, role), config), role.lower())
        for role in ("Embed", "Block", "Head")
    ]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("model", CONFIGS)
def test_shapes_and_dtypes(model, dtype):
    embed, block, head = parts(model, dtype=dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    params = [part.init(key) for part, key in zip((embed, block, head), keys, strict=True)]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    x = embed.apply(params[0], None, BATCH)
    y = block.apply(params[1], None, x, BATCH)
    assert (x.shape, x.dtype) == (y.shape, y.dtype) == ((2, LENGTH, H), dtype)
    loss, weight = head.apply(params[2], None, y, BATCH)
    assert (loss.dtype, loss.shape, float(weight)) == (jnp.float32, (), 2 * LENGTH)
    logits = head.apply(params[2], None, y, method="logits")
    assert (logits.shape, logits.dtype) == ((2, LENGTH, VOCAB), jnp.float32)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["targets"])
    np.testing.assert_allclose(float(loss), float(expected.sum()), rtol=1e-6)


@pytest.mark.parametrize("model", CONFIGS)
def test_blocks_are_causal_and_segments_separate(model):
    _, block, _ = parts(model)
    params = block.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(3), (2, LENGTH, H))
    changed = x.at[:, 9:].add(1)
    apply = jax.jit(lambda x, batch: block.apply(params, None, x, batch))
    np.testing.assert_array_equal(apply(x, BATCH)[:, :9], apply(changed, BATCH)[:, :9])
    split = {**BATCH, "segment_ids": jnp.repeat(jnp.array([[0, 1]] * 2), 8, axis=1)}
    before, after = (apply(value, split) for value in (x, x.at[:, :8].add(1)))
    np.testing.assert_array_equal(before[:, 8:], after[:, 8:])


@pytest.mark.parametrize(("model", "bytes_per_unit"), [("gpt", 2 + 6 + 2 + 2 + 8), ("llama", 2 + 4 + 2 + 2 + 6)])
def test_a_block_keeps_its_named_activations_and_no_more(model, bytes_per_unit):
    """GPT: 20 bytes for each token and hidden unit at bf16; all that B could use would be 34 (paper, section 5)."""
    _, block, _ = parts(model, dtype=jnp.bfloat16)
    params = block.init(jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, LENGTH, H), jnp.bfloat16)

    def named(params, x, batch, key):
        return block.apply(params, key, jax.ad_checkpoint.checkpoint_name(x, "block_input"), batch), jnp.float32(0)

    names = activation_names(named, params, x, BATCH, None)
    assert names == ("attn_out", "block_input", "mlp_up", "qkv", "residual")
    residuals = analyse(named, pj.Offload.full().fates(names), params, x, BATCH, None)
    assert all(residuals.offloaded)
    assert sum(struct.size * struct.dtype.itemsize for struct in residuals.structs) == bytes_per_unit * 2 * LENGTH * H


@pytest.mark.parametrize(("model", "bytes_per_unit"), [("gpt", 2 + 4 + 2 + 2 + 8), ("llama", 2 + 4 + 2 + 2 + 6)])
def test_the_fused_kernel_adds_its_log_sum_exp_and_no_repeated_heads(model, bytes_per_unit):
    """Two of four heads of keys and values are kept once, inside qkv, though the kernel repeats them (trap 15)."""
    _, block, _ = parts(model, dtype=jnp.bfloat16, attention="fused", num_kv_heads=2)
    x = jax.ShapeDtypeStruct((2, LENGTH, H), jnp.bfloat16)

    def named(params, x, batch, key):
        return block.apply(params, key, jax.ad_checkpoint.checkpoint_name(x, "block_input"), batch), jnp.float32(0)

    params = jax.eval_shape(block.init, jax.random.key(0))
    fates = pj.Offload.none().fates(("attn_lse", "attn_out", "block_input", "mlp_up", "qkv", "residual"))
    structs = analyse(named, fates, params, x, BATCH, None).structs
    log_sum_exp = 4 * 2 * HEADS * LENGTH
    held = sum(struct.size * struct.dtype.itemsize for struct in structs)
    assert held == bytes_per_unit * 2 * LENGTH * H + log_sum_exp


def test_dropout_adds_nothing_to_what_a_block_keeps():
    _, block, _ = parts("gpt", dropout=0.5)
    params = block.init(jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, LENGTH, H), jnp.float32)

    def named(params, x, batch, key):
        return block.apply(params, key, jax.ad_checkpoint.checkpoint_name(x, "block_input"), batch), jnp.float32(0)

    fates = pj.Offload.full().fates(("attn_out", "block_input", "mlp_up", "qkv", "residual"))
    with_key, without = (analyse(named, fates, params, x, BATCH, key) for key in (jax.random.key(4), None))
    assert with_key.structs == without.structs


def test_rotation_turns_positions_into_distances():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 8, 1, 16))

    def scores(shift):
        positions = jnp.arange(8)[None] + shift
        return jnp.einsum("bqhd,bkhd->bqk", rotate(query, positions, 1e4), rotate(key, positions, 1e4))

    np.testing.assert_allclose(scores(0), scores(37), atol=1e-4)
    assert not np.allclose(scores(0), jnp.einsum("bqhd,bkhd->bqk", query, key))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_heads=3 does not divide hidden_size=64"):
        parts("gpt", num_heads=3)
    with pytest.raises(ValueError, match="num_kv_heads=3 must divide num_heads"):
        parts("llama", num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim is 1; rotary positions need an even one"):
        parts("llama", num_heads=64)
