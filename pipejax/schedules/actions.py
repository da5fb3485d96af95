"""Custom tables: schedules from and to the action text of PyTorch's pipelining, as CSV or JSON.

An action is the stage, a letter, the microbatch: "2F0" is the forward of microbatch 0 on stage 2, "1B3" a backward,
"1W3" a backward for weights. A rank's actions make a row; empty places are waits and do not count. Where a table has
W's, a B (newer PyTorch writes I for it) is the backward for inputs alone if its W is there too, else the whole one.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipejax.schedules.check import check, check_complete
from pipejax.schedules.schedule import PASS_DTYPE, Kind, Placement, Schedule, sort_passes
from pipejax.schedules.simulate import compact

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_LETTERS = {"F": Kind.F, "B": Kind.B, "I": Kind.B, "W": Kind.W}


def from_actions(ranks: Sequence[Sequence[str]], *, name: str = "custom") -> Schedule:
    """A checked schedule from each rank's actions in order.

    Args:
      ranks: for each device its actions; empty strings are skipped.
      name: the schedule's name.

    Raises:
      ValueError: an action that is none, or stages that do not fill the devices evenly.
      ScheduleError: a missing or repeated pass, or orders that wait for each other (rule "deadlock").
    """
    parsed = [[_parse(text.strip(), device) for text in rank if text.strip()] for device, rank in enumerate(ranks)]
    whole = _whole_backwards(parsed)
    rows = []
    for device, actions in enumerate(parsed):
        order: list[tuple[int, Kind, int]] = []
        for stage, kind, microbatch in actions:
            order.append((stage, kind, microbatch))
            if kind == Kind.B and (stage, microbatch) in whole:
                order.append((stage, Kind.W, microbatch))
        rows += [(device, slot, kind, stage, microbatch, 0) for slot, (stage, kind, microbatch) in enumerate(order)]
    if not rows:
        raise ValueError(f"{name}: the table holds no actions such as 0F0.")
    passes = np.array(rows, PASS_DTYPE)  # with the stage where the chunk will be
    placement = _placement(name, passes, len(parsed))
    passes["chunk"] = placement.chunk[passes["chunk"]]
    schedule = Schedule(
        name=name,
        devices=len(parsed),
        chunks=placement.stages // len(parsed),
        microbatches=int(passes["microbatch"].max()) + 1,
        passes=sort_passes(passes),
        placement=placement,
        split_backward=bool((passes["kind"] == Kind.W).any()),
    )
    check_complete(schedule)
    schedule = compact(schedule)
    check(schedule)
    return schedule


def to_actions(schedule: Schedule) -> list[list[str]]:
    """Each device's actions, one for a slot, "" where it waits.

    Raises:
      ValueError: the schedule cuts microbatches into slices, or is in lockstep; the text has no words for either.
    """
    if schedule.slices > 1 or schedule.lockstep:
        what = "slices" if schedule.slices > 1 else "ticks in which a device runs several passes"
        raise ValueError(f"{schedule.name}: PyTorch's action text has no words for {what}.")
    table = [[""] * schedule.slots for _ in range(schedule.devices)]
    for device, slot, kind, chunk, microbatch, _ in schedule.passes.tolist():
        stage = schedule.placement.stage[device, chunk]
        table[device][slot] = f"{stage}{Kind(kind).name}{microbatch}"
    return table


def read(path: Path) -> Schedule:
    """A schedule from a .csv file (a line for each rank) or a .json one (a list of ranks, or a dict by rank)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        table = json.loads(text)
        ranks = [table[rank] for rank in sorted(table, key=int)] if isinstance(table, dict) else table
    elif path.suffix == ".csv":
        ranks = [row for row in csv.reader(io.StringIO(text)) if row]
    else:
        raise ValueError(f"{path}: a table of actions is a .csv or a .json file.")
    return from_actions(ranks, name=path.stem)


def to_csv(schedule: Schedule) -> str:
    """The actions as CSV, a line for each rank."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(to_actions(schedule))
    return out.getvalue()


def _parse(text: str, device: int) -> tuple[int, Kind, int]:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"rank {device}: {text!r} is no action; write stage, F, B, I or W, microbatch, such as 2F0.")
    return int(match[1]), _LETTERS[match[2]], int(match[3])


def _whole_backwards(parsed: list[list[tuple[int, Kind, int]]]) -> set[tuple[int, int]]:
    """(stage, microbatch) of the B's that have no W, in a table that has some."""
    of = {kind: {(s, i) for actions in parsed for s, k, i in actions if k == kind} for kind in (Kind.B, Kind.W)}
    return of[Kind.B] - of[Kind.W] if of[Kind.W] else set()


def _placement(name: str, passes: np.ndarray, devices: int) -> Placement:
    """Where each stage's first pass is; its chunk counts the device's stages in order."""
    stages = int(passes["chunk"].max()) + 1
    where = np.full(stages, -1, np.int32)
    where[passes["chunk"][::-1]] = passes["device"][::-1]
    chunk = np.array([(where[:stage] == where[stage]).sum() for stage in range(stages)], np.int32)
    stray = np.flatnonzero(passes["device"] != where[passes["chunk"]])
    if stray.size:
        row = passes[stray[0]]
        raise ValueError(f"{name}: stage {row['chunk']} is on ranks {where[row['chunk']]} and {row['device']}.")
    if (where < 0).any() or stages % devices or chunk.max() + 1 != stages // devices:
        raise ValueError(f"{name}: {stages} stages do not fill {devices} ranks evenly; give each as many.")
    return Placement(name="custom", device=where, chunk=chunk)
