"""Llama: rotary positions, RMSNorm, SwiGLU, grouped key and value heads, in Flax nnx.

Named activations of a block: block_input (named by the pipeline), qkv, attn_out, residual, mlp_up (gate and up side by
side). RMSNorm, the rotation and the SwiGLU product are recomputed from them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pipejax.models.attention import Implementation, causal_attention, split_heads
from pipejax.models.norms import normalise
from pipejax.models.vocabulary import Axis, lookup, token_loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a Llama.

    Attributes:
      vocab_size: tokens.
      hidden_size: h.
      num_heads: query heads; they divide h, and head_dim is even.
      num_kv_heads: key and value heads; they divide num_heads.
      mlp_size: width of the SwiGLU product.
      rope_base: base of the rotary frequencies.
      dtype: of the computation; parameters are float32 and the loss is float32 whatever it is.
      attention: see `causal_attention`.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    rope_base: float = 500_000.0
    dtype: Any = jnp.float32
    attention: Implementation = "auto"

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide hidden_size={self.hidden_size}, and "
                f"num_kv_heads={self.num_kv_heads} must divide num_heads; change one of them."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even one, so change num_heads.")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864), halves of a head paired.

    Args:
      x: [b, s, heads, head_dim].
      positions: int32 [b or 1, s].
      base: the longest wavelength is 2π times it, nearly.

    Returns:
      As x; dot products of two such depend on the difference of their positions alone.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Embed(nnx.Module):
    """Tokens to the first block's input."""

    split_parameters = ("table",)

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.table = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        self.vocab_size, self.dtype = config.vocab_size, config.dtype

    def __call__(self, batch: Any, *, axis: Axis = None) -> jax.Array:
        """batch["tokens"] int32 [b, s] → [b, s, h]."""
        return lookup(self.table[...], batch["tokens"], self.vocab_size, self.dtype, axis)


class Block(nnx.Module):
    """Attention and SwiGLU, each behind an RMSNorm and around a residual."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        h, dtype = config.hidden_size, config.dtype
        init = nnx.initializers.normal(0.02)

        def linear(size_in: int, size_out: int) -> nnx.Linear:
            return nnx.Linear(size_in, size_out, use_bias=False, dtype=dtype, kernel_init=init, rngs=rngs)

        self.norm_attention = nnx.RMSNorm(h, dtype=jnp.float32, rngs=rngs)
        self.qkv = linear(h, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self.attention_out = linear(h, h)
        self.norm_mlp = nnx.RMSNorm(h, dtype=jnp.float32, rngs=rngs)
        self.gate_up = linear(h, 2 * config.mlp_size)
        self.down = linear(config.mlp_size, h)
        self.heads, self.kv_heads, self.base = config.num_heads, config.num_kv_heads, config.rope_base
        self.implementation = config.attention

    def __call__(self, x: jax.Array, batch: Any) -> jax.Array:
        """[b, s, h] → [b, s, h]; batch may hold "positions" and "segment_ids", int32 [b, s]."""
        positions = batch.get("positions", jnp.arange(x.shape[1], dtype=jnp.int32)[None])
        qkv = checkpoint_name(self.qkv(normalise(self.norm_attention, x)), "qkv")
        query, key, value = split_heads(qkv, self.heads, self.kv_heads)
        attended = causal_attention(
            rotate(query, positions, self.base),
            rotate(key, positions, self.base),
            value,
            segment_ids=batch.get("segment_ids"),
            implementation=self.implementation,
        )
        x = checkpoint_name(x + self.attention_out(attended), "residual")
        gate, up = jnp.split(checkpoint_name(self.gate_up(normalise(self.norm_mlp, x)), "mlp_up"), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


class Head(nnx.Module):
    """Final RMSNorm, logits over the vocabulary, loss."""

    split_parameters = ("table",)

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(config.hidden_size, dtype=jnp.float32, rngs=rngs)
        shape = (config.vocab_size, config.hidden_size)
        self.table = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        self.vocab_size = config.vocab_size

    def logits(self, x: jax.Array) -> jax.Array:
        """[b, s, h] → float32 [b, s, vocab]."""
        x = normalise(self.norm, x)
        return jnp.einsum("bsh,vh->bsv", x, self.table[...].astype(x.dtype), preferred_element_type=jnp.float32)

    def __call__(self, x: jax.Array, batch: Any, *, axis: Axis = None) -> tuple[jax.Array, jax.Array]:
        """Summed loss and weight; see `token_loss`."""
        x = normalise(self.norm, x)
        return token_loss(x, self.table[...], batch, vocab_size=self.vocab_size, axis=axis)
