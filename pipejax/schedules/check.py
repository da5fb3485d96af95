"""Proves a schedule: complete, free of double booking, in dependency order."""

from __future__ import annotations

import numpy as np

from pipejax.schedules.graph import DeadlockError, device_orders, edges, run_orders
from pipejax.schedules.schedule import IntArray, Kind, Schedule


class ScheduleError(ValueError):
    """A schedule that breaks a rule; the message names rule, device and pass.

    Attributes:
      rule: the rule's name, such as "dependency".
    """

    def __init__(self, schedule: Schedule, rule: str, text: str) -> None:
        super().__init__(f"{schedule.name}: {rule}: {text}.")
        self.rule = rule


def check(schedule: Schedule) -> None:
    """Checks a schedule against every rule.

    A pass takes what another left in an earlier slot. In lockstep, a tick's F comes before its B and its B before its
    W on the same device, so these may share a slot.

    Sends and receives may block until both sides are there. A schedule in dependency order runs even so, if each
    device takes its sends and receives in the order of the senders' slots (ties by sender): that is one order for all,
    so the two sides of the first one that is not done always get to it. Receives right before the pass that needs them
    would not do, not even for 1F1B, where neighbours send to each other at the same time.

    Raises:
      ScheduleError: "placement", "neighbours", "unknown pass", "double booking", "missing pass", "repeated pass";
        "deadlock" where devices wait for each other in a circle, so that no slots can be right for their orders; else
        "dependency".
    """
    slots = check_complete(schedule)
    try:
        _check_dependencies(schedule, slots)
    except ScheduleError:
        if not schedule.lockstep:
            _check_deadlock(schedule)
        raise


def check_complete(schedule: Schedule) -> dict[Kind, IntArray]:
    """Checks all but the order: each pass there once, on the device that holds its stage, alone in its slot.

    Returns:
      For each kind int [stages, microbatches, slices], the slot of each pass.

    Raises:
      ScheduleError: as `check`, but never "dependency".
    """
    _check_placement(schedule)
    _check_range(schedule)
    _check_double_booking(schedule)
    kinds = (Kind.F, Kind.B, Kind.W) if schedule.split_backward else (Kind.F, Kind.B)
    return {kind: _slots(schedule, kind) for kind in kinds}


def describe(kind: int, microbatch: int, piece: int, chunk: int, *, slices: int) -> str:
    """A pass in words, such as "F of microbatch 3, chunk 1"."""
    cut = f", slice {piece}" if slices > 1 else ""
    return f"{Kind(kind).name} of microbatch {microbatch}{cut}, chunk {chunk}"


def deadlock_error(schedule: Schedule, deadlock: DeadlockError) -> ScheduleError:
    """What `check` and the simulator raise where devices wait for each other."""

    def name(row: int) -> str:
        p = schedule.passes[row]
        return describe(p["kind"], p["microbatch"], p["slice"], p["chunk"], slices=schedule.slices)

    circle = ", and ".join(
        f"device {schedule.passes['device'][waiting]} cannot run {name(waiting)} before "
        f"{name(source)} on device {schedule.passes['device'][source]}"
        for waiting, source in deadlock.cycle[:4]
    )
    return ScheduleError(schedule, "deadlock", f"the devices wait for each other: {circle}")


def _check_deadlock(schedule: Schedule) -> None:
    count = len(schedule.passes)
    before = edges(schedule).before.tolist()
    try:
        run_orders(device_orders(schedule), before, [[0.0, 0.0]] * count, [1.0] * count)
    except DeadlockError as deadlock:
        if len(deadlock.cycle) > 1:  # one device that waits for itself has its passes in the wrong order
            raise deadlock_error(schedule, deadlock) from None


def _name(schedule: Schedule, row: np.void) -> str:
    return (
        describe(row["kind"], row["microbatch"], row["slice"], row["chunk"], slices=schedule.slices)
        + f" on device {row['device']}, slot {row['slot']}"
    )


def _check_placement(schedule: Schedule) -> None:
    placement = schedule.placement
    held = set(zip(placement.device.tolist(), placement.chunk.tolist(), strict=True))
    wanted = {(d, c) for d in range(schedule.devices) for c in range(schedule.chunks)}
    if held != wanted or placement.stages != len(wanted):
        raise ScheduleError(
            schedule,
            "placement",
            f"the stages must fill each of {schedule.chunks} chunks on each of {schedule.devices} devices once",
        )
    hop = np.abs(np.diff(placement.device.astype(np.int64)))
    far = np.flatnonzero((hop > 1) & (hop != schedule.devices - 1))  # a ring's two ends are neighbours too
    if far.size:
        stage = int(far[0])
        sender, receiver = placement.device[stage : stage + 2]
        raise ScheduleError(
            schedule,
            "neighbours",
            f"stage {stage} on device {sender} sends to stage {stage + 1} on device {receiver}, which is not beside it",
        )


def _check_range(schedule: Schedule) -> None:
    passes = schedule.passes
    limits = {
        "device": schedule.devices,
        "kind": 3 if schedule.split_backward else 2,
        "chunk": schedule.chunks,
        "microbatch": schedule.microbatches,
        "slice": schedule.slices,
    }
    for column, limit in limits.items():
        outside = passes[(passes[column] < 0) | (passes[column] >= limit)]
        if outside.size:
            row = outside[0]
            raise ScheduleError(
                schedule,
                "unknown pass",
                f"on device {row['device']}, slot {row['slot']}, {column} is {row[column]}, and there are {limit}",
            )
    early = passes[passes["slot"] < 0]
    if early.size:
        raise ScheduleError(schedule, "unknown pass", f"{_name(schedule, early[0])}, and slots count from 0")


def _check_double_booking(schedule: Schedule) -> None:
    passes = schedule.passes
    columns = ["device", "slot", "kind"] if schedule.lockstep else ["device", "slot"]
    order = np.lexsort([passes[column] for column in reversed(columns)])
    same = np.all([np.diff(passes[column][order]) == 0 for column in columns], axis=0)
    if same.any():
        first = int(np.flatnonzero(same)[0])
        mine, other = passes[order[first]], passes[order[first + 1]]
        raise ScheduleError(schedule, "double booking", f"{_name(schedule, mine)}, and {_name(schedule, other)}")


def _slots(schedule: Schedule, kind: Kind) -> IntArray:
    """Int [stages, microbatches, slices], the slot of each pass of a kind, after checking that each is there once."""
    passes = schedule.passes[schedule.passes["kind"] == kind]
    shape = (schedule.placement.stages, schedule.microbatches, schedule.slices)
    stage = schedule.placement.stage[passes["device"], passes["chunk"]]
    flat = np.ravel_multi_index((stage, passes["microbatch"], passes["slice"]), shape)
    count = np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape)
    for rule, wrong in (("missing", count == 0), ("repeated", count > 1)):
        if wrong.any():
            s, i, j = np.argwhere(wrong)[0]
            name = describe(kind, i, j, schedule.placement.chunk[s], slices=schedule.slices)
            raise ScheduleError(schedule, f"{rule} pass", f"{name} on device {schedule.placement.device[s]}")
    slots = np.zeros(shape, np.int32)
    slots.reshape(-1)[flat] = passes["slot"]
    return slots


def _check_dependencies(schedule: Schedule, slots: dict[Kind, IntArray]) -> None:
    apart = 0 if schedule.lockstep else 1  # passes of one device may share a tick
    last = schedule.placement.stages - 1

    def need(kind: Kind, mine: IntArray, other: Kind, theirs: IntArray, gap: int, first_stage: int, shift: int) -> None:
        early = np.argwhere(mine < theirs + gap)
        if early.size:
            s, i, j = early[0]
            stage, source = s + first_stage, s + first_stage + shift
            place = schedule.placement
            raise ScheduleError(
                schedule,
                "dependency",
                f"{describe(kind, i, j, place.chunk[stage], slices=schedule.slices)} on device {place.device[stage]} "
                f"runs in slot {mine[s, i, j]}, too early for "
                f"{describe(other, i, j, place.chunk[source], slices=schedule.slices)} on device "
                f"{place.device[source]} in slot {theirs[s, i, j]}",
            )

    forward, backward = slots[Kind.F], slots[Kind.B]
    need(Kind.F, forward[1:], Kind.F, forward[:-1], 1, 1, -1)
    need(Kind.B, backward[:-1], Kind.B, backward[1:], 1, 0, 1)
    need(Kind.B, backward[last:], Kind.F, forward[last:], apart, last, 0)
    need(Kind.B, backward, Kind.F, forward, apart, 0, 0)
    if Kind.W in slots:
        need(Kind.W, slots[Kind.W], Kind.B, backward, apart, 0, 0)
    if schedule.slices > 1:
        # A causal slice reads the keys and values of those before it, and its B adds to theirs.
        for kind, table in ((Kind.F, forward), (Kind.B, backward[:, :, ::-1])):
            early = np.argwhere(np.diff(table, axis=2) < 1)
            if early.size:
                s, i, _ = early[0]
                raise ScheduleError(
                    schedule,
                    "dependency",
                    f"slices of {kind.name} of microbatch {i}, chunk {schedule.placement.chunk[s]} on device "
                    f"{schedule.placement.device[s]} are out of order",
                )
