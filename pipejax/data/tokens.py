"""Files of tokens: raw little-endian integers, memory-mapped, with a JSON file beside them that says what they are."""

from __future__ import annotations

import json
import os
import pathlib
import zlib
from collections.abc import Iterable

import numpy as np

_DTYPES = ("uint16", "uint32")


class DataError(ValueError):
    """Data that cannot be trained on; the message says what to change."""


def _description(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".json")


def write_tokens(path: str | os.PathLike[str], pieces: Iterable[np.ndarray], *, vocab_size: int) -> int:
    """Writes tokens to `path` (a .bin file) and their description to the .json file beside it.

    The .bin file appears whole or not at all.

    Args:
      path: where to.
      pieces: integer arrays, written one after another; never held together in memory.
      vocab_size: tokens lie in [0, vocab_size); uint16 where that fits, else uint32.

    Returns:
      The number of tokens.

    Raises:
      DataError: a token outside the vocabulary.
    """
    path = pathlib.Path(path)
    dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, count, checksum = path.with_name(f"{path.name}.{os.getpid()}.part"), 0, 0
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                if piece.size and not 0 <= int(piece.min()) <= int(piece.max()) < vocab_size:
                    raise DataError(f"{path}: a token lies outside the vocabulary of {vocab_size}; raise vocab_size.")
                raw = piece.astype(dtype.newbyteorder("<")).tobytes()
                file.write(raw)
                count += piece.size
                checksum = zlib.crc32(raw, checksum)
        description = {"dtype": dtype.name, "vocab_size": vocab_size, "tokens": count, "crc32": checksum}
        _description(path).write_text(json.dumps(description) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


class TokenFile:
    """A memory-mapped file of tokens.

    Attributes:
      path: the .bin file.
      tokens: [n], uint16 or uint32, on disk until read.
      vocab_size: tokens lie in [0, vocab_size).
      crc32: of the bytes when they were written; tells one text from another of the same length.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a file written by `write_tokens`.

        Raises:
          DataError: there is no such file, or it is foreign, truncated or empty.
        """
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise DataError(f"there is no token file {self.path}; write one with pipejax.data.write_tokens.")
        try:
            description = json.loads(_description(self.path).read_text())
            dtype, count = description["dtype"], int(description["tokens"])
            self.vocab_size, self.crc32 = int(description["vocab_size"]), int(description["crc32"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{_description(self.path)}, which should describe {self.path.name}, cannot be read ({error}); write "
                "the tokens again with pipejax.data.write_tokens."
            ) from error
        if dtype not in _DTYPES:
            raise DataError(f"{self.path}: tokens of dtype {dtype!r}, and only {' and '.join(_DTYPES)} are known.")
        size, expected = self.path.stat().st_size, count * np.dtype(dtype).itemsize
        if size != expected or not count:
            raise DataError(
                f"{self.path} holds {size} bytes where its description promises {expected}: it is "
                f"{'empty' if not size else 'cut short' if size < expected else 'too long'}; write it again."
            )
        self.tokens: np.ndarray = np.memmap(self.path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
