"""Lockstep schedules: valid for every size, as long as DESIGN says, and refused by name of the rule when broken."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipejax.schedules import GPipe, Interleaved, Kind, OneFOneB, ScheduleError, by_name, check
from pipejax.schedules.schedule import sort_passes

SPECS = [GPipe(chunks=1), GPipe(chunks=2), OneFOneB(), Interleaved(chunks=1), Interleaved(chunks=3)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_valid_for_every_size(spec):
    for devices in range(1, 9):
        for microbatches in range(1, 20):
            for ticks in (0, 2):
                check(spec.build(devices=devices, microbatches=microbatches, transfer_ticks=ticks))


@given(st.sampled_from(SPECS), st.integers(1, 40), st.integers(1, 90), st.integers(0, 3))
def test_valid_and_as_long_as_it_must_be(spec, devices, microbatches, ticks):
    schedule = spec.build(devices=devices, microbatches=microbatches, transfer_ticks=ticks)
    check(schedule)
    for kind in (Kind.F, Kind.B):
        slots = schedule.passes["slot"][schedule.passes["kind"] == kind]
        if microbatches >= devices:
            # m v + p - 1 ticks of each kind: no bubble but the pipeline's own, whether or not p divides m.
            assert slots.max() - slots.min() + 1 == microbatches * schedule.chunks + devices - 1
        assert len(np.unique(slots)) == slots.max() - slots.min() + 1


def test_the_last_stage_turns_around_at_once():
    schedule = Interleaved(chunks=2).build(devices=4, microbatches=8)
    last = schedule.passes[(schedule.passes["device"] == 3) & (schedule.passes["chunk"] == 1)]
    forward, backward = (last["slot"][last["kind"] == kind] for kind in (Kind.F, Kind.B))
    np.testing.assert_array_equal(np.sort(forward), np.sort(backward))


def test_gpipe_runs_all_forwards_first():
    schedule = GPipe(chunks=2).build(devices=3, microbatches=7)
    slots = [schedule.passes["slot"][schedule.passes["kind"] == kind] for kind in (Kind.F, Kind.B)]
    assert slots[0].max() < slots[1].min()


def broken(change):
    schedule = Interleaved(chunks=2).build(devices=3, microbatches=6)
    passes = schedule.passes.copy()
    return dataclasses.replace(schedule, passes=sort_passes(change(passes)))


def find(passes, device, kind, chunk, microbatch):
    wanted = {"device": device, "kind": kind, "chunk": chunk, "microbatch": microbatch}
    return int(np.flatnonzero(np.all([passes[name] == value for name, value in wanted.items()], axis=0))[0])


def test_a_pass_too_early_is_refused():
    def change(passes):
        passes["slot"][find(passes, 1, Kind.F, 0, 0)] = 0
        return passes

    with pytest.raises(ScheduleError, match="dependency: F of microbatch 0, chunk 0 on device 1 runs in slot 0, too"):
        check(broken(change))


def test_a_backward_before_its_forward_is_refused():
    schedule = Interleaved(chunks=2).build(devices=3, microbatches=6)
    passes = schedule.passes.copy()
    passes["slot"] = np.where(passes["kind"] == Kind.B, passes["slot"] - 1, passes["slot"])
    with pytest.raises(ScheduleError, match="dependency: B of microbatch 0, chunk 1 on device 2"):
        check(dataclasses.replace(schedule, passes=sort_passes(passes)))


def test_two_passes_in_one_slot_are_refused():
    def change(passes):
        passes["slot"][find(passes, 0, Kind.F, 0, 0)] = passes["slot"][find(passes, 0, Kind.F, 0, 1)]
        return passes

    with pytest.raises(ScheduleError, match="double booking: .* on device 0, slot 1"):
        check(broken(change))


def test_a_missing_pass_is_refused():
    with pytest.raises(ScheduleError, match="missing pass: B of microbatch 3, chunk 1 on device 2"):
        check(broken(lambda passes: np.delete(passes, find(passes, 2, Kind.B, 1, 3))))


def test_a_repeated_pass_is_refused():
    def change(passes):
        extra = passes[find(passes, 0, Kind.F, 0, 0)].copy()
        extra["slot"] = 99
        return np.append(passes, extra)

    with pytest.raises(ScheduleError, match="repeated pass: F of microbatch 0, chunk 0 on device 0"):
        check(broken(change))


def test_a_pass_of_no_microbatch_is_refused():
    def change(passes):
        passes["microbatch"][0] = 6
        return passes

    with pytest.raises(ScheduleError, match="unknown pass: .* microbatch is 6, and there are 6"):
        check(broken(change))


def test_sizes_and_names_are_checked():
    with pytest.raises(ValueError, match="chunks is 0"):
        Interleaved(chunks=0)
    with pytest.raises(ValueError, match="must be 1 or more"):
        OneFOneB().build(devices=0, microbatches=4)
    with pytest.raises(ValueError, match=r"no schedule 'pipedream'; the names are: gpipe, 1f1b, interleaved"):
        by_name("pipedream", chunks=1)
    with pytest.raises(ValueError, match="1f1b has one chunk"):
        by_name("1f1b", chunks=2)
