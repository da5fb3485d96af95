"""The backward pass of a layer in two: B, the cotangent of its input, and W, the gradients of its weights.

Zero-bubble pipelining (arXiv 2401.10241) for any block: the backward is traced, its calls are inlined, and its
equations are sorted by what depends on what. B is what the input's cotangent needs, W the rest that the weight
gradients need; no matrix product is in both. What W reads of B's values is handed over, the stash.

Two rules keep the stash small. Equations of W that are no matrix products and come before any run in B already, so that
a sum over tokens (the gradient of a norm's scale or of a bias) is handed over and not what it sums. And what is merely
another view of a handed-over value (a reshape, a cast) or depends on weights and side inputs alone is computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from pipejax import jaxprs

# Equations that are inlined, and the parameter that holds what they call.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
}
# Equations that give another view of their operand, cheaper to take again than to keep.
_VIEWS = {"reshape", "transpose", "broadcast_in_dim", "convert_element_type", "squeeze", "expand_dims", "copy"}
# Equations that cost more than passing over their operands once; so does whatever holds a program of its own.
_HEAVY = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}

Backward = Callable[[Any, tuple[jax.Array, ...], jax.Array, Any, Any], tuple[Any, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """B and W of one layer; make it with `split`.

    Attributes:
      jaxpr: the whole backward, flat.
      first: the equations of B, in order.
      second: those of W.
      handed: the variables that B hands to W.
      stash: their shapes and dtypes.
      params: how the weight gradients are nested.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    first: tuple[Any, ...]
    second: tuple[Any, ...]
    handed: tuple[Any, ...]
    params: Any

    @property
    def stash(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of what B hands to W."""
        return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in self.handed)

    def backward(
        self, params: Any, values: tuple[jax.Array, ...], dy: jax.Array, batch: Any, key: Any
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """B: the cotangent of the layer's input, and the stash; arguments as of the backward that was split."""
        env = self._bind(jax.tree.leaves((params, values, dy, batch, key)), self.jaxpr.invars)
        _run(self.first, env)
        return _read(env, self.jaxpr.outvars[-1]), tuple(_read(env, var) for var in self.handed)

    def weights(self, params: Any, stash: tuple[jax.Array, ...], batch: Any, key: Any) -> Any:
        """W: the gradients of the parameters."""
        before, after = len(jax.tree.leaves(params)), len(jax.tree.leaves((batch, key)))
        invars = self.jaxpr.invars
        known = [*invars[:before], *invars[len(invars) - after :], *self.handed]
        env = self._bind([*jax.tree.leaves((params, batch, key)), *stash], known)
        _run(self.second, env)
        return jax.tree.unflatten(self.params, [_read(env, var) for var in self.jaxpr.outvars[:-1]])

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
    args = (params, values, dy, batch, key)
    called = jax.make_jaxpr(backward)(*args)
    leaves = jax.tree.leaves(args)
    flat: ClosedJaxpr = jax.make_jaxpr(lambda *leaves: _inline(called, leaves))(*leaves)
    if flat.effects:
        raise ValueError(
            f"a block's backward has the side effects {sorted(map(str, flat.effects))}; take prints and callbacks out "
            "of the block."
        )
    jaxpr = flat.jaxpr
    *gradients, dx = jaxpr.outvars
    before, after = len(jax.tree.leaves(params)), len(jax.tree.leaves((batch, key)))
    given = {*jaxpr.invars[:before], *jaxpr.invars[len(jaxpr.invars) - after :], *jaxpr.constvars}
    free = _closure(jaxpr.eqns, given)  # what W can have without B
    for_dx = _needed(jaxpr.eqns, [dx])
    for_weights = [eqn for eqn in _needed(jaxpr.eqns, gradients) if eqn not in for_dx]
    early = _light_prefix(jaxpr.eqns, {*jaxpr.invars, *jaxpr.constvars}, for_dx)
    first = [eqn for eqn in jaxpr.eqns if eqn in for_dx or (eqn in for_weights and eqn in early)]
    late = [eqn for eqn in for_weights if eqn not in early]
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    handed, again = _hand_over(late, gradients, made, free)
    second = [eqn for eqn in jaxpr.eqns if eqn in again or eqn in set(late)]
    return Split(
        jaxpr=jaxpr,
        consts=tuple(flat.consts),
        first=tuple(first),
        second=tuple(second),
        handed=tuple(handed),
        params=jax.tree.structure(params),
    )


def _hand_over(
    late: list[Any], gradients: list[Any], made: dict[Any, Any], free: set[Any]
) -> tuple[list[Any], set[Any]]:
    """The variables that W gets from B, and the equations of B that it computes again.

    Args:
      late: W's own equations.
      gradients: what W gives.
      made: the equation of each variable that is not an argument.
      free: variables that depend on weights and side inputs alone.
    """
    handed: dict[Any, None] = {}
    again: set[Any] = set()
    seen: set[Any] = set()
    own = {var for eqn in late for var in eqn.outvars}
    todo = [var for eqn in late for var in _operands(eqn)] + [var for var in gradients if not isinstance(var, Literal)]
    while todo:
        var = todo.pop()
        if var in seen or var in own:
            continue
        seen.add(var)
        eqn = made.get(var)
        if eqn is None and var in free:
            continue
        if eqn is not None and (var in free or _is_view(eqn)):
            again.add(eqn)
            todo += _operands(eqn)
        else:
            handed[var] = None
    return list(handed), again


def _is_view(eqn: Any) -> bool:
    if eqn.primitive.name not in _VIEWS:
        return False
    (operand, *_), (result,) = _operands(eqn) or [None], eqn.outvars
    return operand is not None and _bytes(operand) <= _bytes(result)


def _light_prefix(eqns: Iterable[Any], given: set[Any], for_dx: set[Any]) -> set[Any]:
    """Equations outside B that are light and need nothing heavy outside B."""
    known, light = set(given), set()
    for eqn in eqns:
        if eqn in for_dx:
            known.update(eqn.outvars)
        elif not _is_heavy(eqn) and all(var in known for var in _operands(eqn)):
            known.update(eqn.outvars)
            light.add(eqn)
    return light


def _is_heavy(eqn: Any) -> bool:
    return eqn.primitive.name in _HEAVY or any(True for _ in jaxprs.sub_jaxprs(eqn))


def _needed(eqns: Sequence[Any], wanted: Iterable[Any]) -> set[Any]:
    """Equations that the wanted variables need."""
    live = {var for var in wanted if not isinstance(var, Literal)}
    found = set()
    for eqn in reversed(eqns):
        if live.intersection(eqn.outvars):
            found.add(eqn)
            live.update(_operands(eqn))
    return found


def _closure(eqns: Iterable[Any], given: set[Any]) -> set[Any]:
    """The variables that follow from the given ones."""
    known = set(given)
    for eqn in eqns:
        if all(var in known for var in _operands(eqn)):
            known.update(eqn.outvars)
    return known


def _operands(eqn: Any) -> list[Any]:
    return [var for var in eqn.invars if not isinstance(var, Literal)]


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def _inline(called: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Evaluates a program with its calls opened."""
    jaxpr = called.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*called.consts, *values], strict=True))
    _run(jaxpr.eqns, env)
    return [_read(env, var) for var in jaxpr.outvars]


def _run(eqns: Iterable[Any], env: dict[Any, Any]) -> None:
    """Evaluates equations in an environment, calls opened."""
    for eqn in eqns:
        values = [_read(env, var) for var in eqn.invars]
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        if inner is not None:
            results = _inline(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), values)
        else:
            results = jaxprs.evaluate(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))


def _read(env: dict[Any, Any], var: Any) -> Any:
    return var.val if isinstance(var, Literal) else env[var]
