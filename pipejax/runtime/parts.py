"""Residuals on their way to the host and back, a part at a time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.runtime import rings


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

    def to_host(
        self, ring: jax.Array, value: jax.Array, slot: jax.Array, layer: jax.Array, part: jax.Array
    ) -> jax.Array:
        """Starts the copy of a part into a host ring."""
        return self.write(ring, jax.device_put(value, rings.HOST), slot, layer, part)

    def from_host(self, ring: jax.Array, slot: jax.Array, layer: jax.Array, part: jax.Array) -> jax.Array:
        """Starts the copy of a part out of a host ring."""
        return jax.device_put(self.read(ring, slot, layer, part), rings.DEVICE)

    def _start(self, slot: jax.Array, layer: jax.Array, part: jax.Array) -> tuple[jax.Array, ...]:
        place = [jnp.int32(0)] * len(self.struct.shape)
        place[self.axis] = jnp.minimum(part * self.rows, self.struct.shape[self.axis] - self.rows)
        return (slot, jnp.asarray(layer, jnp.int32), *place)
