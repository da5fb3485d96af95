"""Rows of a table, remembered until the source or a version changes, so that a run that was stopped goes on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable

Row = tuple[list[str], list[str]]
"""The cells, and the sentences that say what its projected figures assume."""

_ROOT = pathlib.Path(__file__).parents[1]


def row(key: str, make: Callable[[], Row]) -> Row:
    """What `make` returns, or what it returned for the same key, source and versions."""
    name = hashlib.sha256(f"{_state()} {key}".encode()).hexdigest()
    path = _folder() / f"{name}.json"
    try:
        cells, sentences = json.loads(path.read_text(encoding="utf-8"))
        return cells, sentences
    except (OSError, ValueError):
        pass
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(made, file)
    os.replace(file.name, path)
    return made


@functools.cache
def _state() -> str:
    """A digest of all that a row depends on but its key."""
    digest = hashlib.sha256()
    for package in ("jax", "jaxlib", "flax", "optax"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    digest.update(sys.version.encode())
    for file in sorted([*(_ROOT / "pipejax").rglob("*"), *(_ROOT / "benchmarks").glob("*.py")]):
        if file.suffix in (".py", ".toml"):
            digest.update(str(file.relative_to(_ROOT)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "pipejax" / "bench"
