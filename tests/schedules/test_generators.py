"""Every generator is valid for every size, costs whatever they be, and has the bubble and peak its paper claims."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipejax.schedules import NAMES, Costs, TeraPipe, by_name, check, simulate
from pipejax.schedules.check_timeline import check_timeline

ONE_CHUNK = {"1f1b", "zb-h1", "zb-h2", "lockstep-1f1b"}
TWO_CHUNKS = {"zb-v", "v-min", "v-half", "dualpipe-v"}


def specs(chunks):
    for name in NAMES:
        if chunks == {**dict.fromkeys(ONE_CHUNK, 1), **dict.fromkeys(TWO_CHUNKS, 2)}.get(name, chunks):
            yield name, by_name(name, chunks=chunks)
        else:
            with pytest.raises(ValueError, match=f"not {chunks}; leave chunks out"):
                by_name(name, chunks=chunks)


def check_size(devices, chunks, microbatches):
    for _, spec in specs(chunks):
        check(spec.build(devices=devices, microbatches=microbatches))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_sampled_sizes_are_valid(devices, chunks):
    for microbatches in (1, 2, 5, 8, 13):
        check_size(devices, chunks, microbatches)


@pytest.mark.full
@pytest.mark.parametrize("devices", range(1, 10))
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_all_sizes_are_valid(devices, chunks):
    for microbatches in range(1, 21):
        check_size(devices, chunks, microbatches)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    devices=st.integers(1, 20),
    chunks=st.integers(1, 9),
    microbatches=st.integers(1, 50),
    times=st.tuples(*[st.sampled_from([0.5, 1.0, 1.3, 2.0, 3.7])] * 3),
    send=st.sampled_from([0.0, 0.25]),
)
def test_larger_sizes_and_unequal_times_are_valid(name, devices, chunks, microbatches, times, send):
    try:
        spec = by_name(name, chunks=chunks)
    except ValueError:
        spec = by_name(name)
    schedule = spec.build(devices=devices, microbatches=microbatches)
    check(schedule)
    timeline = simulate(schedule, Costs(*times, send=send))
    if not schedule.lockstep:
        check_timeline(timeline)
    assert timeline.makespan >= timeline.busy.max()


def test_stages_of_unequal_cost_are_valid():
    scale = tuple(np.linspace(0.5, 2, 8))
    for _, spec in specs(2):
        schedule = spec.build(devices=4, microbatches=9)
        timeline = simulate(schedule, Costs(stage_scale=scale))
        assert timeline.busy.sum() == pytest.approx(3 * 9 * sum(scale))
        assert timeline.makespan > timeline.busy.max()


@pytest.mark.parametrize("devices", [2, 4, 7, 8])
def test_bubbles_and_peaks_are_those_of_the_papers(devices):
    m = 4 * devices
    for name, bubble, peak in (
        ("gpipe", 3 * (devices - 1), m),
        ("1f1b", 3 * (devices - 1), devices),
        ("interleaved", 3 * (devices - 1), 3 * devices - 1),
        ("zb-h1", devices - 1, devices),
        ("zb-h2", devices - 1, 2 * devices - 1),
        ("zb-v", devices - 1, 2 * devices),
        ("dualpipe-v", devices - 1, 2 * devices + 1),
        ("v-half", 3 * (devices - 1), 2 * ((devices + 2) // 2)),
        ("v-min", 4 * (devices - 1), 2 * ((devices + 4) // 3)),
        ("wave", 3 * 4 * (devices - 1), 5 * devices),
    ):
        timeline = simulate(by_name(name).build(devices=devices, microbatches=m))
        assert timeline.bubble <= bubble, name
        assert timeline.peaks().max() <= peak, name


def test_zero_bubble_h2_waits_nowhere_within_a_device():
    timeline = simulate(by_name("zb-h2").build(devices=6, microbatches=24))
    device = timeline.schedule.passes["device"]
    for rank in range(6):
        mine = device == rank
        assert timeline.stop[mine].max() - timeline.start[mine].min() == 3 * 24


def test_slices_shrink_bubble_and_peak():
    whole = simulate(by_name("1f1b").build(devices=4, microbatches=8))
    for slices in (2, 4):
        sliced = simulate(by_name("seq1f1b", slices=slices).build(devices=4, microbatches=8))
        assert sliced.bubble == whole.bubble / slices
        assert sliced.peaks().max() == (4 + slices - 1) / slices
    terapipe = TeraPipe(slices=4).build(devices=4, microbatches=8)
    check(terapipe)
    assert simulate(terapipe).peaks().max() == 8


def test_names_are_refused_with_the_names():
    with pytest.raises(ValueError, match=r"no schedule is called 'zb'; the names are gpipe, 1f1b, .*lockstep-gpipe"):
        by_name("zb")
    with pytest.raises(ValueError, match="has 1 chunk on each device, not 2"):
        by_name("zb-h1", chunks=2)
    with pytest.raises(ValueError, match="has no option 'group'; its options are: chunks"):
        by_name("po", group=2)
    with pytest.raises(ValueError, match="has no ticks to keep free for transfers"):
        by_name("gis").build(devices=2, microbatches=2, transfer_ticks=2)


@pytest.mark.parametrize("chunks", [3, 4, 8])
def test_a_longer_batch_never_costs_a_wave_more_than_its_share(chunks):
    """The bubble as a share of all time falls with the microbatches, with no step where schedules become large."""
    shares = []
    for microbatches in (16, 32, 64, 128, 256):
        timeline = simulate(by_name("wave", chunks=chunks).build(devices=16, microbatches=microbatches))
        shares.append(timeline.bubble / timeline.makespan)
    assert shares == sorted(shares, reverse=True)


def test_large_waves_are_built_as_well_as_small_ones():
    timeline = simulate(by_name("wave", chunks=8).build(devices=32, microbatches=256))
    assert timeline.bubble <= 412
