"""A schedule in time: when each pass and transfer starts and stops, and what memory that takes. NumPy only."""

from __future__ import annotations

import dataclasses
import enum
import functools

import numpy as np

from pipejax.schedules.costs import Costs
from pipejax.schedules.graph import rows_of
from pipejax.schedules.schedule import Kind, Schedule


class Direction(enum.IntEnum):
    """Which way a transfer goes: activations leave the device, or come back."""

    OFFLOAD = 0
    RELOAD = 1


TRANSFER_DTYPE = np.dtype(
    [
        ("device", "i4"),
        ("lane", "i4"),
        ("direction", "i4"),
        ("chunk", "i4"),
        ("microbatch", "i4"),
        ("slice", "i4"),
        ("start", "f8"),
        ("stop", "f8"),
    ]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """When everything happens.

    Attributes:
      schedule: what runs.
      costs: the times of the passes.
      start, stop: float64 [passes], in the unit of the costs, row for row as `schedule.passes`.
      transfers: structured array of TRANSFER_DTYPE, sorted by (device, lane, start): an offload and a reload for each
        activation that leaves the device.
    """

    schedule: Schedule
    costs: Costs
    start: np.ndarray
    stop: np.ndarray
    transfers: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, TRANSFER_DTYPE))

    @functools.cached_property
    def makespan(self) -> float:
        """From the first start to the last stop."""
        return float(self.stop.max() - self.start.min())

    @functools.cached_property
    def busy(self) -> np.ndarray:
        """float64 [devices], the time that each device computes."""
        return np.bincount(
            self.schedule.passes["device"], self.costs.durations(self.schedule), minlength=self.schedule.devices
        )

    @property
    def bubble(self) -> float:
        """The time that the busiest device does not compute."""
        return self.makespan - float(self.busy.max())

    @property
    def offloaded_fraction(self) -> float:
        """The share of all activations that leaves the device."""
        passes = self.schedule.passes
        return len(self.transfers) / 2 / int((passes["kind"] == Kind.F).sum())

    @functools.cached_property
    def _memory(self) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
        return {
            (where, device): held_over_time(*self._events(where, device), unit=1 / self.schedule.slices)
            for where in ("device", "host")
            for device in range(self.schedule.devices)
        }

    def memory(self, device: int, *, where: str = "device") -> tuple[np.ndarray, np.ndarray]:
        """Activations held over time.

        An activation is held from the start of its F, or of its reload, until the end of its offload, or of its W (of
        its B where the backward is not split). The host holds it from the start of the offload to the end of the
        reload.

        Args:
          device: which device.
          where: "device" or "host".

        Returns:
          float64 [n] times in rising order, and float64 [n] chunk-activations held from each time on.
        """
        return self._memory[where, device]

    def _events(self, where: str, device: int) -> tuple[np.ndarray, np.ndarray]:
        """When an activation begins and ends to be held."""
        moved = self.transfers[self.transfers["device"] == device]
        out, back = (moved[moved["direction"] == way] for way in Direction)
        if where == "host":
            return out["start"], back["stop"]
        lo, hi = np.searchsorted(self.schedule.passes["device"], [device, device + 1])
        kind = self.schedule.passes["kind"][lo:hi]
        last = Kind.W if self.schedule.split_backward else Kind.B
        begin = np.concatenate([self.start[lo:hi][kind == Kind.F], back["start"]])
        return begin, np.concatenate([self.stop[lo:hi][kind == last], out["stop"]])

    def peaks(self, *, where: str = "device") -> np.ndarray:
        """float64 [devices], the most chunk-activations held at any time on each device, or for it on the host."""
        curves = (self.memory(device, where=where)[1] for device in range(self.schedule.devices))
        return np.array([held.max(initial=0.0) for held in curves])

    @functools.cached_property
    def in_flight(self) -> np.ndarray:
        """int64 [devices], the most microbatches whose F has begun and whose last backward pass has not ended."""
        rows = rows_of(self.schedule)
        last = rows[Kind.W if self.schedule.split_backward else Kind.B]
        most = np.zeros(self.schedule.devices, np.int64)
        for device in range(self.schedule.devices):
            stages = self.schedule.placement.device == device
            shape = (-1, self.schedule.microbatches, self.schedule.slices)
            begin = self.start[rows[Kind.F][stages]].reshape(shape).min(axis=(0, 2))
            end = self.stop[last[stages]].reshape(shape).max(axis=(0, 2))
            most[device] = held_over_time(begin, end, unit=1)[1].max()
        return most


def held_over_time(begin: np.ndarray, end: np.ndarray, *, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """How many are held from each moment on; what ends at a moment makes room for what begins then."""
    # Times are sums of floats: moments that differ by rounding alone are one.
    times, index = np.unique(np.round(np.concatenate([begin, end]), 9), return_inverse=True)
    change = np.bincount(index[: len(begin)], minlength=len(times)) - np.bincount(
        index[len(begin) :], minlength=len(times)
    )
    return times, np.cumsum(change) * unit
