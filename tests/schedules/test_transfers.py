"""Transfers: between F and B, one thing at a time on a lane, as much as fits, no more than is needed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipejax.schedules import GIS, POF, Link, ScheduleError, by_name, plan, simulate
from pipejax.schedules.check_timeline import check_timeline
from pipejax.schedules.timeline import Direction

LINKS = [
    Link(k=k, lanes=lanes, shared=shared)
    for k in (0.3, 1, 1.6, 4)
    for lanes, shared in ((1, False), (2, False), (1, True), (2, True))
]


@pytest.mark.parametrize("link", LINKS, ids=str)
@pytest.mark.parametrize("name", ["gis", "po-f", "interleaved", "zb-v", "seq1f1b", "lockstep-interleaved"])
def test_plans_are_valid_whatever_fits(name, link):
    for devices, microbatches in ((1, 3), (4, 8), (5, 7)):
        ticks = 2 if name.startswith("lockstep") else 0
        bare = simulate(by_name(name).build(devices=devices, microbatches=microbatches, transfer_ticks=ticks))
        timeline = plan(bare, link)
        check_timeline(timeline)
        assert timeline.makespan == bare.makespan
        assert timeline.peaks().max() <= bare.peaks().max()
        assert 0 <= timeline.offloaded_fraction <= 1


def test_a_slow_link_moves_what_it_can():
    bare = simulate(POF(chunks=4).build(devices=8, microbatches=32))
    fractions = [plan(bare, Link(k=k)).offloaded_fraction for k in (0.5, 1, 2, 4, 1000)]
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[0] > 0.9
    assert 0.4 < fractions[2] <= 0.55
    assert fractions[-1] == 0


def test_the_longest_lived_chunks_go_first():
    bare = simulate(POF(chunks=3).build(devices=4, microbatches=12))
    timeline = plan(bare, Link(k=0.5), chunks=1)
    assert set(timeline.transfers["chunk"].tolist()) == {0}
    assert timeline.offloaded_fraction == pytest.approx(1 / 3)


def test_no_more_is_moved_than_the_limit_needs():
    bare = simulate(GIS(chunks=2).build(devices=8, microbatches=32))
    moved = [plan(bare, Link(k=0.5), memory_limit=limit) for limit in (16, 12, 8, 5)]
    for limit, timeline in zip((16, 12, 8, 5), moved, strict=True):
        assert timeline.peaks().max() <= limit
    fractions = [timeline.offloaded_fraction for timeline in moved]
    assert fractions[0] == 0
    assert fractions == sorted(fractions)


def test_devices_that_share_the_way_go_in_opposite_directions():
    bare = simulate(POF(chunks=2).build(devices=4, microbatches=16))
    moved = plan(bare, Link(k=1, shared=True)).transfers
    for first in (0, 2):
        mine, other = (moved[moved["device"] == device] for device in (first, first + 1))
        for row in mine:
            together = other[(other["start"] < row["stop"] - 1e-9) & (other["stop"] > row["start"] + 1e-9)]
            assert (together["direction"] != row["direction"]).all()


def test_host_memory_holds_what_has_left():
    bare = simulate(POF(chunks=2).build(devices=4, microbatches=16))
    timeline = plan(bare, Link(k=0.5))
    assert timeline.peaks(where="host").max() > 0
    for device in range(4):
        assert timeline.memory(device, where="host")[1][-1] == 0
        assert timeline.memory(device)[1][-1] == 0
    assert (bare.peaks(where="host") == 0).all()


def broken(change):
    timeline = plan(simulate(GIS(chunks=2).build(devices=4, microbatches=8)), Link(k=0.5))
    transfers = timeline.transfers.copy()
    return dataclasses.replace(timeline, transfers=change(transfers))


def first(transfers, direction):
    return int(np.flatnonzero(transfers["direction"] == direction)[0])


def shift(direction, by):
    def change(transfers):
        index = first(transfers, direction)
        transfers["start"][index] += by
        transfers["stop"][index] += by
        return transfers

    return change


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        (shift(Direction.OFFLOAD, -1), "transfer", "offload of .* on device 0 starts before its F ends"),
        (shift(Direction.OFFLOAD, 30), "transfer", "reload of .* on device 0 starts before its offload ends"),
        (shift(Direction.RELOAD, 30), "transfer", "reload of .* on device 0 ends after its B starts"),
        (lambda t: np.delete(t, first(t, Direction.RELOAD)), "missing transfer", "offload of .* has no reload"),
        (lambda t: np.delete(t, first(t, Direction.OFFLOAD)), "missing transfer", "reload of .* has no offload"),
        (lambda t: np.append(t, t[:1]), "repeated transfer", "happens more than once"),
    ],
)
def test_broken_transfers_are_refused(change, rule, text):
    with pytest.raises(ScheduleError, match=text) as error:
        check_timeline(broken(change))
    assert error.value.rule == rule


def test_a_lane_that_does_two_things_at_a_time_is_refused():
    def stretch(transfers):
        index = first(transfers, Direction.OFFLOAD)
        transfers["stop"][index] = transfers["start"][index + 1] + 0.1
        return transfers

    with pytest.raises(ScheduleError, match="lane 0 still runs the offload") as error:
        check_timeline(broken(stretch))
    assert error.value.rule == "double booking"


def test_arguments_are_refused_with_a_sentence():
    bare = simulate(GIS().build(devices=2, microbatches=2))
    with pytest.raises(ValueError, match="k is 0"):
        Link(k=0)
    with pytest.raises(ValueError, match="lanes is 3; pass 1"):
        Link(lanes=3)
    with pytest.raises(ValueError, match="chunks is 5; gis has 2"):
        plan(bare, Link(), chunks=5)
