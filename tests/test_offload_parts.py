"""Lockstep with only some activations offloaded, a part of one each way in a tick."""

import itertools

import jax
import numpy as np
import pytest
from toy import assert_equals_plain, make_pipeline

import pipejax as pj
from pipejax import program_lockstep
from pipejax.offload import wanted
from pipejax.program import COLUMNS, ProgramError
from pipejax.program_check import check_program
from pipejax.runtime.transfers import Cut

SPECS = [pj.schedules.Interleaved(chunks=3), pj.schedules.GPipe(chunks=2), pj.schedules.OneFOneB()]
OFFLOADS = {
    "chunks": pj.Offload.chunks(1),
    "half": pj.Offload.fraction(0.5),
    "auto": pj.Offload.auto(k=1.6),
    "slow": pj.Offload.fraction(0.9, k=2.5),
}


PAIRS = list(zip(SPECS * 2, [*OFFLOADS, "auto", "half"], strict=True))


@pytest.mark.parametrize(("spec", "offload"), PAIRS, ids=str)
def test_gradients_equal_the_plain_model(spec, offload):
    pipe = make_pipeline(pipe=3, schedule=spec, offload=OFFLOADS[offload], num_microbatches=7, num_layers=10)
    assert pipe.program.column("in_valid").any()
    assert_equals_plain(pipe)


def build(spec, devices, microbatches, offload, layers=1):
    ticks = program_lockstep.TRANSFER_TICKS
    schedule = spec.build(devices=devices, microbatches=microbatches, transfer_ticks=ticks)
    moves = wanted(offload, schedule)
    return program_lockstep.build(schedule, offload=True, layers=layers, wanted=moves, k=offload.k)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_read_finds_what_it_wants(spec):
    for devices, offload in itertools.product((1, 2, 3, 4, 8), OFFLOADS.values()):
        for microbatches in {1, devices, devices + 1, 3 * devices + 1}:
            for layers in (1, 2):
                check_program(build(spec, devices, microbatches, offload, layers))


@pytest.mark.parametrize("column", ["f_move", "b_move", "out_load", "out_store", "in_load", "in_store"])
def test_a_wrong_slot_is_found(column):
    program = build(pj.schedules.Interleaved(chunks=2), 3, 9, OFFLOADS["half"])
    table = program.table.copy()
    table[:, :, COLUMNS.index(column)] = 0
    with pytest.raises(ProgramError, match=r"moving slot .* and holds"):
        check_program(type(program)(**{**vars(program), "table": table}))


def test_memory_and_parts():
    """Half of the activations at k = 2: less than two thirds of the slots, whatever the microbatches."""
    spec = pj.schedules.Interleaved(chunks=2)
    sizes = {
        (program.moving_slots, program.host_slots)
        for program in (build(spec, 8, m, pj.Offload.fraction(0.5, k=2)) for m in (32, 64, 128))
    }
    ((moving, host),) = sizes
    assert (
        moving
        <= 16
        < program_lockstep.build(
            spec.build(devices=8, microbatches=32, transfer_ticks=1), offload=False, layers=1
        ).residual_slots
    )
    assert host <= 16


@pytest.mark.parametrize(("shape", "parts"), [((1, 5, 8), 3), ((2, 7), 4), ((3,), 7), ((1, 1), 2)])
def test_parts_cover_a_residual(shape, parts):
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(1, 1, *shape)
    cut = Cut(jax.ShapeDtypeStruct(shape, np.float32), parts)
    there = jax.numpy.full(value.shape, np.nan)
    for part in range(parts):
        place = (jax.numpy.int32(0), 0, jax.numpy.int32(part))
        there = cut.write(there, cut.read(value, *place), *place)
    np.testing.assert_array_equal(there, value)
