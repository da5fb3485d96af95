"""F and B of one layer, and what B needs from F.

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

from pipejax import frozen, jaxprs
from pipejax.offload import BLOCK_INPUT, Fates, Placed

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


def analyse(block: Block, fates: Fates, params: Any, x: Any, batch: Any, key: Any, *, trained: Any = None) -> Residuals:
    """Traces a block's F and sorts its residuals.

    Args:
      block: one layer.
      fates: of its named activations.
      params, x, batch, key: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      trained: bools like the parameters, see `Layer`.
    """

    def residuals(params: Any, x: Any, batch: Any, key: Any) -> list[jax.Array]:
        return jax.tree.leaves(_vjp(block, fates.forward_policy(), params, x, batch, key, trained)[1])

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


def placed(
    block: Block, fates: Fates, params: Any, x: Any, batch: Any, key: Any, *, trained: Any = None
) -> dict[str, Placed]:
    """Bytes that F of one layer keeps for B, by name; arguments as of `analyse`."""

    def kept(params: Any, x: Any, batch: Any, key: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(_vjp(block, fates.forward_policy(), params, x, batch, key, trained)[1])
        return [leaves[index] for index in residuals.leaves]

    residuals = analyse(block, fates, params, x, batch, key, trained=trained)
    jaxpr = jaxprs.flatten(kept, params, x, batch, key).jaxpr
    found = {name: [0, 0] for fate in dataclasses.asdict(fates).values() for name in fate}
    for var, struct, moved in zip(jaxpr.outvars, residuals.structs, residuals.offloaded, strict=True):
        # All that is kept without a name of its own is the block's input.
        found[_name(jaxpr, var) or BLOCK_INPUT][moved] += struct.size * struct.dtype.itemsize
    fate_of = {name: fate for fate, names in dataclasses.asdict(fates).items() for name in names}
    return {name: Placed(fate_of[name], *sizes) for name, sizes in sorted(found.items())}


def _name(jaxpr: Any, var: Any) -> str | None:
    """The name of a value, whatever memory it has been put in, or which a loop has stacked."""
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    if eqn is None:
        return None
    if eqn.primitive.name == "name":
        return str(eqn.params["name"])
    if eqn.primitive.name in ("device_put", "reduce_precision"):
        return _name(jaxpr, eqn.invars[0])
    if eqn.primitive.name == "scan":
        body = next(jaxprs.sub_jaxprs(eqn))
        return _name(body, body.outvars[eqn.outvars.index(var)])
    return None


def _vjp(block: Block, policy: Any, params: Any, x: Any, batch: Any, key: Any, trained: Any) -> tuple[Any, Any]:
    trained = frozen.mask(params, None) if trained is None else trained
    # F and B of one layer meet different microbatches in a tick, so there is no common subexpression to guard against.
    checkpointed = jax.checkpoint(
        lambda p, h: block(frozen.fill(trained, p, params), h, batch, key), policy=policy, prevent_cse=False
    )
    return jax.vjp(checkpointed, frozen.keep(trained, params), x)


@dataclasses.dataclass(frozen=True)
class Layer:
    """F and B of one layer.

    Attributes:
      block: what it computes.
      fates: what happens to its activations.
      residuals: what its B needs.
      trained: bools like the parameters: which have a gradient. None for all that are floating-point.
    """

    block: Block
    fates: Fates
    residuals: Residuals
    trained: Any = None

    def forward(
        self, params: Any, x: jax.Array, batch: Any, key: Any, *, midway: jaxprs.Midway | None = None
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """F.

        Args:
          params: of the layer.
          x: its input.
          batch: one microbatch.
          key: for dropout, or None.
          midway: called once when half of the work is done, see `jaxprs.run`.

        Returns:
          y, the auxiliary loss (float32), and the residuals listed by `residuals`. Host-typed ones come back typed as
          device memory: the ring's own write moves them, and XLA drops the round trip.
        """

        def run(params: Any, x: jax.Array, batch: Any, key: Any) -> tuple[jax.Array, ...]:
            (y, aux), vjp = _vjp(self.block, self.fates.forward_policy(), params, x, batch, key, self.trained)
            leaves = jax.tree.leaves(vjp)
            values = (jax.device_put(leaves[index], jax.memory.Space.Device) for index in self.residuals.leaves)
            return y, aux.astype(jnp.float32), *values

        args = (params, x, batch, key)
        if midway is None:
            y, aux, *values = run(*args)
        else:
            flat = jaxprs.flatten(run, *args)
            variables = [*flat.jaxpr.constvars, *flat.jaxpr.invars]
            env = dict(zip(variables, [*flat.consts, *jax.tree.leaves(args)], strict=True))
            jaxprs.run(flat.jaxpr.eqns, env, midway)
            y, aux, *values = (jaxprs.read(env, var) for var in flat.jaxpr.outvars)
        return y, aux, tuple(values)

    def backward(
        self, params: Any, values: tuple[jax.Array, ...], dy: jax.Array, batch: Any, key: Any
    ) -> tuple[Any, jax.Array]:
        """B and W: the cotangents of the trained parameters and of the input, for an auxiliary cotangent of one."""
        # This F runs on a stand-in: only its tree and its input-independent leaves are used, the rest is dead code.
        stand_in = jnp.zeros_like(dy)
        (_, aux), vjp = _vjp(self.block, self.fates.backward_policy(), params, stand_in, batch, key, self.trained)
        leaves, tree = jax.tree.flatten(vjp)
        for index, value, struct in zip(self.residuals.leaves, values, self.residuals.structs, strict=True):
            if (leaves[index].shape, leaves[index].dtype) != (struct.shape, struct.dtype):
                raise RuntimeError(
                    "the residuals of F and of its save-only twin differ: this JAX is not supported yet."
                )
            leaves[index] = value
        return jax.tree.unflatten(tree, leaves)((dy, jnp.ones_like(aux)))
