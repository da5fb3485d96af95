"""Residuals on their way to the host and back a part at a time, for both kinds of step.

A part comes from the host while some work runs, and one leaves while other work does; between the two what came is
stored and what leaves is taken, in the slots of a device ring.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.jaxprs import Midway
from pipejax.runtime import rings
from pipejax.runtime.ends import Row, when
from pipejax.runtime.step import State, Step


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one residual of a layer is cut into equal parts, by rows of one axis.

    Where the parts do not divide the rows, the last ones overlap the ones before, and move the same rows again.

    Attributes:
      struct: shape and dtype of the residual.
      parts: how many.
    """

    struct: jax.ShapeDtypeStruct
    parts: int

    @property
    def axis(self) -> int:
        """The first axis long enough, or the longest."""
        shape = self.struct.shape
        return next((axis for axis, size in enumerate(shape) if size >= self.parts), shape.index(max(shape)))

    @property
    def rows(self) -> int:
        """Rows in a part."""
        return -(-self.struct.shape[self.axis] // self.parts)

    def read(self, ring: jax.Array, slot: jax.Array, layer: jax.Array, part: jax.Array) -> jax.Array:
        """A part of one layer's residual, from a ring [slots, layers, ...]."""
        shape = list(self.struct.shape)
        shape[self.axis] = self.rows
        return lax.dynamic_slice(ring, self._start(slot, layer, part), (1, 1, *shape))

    def write(self, ring: jax.Array, value: jax.Array, slot: jax.Array, layer: jax.Array, part: jax.Array) -> jax.Array:
        """The ring with that part overwritten."""
        return lax.dynamic_update_slice(ring, value, self._start(slot, layer, part))

    def _start(self, slot: jax.Array, layer: jax.Array, part: jax.Array) -> tuple[jax.Array, ...]:
        place = [jnp.int32(0)] * len(self.struct.shape)
        place[self.axis] = jnp.minimum(part * self.rows, self.struct.shape[self.axis] - self.rows)
        return (slot, jnp.asarray(layer, jnp.int32), *place)


@dataclasses.dataclass(frozen=True)
class StepInParts(Step):
    """What steps share that move residuals in parts; without offload none move."""

    def sort_residuals(self, residuals: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """A layer's residuals, or anything listed like them, as (those that stay, those that move)."""
        return self.layer.residuals.split(residuals) if self.program.offload else (residuals, ())

    @functools.cached_property
    def _cuts(self) -> tuple[Cut, ...]:
        _, moving = self.sort_residuals(self.layer.residuals.structs)
        return tuple(Cut(struct, self.program.parts) for struct in moving)

    def start_parts(self) -> State:
        """The buffers of residuals that move: on the device, and on the host."""
        _, moving = self.sort_residuals(self.layer.residuals.structs)
        structs = [self.stacked(struct) for struct in moving]
        return {
            "moving": tuple(self.ring(struct, self.program.moving_slots) for struct in structs),
            "host": tuple(rings.make_host_ring(struct, self.program.host_slots, self.fill) for struct in structs),
        }

    def move_parts(self, state: State, row: Row, position: Any) -> Midway:
        """Starts what comes from the host of the layers at one position.

        Args:
          state: the result changes it.
          row: says what moves in this tick.
          position: of the layer in its chunk.

        Returns:
          To be called once between the work that hides what comes and the work that hides what leaves, on a value that
          the one computes and the other takes.
        """
        arriving = tuple(
            jax.device_put(cut.read(ring, row["in_load"], position, row["in_part"]), rings.DEVICE)
            for cut, ring in zip(self._cuts, state["host"], strict=True)
        )

        def midway(signal: jax.Array) -> jax.Array:
            signal, came, host = lax.optimization_barrier((signal, arriving, state["host"]))
            moving, sent = [], []
            for cut, value, ring, far in zip(self._cuts, came, state["moving"], host, strict=True):

                def receive(_: Any, ring: jax.Array, cut: Cut = cut, value: jax.Array = value) -> jax.Array:
                    return cut.write(ring, value, row["in_store"], position, row["in_part"])

                ring = when(row["in_valid"], receive, ring)
                part = cut.read(ring, row["out_load"], position, row["out_part"])
                part, ring = lax.optimization_barrier((part, ring))
                moving.append(ring)
                leaving = jax.device_put(part, rings.HOST)
                sent.append(cut.write(far, leaving, row["out_store"], position, row["out_part"]))
            state["moving"], state["host"] = tuple(moving), tuple(sent)
            return signal

        return midway

    def store_residuals(self, state: State, row: Row, position: Any, values: tuple[jax.Array, ...]) -> None:
        """Stores what F of a layer leaves for B."""
        for name, column, mine in zip(
            ("kept", "moving"), ("f_store", "f_move"), self.sort_residuals(values), strict=True
        ):
            state[name] = tuple(
                rings.store(ring, value, row[column], position) for ring, value in zip(state[name], mine, strict=True)
            )

    def load_residuals(self, state: State, row: Row, letter: str, position: Any) -> tuple[jax.Array, ...]:
        """What F of a layer left for B ("b") or W ("w")."""
        found = []
        for name, column in (("kept", f"{letter}_load"), ("moving", f"{letter}_move")):
            loaded = [rings.load(ring, row[column], position) for ring in state[name]]
            state[name] = tuple(ring for _, ring in loaded)
            found.append(tuple(value for value, _ in loaded))
        return self.layer.residuals.merge(*found) if self.program.offload else found[0]
