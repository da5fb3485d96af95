"""The backward pass of a layer in two: B, the cotangent of its input, and W, the gradients of its weights.

Zero-bubble pipelining (arXiv 2401.10241) for any block: the backward is traced, its calls are inlined, and its
equations are sorted by what depends on what. B is what the input's cotangent needs, W the rest that the weight
gradients need; no matrix product is in both. What W reads of B's values is handed over, the stash.

W has the residuals too, and may compute again what follows from them and from the stash without a matrix product. So
what is handed over is a cut through the light equations, and the cheapest one is taken: bytes kept against bytes
computed again. A sum over tokens (the gradient of a norm's scale) is handed over and not what it sums, the cotangent of
a gated product and not those of its factors, and no norm or activation function of a residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from pipejax import jaxprs
from pipejax.mincut import minimum_cut

# Equations that give another view of their operand; XLA makes them part of what reads them.
_VIEWS = {"reshape", "transpose", "broadcast_in_dim", "convert_element_type", "squeeze", "expand_dims", "copy", "name"}
# How many bytes W may compute again rather than keep one: element-wise equations are fused, and cost little each.
_KEEPING = 32

Backward = Callable[[Any, tuple[jax.Array, ...], jax.Array, Any, Any], tuple[Any, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """B and W of one layer; make it with `split`.

    Attributes:
      jaxpr: the whole backward, flat.
      consts: what it closes over.
      first: the equations of B, in order.
      second: those of W.
      handed: the variables that B hands to W.
      stash: their shapes and dtypes.
      gradients: how the weight gradients are nested.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    first: tuple[Any, ...]
    second: tuple[Any, ...]
    handed: tuple[Any, ...]
    gradients: Any

    @property
    def stash(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of what B hands to W."""
        return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in self.handed)

    def backward(
        self,
        params: Any,
        values: tuple[jax.Array, ...],
        dy: jax.Array,
        batch: Any,
        key: Any,
        *,
        midway: jaxprs.Midway | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """B: the cotangent of the layer's input, and the stash; arguments as of the backward that was split.

        `midway` is called once when half of the work is done, see `jaxprs.run`.
        """
        env = self._bind(jax.tree.leaves((params, values, dy, batch, key)), self.jaxpr.invars)
        jaxprs.run(self.first, env, midway)
        return jaxprs.read(env, self.jaxpr.outvars[-1]), tuple(jaxprs.read(env, var) for var in self.handed)

    def weights(
        self,
        params: Any,
        values: tuple[jax.Array, ...],
        stash: tuple[jax.Array, ...],
        batch: Any,
        key: Any,
        *,
        midway: jaxprs.Midway | None = None,
    ) -> Any:
        """W: the gradients of the parameters."""
        before, after = len(jax.tree.leaves((params, values))), len(jax.tree.leaves((batch, key)))
        invars = self.jaxpr.invars
        known = [*invars[:before], *invars[len(invars) - after :], *self.handed]
        env = self._bind([*jax.tree.leaves((params, values, batch, key)), *stash], known)
        jaxprs.run(self.second, env, midway)
        return jax.tree.unflatten(self.gradients, [jaxprs.read(env, var) for var in self.jaxpr.outvars[:-1]])

    def _bind(self, values: Sequence[Any], variables: Sequence[Any]) -> dict[Any, Any]:
        env = dict(zip(variables, values, strict=True))
        return env | dict(zip(self.jaxpr.constvars, self.consts, strict=True))


def split(backward: Backward, params: Any, values: tuple[Any, ...], dy: Any, batch: Any, key: Any) -> Split:
    """Splits a backward pass (params, residuals, dy, batch, key) -> (weight gradients, dx).

    Args:
      backward: traceable; calls in it are inlined, loops and kernels are taken whole.
      params, values, dy, batch, key: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: it has side effects, whose order the split would change.
    """
    flat = jaxprs.flatten(backward, params, values, dy, batch, key)
    effects = jaxprs.side_effects(flat.jaxpr)
    if effects:
        raise ValueError(
            f"a block's backward has the side effects {sorted(map(str, effects))}; take prints and callbacks out of "
            "the block."
        )
    jaxpr = flat.jaxpr
    *gradients, dx = jaxpr.outvars
    before, own = (len(jax.tree.leaves(tree)) for tree in (params, (values, dy)))
    variables = jaxpr.invars[before : before + own]
    handed = _hand_over(jaxpr.eqns, gradients, dx, variables, variables[len(jax.tree.leaves(values)) :])
    return Split(
        jaxpr=jaxpr,
        consts=tuple(flat.consts),
        first=_needed(jaxpr.eqns, [dx, *handed]),
        second=_needed(jaxpr.eqns, gradients, given=handed),
        handed=handed,
        gradients=jax.tree.structure(jax.eval_shape(backward, params, values, dy, batch, key)[0]),
    )


def _hand_over(
    eqns: Sequence[Any], gradients: Sequence[Any], dx: Any, variables: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[Any, ...]:
    """What W gets from B: a minimum cut between what only B has and what W must have.

    Each value is two nodes, "made" and "had", and keeping it is the edge between them: W makes it if the first is on
    W's side, and has it if the second is.

    Args:
      eqns: the backward.
      gradients: what W gives.
      dx: what B gives.
      variables: the arguments that differ from one microbatch to the next, residuals and cotangents. What does not
        depend on them is never kept, unless it takes a matrix product.
      cotangents: those of them that W is not given.
    """
    for_dx = set(_needed(eqns, [dx]))
    late = _follow(eqns, [], lambda eqn: eqn not in for_dx and jaxprs.is_heavy(eqn))
    varying = _follow(eqns, variables, jaxprs.is_heavy)
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    only_b = {*made, *cotangents}
    wanted = [*gradients, *(var for eqn in _needed(eqns, gradients) if eqn.outvars[0] in late for var in eqn.invars)]
    todo = [var for var in wanted if not isinstance(var, Literal) and var in only_b and var not in late]
    capacities: dict[tuple[Hashable, Hashable], int | None] = {(("had", var), "W"): None for var in todo}
    while todo:
        var = todo.pop()
        if (("made", var), ("had", var)) in capacities:
            continue
        capacities[("made", var), ("had", var)] = _KEEPING * _bytes(var) if var in varying else None
        eqn = made.get(var)
        if eqn is None or jaxprs.is_heavy(eqn):
            capacities["B", ("made", var)] = None
            continue
        if eqn in for_dx and eqn.primitive.name not in _VIEWS:
            capacities["B", ("made", var)] = _bytes(var)
        for operand in jaxprs.operands(eqn):
            if operand in only_b:
                capacities[("had", operand), ("made", var)] = None
                todo.append(operand)
    there = minimum_cut(capacities, "B", "W")
    return tuple(var for var in (*cotangents, *made) if ("had", var) in there and ("made", var) not in there)


def _needed(eqns: Sequence[Any], wanted: Iterable[Any], given: Iterable[Any] = ()) -> tuple[Any, ...]:
    """The equations that the wanted variables need, in order, where some are given."""
    known = set(given)
    live = {var for var in wanted if not isinstance(var, Literal)} - known
    found = []
    for eqn in reversed(eqns):
        if live.intersection(eqn.outvars):
            found.append(eqn)
            live.update(var for var in jaxprs.operands(eqn) if var not in known)
    return tuple(reversed(found))


def _follow(eqns: Iterable[Any], variables: Iterable[Any], starts: Callable[[Any], bool]) -> set[Any]:
    """The variables that depend on the given ones or on equations of a kind."""
    found = set(variables)
    for eqn in eqns:
        if starts(eqn) or any(var in found for var in jaxprs.operands(eqn)):
            found.update(eqn.outvars)
    return found


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize
