"""Proof that a timeline is valid: passes in dependency order, transfers between F and B, one thing at a time."""

from __future__ import annotations

import numpy as np

from pipejax.schedules.check import ScheduleError, check_complete, describe
from pipejax.schedules.graph import NONE, edges, rows_of
from pipejax.schedules.schedule import Kind
from pipejax.schedules.timeline import Direction, Timeline

_SLACK = 1e-6  # times are sums of floats


def check_timeline(timeline: Timeline) -> None:
    """Checks a timeline against every rule, whatever made it.

    Raises:
      ScheduleError: what `check` raises for an incomplete schedule, and "dependency", "double booking" (a device or a
        lane at two things at a time), "missing transfer", "repeated transfer" or "transfer" (not between F and B).
    """
    check_complete(timeline.schedule)
    _check_passes(timeline)
    _check_pairs(timeline)
    _check_windows(timeline)
    _check_lanes(timeline)


def _pass_name(timeline: Timeline, row: int) -> str:
    p = timeline.schedule.passes[row]
    what = describe(p["kind"], p["microbatch"], p["slice"], p["chunk"], slices=timeline.schedule.slices)
    return f"{what} on device {p['device']}"


def _transfer_name(timeline: Timeline, row: np.void) -> str:
    cut = f", slice {row['slice']}" if timeline.schedule.slices > 1 else ""
    way = Direction(row["direction"]).name.lower()
    return f"{way} of microbatch {row['microbatch']}{cut}, chunk {row['chunk']} on device {row['device']}"


def _check_passes(timeline: Timeline) -> None:
    need = edges(timeline.schedule)
    lag = np.where(need.far, timeline.costs.send, 0.0)
    early = (need.before != NONE) & (timeline.start[:, None] < timeline.stop[need.before] + lag - _SLACK)
    if early.any():
        row, which = (int(x) for x in np.argwhere(early)[0])
        source = int(need.before[row, which])
        raise ScheduleError(
            timeline.schedule,
            "dependency",
            f"{_pass_name(timeline, row)} starts at {timeline.start[row]:g}, too early for "
            f"{_pass_name(timeline, source)}, which ends at {timeline.stop[source]:g}",
        )
    device = timeline.schedule.passes["device"]
    order = np.lexsort((timeline.start, device))
    both = (timeline.start[order[1:]] < timeline.stop[order[:-1]] - _SLACK) & (np.diff(device[order]) == 0)
    if both.any():
        at = int(np.flatnonzero(both)[0])
        first, second = (_pass_name(timeline, int(row)) for row in order[at : at + 2])
        raise ScheduleError(timeline.schedule, "double booking", f"{first} still runs when {second} starts")


def _check_pairs(timeline: Timeline) -> None:
    """An activation that moves leaves once and comes back once."""
    moved = timeline.transfers
    for direction, other in ((Direction.OFFLOAD, Direction.RELOAD), (Direction.RELOAD, Direction.OFFLOAD)):
        mine = moved[moved["direction"] == direction]
        keys = mine[["device", "chunk", "microbatch", "slice"]].tolist()
        partners = set(moved[moved["direction"] == other][["device", "chunk", "microbatch", "slice"]].tolist())
        seen: set[tuple[int, ...]] = set()
        for key, row in zip(keys, mine, strict=True):
            if key in seen:
                raise ScheduleError(
                    timeline.schedule, "repeated transfer", f"{_transfer_name(timeline, row)} happens more than once"
                )
            if key not in partners:
                missing = other.name.lower()
                raise ScheduleError(
                    timeline.schedule, "missing transfer", f"{_transfer_name(timeline, row)} has no {missing}"
                )
            seen.add(key)


def _check_windows(timeline: Timeline) -> None:
    """F, offload, reload, B follow each other."""
    moved = timeline.transfers
    if not len(moved):
        return
    schedule = timeline.schedule
    rows = rows_of(schedule)
    unit = moved["microbatch"].astype(np.int64) * schedule.slices + moved["slice"]
    stage = schedule.placement.stage[moved["device"], moved["chunk"]]
    out = moved["direction"] == Direction.OFFLOAD
    gone = np.zeros((schedule.placement.stages, schedule.microbatches * schedule.slices))
    gone[stage[out], unit[out]] = moved["stop"][out]
    forward, backward = rows[Kind.F][stage, unit], rows[Kind.B][stage, unit]
    for wrong, text in (
        (out & (moved["start"] < timeline.stop[forward] - _SLACK), "starts before its F ends"),
        (~out & (moved["start"] < gone[stage, unit] - _SLACK), "starts before its offload ends"),
        (~out & (moved["stop"] > timeline.start[backward] + _SLACK), "ends after its B starts"),
    ):
        if wrong.any():
            row = moved[int(np.flatnonzero(wrong)[0])]
            raise ScheduleError(schedule, "transfer", f"{_transfer_name(timeline, row)} {text}")


def _check_lanes(timeline: Timeline) -> None:
    moved = timeline.transfers[
        np.lexsort((timeline.transfers["start"], timeline.transfers["lane"], timeline.transfers["device"]))
    ]
    same = (np.diff(moved["device"]) == 0) & (np.diff(moved["lane"]) == 0)
    both = same & (moved["start"][1:] < moved["stop"][:-1] - _SLACK)
    if both.any():
        at = int(np.flatnonzero(both)[0])
        first, second = (_transfer_name(timeline, moved[row]) for row in (at, at + 1))
        raise ScheduleError(
            timeline.schedule,
            "double booking",
            f"lane {moved['lane'][at]} still runs the {first} when the {second} starts",
        )
