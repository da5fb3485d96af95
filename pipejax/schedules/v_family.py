"""V-Min, V-Half and ZB-V: two chunks on each device, the second running back (arXiv 2405.15362, 2401.10241).

All are one building block for each microbatch, repeated every six slots (two F, two B, two W). In it each of the four
chains F0, F1, B1, B0 takes a number of slots from device to device, and the slower the chains, the longer activations
live: lifespans sum up to 6 times the peak.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from pipejax.schedules.blocks import from_slots, refuse_transfer_ticks
from pipejax.schedules.refill import refill
from pipejax.schedules.schedule import Kind, Schedule, check_size, wave
from pipejax.schedules.simulate import compact

_PERIOD = 6
_LONGEST_WAIT = 7  # slots that a chain may wait where it turns


@dataclasses.dataclass(frozen=True)
class VMin:
    """A third of 1F1B's activations: (p + 4) // 3 microbatches, for about two thirds of its bubble."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return _build("v-min", devices, microbatches, transfer_ticks, (1, 1), 2 * ((devices + 4) // 3))


@dataclasses.dataclass(frozen=True)
class VHalf:
    """Half of 1F1B's activations: (p + 2) // 2 microbatches, for half of its bubble."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return _build("v-half", devices, microbatches, transfer_ticks, (1, 2), 2 * ((devices + 2) // 2))


@dataclasses.dataclass(frozen=True)
class ZBV:
    """1F1B's activations, and no wait but that for the first microbatch: p - 1 slots of bubble."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        return _build("zb-v", devices, microbatches, transfer_ticks, (1, 5), 2 * devices)


def _build(
    name: str, devices: int, microbatches: int, transfer_ticks: int, pace: tuple[int, int], limit: int
) -> Schedule:
    check_size(name, devices, microbatches)
    refuse_transfer_ticks(name, transfer_ticks)
    # W's moved into the waits of warm-up and cool-down shorten most; where they don't, the block itself is kept. The
    # tightest pace always fits in memory, a looser one may need W's moved for that.
    candidates = []
    for tried in dict.fromkeys([pace, (1, 1)]):
        block = _repeat(name, devices, microbatches, _block(devices, *tried))
        candidates += [block, refill(block, limit)]
    fitting = [c for c in candidates if c is not None and _peak(c) <= limit]
    return min(fitting, key=lambda schedule: schedule.slots)


def _peak(schedule: Schedule) -> int:
    """The most chunk-activations held on a device; in a compact schedule the order alone decides it."""
    change = np.where(schedule.passes["kind"] == Kind.F, 1, np.where(schedule.passes["kind"] == Kind.W, -1, 0))
    held = np.cumsum(change)  # every device ends at 0, so that devices do not mix
    return int(held.max())


def _repeat(name: str, devices: int, microbatches: int, block: dict[Kind, np.ndarray]) -> Schedule:
    placement = wave(devices, 2)
    slots = {
        kind: at[placement.chunk, placement.device][:, None] + _PERIOD * np.arange(microbatches)
        for kind, at in block.items()
    }
    return compact(from_slots(name, placement, slots, devices=devices, microbatches=microbatches))


@functools.cache
def _block(devices: int, out: int, back: int) -> dict[Kind, np.ndarray]:
    """int64 [2, devices], the slots of the first microbatch's F, B and W.

    F0 and B1 take `out` slots from device to device, F1 and B0, which run the other way, `back`. The waits where a
    chain turns are the shortest for which no device has two passes in one slot of the period.
    """
    rank = np.arange(devices)
    away = devices - 1 - rank
    best, best_key = None, None
    for waits in itertools.product(range(_LONGEST_WAIT), repeat=3):
        first = out * rank
        second = first[-1] + 1 + waits[0] + back * away
        down = second[0] + 1 + waits[1] + out * rank
        up = down[-1] + 1 + waits[2] + back * away
        taken = np.stack([first, second, down, up]) % _PERIOD
        if any((np.unique(column).size < 4) for column in taken.T):
            continue
        weights = np.stack([_weights(*column) for column in np.stack([first, second, down, up]).T], axis=1)
        block = {Kind.F: np.stack([first, second]), Kind.B: np.stack([up, down]), Kind.W: weights}
        key = (_block_peak(block), int(weights.max()))
        if best_key is None or key < best_key:
            best, best_key = block, key
    if best is None:
        raise AssertionError(f"no block for {devices} devices at a pace of {out} and {back} slots")
    return best


def _weights(first: int, second: int, down: int, up: int) -> np.ndarray:
    """int64 [2], the slots of a device's two W's: the next ones after their B's that its other passes leave."""
    free = sorted(set(range(_PERIOD)) - {x % _PERIOD for x in (first, second, down, up)})
    choices = []
    for residues in (free, free[::-1]):
        slots = np.array([b + 1 + (r - b - 1) % _PERIOD for b, r in zip((up, down), residues, strict=True)])
        block = {Kind.F: np.array([[first], [second]]), Kind.W: slots[:, None]}
        choices.append((_block_peak(block), int(slots.sum()), slots.tolist()))
    return np.array(min(choices)[2])


def _block_peak(block: dict[Kind, np.ndarray]) -> int:
    """The most chunk-activations that the repeated block holds on a device."""
    time = np.arange(_PERIOD)[:, None, None]
    held = (time - block[Kind.F]) // _PERIOD - (time - block[Kind.W] - 1) // _PERIOD
    return int(held.sum(axis=1).max())
