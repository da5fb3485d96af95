"""Checkpoints: layer-major whatever the pipeline, written by orbax, asynchronous and atomic."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from pipejax.layout import rest_spec
from pipejax.train.state import Trainer, TrainState

FORMAT = "pipejax checkpoint, version 2"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says what to change."""


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint holds the state layer-major, so any number of devices and chunks can restore it, and beside it the
    run's identity: what must be the same for the run to go on as if it had never stopped. The data position and the
    dropout keys are functions of step and seed, which are both in it. A checksum of every array is in it too: the
    files themselves notice a missing piece, but not a wrong bit.
    """

    def __init__(
        self, folder: str | os.PathLike[str], trainer: Trainer, *, identity: dict[str, Any], keep: int = 3
    ) -> None:
        """Opens a folder, which need not exist yet.

        Args:
          folder: where the checkpoints are.
          trainer: makes the states to save, and shapes and shards those restored.
          identity: JSON values by name.
          keep: how many of the newest checkpoints to keep.
        """
        self.folder = pathlib.Path(folder).absolute()
        self._trainer, self._identity = trainer, identity
        self._manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        )
        layered = jax.eval_shape(trainer.to_layers, trainer.structs)
        pipe = trainer.pipe.mesh.shape["pipe"]
        self._shardings = jax.tree.map(
            lambda leaf: NamedSharding(trainer.pipe.mesh, rest_spec(leaf.shape, pipe)), layered
        )
        self._abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            layered,
            self._shardings,
        )
        self._to_layers = jax.jit(trainer.to_layers, out_shardings=self._shardings)
        self._from_layers = jax.jit(trainer.from_layers, out_shardings=trainer.shardings)
        self._checksums = jax.jit(_checksums)

    @property
    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Starts saving a state, and returns once it has been copied out of the devices."""
        step = int(state.step)
        layered = self._to_layers(state)
        sums = jax.device_get(self._checksums(layered)).tolist()
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(layered),
            identity=ocp.args.JsonSave({"format": FORMAT, "identity": self._identity, "checksums": sums}),
        )
        self._manager.save(step, args=arguments)

    def restore(self) -> TrainState:
        """The newest checkpoint's state, sharded as the trainer's pipeline has it.

        Raises:
          CheckpointError: there is none, it is of another run or model, or it is damaged.
        """
        step = self.latest
        if step is None:
            raise CheckpointError(f"{self.folder} holds no checkpoint to resume from; run without --resume first.")
        record = self._read(step, "identity", ocp.args.JsonRestore())
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.folder}/{step} was not written by this version of pipejax; use another folder."
            )
        self._check_identity(step, record["identity"])
        layered = self._read(step, "state", ocp.args.StandardRestore(self._abstract))
        if jax.device_get(self._checksums(layered)).tolist() != record["checksums"]:
            raise self._damaged(step, "its arrays are not those that were saved")
        return self._from_layers(layered)

    def _read(self, step: int, item: str, how: Any) -> Any:
        complain = sys.unraisablehook
        sys.unraisablehook = functools.partial(_complain_but_of_reads, complain)
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
            sys.unraisablehook = complain
            return restored
        except Exception as error:
            # The hook stays: reads that were in flight go on failing.
            # The first sentence: what follows is TensorStore's whole specification of the array.
            reason = str(error).strip(" \n'\"").split("\n")[0].split(". ")[0] or type(error).__name__
            raise self._damaged(step, reason) from error

    def _check_identity(self, step: int, saved: dict[str, Any]) -> None:
        for name in sorted(self._identity.keys() | saved.keys()):
            if saved.get(name) != self._identity.get(name):
                raise CheckpointError(
                    f"the checkpoint {self.folder}/{step} is of a run with {name} = {saved.get(name)!r}, and this one "
                    f"has {self._identity.get(name)!r}; make them equal, or use another folder."
                )

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.folder}/{step} is damaged or foreign ({reason}); remove that folder to resume from "
            "the one before."
        )

    def wait(self) -> None:
        """Waits until all saves are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves and lets go of the folder."""
        self._manager.close()


def _complain_but_of_reads(complain: Callable[[Any], Any], what: Any) -> None:
    """Python's hook for errors nobody can catch, less those of reads that outlive a failed one's event loop."""
    if not (isinstance(what.exc_value, RuntimeError) and str(what.exc_value) == "Event loop is closed"):
        complain(what)


def _checksums(tree: Any) -> jax.Array:
    """uint32 [leaves], a checksum of each array of 8, 16 or 32 bit numbers, in any sharding.

    The words' sum mod 2^32, each times an odd number of its own: no change of one word leaves it as it was, and sums
    of integers are the same in any order.
    """

    def one(leaf: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        place = jnp.uint32(1)
        for axis in range(words.ndim):
            index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
            place += index * jnp.uint32(2 * math.prod(words.shape[axis + 1 :]) % 2**32)
        return jnp.sum(words * place, dtype=jnp.uint32)

    return jnp.stack([one(leaf) for leaf in jax.tree.leaves(tree)])
