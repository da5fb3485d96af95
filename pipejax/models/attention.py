"""Causal self-attention with grouped key and value heads, by XLA or by a fused kernel."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pipejax.models.fused_attention import fused_attention

Implementation = Literal["auto", "xla", "fused"]


def split_heads(qkv: jax.Array, heads: int, kv_heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One projection's output as queries, keys and values.

    Args:
      qkv: [batch, length, (heads + 2 kv_heads) * head_dim].
      heads, kv_heads: how many of each.

    Returns:
      [batch, length, heads, head_dim], and twice [batch, length, kv_heads, head_dim].
    """
    head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    # Cut before the reshape: the other way round XLA holds one more array of qkv's size in the backward pass.
    parts = jnp.split(qkv, [heads * head_dim, (heads + kv_heads) * head_dim], axis=-1)
    query, key, value = (part.reshape(*qkv.shape[:2], -1, head_dim) for part in parts)
    return query, key, value


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Causal attention; its output is named `attn_out`, and the fused kernel's log-sum-exp `attn_lse`.

    Args:
      query: [batch, length, heads, head_dim].
      key, value: [batch, length, kv_heads, head_dim]; kv_heads divides heads.
      segment_ids: int32 [batch, length]: tokens attend within their segment.
      implementation: "xla" stores the scores, computes in float32 and runs anywhere; "fused" runs on GPUs; "auto" is
        "fused" where JAX's default backend is a GPU.

    Returns:
      [batch, length, heads * head_dim], in the dtype of query.
    """
    if implementation == "auto":
        implementation = "fused" if jax.default_backend() == "gpu" else "xla"
    batch, length, heads, head_dim = query.shape
    if implementation == "fused":
        groups = heads // key.shape[2]
        key, value = (jnp.repeat(array, groups, axis=2) if groups > 1 else array for array in (key, value))
        out = fused_attention(query, key, value, segment_ids, True, False)
    else:
        mask = None
        if segment_ids is not None:
            mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        # In float32: JAX's mixture for bfloat16 needs dtype promotion in its backward, which a user may have forbidden.
        query32, key32, value32 = (array.astype(jnp.float32) for array in (query, key, value))
        out = jax.nn.dot_product_attention(query32, key32, value32, mask=mask, is_causal=True, implementation="xla")
        out = checkpoint_name(out.astype(query.dtype), "attn_out")
    return out.reshape(batch, length, heads * head_dim)
