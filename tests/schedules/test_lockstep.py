"""Lockstep schedules: valid for every size, no bubble added, no longer wait between F and B than needed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipejax.schedules import GPipe, Interleaved, Kind, OneFOneB, ScheduleError, check

SPECS = [
    GPipe(),
    GPipe(chunks=3),
    OneFOneB(),
    Interleaved(chunks=1),
    Interleaved(chunks=2),
    Interleaved(chunks=4),
    *(dataclasses.replace(spec, split_weights=True) for spec in (GPipe(chunks=2), OneFOneB(), Interleaved(chunks=3))),
]
IDS = [repr(spec) for spec in SPECS]


def of_kind(schedule, kind):
    return schedule.passes[schedule.passes["kind"] == kind]


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("transfer_ticks", [0, 2])
def test_every_size_is_valid(spec, transfer_ticks):
    for devices in range(1, 7):
        for microbatches in (1, 2, 3, 5, 6, 7, 12, 13):
            check(spec.build(devices=devices, microbatches=microbatches, transfer_ticks=transfer_ticks))


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_as_many_ticks_as_passes_and_a_warm_up(spec):
    devices = 5
    for microbatches in (5, 6, 9, 17):
        schedule = spec.build(devices=devices, microbatches=microbatches)
        for kind in {int(k) for k in schedule.passes["kind"]}:
            ticks = len(np.unique(of_kind(schedule, kind)["slot"]))
            warm_up = 0 if kind == Kind.W else devices - 1
            assert ticks == schedule.chunks * microbatches + warm_up


@pytest.mark.parametrize("spec", [OneFOneB(), Interleaved(chunks=1), Interleaved(chunks=2), Interleaved(chunks=4)])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 7, 8, 30])
def test_offset_is_the_smallest(spec, microbatches):
    schedule = spec.build(devices=4, microbatches=microbatches)
    earlier = schedule.passes.copy()
    earlier["slot"] -= earlier["kind"] == Kind.B
    with pytest.raises(ScheduleError, match="dependency"):
        check(dataclasses.replace(schedule, passes=earlier))


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_transfers_get_their_ticks(spec):
    for microbatches in (1, 4, 11):
        schedule = spec.build(devices=3, microbatches=microbatches, transfer_ticks=2)
        order = ("device", "chunk", "microbatch")
        forward, backward = (np.sort(of_kind(schedule, kind), order=order)["slot"] for kind in (Kind.F, Kind.B))
        assert (backward - forward).min() >= 2


def test_gpipe_runs_all_forwards_first():
    schedule = GPipe(chunks=2).build(devices=3, microbatches=4)
    assert of_kind(schedule, Kind.F)["slot"].max() < of_kind(schedule, Kind.B)["slot"].min()


def test_arguments_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="chunks is 0"):
        Interleaved(chunks=0)
    with pytest.raises(ValueError, match="devices is 0; pass 1 or more"):
        OneFOneB().build(devices=0, microbatches=1)
    with pytest.raises(ValueError, match="microbatches is 0; pass 1 or more"):
        GPipe().build(devices=1, microbatches=0)
    with pytest.raises(ValueError, match="transfer_ticks is -1"):
        GPipe().build(devices=1, microbatches=1, transfer_ticks=-1)
