"""Jaxprs: which equations they hold, which outputs depend on which inputs, and running them equation by equation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import NamedAxisEffect  # no public name for it in JAX 0.10 to 0.12
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Equations that are inlined, and the parameter that holds what they call.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # what JAX 0.12 leaves of a derivative around loops
}
# Equations that cost more than passing over their operands once; so does whatever holds a program of its own.
_HEAVY = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}

# Called with a value that a program has computed by a certain point, to be replaced by what is returned.
Midway = Callable[[jax.Array], jax.Array]


def sub_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters (bodies of calls, loops and branches)."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a jaxpr, those of its sub-jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from all_equations(inner)


def operands(eqn: Any) -> list[Any]:
    """The variables among an equation's operands."""
    return [var for var in eqn.invars if not isinstance(var, Literal)]


def is_heavy(eqn: Any) -> bool:
    """Whether an equation costs more than passing over its operands once: a product, loop, kernel or collective."""
    return eqn.primitive.name in _HEAVY or bool(eqn.effects) or any(True for _ in sub_jaxprs(eqn))


def side_effects(jaxpr: Jaxpr) -> set[Any]:
    """The effects of a jaxpr, but for collectives: what those do follows from their operands."""
    return {effect for effect in jaxpr.effects if not isinstance(effect, NamedAxisEffect)}


def flatten(function: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """A function's program with all calls opened; `args` may be arrays or `jax.ShapeDtypeStruct`s."""
    called = jax.make_jaxpr(function)(*args)
    return jax.make_jaxpr(lambda *leaves: _inline(called, leaves))(*jax.tree.leaves(args))


def run(eqns: Sequence[Any], env: dict[Any, Any], midway: Midway | None = None) -> None:
    """Evaluates equations, calls opened, in an environment of values by variable.

    Args:
      eqns: in an order in which each has what it needs.
      env: gets their results.
      midway: called with the result of the heavy equation at which half of the work is done, which it may replace;
        once, at the end if no equation is heavy.
    """
    middle = _middle(eqns) if midway and eqns else None
    for eqn in eqns:
        values = [read(env, var) for var in eqn.invars]
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        if inner is not None:
            results = _inline(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), values)
        else:
            results = evaluate(eqn, values)
        if midway and eqn is middle:
            results = [midway(results[0]), *results[1:]]
        env.update(zip(eqn.outvars, results, strict=True))
    if midway and not eqns:
        midway(jnp.float32(0))


def read(env: dict[Any, Any], var: Any) -> Any:
    """The value of an operand."""
    return var.val if isinstance(var, Literal) else env[var]


def evaluate(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of one equation for its operands, literals among them; as if traced where it stood."""
    # What the equation is annotated with (host compute, scheduling, mesh), and the names that profiles show.
    with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _inline(called: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    jaxpr = called.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*called.consts, *values], strict=True))
    run(jaxpr.eqns, env)
    return [read(env, var) for var in jaxpr.outvars]


def _middle(eqns: Sequence[Any]) -> Any:
    """The heavy equation after which half of the work is done or more; the last equation where none is heavy."""
    heavy = [eqn for eqn in eqns if is_heavy(eqn)]
    work = list(itertools.accumulate(map(_work, heavy)))
    return next((eqn for eqn, done in zip(heavy, work, strict=True) if 2 * done >= work[-1]), eqns[-1])


def _work(eqn: Any) -> float:
    """Multiplications, roughly: of a product exactly, of a loop or kernel as if its results were products."""
    results = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return results * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return results * max((max(var.aval.shape, default=1) for var in operands(eqn)), default=1)


def depends(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr depend on the marked inputs.

    Calls and scans are looked into; of any other equation all outputs count as dependent once one operand is, which
    errs on the safe side (a residual too many in a ring, never one too few).

    Args:
      jaxpr: the program.
      inputs: one flag per input of `jaxpr`.

    Returns:
      One flag per output.
    """
    marked = {var for var, flag in zip(jaxpr.invars, inputs, strict=True) if flag}

    def flag(var: Any) -> bool:
        return not isinstance(var, Literal) and var in marked

    for eqn in jaxpr.eqns:
        flags = [flag(var) for var in eqn.invars]
        if any(flags):
            marked.update(var for var, out in zip(eqn.outvars, _eqn_depends(eqn, flags), strict=True) if out)
    return [flag(var) for var in jaxpr.outvars]


def _eqn_depends(eqn: Any, flags: list[bool]) -> list[bool]:
    inner = list(sub_jaxprs(eqn))
    if eqn.primitive.name == "scan":
        return _scan_depends(eqn, inner[0], flags)
    called = len(inner) == 1 and len(inner[0].invars) == len(flags) and len(inner[0].outvars) == len(eqn.outvars)
    if called and eqn.primitive.name in _CALLS:
        return depends(inner[0], flags)
    return [True] * len(eqn.outvars)


def _scan_depends(eqn: Any, body: Jaxpr, flags: list[bool]) -> list[bool]:
    if "ft_in" in eqn.params:  # from JAX 0.12 on
        consts, carries, _ = map(len, eqn.params["ft_in"].unpack())
    else:
        consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    while True:  # a carry marked by one trip marks more in the next: at most `carries` rounds
        outs = depends(body, flags)
        grown = [a or b for a, b in zip(flags[consts : consts + carries], outs[:carries], strict=True)]
        if grown == flags[consts : consts + carries]:
            return outs
        flags = [*flags[:consts], *grown, *flags[consts + carries :]]
