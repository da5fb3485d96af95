"""GIS, general groups, GIS-H: the paper's order, its times and its peaks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipejax.schedules import GIS, GISH, by_name, check, simulate
from pipejax.schedules.actions import to_actions

# PipeOffload (arXiv 2503.01328), Fig. 5: rank 0 of d=4, v=2, m=8, microbatch-chunk.
RANK_0 = (
    "F0-0 F1-0 F2-0 F3-0 F0-1 F1-1 F2-1 F3-1 . . . B0-1 W0-1 F4-0 B1-1 W1-1 F5-0 B2-1 W2-1 F6-0 B3-1 W3-1 F7-0 "
    "B0-0 W0-0 F4-1 B1-0 W1-0 F5-1 B2-0 W2-0 F6-1 B3-0 W3-0 F7-1 B4-1 W4-1 . B5-1 W5-1 . B6-1 W6-1 . B7-1 W7-1 "
    "B4-0 W4-0 B5-0 W5-0 B6-0 W6-0 B7-0 W7-0"
)


def sampled(full):
    return [case for index, case in enumerate(full) if index % 37 == 0]


SIZES = [(d, v, m) for d in range(1, 17) for v in range(1, 9) for m in (d, 2 * d, 4 * d)]


def test_the_papers_order_pass_for_pass():
    schedule = GIS(chunks=2).build(devices=4, microbatches=8)
    row = to_actions(schedule)[0]
    # Stage is chunk * 4 on rank 0.
    mine = [f"{a[1]}{a[2:]}-{int(a[0]) // 4}" if a else "." for a in row]
    assert mine == RANK_0.split()
    assert schedule.slots == 54


def check_times_and_peaks(devices, chunks, microbatches):
    rank = np.arange(devices)
    for group in range(math.ceil(devices / 2), devices + 1):
        schedule = GIS(chunks=chunks, group=group).build(devices=devices, microbatches=microbatches)
        check(schedule)
        timeline = simulate(schedule)
        np.testing.assert_array_equal(timeline.peaks(), group * (chunks - 1) + devices - rank)
        if group == devices:
            assert timeline.makespan == 3 * microbatches * chunks + 2 * (devices - 1)
    half = simulate(GISH(chunks=chunks).build(devices=devices, microbatches=microbatches))
    np.testing.assert_array_equal(half.peaks(), math.ceil(devices / 2) * (chunks - 1) + devices - rank)


@pytest.mark.parametrize(("devices", "chunks", "microbatches"), sampled(SIZES))
def test_times_and_peaks(devices, chunks, microbatches):
    check_times_and_peaks(devices, chunks, microbatches)


@pytest.mark.full
@pytest.mark.parametrize(("devices", "chunks", "microbatches"), SIZES)
def test_times_and_peaks_of_every_size(devices, chunks, microbatches):
    check_times_and_peaks(devices, chunks, microbatches)


@pytest.mark.parametrize(
    ("devices", "chunks", "gis", "gis_h", "po"),
    [
        (4, 2, 6, 8, 9),
        (4, 4, 6, 12, 18),
        (8, 2, 14, 18, 23),
        (8, 4, 14, 26, 41),
        (8, 8, 14, 42, 87),
        (16, 2, 30, 38, 51),
        (16, 8, 30, 86, 179),
    ],
)
def test_bubbles_are_the_published_ones(devices, chunks, gis, gis_h, po):
    for name, bubble in (("gis", gis), ("gis-h", gis_h), ("po", po)):
        schedule = by_name(name, chunks=chunks).build(devices=devices, microbatches=4 * devices)
        assert simulate(schedule).bubble == bubble


def test_a_group_larger_than_the_ring_is_refused():
    with pytest.raises(ValueError, match="group is 5 on 4 devices"):
        GIS(group=5).build(devices=4, microbatches=8)
