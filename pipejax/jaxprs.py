"""Questions about a jaxpr: which equations it holds, and which outputs depend on which inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


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


def evaluate(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of one equation for its operands, literals among them; as if traced where it stood."""
    # What the equation is annotated with (host compute, scheduling, mesh), and the names that profiles show.
    with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


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
    if called and eqn.primitive.name in ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call"):
        return depends(inner[0], flags)
    return [True] * len(eqn.outvars)


def _scan_depends(eqn: Any, body: Jaxpr, flags: list[bool]) -> list[bool]:
    consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    while True:  # a carry marked by one trip marks more in the next: at most `carries` rounds
        outs = depends(body, flags)
        grown = [a or b for a, b in zip(flags[consts : consts + carries], outs[:carries], strict=True)]
        if grown == flags[consts : consts + carries]:
            return outs
        flags = [*flags[:consts], *grown, *flags[consts + carries :]]
