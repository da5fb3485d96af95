"""A schedule as an SVG picture: passes, transfer lanes and memory of every device on one axis of time."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from xml.sax.saxutils import escape

import numpy as np

from pipejax.schedules.schedule import Kind, Schedule
from pipejax.schedules.simulate import simulate
from pipejax.schedules.timeline import Direction, Timeline

_INK, _FAINT, _GRID = "#1f2933", "#66727f", "#e4e8ec"
_HOST = "#7a869a"
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 62, 100, 30  # margins, px
_WIDEST, _NARROWEST = 3600, 700  # px of time; longer schedules get narrower passes, short ones wider ones
_SCREEN = 1500  # px, the width at which a wide picture is likely to be looked at
_CELL = 19  # px, the width of the shortest pass where there is room
_NARROWEST_LABEL = 6.0  # px, the narrowest pass that gets a number


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Heights of the rows of one device, px."""

    passes: float
    lane: float
    memory: float
    gap: float

    @classmethod
    def of(cls, devices: int) -> _Rows:
        if devices <= 8:
            return cls(passes=24, lane=13, memory=34, gap=12)
        if devices <= 16:
            return cls(passes=20, lane=11, memory=24, gap=8)
        return cls(passes=20, lane=10, memory=20, gap=7)


def svg(what: Schedule | Timeline, *, title: str | None = None) -> str:
    """Draws a schedule.

    Args:
      what: a schedule, simulated with unit costs, or a timeline with its transfers.
      title: heading; None for name, size, makespan, bubble and peak.

    Returns:
      An SVG document. Passes are coloured by chunk (light F, dark B, grey W) and carry the microbatch's number;
      transfers carry microbatch.chunk; the curves under them are chunk-activations on the device and in host memory.
    """
    timeline = what if isinstance(what, Timeline) else simulate(what)
    return "\n".join(_Picture(timeline).lines(title))


def chunk_colours(chunk: int, chunks: int) -> dict[Kind, str]:
    """The fill of each kind of pass of one chunk."""
    # Hues a golden angle apart look as different as they can for few chunks, even steps for many.
    hue = (212 + 137.5 * chunk) % 360 if chunks <= 6 else (212 + 360 * chunk / chunks) % 360
    return {
        Kind.F: f"hsl({hue:.0f} 78% 83%)",
        Kind.B: f"hsl({hue:.0f} 58% 46%)",
        Kind.W: f"hsl({hue:.0f} 26% 68%)",
    }


def _heading(schedule: Schedule) -> str:
    text = f"{schedule.name} · {schedule.devices} devices · {schedule.chunks} chunks"
    text += f" · {schedule.microbatches} microbatches"
    return text + (f" · {schedule.slices} slices" if schedule.slices > 1 else "")


def _figures(timeline: Timeline) -> str:
    share = timeline.bubble / timeline.makespan
    text = f"time {timeline.makespan:g}, bubble {timeline.bubble:g} ({share:.0%})"
    text += f", peak {timeline.peaks().max():g} chunk-activations"
    if len(timeline.transfers):
        text += f", {timeline.peaks(where='host').max():g} on the host, {timeline.offloaded_fraction:.0%} offloaded"
    return text


def _text(x: float, y: float, text: str, *, size: float, anchor: str = "start", fill: str = _INK) -> str:
    fill = "" if fill == _INK else f' fill="{fill}"'
    anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}"{anchor}{fill}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {style}/>'


def _curve_style(where: str) -> str:
    if where == "device":
        return f'fill="{_FAINT}" fill-opacity=".3"'
    return f'fill="none" stroke="{_HOST}" stroke-dasharray="3 2"'


class _Picture:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.schedule = timeline.schedule
        self.rows = _Rows.of(self.schedule.devices)
        shortest = float((timeline.stop - timeline.start).min())
        self.end = max(float(timeline.stop.max()), float(timeline.transfers["stop"].max(initial=0.0)))
        self.scale = max(min(_CELL / shortest, _WIDEST / self.end), _NARROWEST / self.end)
        # A wide picture is shown reduced: what must be read at a glance grows with it.
        self.zoom = max(1.0, self.end * self.scale / _SCREEN)
        self.left, self.right = _LEFT * self.zoom, _RIGHT * self.zoom
        self.top, self.bottom = _TOP * self.zoom, _BOTTOM * self.zoom
        moved = timeline.transfers
        self.lanes = int(moved["lane"].max()) + 1 if len(moved) else 0
        self.pitch = self.rows.passes + self.lanes * (self.rows.lane + 1) + 3 + self.rows.memory + self.rows.gap
        self.width = self.left + self.end * self.scale + self.right
        self.height = self.top + self.schedule.devices * self.pitch + self.bottom

    def lines(self, title: str | None) -> Iterator[str]:
        heading = title or _heading(self.schedule)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'width="{self.width:.0f}" height="{self.height:.0f}" role="img" '
            'font-family="Inter,Helvetica,Arial,sans-serif">'
        )
        yield f"<title>{escape(heading)}</title>"
        yield f'<rect width="100%" height="100%" fill="white"/><g fill="{_INK}">'
        yield f'<g transform="translate({self.left:.1f} 0) scale({self.zoom:.3f})">'
        yield f'<g font-weight="600">{_text(0, 24, heading, size=16)}</g>'
        yield _text(0, 43, _figures(self.timeline), size=12.5, fill=_FAINT)
        yield from self._legend()
        yield "</g>"
        yield from self._axis()
        for device in range(self.schedule.devices):
            yield from self._device(device)
        yield "</g></svg>"

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    def _legend(self) -> Iterator[str]:
        x, y = 0.0, 54.0
        kinds = list(Kind) if self.schedule.split_backward else [Kind.F, Kind.B]
        for chunk in range(self.schedule.chunks):
            if x > (self.width - self.left - self.right) / self.zoom - 60:
                yield _text(x, y + 11, "…", size=12)
                break
            for kind, colour in chunk_colours(chunk, self.schedule.chunks).items():
                if kind in kinds:
                    ink = "white" if kind is Kind.B else _INK
                    yield _rect(x, y, 17, 14, f'rx="2" fill="{colour}"')
                    yield _text(x + 8.5, y + 10.5, kind.name, size=10, anchor="middle", fill=ink)
                    x += 18
            yield _text(x + 3, y + 11, f"chunk {chunk}", size=12)
            x += 62
        x, y = 0.0, 75.0
        notes = [(_curve_style("device"), "activations on the device")]
        if self.lanes:
            notes.append((_curve_style("host"), "in host memory (own scale)"))
            notes.append((f'fill="white" stroke="{_FAINT}"', "transfers, microbatch.chunk: ▸ to the host, ◂ back"))
        for style, text in notes:
            yield _rect(x, y, 17, 11, style) + _text(x + 22, y + 10, text, size=12)
            x += 40 + 6.4 * len(text)

    def _axis(self) -> Iterator[str]:
        bottom, size = self.height - self.bottom, 11 * self.zoom
        steps = itertools.chain.from_iterable((n, 2 * n, 5 * n) for n in 10.0 ** np.arange(-6, 9))
        step = next(step for step in steps if step * self.scale >= 56 * self.zoom)
        for time in np.arange(0, self.end + step * 1e-6, step).tolist():
            x = self.x(time)
            yield f'<path d="M{x:.1f} {self.top - 4:.1f}V{bottom:.1f}" stroke="{_GRID}"/>'
            yield _text(x, bottom + 1.3 * size, f"{time:g}", size=size, anchor="middle", fill=_FAINT)
        yield _text(self.width - size, bottom + 1.3 * size, "time", size=size, anchor="end", fill=_FAINT)

    def _device(self, device: int) -> Iterator[str]:
        rows, y = self.rows, self.top + device * self.pitch
        size = min(12 * self.zoom, self.pitch * 0.6)
        yield _text(
            self.left - 20, y + max(rows.passes * 0.5, size * 0.5) + size * 0.36, f"{device}", size=size, anchor="end"
        )
        yield from self._passes(device, y)
        y += rows.passes + 1
        for lane in range(self.lanes):
            yield from self._lane(device, lane, y)
            y += rows.lane + 1
        yield from self._memory(device, y + 2)

    def _passes(self, device: int, y: float) -> Iterator[str]:
        lo, hi = np.searchsorted(self.schedule.passes["device"], [device, device + 1])
        rows = self.schedule.passes[lo:hi].tolist()
        fills: dict[tuple[Kind, int], list[str]] = defaultdict(list)
        labels: dict[bool, list[str]] = {True: [], False: []}
        height = self.rows.passes
        for row, start, stop in zip(rows, self.timeline.start[lo:hi], self.timeline.stop[lo:hi], strict=True):
            _, _, kind, chunk, microbatch, piece = row
            x, width = self.x(start), (stop - start) * self.scale
            seam = min(0.8, width / 6)  # between neighbours
            fills[Kind(kind), chunk].append(f"M{x:.2f} {y:.1f}h{width - seam:.2f}v{height:.1f}h{seam - width:.2f}z")
            if width >= _NARROWEST_LABEL:
                text = str(microbatch) if self.schedule.slices == 1 else f"{microbatch}.{piece}"
                size = min(height * 0.62, 12.0, (width - 1) / (0.58 * len(text)))
                labels[kind == Kind.B].append(_text(x + width / 2, y + height / 2 + size * 0.36, text, size=size))
        for (kind, chunk), paths in sorted(fills.items()):
            yield f'<path fill="{chunk_colours(chunk, self.schedule.chunks)[kind]}" d="{"".join(paths)}"/>'
        for dark, texts in labels.items():
            if texts:
                yield f'<g text-anchor="middle" fill="{"white" if dark else _INK}">{"".join(texts)}</g>'

    def _lane(self, device: int, lane: int, y: float) -> Iterator[str]:
        moved = self.timeline.transfers
        moved = moved[(moved["device"] == device) & (moved["lane"] == lane)]
        height = self.rows.lane
        yield f'<path d="M{self.left} {y + height / 2:.1f}H{self.width - self.right:.1f}" stroke="{_GRID}"/>'
        sign = "▸◂" if self.lanes == 1 else "▸◂"[lane]
        yield _text(self.left - 5, y + height * 0.85, sign, size=height * 0.85, anchor="end", fill=_FAINT)
        texts = []
        for row in moved:
            x, width = self.x(row["start"]), (row["stop"] - row["start"]) * self.scale
            yield self._arrow(row, x, y, width)
            text = f"{row['microbatch']}.{row['chunk']}"
            size = min(height * 0.78, (width - 2) / (0.56 * len(text)))
            if size >= 3:
                texts.append(_text(x + width / 2, y + height / 2 + size * 0.36, text, size=size))
        yield f'<g text-anchor="middle">{"".join(texts)}</g>'

    def _arrow(self, row: np.void, x: float, y: float, width: float) -> str:
        """A transfer, pointing the way it goes in time: on to the host, or back."""
        height = self.rows.lane
        colours = chunk_colours(int(row["chunk"]), self.schedule.chunks)
        point, seam = min(height / 2.5, width / 4), min(0.8, width / 6)
        inner, half = width - seam - point, height / 2
        if row["direction"] == Direction.OFFLOAD:
            shape = f"M{x:.2f} {y:.1f}h{inner:.2f}l{point:.2f} {half}l{-point:.2f} {half}h{-inner:.2f}z"
            fill = f'fill="{colours[Kind.F]}"'
        else:
            shape = f"M{x + point:.2f} {y:.1f}h{inner:.2f}v{height}h{-inner:.2f}l{-point:.2f} {-half}z"
            fill = f'fill="{colours[Kind.B]}" fill-opacity=".55"'
        return f'<path d="{shape}" {fill} stroke="{colours[Kind.B]}" stroke-width=".7"/>'

    def _memory(self, device: int, y: float) -> Iterator[str]:
        height = self.rows.memory
        base = y + height
        for where in ("device", "host"):
            times, held = self.timeline.memory(device, where=where)
            most = self.timeline.peaks(where=where).max()
            if not most:
                continue
            steps = "".join(
                f"H{self.x(time):.1f}V{base - count / most * height:.1f}"
                for time, count in zip(times, held, strict=True)
            )
            yield f'<path d="M{self.x(0):.1f} {base:.1f}{steps}H{self.x(self.end):.1f}" {_curve_style(where)}/>'
        yield f'<path d="M{self.left} {base:.1f}H{self.width - self.right:.1f}" stroke="{_FAINT}" stroke-width=".6"/>'
        size = min(11.0 * self.zoom, self.pitch * 0.5)
        yield _text(self.width - self.right + 6, base, f"peak {self.timeline.peaks()[device]:g}", size=size)
