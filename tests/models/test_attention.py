"""Attention: the fused kernel, interpreted, against XLA's; causality, segments, grouped heads; what B keeps of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.models import attention, fused_attention


def arrays(heads=4, kv_heads=4, length=32, dim=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (2, length, count, dim), dtype)
        for key, count in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    ]


def xla(*inputs, segment_ids=None):
    return attention.causal_attention(*inputs, segment_ids=segment_ids, implementation="xla")


def fused(query, key, value, segment_ids=None):
    out = fused_attention.fused_attention(query, key, value, segment_ids, True, True)
    return out.reshape(*query.shape[:2], -1)


@pytest.mark.parametrize("segments", [False, True])
def test_the_fused_kernel_computes_what_xla_does(segments):
    inputs = arrays()
    ids = jnp.repeat(jnp.array([[0, 1], [3, 3]]), 16, axis=1) if segments else None
    cotangent = jax.random.normal(jax.random.key(9), (2, 32, 64))
    ours, our_vjp = jax.vjp(lambda *a: fused(*a, segment_ids=ids), *inputs)
    theirs, their_vjp = jax.vjp(lambda *a: xla(*a, segment_ids=ids), *inputs)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    for mine, other in zip(our_vjp(cotangent), their_vjp(cotangent), strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "dim", "dtype", "tolerance"), [(48, 24, jnp.float32, 2e-6), (32, 16, jnp.bfloat16, 2e-2)]
)
def test_grouped_heads_through_the_fused_kernel(monkeypatch, length, dim, dtype, tolerance):
    """Lengths and widths that are no powers of two, too; both against XLA's attention in float32."""
    kernel = fused_attention.fused_attention
    monkeypatch.setattr(attention, "fused_attention", lambda *a: kernel(*a[:-1], True))
    inputs = arrays(kv_heads=2, length=length, dim=dim, dtype=dtype)
    cotangent = jax.random.normal(jax.random.key(9), (2, length, 4 * dim), dtype)

    def run(implementation, dtype):
        attend = lambda *a: attention.causal_attention(*a, implementation=implementation)
        out, vjp = jax.vjp(attend, *(array.astype(dtype) for array in inputs))
        return out, *vjp(cotangent.astype(dtype))

    for mine, other in zip(run("fused", dtype), run("xla", jnp.float32), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, dtype)
        limit = tolerance * float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(mine.astype(jnp.float32), other, rtol=0, atol=limit)


def test_lengths_that_the_kernel_cannot_tile_are_refused():
    with pytest.raises(ValueError, match="fused attention takes lengths that 16 divides, not 40"):
        fused(*arrays(length=40))


def test_a_token_sees_none_behind_it():
    query, key, value = arrays()
    before = xla(query, key, value)
    after = xla(query, key.at[:, 20:].add(1), value.at[:, 20:].add(1))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.allclose(before[:, 20:], after[:, 20:])


def test_segments_are_separate():
    query, key, value = arrays(length=8)
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    together = xla(query, key, value, segment_ids=ids)
    for span in (slice(0, 3), slice(3, 8)):
        alone = xla(*(array[:, span] for array in (query, key, value)))
        np.testing.assert_allclose(together[:, span], alone, atol=1e-6)


def test_grouped_heads_are_shared_heads():
    query, key, value = arrays(heads=4, kv_heads=2)
    repeated = xla(query, jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2))
    np.testing.assert_allclose(xla(query, key, value), repeated, atol=1e-6)


def test_one_projection_is_cut_into_heads():
    qkv = jnp.arange(2 * 3 * 8 * 5).reshape(2, 3, 40)
    query, key, value = attention.split_heads(qkv, 4, 2)
    assert (query.shape, key.shape, value.shape) == ((2, 3, 4, 5), (2, 3, 2, 5), (2, 3, 2, 5))
    np.testing.assert_array_equal(jnp.concatenate([query, key, value], axis=2).reshape(qkv.shape), qkv)


def test_backward_keeps_output_and_log_sum_exp_once_and_runs_no_forward_kernel():
    """DESIGN trap 15, read from what `jax.vjp` keeps under a policy that saves the names."""
    policy = jax.checkpoint_policies.save_only_these_names("attn_out", "attn_lse")
    inputs = arrays()
    _, vjp = jax.vjp(jax.checkpoint(fused, policy=policy), *inputs)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(vjp))
    assert shapes == sorted([*(array.shape for array in inputs), (2, 32, 4, 16), (2, 4, 32)])
    text = str(jax.make_jaxpr(vjp)(jnp.ones((2, 32, 64))))
    assert "mha_backward" in text
    assert "mha_forward" not in text
    bare = jax.checkpoint(fused, policy=jax.checkpoint_policies.save_only_these_names("nothing"))
    assert "mha_forward" in str(jax.make_jaxpr(jax.vjp(bare, *inputs)[1])(jnp.ones((2, 32, 64))))
