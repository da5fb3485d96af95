"""Timing: as soon as possible, with communication and unequal times; memory counted at starts and stops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipejax.schedules import GIS, Costs, Interleaved, Kind, OneFOneB, ScheduleError, by_name, check, simulate
from pipejax.schedules.check_timeline import check_timeline
from pipejax.schedules.simulate import as_planned, compact


def test_gpipe_by_hand():
    timeline = simulate(by_name("gpipe").build(devices=2, microbatches=2), Costs(1, 2, 3, send=0.5))
    # Device 1: F0 at 1.5, F1 at 2.5, then B0 and B1 of 5 each; device 0 gets B1's half a unit later.
    mine = timeline.schedule.passes["device"] == 1
    np.testing.assert_allclose(timeline.start[mine], [1.5, 2.5, 3.5, 8.5])
    assert timeline.makespan == 13.5 + 0.5 + 5
    np.testing.assert_allclose(timeline.busy, [12, 12])
    assert timeline.bubble == 7


def test_unit_times_are_the_slots_of_a_compact_schedule():
    schedule = GIS(chunks=3).build(devices=5, microbatches=11)
    np.testing.assert_array_equal(simulate(schedule).start, schedule.passes["slot"])
    np.testing.assert_array_equal(as_planned(schedule).start, schedule.passes["slot"])


def test_memory_counts_from_f_to_w():
    times, held = simulate(by_name("zb-h1").build(devices=3, microbatches=1)).memory(2)
    np.testing.assert_array_equal(held, [1, 0])
    np.testing.assert_array_equal(times, [2, 5])
    timeline = simulate(by_name("1f1b").build(devices=3, microbatches=5))
    np.testing.assert_array_equal(timeline.peaks(), [3, 2, 1])
    np.testing.assert_array_equal(timeline.in_flight, [3, 2, 1])


@pytest.mark.parametrize("split", [False, True])
def test_lockstep_time_is_that_of_the_phases(split):
    devices, microbatches, chunks = 4, 8, 2
    costs = Costs(1, 1.5, 0.75)
    timeline = simulate(
        Interleaved(chunks=chunks, split_weights=split).build(devices=devices, microbatches=microbatches), costs
    )
    whole = chunks * microbatches
    alone = devices - 1
    warm_up = costs.forward + costs.backward + (0 if split else costs.weights)
    assert timeline.makespan == pytest.approx(whole * costs.chunk + alone * warm_up)


def test_lockstep_memory_is_that_of_interleaved_1f1b():
    timeline = simulate(Interleaved(chunks=4).build(devices=8, microbatches=32))
    assert timeline.peaks().max() == 8 * 4 + 8 - 1
    assert simulate(OneFOneB().build(devices=8, microbatches=32)).peaks().max() <= 2 * 8 - 1


def test_orders_that_wait_for_each_other_are_refused():
    schedule = by_name("zb-h1").build(devices=2, microbatches=2)
    passes = schedule.passes.copy()
    # Device 0 wants B0 before F1; device 1 wants F1 before B0.
    for device, order in ((0, "F0 B0 F1 B1 W0 W1"), (1, "F0 F1 B0 B1 W0 W1")):
        for slot, text in enumerate(order.split()):
            row = (
                (passes["device"] == device)
                & (passes["kind"] == Kind[text[0]])
                & (passes["microbatch"] == int(text[1]))
            )
            passes["slot"][row] = slot
    with pytest.raises(ScheduleError, match="the devices wait for each other: device 0 cannot run") as error:
        compact(dataclasses.replace(schedule, passes=passes))
    assert error.value.rule == "deadlock"


def test_passes_moved_too_early_are_refused():
    timeline = simulate(GIS().build(devices=4, microbatches=8))
    start = timeline.start.copy()
    row = int(np.flatnonzero(timeline.schedule.passes["device"] == 1)[0])
    start[row] = 0
    with pytest.raises(ScheduleError, match="F of microbatch 0, chunk 0 on device 1 starts at 0, too early") as error:
        check_timeline(dataclasses.replace(timeline, start=start))
    assert error.value.rule == "dependency"
    stop = timeline.stop.copy()
    stop[-1] += 0  # the last pass of the last device ends nobody's wait
    stop[int(np.flatnonzero(timeline.schedule.passes["kind"] == Kind.W)[0])] += 0.5
    with pytest.raises(ScheduleError, match="still runs when") as error:
        check_timeline(dataclasses.replace(timeline, stop=stop))
    assert error.value.rule == "double booking"


def test_a_large_schedule_takes_seconds():
    schedule = GIS(chunks=8).build(devices=32, microbatches=256)
    check(schedule)
    assert simulate(schedule).makespan == 3 * 256 * 8 + 62


def test_costs_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="forward is 0; a pass takes a time above 0"):
        Costs(forward=0)
    with pytest.raises(ValueError, match="stage_scale has 3 values for 4 stages"):
        simulate(by_name("1f1b").build(devices=4, microbatches=2), Costs(stage_scale=(1, 1, 1)))
