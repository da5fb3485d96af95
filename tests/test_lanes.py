"""Pictures of programs: passes and transfers in time, valid by the rules that hold for any timeline."""

import numpy as np
import pytest

from pipejax import lanes, program_lockstep, program_staggered
from pipejax.offload import Offload, wanted
from pipejax.schedules import by_name, check_timeline, draw
from pipejax.schedules.schedule import Kind
from pipejax.schedules.timeline import Direction

LOCKSTEP = ("lockstep-interleaved", "lockstep-gpipe", "lockstep-1f1b")
SIZES = [(1, 1), (1, 3), (3, 1), (3, 2), (4, 9)]


def lockstep(name, devices, microbatches, offload):
    ticks = program_lockstep.TRANSFER_TICKS
    schedule = by_name(name).build(devices=devices, microbatches=microbatches, transfer_ticks=ticks)
    some = wanted(offload, schedule) if offload.partial else None
    return program_lockstep.build(schedule, offload=True, layers=1, wanted=some, k=offload.k)


def staggered(name, devices, microbatches, offload):
    schedule = by_name(name).build(devices=devices, microbatches=microbatches)
    return program_staggered.build(schedule, wanted=wanted(offload, schedule), layers=1, k=offload.k)


@pytest.mark.parametrize("name", LOCKSTEP)
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_all_activations_move(name, devices, microbatches):
    timed = lanes.timeline(lockstep(name, devices, microbatches, Offload.full()))
    check_timeline(timed)
    assert timed.offloaded_fraction == 1


def test_reads_stand_beside_forward_and_writes_beside_backward():
    """In a tick with both; without overlap in a tick of F alone, the write comes a tick later."""
    program = lockstep("lockstep-interleaved", 4, 16, Offload.full())
    timed = lanes.timeline(program)
    (both,) = (phase for phase in program.phases if phase.forward and phase.backward)
    start = {
        (int(p["kind"]), int(p["device"]), int(p["chunk"]), int(p["microbatch"])): (int(p["slot"]), at)
        for p, at in zip(timed.schedule.passes, timed.start, strict=True)
    }
    seen = 0
    for row in timed.transfers:
        leaves = row["direction"] == Direction.OFFLOAD
        unit = int(row["device"]), int(row["chunk"]), int(row["microbatch"])
        tick, at = start[(int(Kind.F if leaves else Kind.B), *unit)]
        if both.start <= tick < both.stop:
            seen += 1
            assert row["start"] == at + (
                1 if leaves else -1
            )  # F, then B and W: the write follows F, the read is beside it
    assert seen > 100


@pytest.mark.parametrize("offload", [Offload.fraction(0.5), Offload.chunks(1), Offload.auto(k=1.6)], ids=str)
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_some_activations_move_in_lockstep(offload, devices, microbatches):
    program = lockstep("lockstep-interleaved", devices, microbatches, offload)
    timed = lanes.timeline(program)
    check_timeline(timed)
    moved = program.column("in_valid").sum() / program.parts
    assert len(timed.transfers) == 2 * moved


@pytest.mark.parametrize("name", ["po-h", "po-f", "gis", "zb-v", "wave", "1f1b", "gpipe"])
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_some_activations_move_in_staggered_schedules(name, devices, microbatches):
    program = staggered(name, devices, microbatches, Offload.full())
    timed = lanes.timeline(program)
    check_timeline(timed)
    assert len(timed.transfers) == 2 * program.column("in_valid").sum() / program.parts


def test_a_transfer_lasts_from_its_first_part_to_its_last():
    program = staggered("po-h", 4, 16, Offload.full())
    timed = lanes.timeline(program)
    length = timed.transfers["stop"] - timed.transfers["start"]
    np.testing.assert_allclose(length, program.parts - 0.5)  # ticks of one unit each; half of one at an end is not used


def test_a_program_that_moves_nothing_is_its_schedule():
    schedule = by_name("gis").build(devices=3, microbatches=5)
    timed = lanes.timeline(program_staggered.build(schedule, wanted=None, layers=1))
    assert not len(timed.transfers)
    assert draw.svg(timed).startswith("<svg")
