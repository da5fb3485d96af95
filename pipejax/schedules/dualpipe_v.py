"""DualPipeV: the half of DeepSeek's DualPipe that a V placement needs (arXiv 2412.19437, and its code's README).

Its steady state pairs an F of one chunk with a B of the other, so that one's communication hides behind the other's
matrix products. W follows its B at once, except where splitting it off fills the warm-up and the cool-down.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

import numpy as np

from pipejax.schedules.blocks import from_slots, refuse_transfer_ticks
from pipejax.schedules.schedule import Kind, Schedule, check_size, wave
from pipejax.schedules.simulate import compact


@dataclasses.dataclass(frozen=True)
class DualPipeV:
    """Two chunks on each device in a V; about 2 p + 1 chunk-activations on each."""

    def build(self, *, devices: int, microbatches: int, transfer_ticks: int = 0) -> Schedule:
        """The schedule for so many devices and microbatches; see `ScheduleSpec.build`."""
        check_size("dualpipe-v", devices, microbatches)
        refuse_transfer_ticks("dualpipe-v", transfer_ticks)
        placement = wave(devices, 2)
        # The phases need two microbatches for each device. With fewer, the same order without the missing ones is
        # still in dependency order.
        planned = max(microbatches, 2 * devices)
        slots = {kind: np.zeros((2 * devices, planned), np.int64) for kind in Kind}
        for device in range(devices):
            for slot, (kind, chunk, microbatch) in enumerate(_order(device, devices, planned)):
                slots[kind][placement.stage[device, chunk], microbatch] = slot
        slots = {kind: at[:, :microbatches] for kind, at in slots.items()}
        return compact(from_slots("dualpipe-v", placement, slots, devices=devices, microbatches=microbatches))


def _order(rank: int, devices: int, microbatches: int) -> Iterator[tuple[Kind, int, int]]:
    """The passes of a device in order, as (kind, chunk, microbatch)."""
    ahead = devices - rank - 1  # devices between this one and the turn of the V
    count: dict[tuple[Kind, int], int] = dict.fromkeys(((kind, chunk) for kind in Kind for chunk in (0, 1)), 0)
    waiting: deque[tuple[Kind, int, int]] = deque()

    def take(kind: Kind, chunk: int) -> tuple[Kind, int, int]:
        count[kind, chunk] += 1
        return kind, chunk, count[kind, chunk] - 1

    def backward(chunk: int) -> Iterator[tuple[Kind, int, int]]:
        _, _, microbatch = b = take(Kind.B, chunk)
        yield b
        waiting.append((Kind.W, chunk, microbatch))

    # Warm-up: F of the first chunk alone, then both chunks in turns.
    for _ in range(2 * ahead):
        yield take(Kind.F, 0)
    for _ in range(rank + 1):
        yield take(Kind.F, 0)
        yield take(Kind.F, 1)
    # B's of the second chunk arrive; W fills the wait for the next F.
    for _ in range(ahead):
        yield from backward(1)
        yield waiting.popleft()
        yield take(Kind.F, 1)
    # Steady state: F of one chunk beside B of the other.
    for _ in range(microbatches - 2 * devices + rank + 1):
        for forward_chunk, backward_chunk in ((0, 1), (1, 0)):
            yield take(Kind.F, forward_chunk)
            yield from backward(backward_chunk)
            yield waiting.popleft()
    # The first chunk has no F left.
    for _ in range(ahead):
        yield from backward(1)
        yield waiting.popleft()
        yield take(Kind.F, 1)
        yield from backward(0)
        yield waiting.popleft()
    # Cool-down: B's only; the later half leave their W's for the waits that follow.
    for index in range(2 * (rank + 1)):
        yield from backward(1 - index % 2)
        if index < rank + 1:
            yield waiting.popleft()
    for _ in range(ahead):
        yield waiting.popleft()
        yield from backward(0)
    yield from waiting
