"""Schedules by the names that the command line knows."""

from __future__ import annotations

from collections.abc import Callable

from pipejax.schedules.lockstep import GPipe, Interleaved, OneFOneB
from pipejax.schedules.schedule import ScheduleSpec


def _one_chunk(name: str, make: Callable[[], ScheduleSpec]) -> Callable[[int], ScheduleSpec]:
    def build(chunks: int) -> ScheduleSpec:
        if chunks != 1:
            raise ValueError(f"schedule {name!r} has one chunk on each device, not {chunks}; pass chunks=1.")
        return make()

    return build


# For each name: chunks when none are asked for, and the spec for so many chunks.
_MAKERS: dict[str, tuple[int, Callable[[int], ScheduleSpec]]] = {
    "lockstep-gpipe": (1, lambda chunks: GPipe(chunks=chunks)),
    "lockstep-1f1b": (1, _one_chunk("lockstep-1f1b", OneFOneB)),
    "lockstep-interleaved": (2, lambda chunks: Interleaved(chunks=chunks)),
}

NAMES = tuple(_MAKERS)


def by_name(name: str, *, chunks: int | None = None) -> ScheduleSpec:
    """The schedule of a name in `NAMES`.

    Args:
      name: such as "lockstep-interleaved".
      chunks: chunks on each device; None for what the schedule is usually run with.

    Raises:
      ValueError: an unknown name, or a number of chunks that the schedule does not have.
    """
    if name not in _MAKERS:
        raise ValueError(f"no schedule is called {name!r}; the names are {', '.join(NAMES)}.")
    usual, make = _MAKERS[name]
    return make(usual if chunks is None else chunks)
