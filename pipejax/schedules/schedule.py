"""The schedule record: which pass each device runs at which slot. NumPy only, no JAX.

A schedule is data. Generators make one, `check` proves it, the simulator times it, `pipejax.program` turns it
into the integer tables that the runtime scans over. Nothing downstream knows a schedule by its name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class Kind(enum.IntEnum):
    """What a pass computes for one chunk and one microbatch.

    F is the forward; B the backward for the chunk's input; W the backward for its weights. In a schedule whose
    backward is not split, B stands for B then W and there is no W.
    """

    F = 0
    B = 1
    W = 2


PASS_DTYPE = np.dtype(
    [("device", "i4"), ("slot", "i4"), ("kind", "i4"), ("chunk", "i4"), ("microbatch", "i4"), ("slice", "i4")]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where each virtual stage lives.

    Attributes:
      name: "looping", "v" or "wave", or whatever a custom table brings.
      device: int32 [stages], the device of each virtual stage in the order of the model.
      chunk: int32 [stages], the chunk on that device; (device, chunk) pairs are distinct.
    """

    name: str
    device: IntArray
    chunk: IntArray

    @property
    def stages(self) -> int:
        """The number of virtual stages, devices times chunks."""
        return len(self.device)

    @functools.cached_property
    def stage(self) -> IntArray:
        """int32 [devices, chunks], the virtual stage that each chunk of each device holds."""
        table = np.zeros((int(self.device.max()) + 1, int(self.chunk.max()) + 1), np.int32)
        table[self.device, self.chunk] = np.arange(self.stages)
        return table


def looping(devices: int, chunks: int) -> Placement:
    """Virtual stage s = chunk * devices + device: each chunk goes once around the ring (Megatron's placement)."""
    stages = np.arange(devices * chunks, dtype=np.int32)
    return Placement(name="looping", device=stages % devices, chunk=stages // devices)


def wave(devices: int, chunks: int) -> Placement:
    """Each chunk runs over the devices the other way round than the one before (Hanayo, arXiv 2308.15762).

    The turn from one chunk to the next stays on one device. With two chunks the stages form a V (arXiv 2401.10241).
    """
    stages = np.arange(devices * chunks, dtype=np.int32)
    along, chunk = stages % devices, stages // devices
    device = np.where(chunk % 2 == 0, along, devices - 1 - along).astype(np.int32)
    return Placement(name="v" if chunks == 2 else "wave", device=device, chunk=chunk)


def check_size(name: str, devices: int, microbatches: int) -> None:
    """Refuses a pipeline without devices or microbatches; `name` is the schedule's."""
    for what, value in (("devices", devices), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"schedule {name!r}: {what} is {value}; pass 1 or more.")


def check_chunks(chunks: int) -> None:
    """Refuses a number of chunks below one."""
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; a device needs one chunk or more.")


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A table of passes.

    Attributes:
      name: the schedule's name, for people.
      devices: p, the pipeline's devices.
      chunks: v, chunks on each device.
      microbatches: m.
      passes: structured array of PASS_DTYPE, sorted by (device, slot, kind). `slot` is when the pass starts, in the
        schedule's own unit of time: a tick where `lockstep`, else a slot in which a device runs one pass.
      placement: the device and chunk of each virtual stage.
      split_backward: whether B and W are passes of their own.
      lockstep: whether one slot of a device holds up to one pass of each kind (a tick of the scan) and all
        devices run the same kinds in the same slot.
      slices: sequence slices per microbatch; the unit of work is (microbatch, slice).
      offload_chunks: how many chunks of each device, the longest-lived, the schedule is meant to keep in host memory.
    """

    name: str
    devices: int
    chunks: int
    microbatches: int
    passes: np.ndarray
    placement: Placement
    split_backward: bool = False
    lockstep: bool = False
    slices: int = 1
    offload_chunks: int = 0

    @property
    def slots(self) -> int:
        """The number of slots from the first to the last pass, both included."""
        return int(self.passes["slot"].max()) + 1

    def of_device(self, device: int) -> np.ndarray:
        """The passes of one device, in the order in which it runs them."""
        lo, hi = np.searchsorted(self.passes["device"], [device, device + 1])
        return self.passes[lo:hi]


def sort_passes(passes: np.ndarray) -> np.ndarray:
    """A copy of a pass table in the order that `Schedule.passes` promises."""
    return passes[np.lexsort((passes["kind"], passes["slot"], passes["device"]))]


@runtime_checkable
class ScheduleSpec(Protocol):
    """A schedule before the pipeline's size is known: what `pj.Pipeline` takes."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches.

        Args:
          devices: p.
          microbatches: m.
          transfer_ticks: the least number of ticks between an F and its B, 2 where residuals go through host memory.
        """
        ...
