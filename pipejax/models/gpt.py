"""GPT: learned positions, LayerNorm, GeLU (GPT-2's block, pre-norm) in Flax nnx.

Named activations of a block, in bytes per token and hidden unit at bf16: block_input 2 (named by the pipeline), qkv 6
(less with fewer key and value heads), attn_out 2, residual 2, mlp_up 8; 20 in all. LayerNorm, GeLU and dropout masks
are recomputed from them.
"""

from __future__ import annotations

import dataclasses
import math
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
    """Sizes of a GPT.

    Attributes:
      vocab_size: tokens.
      hidden_size: h.
      num_heads: attention heads; they divide h.
      num_layers: blocks; scales the initial residual projections.
      max_length: positions.
      dropout: rate after embedding, attention and MLP.
      dtype: of the computation; parameters are float32 and the loss is float32 whatever it is.
      attention: see `causal_attention`.
      num_kv_heads: key and value heads, which divide num_heads; as many by default.
      init_std: of initial tables and matrices; GPT-2's 0.02 is for widths of about 1000, and a narrow model learns
        faster from more (the demo's, h=64: BUILD_NOTES).
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    max_length: int
    dropout: float = 0.0
    dtype: Any = jnp.float32
    attention: Implementation = "auto"
    num_kv_heads: int | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; change one.")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}; change one.")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


def _normal(std: float) -> nnx.Initializer:
    return nnx.initializers.normal(std)


class Embed(nnx.Module):
    """Tokens and positions to the first block's input."""

    split_parameters = ("table",)

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(_normal(config.init_std)(rngs.params(), (config.vocab_size, config.hidden_size)))
        self.positions = nnx.Param(_normal(config.init_std)(rngs.params(), (config.max_length, config.hidden_size)))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.vocab_size, self.dtype = config.vocab_size, config.dtype

    def __call__(self, batch: Any, *, axis: Axis = None) -> jax.Array:
        """batch["tokens"] int32 [b, s] (and "positions" int32 [b, s], if given) → [b, s, h]."""
        tokens = batch["tokens"]
        positions = batch.get("positions", jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
        x = lookup(self.table[...], tokens, self.vocab_size, self.dtype, axis)
        x = x + self.positions[...][positions].astype(self.dtype)
        return self.dropout(x)


class Block(nnx.Module):
    """Attention and MLP, each behind a LayerNorm and around a residual."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        h, dtype = config.hidden_size, config.dtype
        init, out = _normal(config.init_std), _normal(config.init_std / math.sqrt(2 * config.num_layers))
        self.norm_attention = nnx.LayerNorm(h, dtype=jnp.float32, rngs=rngs)
        width = h // config.num_heads
        self.qkv = nnx.Linear(h, h + 2 * config.kv_heads * width, dtype=dtype, kernel_init=init, rngs=rngs)
        self.attention_out = nnx.Linear(h, h, dtype=dtype, kernel_init=out, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(h, dtype=jnp.float32, rngs=rngs)
        self.up = nnx.Linear(h, 4 * h, dtype=dtype, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(4 * h, h, dtype=dtype, kernel_init=out, rngs=rngs)
        self.dropout_attention = nnx.Dropout(config.dropout, rngs=rngs)
        self.dropout_mlp = nnx.Dropout(config.dropout, rngs=rngs)
        self.heads, self.kv_heads, self.implementation = config.num_heads, config.kv_heads, config.attention

    def __call__(self, x: jax.Array, batch: Any) -> jax.Array:
        """[b, s, h] → [b, s, h]; batch may hold "segment_ids", int32 [b, s]."""
        qkv = checkpoint_name(self.qkv(normalise(self.norm_attention, x)), "qkv")
        query, key, value = split_heads(qkv, self.heads, self.kv_heads)
        attended = causal_attention(
            query, key, value, segment_ids=batch.get("segment_ids"), implementation=self.implementation
        )
        x = checkpoint_name(x + self.dropout_attention(self.attention_out(attended)), "residual")
        up = checkpoint_name(self.up(normalise(self.norm_mlp, x)), "mlp_up")
        return x + self.dropout_mlp(self.down(jax.nn.gelu(up)))


class Head(nnx.Module):
    """Final LayerNorm, logits over the vocabulary, loss. Its table may be tied to the embedding's."""

    split_parameters = ("table",)

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(config.hidden_size, dtype=jnp.float32, rngs=rngs)
        self.table = nnx.Param(_normal(config.init_std)(rngs.params(), (config.vocab_size, config.hidden_size)))
        self.vocab_size = config.vocab_size

    def logits(self, x: jax.Array) -> jax.Array:
        """[b, s, h] → float32 [b, s, vocab]."""
        x = normalise(self.norm, x)
        table = self.table[...].astype(x.dtype)
        return jnp.einsum("bsh,vh->bsv", x, table, preferred_element_type=jnp.float32)

    def __call__(self, x: jax.Array, batch: Any, *, axis: Axis = None) -> tuple[jax.Array, jax.Array]:
        """Summed loss and weight; see `token_loss`."""
        x = normalise(self.norm, x)
        return token_loss(x, self.table[...], batch, vocab_size=self.vocab_size, axis=axis)
