"""A schedule as a Chrome trace, to be opened in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pipejax.schedules.schedule import Kind, Schedule
from pipejax.schedules.simulate import simulate
from pipejax.schedules.timeline import Direction, Timeline

_UNIT = 1000.0  # microseconds for a unit of the costs
_COMPUTE, _FIRST_LANE = 0, 1


def trace(what: Schedule | Timeline) -> str:
    """The trace-event JSON of a schedule.

    Args:
      what: a schedule, simulated with unit costs, or a timeline with its transfers.

    Returns:
      JSON: a process for each device, with a thread of passes, one for each transfer lane, and counters of the
      chunk-activations held on the device and in host memory. A unit of time is a millisecond.
    """
    timeline = what if isinstance(what, Timeline) else simulate(what)
    events: list[dict[str, Any]] = []
    for device in range(timeline.schedule.devices):
        events += _names(timeline, device) + _passes(timeline, device) + _transfers(timeline, device)
        events += _counters(timeline, device)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(timeline: Timeline, device: int) -> list[dict[str, Any]]:
    moved = timeline.transfers
    lanes = np.unique(moved["lane"][moved["device"] == device]).tolist()
    one = {0: "transfers"} if len(lanes) == 1 else {0: "offload", 1: "reload"}
    threads = {_COMPUTE: "compute"} | {_FIRST_LANE + lane: one[lane] for lane in lanes}
    return [{"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}}] + [
        {"ph": "M", "name": "thread_name", "pid": device, "tid": thread, "args": {"name": name}}
        for thread, name in threads.items()
    ]


def _passes(timeline: Timeline, device: int) -> list[dict[str, Any]]:
    lo, hi = np.searchsorted(timeline.schedule.passes["device"], [device, device + 1])
    fields = ("chunk", "microbatch") + (("slice",) if timeline.schedule.slices > 1 else ())
    return [
        {
            "ph": "X",
            "name": f"{Kind(row['kind']).name}{row['microbatch']}.{row['chunk']}",
            "cat": Kind(row["kind"]).name,
            "pid": device,
            "tid": _COMPUTE,
            "ts": float(start) * _UNIT,
            "dur": float(stop - start) * _UNIT,
            "args": {field: int(row[field]) for field in fields},
        }
        for row, start, stop in zip(
            timeline.schedule.passes[lo:hi], timeline.start[lo:hi], timeline.stop[lo:hi], strict=True
        )
    ]


def _transfers(timeline: Timeline, device: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "name": f"{Direction(row['direction']).name.lower()} {row['microbatch']}.{row['chunk']}",
            "cat": Direction(row["direction"]).name,
            "pid": device,
            "tid": _FIRST_LANE + int(row["lane"]),
            "ts": float(row["start"]) * _UNIT,
            "dur": float(row["stop"] - row["start"]) * _UNIT,
            "args": {"chunk": int(row["chunk"]), "microbatch": int(row["microbatch"])},
        }
        for row in timeline.transfers[timeline.transfers["device"] == device]
    ]


def _counters(timeline: Timeline, device: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "C",
            "name": f"activations, {where}",
            "pid": device,
            "ts": time * _UNIT,
            "args": {"chunks": count},
        }
        for where in ("device", "host")
        for time, count in zip(*(values.tolist() for values in timeline.memory(device, where=where)), strict=True)
    ]
