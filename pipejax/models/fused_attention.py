"""The one place that touches Pallas' attention kernel for GPUs (Triton), which JAX keeps outside its stable API.

Its forward is wrapped in a `custom_vjp` of our own whose forward rule names output and log-sum-exp, so that a
checkpoint policy can keep both and B does not run the forward kernel again (DESIGN trap 15).
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_BLOCK = 128  # the longest tile of queries or keys that one thread block takes
_TILE_BYTES = 32 * 1024  # what one such tile may take: queries and two stages of keys and values share 160 KiB


def _kernel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    return attention


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def fused_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, causal: bool, interpret: bool
) -> jax.Array:
    """Attention by a fused kernel that never stores the scores.

    Args:
      query, key, value: [batch, length, heads, head_dim], one dtype; the length is a multiple of 16.
      segment_ids: int32 [batch, length], or None; tokens attend within their segment.
      causal: whether a token attends only to those before it.
      interpret: runs the kernel in Pallas' interpreter, on any device.

    Returns:
      [batch, length, heads, head_dim], in the dtype of query.

    Raises:
      ValueError: 16 does not divide the length.
    """
    return _forward(query, key, value, segment_ids, causal, interpret)[0]


def _options(query: jax.Array, causal: bool, interpret: bool) -> dict[str, Any]:
    block, backward = _blocks(query)
    sizes = _kernel().BlockSizes(
        block_q=block,
        block_k=block,
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )
    return {
        "sm_scale": 1 / math.sqrt(query.shape[-1]),
        "causal": causal,
        "block_sizes": sizes,
        "backward_pass_impl": "triton",
        "num_warps": None,
        "num_stages": 2,
        "grid": None,
        "interpret": interpret,
        "debug": False,
    }


def _blocks(query: jax.Array) -> tuple[int, int]:
    """Tokens in a tile of the forward and of the backward kernel: powers of two that divide the length."""
    _, length, _, head_dim = query.shape
    if length % 16:
        raise ValueError(
            f"fused attention takes lengths that 16 divides, not {length}; pad the sequences, or set attention='xla'."
        )
    width = 1 << (head_dim - 1).bit_length()  # the kernel pads a head to a power of two
    fits = max(16, _TILE_BYTES // (width * query.dtype.itemsize))
    block = math.gcd(length, min(_BLOCK, fits))
    return block, min(32, block)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, causal: bool, interpret: bool
) -> tuple[jax.Array, Any]:
    out, lse = _kernel().mha(
        query, key, value, segment_ids, return_residuals=True, **_options(query, causal, interpret)
    )
    out, lse = checkpoint_name(out, "attn_out"), checkpoint_name(lse, "attn_lse")
    return out, (query, key, value, segment_ids, out, lse)


def _backward(causal: bool, interpret: bool, residuals: Any, cotangent: jax.Array) -> Any:
    options = _options(residuals[0], causal, interpret)
    return _kernel()._mha_backward(*options.values(), False, residuals, cotangent)


fused_attention.defvjp(_forward, _backward)
