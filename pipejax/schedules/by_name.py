"""Schedules by the names used on the command line."""

from __future__ import annotations

from pipejax.schedules.lockstep import GPipe, Interleaved, OneFOneB
from pipejax.schedules.schedule import ScheduleSpec

NAMES = ("gpipe", "1f1b", "interleaved")


def by_name(name: str, *, chunks: int) -> ScheduleSpec:
    """The schedule of a name.

    Args:
      name: one of `NAMES`.
      chunks: v, chunks on each device.

    Raises:
      ValueError: there is no such schedule, or it cannot have so many chunks.
    """
    if name == "1f1b":
        if chunks != 1:
            raise ValueError(f"1f1b has one chunk on each device, not {chunks}; use interleaved for more.")
        return OneFOneB()
    families = {"gpipe": GPipe, "interleaved": Interleaved}
    if name not in families:
        raise ValueError(f"there is no schedule {name!r}; the names are: {', '.join(NAMES)}.")
    return families[name](chunks=chunks)
