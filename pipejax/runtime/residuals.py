"""F and B of one chunk, and what B needs from F.

F is `jax.vjp` of the block under the `jax.checkpoint` policy that types offloaded residuals as pinned host memory; B
unflattens the vjp of the same block under the save-only twin of that policy, with the residuals put back in place
(DESIGN section 3, "Through the policy"). Residuals that do not depend on the block's input, such as slices or casts of
the weights, never enter a ring: B computes them again (DESIGN trap 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax import jaxprs
from pipejax.offload import Fates

# (params of one layer, x, batch of one microbatch, key) -> (y, auxiliary loss)
Block = Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, jax.Array]]

# Leaves no larger than this many elements stay on the device: a transfer costs more than it frees (paper, section 5).
SMALL = 1024


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What F of one layer hands to its B.

    Attributes:
      leaves: indices, among the leaves of the block's vjp, of those that depend on the block's input.
      structs: shape and dtype of each of them.
      offloaded: whether each goes through pinned host memory.
    """

    leaves: tuple[int, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    offloaded: tuple[bool, ...]

    def split(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Residuals (or anything listed like them) as (kept on the device, offloaded)."""
        kept = tuple(value for value, moved in zip(values, self.offloaded, strict=True) if not moved)
        return kept, tuple(value for value, moved in zip(values, self.offloaded, strict=True) if moved)

    def merge(self, kept: tuple[Any, ...], moved: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inverse of `split`."""
        sources = iter(kept), iter(moved)
        return tuple(next(sources[flag]) for flag in self.offloaded)


def analyse(block: Block, fates: Fates, params: Any, x: Any, batch: Any, key: Any) -> Residuals:
    """Traces a block's F and sorts its residuals; arguments may be arrays or `jax.ShapeDtypeStruct`s."""

    def residuals(params: Any, x: Any, batch: Any, key: Any) -> list[jax.Array]:
        return jax.tree.leaves(_vjp(block, fates.forward_policy(), params, x, batch, key)[1])

    closed = jax.make_jaxpr(residuals)(params, x, batch, key)
    before, after = len(jax.tree.leaves(params)), len(jax.tree.leaves((batch, key)))
    dependent = jaxprs.depends(closed.jaxpr, [False] * before + [True] + [False] * after)
    leaves = tuple(index for index, flag in enumerate(dependent) if flag)
    avals: list[Any] = [closed.jaxpr.outvars[index].aval for index in leaves]
    return Residuals(
        leaves=leaves,
        structs=tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals),
        offloaded=tuple(aval.memory_space == jax.memory.Space.Host and aval.size > SMALL for aval in avals),
    )


def _vjp(block: Block, policy: Any, params: Any, x: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    # F and B of one layer meet different microbatches in a tick, so there is no common subexpression to guard against.
    checkpointed = jax.checkpoint(lambda p, h: block(p, h, batch, key), policy=policy, prevent_cse=False)
    return jax.vjp(checkpointed, params, x)


def layer_forward(
    block: Block, fates: Fates, residuals: Residuals, params: Any, x: jax.Array, batch: Any, key: Any
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """F of one layer.

    Returns:
      y, the auxiliary loss, and the residuals listed by `residuals`. Host-typed ones come back typed as device
      memory: the ring's own write moves them, and XLA drops the round trip.
    """
    (y, aux), vjp = _vjp(block, fates.forward_policy(), params, x, batch, key)
    leaves = jax.tree.leaves(vjp)
    return y, aux, tuple(jax.device_put(leaves[index], jax.memory.Space.Device) for index in residuals.leaves)


def layer_backward(
    block: Block,
    fates: Fates,
    residuals: Residuals,
    params: Any,
    values: tuple[jax.Array, ...],
    dy: jax.Array,
    batch: Any,
    key: Any,
) -> tuple[Any, jax.Array]:
    """B (and W) of one layer: the cotangents of its parameters and of its input, for an auxiliary cotangent of one."""
    # This F runs on a stand-in: only its tree and its input-independent leaves are used, the rest is dead code.
    (_, aux), vjp = _vjp(block, fates.backward_policy(), params, jnp.zeros_like(dy), batch, key)
    leaves, tree = jax.tree.flatten(vjp)
    for index, value, struct in zip(residuals.leaves, values, residuals.structs, strict=True):
        if (leaves[index].shape, leaves[index].dtype) != (struct.shape, struct.dtype):
            raise RuntimeError("the residuals of F and of its save-only twin differ: this JAX is not supported yet.")
        leaves[index] = value
    return jax.tree.unflatten(tree, leaves)((dy, jnp.ones_like(aux)))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """F and B of a chunk's layers, one after another.

    Attributes:
      block: the layer.
      fates: what happens to its activations.
      residuals: what its B needs.
      layers: positions in a chunk.
      uniform: whether all positions of all chunks hold a layer.
    """

    block: Block
    fates: Fates
    residuals: Residuals
    layers: int
    uniform: bool

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Residuals of a chunk: each layer's, stacked over the chunk's positions."""
        return tuple(jax.ShapeDtypeStruct((self.layers, *s.shape), s.dtype) for s in self.residuals.structs)

    def _single(self) -> bool:
        return self.uniform and self.layers == 1

    def forward(
        self, params: Any, x: jax.Array, batch: Any, keys: Any, count: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """F of a chunk.

        Args:
          params: leaves [layers, ...].
          x: the chunk's input.
          batch: one microbatch.
          keys: one key for each position, [layers], or None.
          count: int32 scalar, how many positions hold a layer.

        Returns:
          y, the sum of the auxiliary losses (float32), and the stacked residuals.
        """
        layer = self._bind(layer_forward, batch)
        if self._single():
            y, aux, values = layer(_at(params, 0), x, key=_at(keys, 0))
            return y, aux.astype(jnp.float32), tuple(value[None] for value in values)

        def body(index: jax.Array, carry: Any) -> Any:
            x, total, stacked = carry
            y, aux, values = layer(_at(params, index), x, key=_at(keys, index))
            stacked = tuple(_put(ring, value, index) for ring, value in zip(stacked, values, strict=True))
            return y, total + aux.astype(jnp.float32), stacked

        empty = tuple(lax.empty(struct.shape, struct.dtype) for struct in self.structs)
        return lax.fori_loop(0, self._trips(count), body, (x, jnp.float32(0), empty))

    def backward(
        self,
        params: Any,
        values: tuple[jax.Array, ...],
        dy: jax.Array,
        batch: Any,
        keys: Any,
        count: jax.Array,
        valid: jax.Array,
        grads: Any,
        chunk: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """B of a chunk.

        Args:
          params, batch, keys, count: as for `forward`.
          values: the residuals, [layers, ...] each.
          dy: the cotangent of the chunk's output.
          valid: bool scalar; where False the chunk's weight gradients are dropped.
          grads: float32 accumulators, leaves [chunks, layers, ...].
          chunk: int32 scalar, the accumulators' chunk.

        Returns:
          The cotangent of the chunk's input, and the accumulators.
        """
        layer = self._bind(layer_backward, batch)

        def one(index: Any, dy: jax.Array, grads: Any) -> tuple[jax.Array, Any]:
            residuals = tuple(value[index] for value in values)
            dparams, dx = layer(_at(params, index), residuals, dy, key=_at(keys, index))
            added = jax.tree.map(lambda total, grad: _add(total, grad, (chunk, index), valid), grads, dparams)
            return dx, added

        if self._single():
            return one(0, dy, grads)
        trips = self._trips(count)
        return lax.fori_loop(0, trips, lambda step, carry: one(trips - 1 - step, *carry), (dy, grads))

    def infer(self, params: Any, x: jax.Array, batch: Any, keys: Any, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The chunk's output and auxiliary loss alone, for forward-only runs."""

        def body(index: Any, carry: Any) -> Any:
            y, aux = self.block(_at(params, index), carry[0], batch, _at(keys, index))
            return y, carry[1] + aux.astype(jnp.float32)

        if self._single():
            return body(0, (x, jnp.float32(0)))
        return lax.fori_loop(0, self._trips(count), body, (x, jnp.float32(0)))

    def _trips(self, count: jax.Array) -> Any:
        return self.layers if self.uniform else count

    def _bind(self, layer: Callable[..., Any], batch: Any) -> Callable[..., Any]:
        return lambda *args, key: layer(self.block, self.fates, self.residuals, *args, batch, key)


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _put(ring: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(ring, value, index, 0)


def _add(total: jax.Array, grad: jax.Array, where: tuple[Any, ...], valid: jax.Array) -> jax.Array:
    """Adds a gradient to one place of its accumulator; a bubble's garbage, NaN perhaps, adds zero."""
    return total.at[where].add(jnp.where(valid, grad.astype(total.dtype), 0))
