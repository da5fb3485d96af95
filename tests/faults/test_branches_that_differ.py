"""Fault 1: replicated weights under a branch that differs from device to device, and collectives in one.

See also test_no_collective_stands_in_a_branch in tests/test_program_shape.py, for parts with whole parameters. Where
parameters are split over the devices, all of them must run the part at once: a collective then stands under a
predicate, and that must be one of the table's columns that are the same on every device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import BLOCK, make_batch, make_pipeline

import pipejax as pj
from pipejax import jaxprs
from pipejax.models import gpt
from pipejax.program import COLUMNS

COLLECTIVES = {"ppermute", "psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "pmax", "pmin"}
SAME_EVERYWHERE = {"embed_due", "head_due", "unembed_due"}
SCHEDULES = {
    "lockstep": {"schedule": pj.schedules.Interleaved(chunks=2)},
    "staggered": {"schedule": pj.schedules.POH(chunks=2)},
    "V": {"schedule": pj.schedules.ZBV(), "offload": pj.Offload.none()},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_twice_on_one_device_and_three_times_on_another_is_five(schedule):
    """A replicated x: the first stage's device returns 2x, the last stage's 3x; the gradient of the sum is 5."""
    part = {"x": jnp.float32(7)}
    pipe = make_pipeline(
        embed=pj.Part(init=lambda *_: part, apply=lambda params, key, batch: 2 * params["x"] * batch["one"]),
        block=pj.Part(init=lambda *_: {"zero": jnp.zeros(1)}, apply=lambda params, key, x, batch: x + params["zero"]),
        head=pj.Part(
            init=lambda *_: part,
            apply=lambda params, key, x, batch: (jnp.sum(x + 3 * params["x"]), jnp.float32(x.size)),
        ),
        tied={"head.x": "embed.x"},
        **SCHEDULES[schedule],
    )
    batch = {"one": jnp.ones(8)}
    loss, grads = pipe.value_and_grad(pipe.init(jax.random.key(0), batch), batch)
    assert float(loss) == 35
    assert float(grads["embed"]["x"]) == 5
    assert {float(shard.data) for shard in grads["embed"]["x"].addressable_shards} == {5}


def columns_of(jaxpr, known, found):
    """Which columns of the table each variable follows from; notes those of loops' conditions that hold collectives."""
    at = {var: names for var, names in zip(jaxpr.invars, known, strict=True) if names}

    def of(var):
        return at.get(var, frozenset()) if not isinstance(var, jax.extend.core.Literal) else frozenset()

    for eqn in jaxpr.eqns:
        names = [of(var) for var in eqn.invars]
        table = [var for var, mine in zip(eqn.invars, names, strict=True) if mine == {"row"}]
        every = frozenset().union(*names)
        outs = [every] * len(eqn.outvars)
        if table and eqn.primitive.name == "slice":
            outs = [frozenset({COLUMNS[eqn.params["start_indices"][-1]]})]
        inner = list(jaxprs.sub_jaxprs(eqn))
        if eqn.primitive.name == "while":
            condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
            first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = names[first + second :]
            held = {inside.primitive.name for inside in jaxprs.all_equations(body)} & COLLECTIVES
            into = [*names[:first], *carry]
            needed = [jaxprs.depends(condition, [i == k for i in range(len(into))])[0] for k in range(len(into))]
            predicate = frozenset().union(*(mine for mine, need in zip(into, needed, strict=True) if need))
            if held:
                found.append(predicate)
            outs = columns_of(body, [*names[first : first + second], *carry], found)
            outs = [mine | out for mine, out in zip(carry, outs, strict=True)]
        elif eqn.primitive.name == "cond":
            assert not any(e.primitive.name in COLLECTIVES for body in inner for e in jaxprs.all_equations(body))
        elif len(inner) == 1 and len(inner[0].invars) == len(eqn.invars) and len(inner[0].outvars) == len(outs):
            into = list(names)
            if eqn.primitive.name == "scan" and inner[0].invars[-1].aval.shape == (len(COLUMNS),):
                into[-1] = frozenset({"row"})
            outs = columns_of(inner[0], into, found)
        at.update(zip(eqn.outvars, outs, strict=True))
    return [of(var) for var in jaxpr.outvars]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collectives_stand_under_predicates_that_are_the_same_on_all_devices(schedule):
    config = gpt.Config(vocab_size=13, hidden_size=8, num_heads=2, num_layers=4, max_length=6)
    pipe = pj.Pipeline(
        embed=functools.partial(gpt.Embed, config),
        block=functools.partial(gpt.Block, config),
        head=functools.partial(gpt.Head, config),
        num_layers=config.num_layers,
        mesh=pj.make_mesh(pipe=2),
        num_microbatches=4,
        **{"offload": pj.Offload.full(), **SCHEDULES[schedule]},
    )
    batch = {name: jnp.zeros((8, 6), jnp.int32) for name in ("tokens", "targets")}
    pipe.describe(batch)
    jaxpr = jax.make_jaxpr(pipe.value_and_grad)(pipe.structs, batch).jaxpr
    found = []
    columns_of(jaxpr, [frozenset()] * len(jaxpr.invars), found)
    assert set().union(*found) == SAME_EVERYWHERE
    assert all(len(predicate) == 1 for predicate in found)
    for name in SAME_EVERYWHERE:
        column = pipe.program.column(name)
        np.testing.assert_array_equal(column, np.broadcast_to(column[:1], column.shape))


def test_the_walk_finds_a_predicate_that_differs():
    """A block with a collective stands under its pass's own predicate in a staggered step: the walk must see it."""

    def block(params, key, x, batch):
        return x + 0 * jax.lax.psum(BLOCK.apply(params, key, x, batch)[0], "pipe")

    pipe = make_pipeline(schedule=pj.schedules.GIS(chunks=2), offload=pj.Offload.none())
    batch = make_batch(8)
    pipe.describe(batch)
    pipe.block = pj.Part(init=BLOCK.init, apply=block)
    jaxpr = jax.make_jaxpr(pipe._traced_value_and_grad)(pipe.structs, batch, None).jaxpr
    found = []
    columns_of(jaxpr, [frozenset()] * len(jaxpr.invars), found)
    assert "f_valid" in set().union(*found)
