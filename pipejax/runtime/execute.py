"""A step on the whole mesh: `shard_map` over `pipe` around the per-device step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pipejax import frozen
from pipejax.layout import Layout
from pipejax.offload import Fates
from pipejax.program import Program
from pipejax.runtime.ends import AXIS, Ends, Functions
from pipejax.runtime.lockstep import Lockstep
from pipejax.runtime.lockstep_parts import LockstepInParts
from pipejax.runtime.residuals import Block, Layer, analyse
from pipejax.runtime.split import split
from pipejax.runtime.staggered import Staggered
from pipejax.runtime.step import Local


@dataclasses.dataclass(frozen=True)
class Executor:
    """Runs a program over a mesh.

    Attributes:
      mesh: has an axis `pipe`.
      layout: where each layer lives.
      functions: embedding and head, and which of their parameters are cut over the devices.
      block: one layer.
      fates: what happens to the block's named activations.
      specs: {"embed", "layers", "head"}, the partition specs of the parameters at rest.
      fill: what rings hold before anything is stored.
    """

    mesh: Mesh
    layout: Layout
    functions: Functions
    block: Block
    fates: Fates
    specs: Any
    fill: float

    def value_and_grad(self, program: Program, params: Any, batch: Any, key: Any) -> tuple[jax.Array, Any, jax.Array]:
        """Loss sum over weight, its gradients, and the weight.

        Args:
          program: of a whole step.
          params: {"embed", "layers", "head"}, sharded as `specs` says; leaves of "layers" are
            [devices, chunks, positions, ...].
          batch: leaves [microbatches, ...].
          key: for dropout; None to do without.

        Returns:
          The loss (float32 scalar), the gradients (float32, shaped and sharded as params; None where nothing is
          trained), the weight.
        """

        def device(params: Any, batch: Any, key: Any, tables: Any) -> tuple[jax.Array, Any, jax.Array]:
            step = self._step(program, params, batch, key, tables)
            grads, loss, weight = step.train(tables["program"][0])
            loss, weight = lax.psum((loss, weight), AXIS)
            scale = 1 / jnp.where(weight == 0, 1, weight)
            grads = {
                "embed": self._scatter(grads["embed"], "embed"),
                "layers": jax.tree.map(lambda leaf: leaf[None], grads["layers"]),
                "head": self._scatter(grads["head"], "head"),
            }
            return loss * scale, jax.tree.map(lambda grad: grad * scale, grads), weight

        specs = frozen.keep(self.functions.trained, self.specs)
        return self._map(device, out_specs=(PartitionSpec(), specs, PartitionSpec()))(
            params, batch, key, self._tables(program)
        )

    def loss(self, program: Program, params: Any, batch: Any) -> jax.Array:
        """The loss of a forward-only program, without dropout."""

        def device(params: Any, batch: Any, key: Any, tables: Any) -> jax.Array:
            step = self._step(program, params, batch, key, tables)
            loss, weight = lax.psum(step.evaluate(tables["program"][0]), AXIS)
            return loss / jnp.where(weight == 0, 1, weight)

        return self._map(device, out_specs=PartitionSpec())(params, batch, None, self._tables(program))

    def _tables(self, program: Program) -> dict[str, np.ndarray]:
        return {
            "program": program.table,
            "chunk_layers": self.layout.chunk_layers,
            "first_layer": self.layout.first_layer,
        }

    def _map(self, function: Callable[..., Any], *, out_specs: Any) -> Callable[..., Any]:
        # The backward pass is written by hand, so replication is not tracked (DESIGN trap 10).
        in_specs = (self.specs, PartitionSpec(), PartitionSpec(), PartitionSpec(AXIS))
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={AXIS}, check_vma=False
        )

    def _step(self, program: Program, params: Any, batch: Any, key: Any, tables: Any) -> Lockstep | Staggered:
        local = Local(
            layers=jax.tree.map(lambda leaf: leaf[0], params["layers"]),
            batch=batch,
            chunk_layers=tables["chunk_layers"][0],
            uniform=self.layout.uniform,
            layer_keys=functools.partial(self._layer_keys, key, tables["first_layer"][0]),
        )
        ends = Ends(
            functions=self.functions,
            params={part: self._gather(params[part], part) for part in ("embed", "head")},
            microbatch=local.microbatch,
            key=functools.partial(self._part_key, key),
        )
        microbatch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
        x = jax.eval_shape(self.functions.embed, ends.params["embed"], microbatch, key)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), local.layers)
        trained = self.functions.trained["layers"]
        residuals = analyse(self.block, self.fates, one, x, microbatch, key, trained=trained)
        layer = Layer(block=self.block, fates=self.fates, residuals=residuals, trained=trained)
        halves = split(layer.backward, one, residuals.structs, x, microbatch, key)
        make = Staggered if program.predicated else LockstepInParts if program.parts else Lockstep
        return make(program=program, ends=ends, layer=layer, split=halves, local=local, x=x, fill=self.fill)

    def _layer_keys(self, key: Any, first_layer: jax.Array, chunk: jax.Array, microbatch: jax.Array) -> Any:
        if key is None:
            return None
        layers = first_layer[chunk] + jnp.arange(self.layout.layers_per_chunk, dtype=jnp.int32)
        return jax.vmap(lambda layer: fold_key(key, layer, microbatch))(layers)

    def _part_key(self, key: Any, part: int, microbatch: jax.Array) -> Any:
        return None if key is None else fold_key(key, self.layout.num_layers + part, microbatch)

    def _gather(self, tree: Any, part: str) -> Any:
        """Parameters that rest in shards, whole, but for those that are used as they rest."""
        return self._where_whole(
            lambda leaf, axis: leaf if axis is None else lax.all_gather(leaf, AXIS, axis=axis, tiled=True), tree, part
        )

    def _scatter(self, grads: Any, part: str) -> Any:
        """Sums gradients over the devices, each keeping the shard that it holds at rest."""
        return self._where_whole(
            lambda leaf, axis: (
                lax.psum(leaf, AXIS)
                if axis is None
                else lax.psum_scatter(leaf, AXIS, scatter_dimension=axis, tiled=True)
            ),
            grads,
            part,
        )

    def _where_whole(self, function: Callable[[Any, int | None], Any], tree: Any, part: str) -> Any:
        """Applies (leaf, the axis along which it rests in shards) to the leaves that a step uses whole."""

        def one(cut: bool, leaf: Any, spec: Any) -> Any:
            axes = tuple(spec)
            return leaf if cut or leaf is None else function(leaf, axes.index(AXIS) if AXIS in axes else None)

        return jax.tree.map(one, self.functions.cut[part], tree, self.specs[part])


def fold_key(key: jax.Array, layer: Any, microbatch: Any) -> jax.Array:
    """The dropout key of one layer (or part) and microbatch, whatever device and tick it runs on."""
    return jax.random.fold_in(jax.random.fold_in(key, layer), microbatch)
