"""A schedule for a terminal: a line of passes for each device, its transfer lanes and its memory under it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from pipejax.schedules.schedule import Kind, Schedule
from pipejax.schedules.simulate import simulate
from pipejax.schedules.timeline import Direction, Timeline

# For each chunk, colours (of 256) of F's ground and of B's; W has the ground of F and is dimmed.
_PALETTE = ((153, 25), (217, 124), (157, 28), (222, 130), (183, 91), (159, 30), (223, 94), (225, 126))
_BARS = " ▁▂▃▄▅▆▇█"
_LABEL = 8  # characters left of the axis of time


def text(what: Schedule | Timeline, *, width: int = 160, colour: bool = True) -> str:
    """Draws a schedule in characters.

    Args:
      what: a schedule, simulated with unit costs, or a timeline with its transfers.
      width: characters in a line; where a pass does not get its own number, a column stands for a span of time.
      colour: whether to use ANSI colours; without them passes are letters, and wide enough schedules get
        microbatch.chunk after each.

    Returns:
      Lines: a heading, a legend, and for each device its passes, its transfers where there are any, its memory.
    """
    timeline = what if isinstance(what, Timeline) else simulate(what)
    return "\n".join(_Text(timeline, width - _LABEL, colour).lines())


@dataclasses.dataclass(frozen=True)
class _Cell:
    """One drawn thing: a span of columns, what is written in it, and how it is coloured."""

    start: int
    stop: int
    label: str
    style: str


class _Text:
    def __init__(self, timeline: Timeline, width: int, colour: bool) -> None:
        self.timeline = timeline
        self.schedule = timeline.schedule
        self.colour = colour
        shortest = float((timeline.stop - timeline.start).min())
        digits = len(str(self.schedule.microbatches - 1))
        if not colour:
            digits += 3 + len(str(self.schedule.chunks - 1))  # F12.3 and a space
        end = float(timeline.stop.max())
        room = max(width, 20)
        # Characters for the shortest pass: room for its number, else a whole number or a whole part of what fits, so
        # that no pass falls between two columns for rounding alone.
        size = min(max(digits, 2), room * shortest / end)
        self.scale = (np.floor(size) if size >= 1 else 1 / np.ceil(1 / size)) / shortest
        self.columns = int(np.ceil(end * self.scale - 1e-6))

    def lines(self) -> Iterator[str]:
        t, s = self.timeline, self.schedule
        yield (
            f"{s.name}: {s.devices} devices, {s.chunks} chunks, {s.microbatches} microbatches; time {t.makespan:g}, "
            f"bubble {t.bubble:g} ({t.bubble / t.makespan:.0%}), peak {t.peaks().max():g} chunk-activations"
        )
        yield self._legend()
        for device in range(s.devices):
            yield f"{f'dev {device}':<{_LABEL}}" + self._row(self._passes(device))
            yield from self._lanes(device)
            yield f"{'memory':>{_LABEL - 1}} " + self._memory(device)
        yield " " * _LABEL + self._axis()

    def _style(self, kind: Kind, chunk: int) -> str:
        light, dark = _PALETTE[chunk % len(_PALETTE)]
        return {Kind.F: f"48;5;{light};38;5;16", Kind.B: f"48;5;{dark};38;5;231", Kind.W: f"48;5;{light};38;5;240;2"}[
            kind
        ]

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour and style else text

    def _legend(self) -> str:
        kinds = list(Kind) if self.schedule.split_backward else [Kind.F, Kind.B]
        if not self.colour:
            return "F forward, B backward, W weights; microbatch.chunk; > to the host, < back"
        chunks = (
            "".join(self._paint(f" {kind.name} ", self._style(kind, chunk)) for kind in kinds) + f" chunk {chunk}"
            for chunk in range(self.schedule.chunks)
        )
        return "  ".join(chunks) + ("  ▸ to the host, ◂ back" if len(self.timeline.transfers) else "")

    def _span(self, start: float, stop: float) -> tuple[int, int]:
        lo, hi = (round(time * self.scale) for time in (start, stop))
        return lo, max(hi, lo + 1)

    def _passes(self, device: int) -> Iterator[_Cell]:
        lo, hi = np.searchsorted(self.schedule.passes["device"], [device, device + 1])
        for index in range(lo, hi):
            row = self.schedule.passes[index]
            kind, chunk, microbatch = Kind(row["kind"]), int(row["chunk"]), str(row["microbatch"])
            label = microbatch if self.colour else f"{kind.name}{microbatch}.{chunk}"
            span = self._span(self.timeline.start[index], self.timeline.stop[index])
            yield _Cell(*span, label, self._style(kind, chunk))

    def _lanes(self, device: int) -> Iterator[str]:
        moved = self.timeline.transfers
        moved = moved[moved["device"] == device]
        for lane in np.unique(moved["lane"]).tolist():
            cells = []
            for row in moved[moved["lane"] == lane]:
                out = row["direction"] == Direction.OFFLOAD
                sign = ("▸" if out else "◂") if self.colour else (">" if out else "<")
                style = self._style(Kind.F if out else Kind.B, int(row["chunk"]))
                label = f"{sign}{row['microbatch']}" + ("" if self.colour else f".{row['chunk']}")
                cells.append(_Cell(*self._span(row["start"], row["stop"]), label, style))
            yield f"{'host':>{_LABEL - 1}} " + self._row(cells)

    def _row(self, cells: Iterator[_Cell] | list[_Cell]) -> str:
        line, at = [], 0
        for cell in cells:
            if cell.start < at:  # more than one in a column: the first is shown
                continue
            size = cell.stop - cell.start
            label = cell.label if len(cell.label) <= size else cell.label[:1] if not self.colour else " "
            line.append(" " * (cell.start - at) + self._paint(f"{label:<{size}}"[:size], cell.style))
            at = cell.stop
        return "".join(line)

    def _memory(self, device: int) -> str:
        times, held = self.timeline.memory(device)
        edges = np.arange(self.columns) / self.scale
        # The most held in each column.
        bars = []
        for start in edges.tolist():
            lo = max(int(np.searchsorted(times, start + 1e-9, side="right")) - 1, 0)
            hi = int(np.searchsorted(times, start + 1 / self.scale - 1e-9))
            bars.append(float(held[lo : max(hi, lo + 1)].max()))
        most = max(self.timeline.peaks().max(), 1.0)
        line = "".join(_BARS[int(np.ceil(bar / most * (len(_BARS) - 1)))] for bar in bars)
        return f"{self._paint(line, '38;5;245')} {self.timeline.peaks()[device]:g}"

    def _axis(self) -> str:
        line = [" "] * (self.columns + 8)
        step = next(n * 10**e for e in range(9) for n in (1, 2, 5) if n * 10**e * self.scale >= 8)
        for time in np.arange(0, self.columns / self.scale, step).tolist():
            at = round(time * self.scale)
            mark = f"|{time:g}"
            line[at : at + len(mark)] = mark
        return "".join(line).rstrip()
