"""Which layer lives where: from the model's order to (device, chunk, position) and back."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pipejax.schedules.schedule import IntArray, Placement


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Layers spread over the virtual stages, in model order.

    Stages hold as many layers as any other or one fewer. Where the stages do not divide the layers, the ends are made
    lighter first (last, first, last but one, second, ...), since they also embed and run the head. A chunk's missing
    layers are fillers: zeros that are skipped, at the end of the chunk.

    Attributes:
      num_layers: the model's layers.
      placement: the device and chunk of each virtual stage.
      counts: int32 [stages], layers in each stage.
    """

    num_layers: int
    placement: Placement
    counts: IntArray

    @functools.cached_property
    def layers_per_chunk(self) -> int:
        """Positions in a chunk, fillers included."""
        return int(self.counts.max())

    @property
    def uniform(self) -> bool:
        """Whether every chunk is full."""
        return bool((self.counts == self.layers_per_chunk).all())

    @functools.cached_property
    def chunk_layers(self) -> IntArray:
        """int32 [devices, chunks], how many layers each chunk holds."""
        return self.counts[self.placement.stage]

    @functools.cached_property
    def first_layer(self) -> IntArray:
        """int32 [devices, chunks], the model's index of each chunk's first layer."""
        starts = np.cumsum(self.counts) - self.counts
        return starts[self.placement.stage].astype(np.int32)

    @functools.cached_property
    def layer(self) -> IntArray:
        """int32 [devices, chunks, layers_per_chunk], the model's layer at each position; -1 for a filler."""
        position = np.arange(self.layers_per_chunk, dtype=np.int32)
        layers = self.first_layer[:, :, None] + position
        return np.where(position < self.chunk_layers[:, :, None], layers, np.int32(-1))

    def to_layers(self, leaf: jax.Array) -> jax.Array:
        """[devices, chunks, layers_per_chunk, ...] → [num_layers, ...], fillers dropped."""
        flat = leaf.reshape((-1, *leaf.shape[3:]))
        where = np.zeros(self.num_layers, np.int32)
        layers = self.layer.reshape(-1)
        where[layers[layers >= 0]] = np.flatnonzero(layers >= 0)
        return jnp.take(flat, where, axis=0, indices_are_sorted=False, unique_indices=True)

    def from_layers(self, leaf: jax.Array) -> jax.Array:
        """[num_layers, ...] → [devices, chunks, layers_per_chunk, ...], fillers zero."""
        taken = jnp.take(leaf, np.maximum(self.layer, 0), axis=0)
        filler = (self.layer < 0).reshape(self.layer.shape + (1,) * (leaf.ndim - 1))
        return jnp.where(filler, jnp.zeros((), leaf.dtype), taken) if not self.uniform else taken


def spread(*, num_layers: int, placement: Placement) -> Layout:
    """Spreads layers over a placement's stages.

    Raises:
      ValueError: there is no layer.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}; a pipeline needs one layer or more.")
    stages = placement.stages
    full = -(-num_layers // stages)
    counts = np.full(stages, full, np.int32)
    ends = [stages - 1 - i // 2 if i % 2 == 0 else i // 2 for i in range(stages)]
    counts[ends[: full * stages - num_layers]] -= 1
    return Layout(num_layers=num_layers, placement=placement, counts=counts)


def rest_spec(shape: tuple[int, ...], pipe: int) -> PartitionSpec:
    """Shards the first axis that the pipeline's devices divide; an array with none is held by every device."""
    for axis, size in enumerate(shape):
        if size and size % pipe == 0:
            return PartitionSpec(*(None,) * axis, "pipe")
    return PartitionSpec()
