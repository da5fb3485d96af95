"""A progress bar with loss, tokens per second and step time; plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

import rich.console
import rich.progress

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows how far a run is."""

    def __init__(self, *, total: int, done: int) -> None:
        """`total` steps, of which `done` are behind us."""
        self._console = rich.console.Console()
        self._total, self._last_line = total, -float("inf")
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[figures]}"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, completed=done, figures="compiling")

    def update(self, step: int, *, loss: float, tokens_per_second: float, step_seconds: float) -> None:
        """Shows the figures of a step just done."""
        figures = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {step_seconds * 1e3:,.0f} ms/step"
        self._bar.update(self._task, completed=step, figures=figures)
        now = time.monotonic()
        due = now - self._last_line >= _SECONDS_BETWEEN_LINES or step == self._total
        if not self._console.is_terminal and due:
            self._last_line = now
            self._console.print(f"step {step}/{self._total}  {figures}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
