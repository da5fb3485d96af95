"""Shuffled batches of token windows, each a function of (seed, step): a loader has no position to lose."""

from __future__ import annotations

import functools

import numpy as np

from pipejax.data.tokens import DataError, TokenFile


class Loader:
    """Batches of windows of consecutive tokens, every window once an epoch, in an order that changes by epoch.

    Batch k is the same whenever it is asked for, so resuming means asking for the next one. Windows that do not fill
    an epoch's last batch are left for other epochs' orders.
    """

    def __init__(
        self, file: TokenFile, *, batch_size: int, length: int, seed: int, shard: int = 0, shards: int = 1
    ) -> None:
        """Cuts a file into windows.

        Args:
          file: the tokens.
          batch_size: windows in a whole batch, all shards together.
          length: tokens in a window, besides the one after it that the last target is.
          seed: of the orders.
          shard, shards: this process takes the rows [shard * n, (shard + 1) * n) of each batch,
            n = batch_size / shards.

        Raises:
          DataError: the file is too short for one batch, or the shards do not divide it.
        """
        if batch_size < 1 or length < 1:
            raise DataError(f"a batch of {batch_size} windows of {length} tokens holds nothing; make both 1 or more.")
        if batch_size % shards:
            raise DataError(f"{shards} processes do not divide a batch of {batch_size} windows; change one.")
        self.windows = (len(file.tokens) - 1) // length
        if self.windows < batch_size:
            raise DataError(
                f"{file.path} holds {len(file.tokens)} tokens, which make {max(self.windows, 0)} windows of {length}, "
                f"and a batch takes {batch_size}; bring more text, or lower batch size or length."
            )
        self._file, self._length, self._seed = file, length, seed
        self._batch_size = batch_size
        rows = batch_size // shards
        self._rows = slice(shard * rows, (shard + 1) * rows)
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    @property
    def batches_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.windows // self._batch_size

    @property
    def tokens_per_batch(self) -> int:
        """Targets in a whole batch, all shards together."""
        return self._batch_size * self._length

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Batch number `step`: {"tokens", "targets"}, int32 [rows, length], targets one token ahead."""
        epoch, index = divmod(step, self.batches_per_epoch)
        chosen = self._order(epoch)[index * self._batch_size : (index + 1) * self._batch_size][self._rows]
        spans = chosen[:, None] * self._length + np.arange(self._length + 1)
        tokens = self._file.tokens[spans].astype(np.int32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    def _make_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self.windows)
