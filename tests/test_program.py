"""Programs: slots, phases and transfers, proven by a walk that knows nothing of how they were made."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipejax import program_lockstep
from pipejax.program import COLUMNS, ProgramError
from pipejax.program_check import check_program
from pipejax.program_lockstep import TRANSFER_TICKS
from pipejax.program_table import assign_slots
from pipejax.schedules import GPipe, Interleaved, OneFOneB

SPECS = [GPipe(chunks=1), GPipe(chunks=3), OneFOneB(), Interleaved(chunks=2), Interleaved(chunks=3)]


def build(spec, devices, microbatches, *, offload, layers=1):
    schedule = spec.build(devices=devices, microbatches=microbatches, transfer_ticks=TRANSFER_TICKS)
    return program_lockstep.build(schedule, offload=offload, layers=layers)


@pytest.mark.parametrize(("offload", "layers"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_read_finds_what_it_wants(spec, offload, layers):
    for devices in (1, 2, 3, 4, 8):
        for microbatches in {1, max(devices - 1, 1), devices, devices + 1, 2 * devices + 3}:
            check_program(build(spec, devices, microbatches, offload=offload, layers=layers))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SPECS), st.integers(1, 12), st.integers(1, 40), st.booleans(), st.integers(1, 2))
def test_every_read_finds_what_it_wants_anywhere(spec, devices, microbatches, offload, layers):
    check_program(build(spec, devices, microbatches, offload=offload, layers=layers))


@pytest.mark.parametrize("column", ["f_source", "f_store", "f_from_before", "b_source", "b_load", "b_from_after"])
def test_a_wrong_slot_is_found(column):
    program = build(Interleaved(chunks=2), 3, 10, offload=False)
    wrong = []
    for device, tick in np.ndindex(program.table.shape[:2]):
        table = program.table.copy()
        table[device, tick, COLUMNS.index(column)] += 1
        wrong.append(refusal(dataclasses.replace(program, table=table)))
    # A slot of a tick in which the device does nothing may hold anything.
    found = [message for message in wrong if message]
    assert len(found) >= 30
    assert all("read before it is written or after it is reused" in message for message in found)


def refusal(program):
    try:
        check_program(program)
    except ProgramError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("column", ["host_write", "host_load"])
def test_a_wrong_host_slot_is_found(column):
    program = build(Interleaved(chunks=2), 2, 4, offload=True)
    table = program.table.copy()
    table[0, :, COLUMNS.index(column)] = 0
    with pytest.raises(ProgramError, match="read from the host"):
        check_program(dataclasses.replace(program, table=table))


def test_memory_is_flat_in_microbatches():
    """Without offload (v + 1) p residuals, Megatron's interleaved 1F1B, give or take those of the last tick."""
    for devices, chunks in ((4, 2), (8, 2), (8, 4)):
        slots = {
            build(Interleaved(chunks=chunks), devices, m * devices, offload=False).residual_slots for m in (4, 8, 16)
        }
        assert len(slots) == 1
        assert slots.pop() <= (chunks + 1) * devices + 1


def test_host_memory_is_flat_in_microbatches():
    slots = {build(Interleaved(chunks=2), 8, m, offload=True).host_slots for m in (32, 64, 128)}
    assert len(slots) == 1
    assert slots.pop() <= 3 * 8


def test_time_does_not_depend_on_offload():
    """Delaying B by two ticks adds F-only and B-only ticks in place of nothing: m v + p - 1 of each kind in all."""
    for offload in (False, True):
        program = build(Interleaved(chunks=2), 4, 12, offload=offload)
        for flag in ("forward", "backward"):
            ticks = sum(phase.stop - phase.start for phase in program.phases if getattr(phase, flag))
            assert ticks == 12 * 2 + 4 - 1


def test_a_tick_lies_between_forward_and_backward():
    schedule = Interleaved(chunks=2).build(devices=2, microbatches=4)
    with pytest.raises(ProgramError, match="transfer_ticks=1"):
        program_lockstep.build(schedule, offload=False, layers=1)


def test_every_device_knows_what_another_embeds():
    program = build(Interleaved(chunks=2), 3, 5, offload=False)
    for name, flag, microbatch in (
        ("embed", "f_embed", "f_microbatch"),
        ("head", "f_head", "f_microbatch"),
        ("unembed", "b_embed", "b_microbatch"),
    ):
        due, index = program.column(f"{name}_due"), program.column(f"{name}_microbatch")
        assert (due == due[:1]).all()
        assert (index == index[:1]).all()
        mine = program.column(flag) > 0
        assert mine.any(axis=0).sum() == due[0].sum() == 5
        assert (program.column(microbatch)[mine] == index[mine]).all()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=60))
def test_slots_are_disjoint_and_as_few_as_can_be(pairs):
    intervals = [(start, start + length) for start, length in pairs]
    slots, count = assign_slots(intervals)
    usage = np.zeros((max(count, 1), 80), int)
    overlap = np.zeros(80, int)
    for slot, (start, end) in zip(slots, intervals, strict=True):
        usage[slot, start : end + 1] += 1
        overlap[start : end + 1] += 1
    assert usage.max() <= 1
    assert count == overlap.max()
