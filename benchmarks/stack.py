"""The model that all are compared on: a stack of GPT blocks alone, attention replaced by an element-wise stand-in.

The stand-in keeps what a fused attention kernel keeps and multiplies no matrices, so that every peer can compile it,
sharded any way, and no peer's choice of kernel counts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

NAMES = ("block_input", "qkv", "attn_out", "residual", "mlp_up")


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, loss and gradients, and what to lower it with: parameters, inputs, cotangents."""

    step: Any
    arguments: tuple[Any, ...]

    def lower(self) -> jax.stages.Lowered:
        """The step, lowered."""
        return self.step.lower(*self.arguments)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the stack and of how it is run; one layer a chunk, one sequence a microbatch, bfloat16."""

    hidden: int = 4096
    length: int = 4096
    devices: int = 8
    chunks: int = 2
    microbatches: int = 16

    @property
    def layers(self) -> int:
        """Blocks in the stack."""
        return self.devices * self.chunks

    @property
    def activation(self) -> jax.ShapeDtypeStruct:
        """[1, length, hidden], what a block takes and gives."""
        return jax.ShapeDtypeStruct((1, self.length, self.hidden), jnp.bfloat16)

    @property
    def inputs(self) -> jax.ShapeDtypeStruct:
        """[microbatches, length, hidden]."""
        return jax.ShapeDtypeStruct((self.microbatches, self.length, self.hidden), jnp.bfloat16)


def layer_structs(sizes: Sizes) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters of one block."""
    h = sizes.hidden
    shapes = {
        "norm_attention": (h,),
        "norm_mlp": (h,),
        "qkv": (h, 3 * h),
        "out": (h, h),
        "up": (h, 4 * h),
        "down": (4 * h, h),
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """[b, s, h] → [b, s, h], with the activations of `NAMES` but the first, which the caller names."""
    qkv = checkpoint_name(_norm(x, params["norm_attention"]) @ params["qkv"], "qkv")
    query, key, value = jnp.split(qkv, 3, axis=-1)
    attended = checkpoint_name(jnp.tanh(query) * key + value, "attn_out")
    x = checkpoint_name(x + attended @ params["out"], "residual")
    up = checkpoint_name(_norm(x, params["norm_mlp"]) @ params["up"], "mlp_up")
    return x + jax.nn.gelu(up) @ params["down"]


def loss(y: jax.Array, cotangent: jax.Array) -> jax.Array:
    """A loss with a given gradient: the sum of the two's product, in float32."""
    return jnp.sum(y.astype(jnp.float32) * cotangent.astype(jnp.float32))


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 - x32.mean(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def pick(tree: Any, index: jax.Array) -> Any:
    """One entry of each stacked leaf."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)
