"""Bytes as tokens: any folder of text can be trained on, with nothing to download."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from pipejax.data.tokens import DataError, TokenFile, write_tokens

SEPARATOR = 256  # stands between files
VOCAB_SIZE = 257


def encode(text: str) -> np.ndarray:
    """int32 [n], the bytes of a text in UTF-8."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
    """The text of byte tokens; separators and broken UTF-8 become U+FFFD."""
    return b"".join(bytes([token]) if token < SEPARATOR else b"\xff" for token in tokens).decode(errors="replace")


def tokenize_folder(folder: str | os.PathLike[str], path: str | os.PathLike[str], *, pattern: str) -> TokenFile:
    """Writes a folder's text files, byte by byte and in the order of their names, into one token file.

    Args:
      folder: where the text is.
      path: the .bin file to write.
      pattern: which files, as for `pathlib.Path.glob`: "*.txt", "**/*.py".

    Raises:
      DataError: no file matches, or all are empty.
    """
    folder = pathlib.Path(folder)
    files = sorted(file for file in folder.glob(pattern) if file.is_file())
    if not any(file.stat().st_size for file in files):
        raise DataError(f"{folder} holds no text that matches {pattern!r}; point to a folder that does.")

    def pieces() -> Iterator[np.ndarray]:
        for file in files:
            yield np.frombuffer(file.read_bytes(), np.uint8).astype(np.uint16)
            yield np.array([SEPARATOR], np.uint16)

    write_tokens(path, pieces(), vocab_size=VOCAB_SIZE)
    return TokenFile(path)
