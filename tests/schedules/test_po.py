"""PO, PO-H, PO-F: peaks no higher than the published generator's, and never a failure."""

from __future__ import annotations

import pytest

from pipejax.schedules import Link, by_name, check, plan, simulate
from pipejax.schedules.check_timeline import check_timeline

# Peaks of the published generator at m = 4 d: PO; PO-H at k = 1; PO-F at k = 0.5, 0.8, 1 (None: it fails).
PUBLISHED = {
    (4, 2): (7, 4, (3, 4, 4)),
    (4, 4): (11, 5, (3, 4, 4)),
    (8, 2): (13, 6, (3, 4, 6)),
    (8, 4): (23, 9, (3, 4, None)),
    (8, 8): (39, 13, (3, 4, 6)),
    (16, 2): (25, 10, (3, 4, 8)),
    (16, 8): (79, 24, (3, 5, 8)),
}


def peak(name, devices, chunks, k=None, microbatches=None):
    schedule = by_name(name, chunks=chunks).build(devices=devices, microbatches=microbatches or 4 * devices)
    check(schedule)
    timeline = simulate(schedule)
    if k is not None:
        timeline = plan(timeline, Link(k=k), chunks=schedule.offload_chunks)
    check_timeline(timeline)
    return timeline.peaks().max()


@pytest.mark.parametrize(("devices", "chunks"), PUBLISHED)
def test_peaks_are_no_higher_than_the_published_ones(devices, chunks):
    po, half, full = PUBLISHED[devices, chunks]
    assert peak("po", devices, chunks) <= po
    assert peak("po-h", devices, chunks, k=1) <= half
    for k, published in zip((0.5, 0.8, 1), full, strict=True):
        assert peak("po-f", devices, chunks, k=k) <= (published or 4)


@pytest.mark.parametrize("devices", [1, 3, 5, 7, 9, 13])
@pytest.mark.parametrize("k", [0.5, 1, 1.7, 3])
def test_odd_devices_and_slow_links_never_fail(devices, k):
    without = peak("po", devices, 3, microbatches=2 * devices + 1)
    for name in ("po-h", "po-f"):
        assert peak(name, devices, 3, k=k, microbatches=2 * devices + 1) <= without


def test_the_bubble_stays_below_1f1bs():
    for devices, chunks in PUBLISHED:
        timeline = simulate(by_name("po-f", chunks=chunks).build(devices=devices, microbatches=4 * devices))
        assert timeline.bubble < 3 * chunks * (devices - 1)
