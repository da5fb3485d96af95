"""Tables in Markdown, whose rows are printed as they come."""

from __future__ import annotations

from collections.abc import Iterable


class Table:
    """Rows of text under a heading of column names."""

    def __init__(self, *names: str) -> None:
        self.lines = [_row(names), "|---" + "|---:" * (len(names) - 1) + "|"]
        print(self.lines[0], flush=True)

    def add(self, *cells: str) -> None:
        """One more row."""
        self.lines.append(_row(cells))
        print(self.lines[-1], flush=True)


def assumptions(sentences: Iterable[str]) -> list[str]:
    """What a projection rests on, as a list."""
    return ["", "Projected figures assume:", "", *(f"- {sentence}" for sentence in sentences), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
