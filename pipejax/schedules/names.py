"""Schedules by the names that the command line knows."""

from __future__ import annotations

from collections.abc import Callable

from pipejax.schedules.dualpipe_v import DualPipeV
from pipejax.schedules.gis import GIS, GISH
from pipejax.schedules.lockstep import GPipe, Interleaved, OneFOneB
from pipejax.schedules.po import PO, POF, POH
from pipejax.schedules.schedule import ScheduleSpec
from pipejax.schedules.seq1f1b import Seq1F1B
from pipejax.schedules.staggered import StaggeredGPipe, StaggeredInterleaved, StaggeredOneFOneB
from pipejax.schedules.v_family import ZBV, VHalf, VMin
from pipejax.schedules.wave import Wave
from pipejax.schedules.zero_bubble import ZBH1, ZBH2

# For each name: what builds it; the chunks it has when none are asked for; whether it can have another number; what
# it is, in a line.
_MAKERS: dict[str, tuple[Callable[..., ScheduleSpec], int, bool, str]] = {
    "gpipe": (StaggeredGPipe, 1, True, "all forwards, then all backwards"),
    "1f1b": (StaggeredOneFOneB, 1, False, "one forward, one backward (DAPPLE, PipeDream-flush)"),
    "interleaved": (StaggeredInterleaved, 2, True, "Megatron's interleaved 1F1B"),
    "gis": (GIS, 2, True, "grouped interleaved, B and W split; --group for another group than the devices"),
    "gis-h": (GISH, 2, True, "GIS in groups of half the devices: about half of its activations"),
    "po": (PO, 2, True, "PipeOffload's uniform schedule, nothing offloaded"),
    "po-h": (POH, 2, True, "PO, the longer-lived half of the chunks offloaded"),
    "po-f": (POF, 2, True, "PO, all chunks offloaded"),
    "zb-h1": (ZBH1, 1, False, "zero bubble at 1F1B's memory: a third of its bubble"),
    "zb-h2": (ZBH2, 1, False, "zero bubble at twice 1F1B's memory: no wait within a device"),
    "zb-v": (ZBV, 2, False, "zero bubble on a V placement at 1F1B's memory"),
    "v-min": (VMin, 2, False, "V placement at a third of 1F1B's memory"),
    "v-half": (VHalf, 2, False, "V placement at half of 1F1B's memory"),
    "wave": (Wave, 4, True, "Hanayo's waves"),
    "dualpipe-v": (DualPipeV, 2, False, "DeepSeek's DualPipeV: F of one chunk beside B of the other"),
    "seq1f1b": (Seq1F1B, 1, True, "1F1B over slices of the sequence"),
    "lockstep-gpipe": (GPipe, 1, True, "GPipe in lockstep"),
    "lockstep-1f1b": (OneFOneB, 1, False, "1F1B in lockstep"),
    "lockstep-interleaved": (Interleaved, 2, True, "interleaved 1F1B in lockstep"),
}

NAMES = tuple(_MAKERS)


def by_name(name: str, *, chunks: int | None = None, **options: object) -> ScheduleSpec:
    """The schedule of a name in `NAMES`.

    Args:
      name: such as "gis" or "lockstep-interleaved".
      chunks: chunks on each device; None for what the schedule is usually run with.
      **options: other fields of the schedule's record, such as `group` of "gis".

    Raises:
      ValueError: an unknown name, a number of chunks that the schedule does not have, or an option it does not know.
    """
    make, usual, free, _ = _maker(name)
    if free:
        options["chunks"] = usual if chunks is None else chunks
    elif chunks not in (None, usual):
        one = "chunk" if usual == 1 else "chunks"
        raise ValueError(f"schedule {name!r} has {usual} {one} on each device, not {chunks}; leave chunks out.")
    known = options_of(name)
    for option in options:
        if option not in known:
            known_text = ", ".join(known) or "none"
            raise ValueError(f"schedule {name!r} has no option {option!r}; its options are: {known_text}.")
    return make(**options)


def options_of(name: str) -> tuple[str, ...]:
    """The fields that a schedule's record has."""
    return tuple(getattr(_maker(name)[0], "__dataclass_fields__", ()))


def summary(name: str) -> str:
    """What a schedule is, in a line."""
    return _maker(name)[3]


def _maker(name: str) -> tuple[Callable[..., ScheduleSpec], int, bool, str]:
    if name not in _MAKERS:
        raise ValueError(f"no schedule is called {name!r}; the names are {', '.join(NAMES)}.")
    return _MAKERS[name]
