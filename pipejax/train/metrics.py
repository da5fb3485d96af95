"""Metrics on disk: one JSON object a step, and TensorBoard."""

from __future__ import annotations

import json
import pathlib
from types import TracebackType

from tensorboardX import SummaryWriter


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard events; a step that is run again after a resume replaces its old lines."""

    def __init__(self, folder: pathlib.Path, *, step: int) -> None:
        """Opens the folder's files and drops what lies beyond `step`, the steps done."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = [line for line in self._lines() if json.loads(line)["step"] <= step]
        whole = self.path.with_suffix(".part")  # killed here, nothing is lost
        whole.write_text("".join(kept))
        whole.replace(self.path)
        self._file = self.path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def _lines(self) -> list[str]:
        if not self.path.exists():
            return []
        # A process killed while writing leaves half a line.
        return [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("}\n")]

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes one step's values; the line is on its way to disk when this returns."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()
