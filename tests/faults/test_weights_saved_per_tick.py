"""Fault 2: memory, programs or compile times that grow with the number of microbatches, as weights saved per tick do.

See also test_no_ring_and_no_scan_output_holds_a_weight in tests/test_program_shape.py. Whether the pool of pinned
memory grows from step to step shows on a GPU alone; what a step asks of it is `host_slots`, held below.
"""

import functools
import math
import time

import jax
import jax.numpy as jnp
import pytest
from toy import EMBED, HEAD, HIDDEN, make_batch, make_pipeline

import pipejax as pj
from pipejax import jaxprs

WIDE = 1024  # weights are large, activations small
BLOCK = pj.Part(
    init=lambda key, x, batch: {"up": jnp.zeros((HIDDEN, WIDE)), "down": jnp.zeros((WIDE, HIDDEN))},
    apply=lambda params, key, x, batch: x + jnp.tanh(x @ params["up"]) @ params["down"],
)
WEIGHTS = 2 * HIDDEN * WIDE * 4  # bytes of a layer's
SCHEDULES = {
    "lockstep": {"schedule": pj.schedules.Interleaved(chunks=2), "offload": pj.Offload.full()},
    "staggered": {"schedule": pj.schedules.POH(chunks=2), "offload": pj.Offload.full()},
    "split": {"schedule": pj.schedules.ZBV(), "offload": pj.Offload.none()},
}
SIZES = (8, 32, 128)


@functools.cache
def traced(schedule, microbatches):
    pipe = make_pipeline(embed=EMBED, block=BLOCK, head=HEAD, num_microbatches=microbatches, **SCHEDULES[schedule])
    batch = make_batch(microbatches)
    pipe.describe(batch)
    return pipe, pipe._value_and_grad.trace(pipe.structs, batch, None)


@functools.cache
def compiled(schedule, microbatches):
    lowered = traced(schedule, microbatches)[1].lower()
    start = time.process_time()
    return lowered.compile(), time.process_time() - start


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_memory_does_not_grow_by_the_weights(schedule):
    """What a microbatch adds is its rows of the program's table, 200 bytes a tick."""
    temp = [compiled(schedule, m)[0].memory_analysis().temp_size_in_bytes for m in SIZES]
    assert temp[0] > WEIGHTS  # gradients: the figure does count what has a weight's size
    assert (temp[1] - temp[0]) / (SIZES[1] - SIZES[0]) < 2048 < WEIGHTS / 16
    assert (temp[2] - temp[1]) / (SIZES[2] - SIZES[1]) < 2048


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_scans_carry_has_no_axis_of_ticks_before_a_weights(schedule):
    """Accumulators are [chunks, layers, ...]; scans have no outputs by tick at all."""
    for m in (8, 32):
        pipe, program = traced(schedule, m)
        for eqn in jaxprs.all_equations(program.jaxpr.jaxpr):
            for var in eqn.outvars:
                shape = getattr(var.aval, "shape", ())
                if shape[-2:] in {(HIDDEN, WIDE), (WIDE, HIDDEN)}:
                    assert math.prod(shape[:-2]) <= pipe.mesh.size * pipe.plan.chunks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_program_is_as_long_for_any_number(schedule):
    counts = {sum(1 for _ in jaxprs.all_equations(traced(schedule, m)[1].jaxpr.jaxpr)) for m in SIZES}
    assert len(counts) == 1
    programs = [traced(schedule, m)[0].program for m in SIZES]
    assert len({program.host_slots for program in programs[1:]}) == 1
    assert len({program.residual_slots for program in programs}) == 1


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_compiling_takes_as_long_for_any_number(schedule):
    """In CPU time of this process, so that a busy machine matters little; twice as long would be a mistake."""
    seconds = [compiled(schedule, m)[1] for m in SIZES]
    assert max(seconds) < 2 * seconds[0] + 0.5


def test_putting_parameters_where_they_are_is_free():
    """The shardings that a pipeline gives are those of its parameters, memory kind included: no byte is copied."""
    pipe = make_pipeline()
    params = pipe.init(jax.random.key(0), make_batch(8))

    def places(tree):
        return [
            shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
        ]

    assert places(jax.device_put(params, pipe.shardings)) == places(params)
