"""A table broken in one way is refused by the rule it breaks, naming device and pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pipejax.schedules import Interleaved, Kind, Placement, ScheduleError, by_name, check
from pipejax.schedules.schedule import sort_passes


def build(**kwargs):
    return Interleaved(chunks=2, **kwargs).build(devices=4, microbatches=8)


def refuse(schedule, passes, rule, text):
    with pytest.raises(ScheduleError, match=text) as error:
        check(dataclasses.replace(schedule, passes=sort_passes(passes)))
    assert error.value.rule == rule


def find(passes, **fields):
    return int(np.flatnonzero(np.all([passes[name] == value for name, value in fields.items()], axis=0))[0])


def test_missing_pass():
    schedule = build()
    index = find(schedule.passes, device=2, kind=Kind.B, chunk=1, microbatch=3)
    refuse(
        schedule,
        np.delete(schedule.passes, index),
        "missing pass",
        "missing pass: B of microbatch 3, chunk 1 on device 2",
    )


def test_repeated_pass():
    schedule = build()
    again = schedule.passes[[find(schedule.passes, device=1, kind=Kind.F, chunk=0, microbatch=2)]].copy()
    again["slot"] = 60
    refuse(
        schedule,
        np.concatenate([schedule.passes, again]),
        "repeated pass",
        "repeated pass: F of microbatch 2, chunk 0 on device 1",
    )


def test_double_booking():
    schedule = build()
    passes = schedule.passes.copy()
    passes["slot"][find(passes, device=0, kind=Kind.F, chunk=0, microbatch=1)] = 0
    refuse(
        schedule,
        passes,
        "double booking",
        "F of microbatch 0, chunk 0 on device 0, slot 0, and F of micro",
    )


def test_forward_before_its_input():
    schedule = build()
    passes = schedule.passes.copy()
    passes["slot"][find(passes, device=1, kind=Kind.F, chunk=0, microbatch=0)] = 0
    refuse(
        schedule,
        passes,
        "dependency",
        "F of microbatch 0, chunk 0 on device 1 runs in slot 0, too early for F of microbatch 0, chunk 0 on device 0",
    )


def test_backward_before_its_cotangent():
    schedule = build()
    passes = schedule.passes.copy()
    passes["slot"][find(passes, device=0, kind=Kind.B, chunk=0, microbatch=0)] = 0
    refuse(schedule, passes, "dependency", "B of microbatch 0, chunk 0 on device 0 runs in slot 0, .* on device 1")


def test_backward_before_its_forward():
    schedule = build()
    passes = schedule.passes.copy()
    passes["slot"][passes["kind"] == Kind.B] -= 3
    refuse(
        schedule,
        passes,
        "dependency",
        "B of microbatch 0, chunk 1 on device 3 .* too early for F of microbatch 0",
    )


def test_weights_before_the_backward():
    schedule = build(split_weights=True)
    passes = schedule.passes.copy()
    passes["slot"][passes["kind"] == Kind.W] -= 1
    refuse(schedule, passes, "dependency", "W of microbatch 0, chunk 0 on device 0 .* too early for B")


@pytest.mark.parametrize(
    ("field", "value"), [("chunk", 2), ("microbatch", 8), ("device", 4), ("kind", 2), ("slot", -1)]
)
def test_pass_out_of_range(field, value):
    schedule = build()
    passes = schedule.passes.copy()
    passes[field][0] = value
    refuse(schedule, passes, "unknown pass", f"{field}.* {value}")


def test_stages_must_fill_the_devices_and_lie_beside_each_other():
    schedule = build()
    stage = np.arange(8, dtype=np.int32)
    for device, rule in ((stage % 2, "placement"), (np.array([0, 2, 1, 3] * 2, np.int32), "neighbours")):
        placement = Placement(name="odd", device=device, chunk=stage // 4)
        with pytest.raises(ScheduleError) as error:
            check(dataclasses.replace(schedule, placement=placement))
        assert error.value.rule == rule


def test_backward_of_the_last_stage_may_share_its_forwards_tick_but_no_other_slot():
    schedule = build()
    forward, backward = (
        schedule.passes["slot"][find(schedule.passes, device=3, kind=kind, chunk=1, microbatch=0)]
        for kind in (Kind.F, Kind.B)
    )
    assert forward == backward
    with pytest.raises(ScheduleError, match="double booking"):
        check(dataclasses.replace(schedule, lockstep=False))


def in_order(*orders):
    """One chunk a device, each device's passes one a slot in the order written."""
    schedule = by_name("zb-h1").build(devices=len(orders), microbatches=2)
    passes = schedule.passes.copy()
    for device, order in enumerate(orders):
        for slot, text in enumerate(order.split()):
            passes["slot"][find(passes, device=device, kind=Kind[text[0]], microbatch=int(text[1]))] = slot
    return schedule, passes


def test_devices_that_block_each_other_are_refused_as_a_deadlock():
    # Device 0 sends F1 only after B0, device 1 sends B0's cotangent only after F1: no slots can be right.
    schedule, passes = in_order("F0 B0 F1 B1 W0 W1", "F0 F1 B0 B1 W0 W1")
    text = "device 0 cannot run B of microbatch 0, .* on device 1, and device 1 cannot run F of microbatch 1"
    refuse(schedule, passes, "deadlock", text)


def test_a_device_that_waits_for_itself_or_starts_early_is_no_deadlock():
    schedule, passes = in_order("F0 F1 B0 B1 W0 W1", "F0 F1 W0 B0 B1 W1")
    refuse(schedule, passes, "dependency", "on device 1 runs in slot 0, too early for F of microbatch 0")
    schedule, passes = in_order("F0 F1 B0 B1 W0 W1", "F0 F1 B0 B1 W0 W1")
    refuse(schedule, passes, "dependency", "on device 1 runs in slot 0, too early for F of microbatch 0")
