"""The training step on one device of the pipeline: phases of ticks, each tick an F and a B.

Runs inside `shard_map` over the axis `pipe`. The order within a tick is that of `pipejax.program`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.program import COLUMNS, Phase, Program
from pipejax.runtime import rings
from pipejax.runtime.residuals import Chunk

Row = dict[str, jax.Array]

# Embedding and head draw their dropout as if they were the layers num_layers + these.
EMBED_KEY, HEAD_KEY = 0, 1


@dataclasses.dataclass(frozen=True)
class Functions:
    """The model as the runtime sees it. Keys are None in evaluation.

    Attributes:
      embed: (params, batch, key) -> x, the first block's input.
      head: (params, x, batch, key) -> (loss sum, weight), float32 scalars.
    """

    embed: Callable[[Any, Any, Any], jax.Array]
    head: Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Local:
    """What one device holds during a step.

    Attributes:
      embed, head: their parameters, whole.
      layers: leaves [chunks, layers_per_chunk, ...].
      batch: leaves [microbatches, ...], the same on every device.
      chunk_layers: int32 [chunks], how many layers each chunk holds.
      layer_keys: (chunk, microbatch) -> a key for each position of the chunk, or None.
      part_keys: (EMBED_KEY or HEAD_KEY, microbatch) -> a key, or None.
    """

    embed: Any
    head: Any
    layers: Any
    batch: Any
    chunk_layers: jax.Array
    layer_keys: Callable[[jax.Array, jax.Array], Any]
    part_keys: Callable[[int, jax.Array], Any]

    def microbatch(self, index: jax.Array) -> Any:
        """One microbatch's arrays."""
        return _pick(self.batch, index)


@dataclasses.dataclass(frozen=True)
class Step:
    """One device's part of a step.

    Attributes:
      program: the tables' meaning; the table itself comes in as an argument, sharded.
      functions: embedding and head.
      chunk: F and B of a chunk.
      local: parameters and data.
      x: shape and dtype of one microbatch's activations.
      fill: what rings hold before anything is stored (NaN in tests).
    """

    program: Program
    functions: Functions
    chunk: Chunk
    local: Local
    x: jax.ShapeDtypeStruct
    fill: float

    def train(self, table: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Runs all phases.

        Args:
          table: int32 [ticks, len(COLUMNS)], this device's rows.

        Returns:
          Gradients of this device's loss sum as {"embed", "layers", "head"} in float32, its loss sum (auxiliary
          losses included) and its weight.
        """
        kept, moved = self.chunk.residuals.split(self.chunk.structs)
        carry: dict[str, Any] = {
            "x": self._ring(self.x, self.program.forward_arrivals),
            "dy": self._ring(self.x, self.program.backward_arrivals),
            "kept": tuple(self._ring(struct, self.program.residual_slots) for struct in kept),
            "grads": jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, jnp.float32),
                {"embed": self.local.embed, "layers": self.local.layers, "head": self.local.head},
            ),
            "loss": jnp.float32(0),
            "weight": jnp.float32(0),
        }
        if self.program.offload:
            carry["host"] = tuple(rings.make_host_ring(struct, self.program.host_slots, self.fill) for struct in moved)
        for phase in self.program.phases:
            if self.program.offload:
                carry = self._enter(carry, phase, table, moved)
            rows = table[phase.start : phase.stop]
            tick = functools.partial(self._tick, phase=phase)
            carry = _scan(tick, carry, rows)
        return carry["grads"], carry["loss"], carry["weight"]

    def evaluate(self, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs the forward passes alone; returns this device's loss sum (auxiliary losses included) and weight."""

        def tick(carry: dict[str, Any], row: Row) -> dict[str, Any]:
            x, batch, keys, carry = self._forward_input(carry, row)
            count = self.local.chunk_layers[row["f_chunk"]]
            y, aux = self.chunk.infer(_pick(self.local.layers, row["f_chunk"]), x, batch, keys, count)
            carry["loss"] += jnp.where(row["f_valid"] > 0, aux, 0)

            def head(_: Any, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                key = self.local.part_keys(HEAD_KEY, row["f_microbatch"])
                loss, weight = self.functions.head(self.local.head, y, batch, key)
                return totals[0] + loss, totals[1] + weight

            totals = _when(row["f_head"], head, (carry["loss"], carry["weight"]))
            carry["loss"], carry["weight"] = totals
            carry["x"] = rings.store(carry["x"], self._send(y, 1), row["f_receive"])
            return carry

        start = {
            "x": self._ring(self.x, self.program.forward_arrivals),
            "loss": jnp.float32(0),
            "weight": jnp.float32(0),
        }
        carry = _scan(tick, start, table)
        return carry["loss"], carry["weight"]

    def _ring(self, struct: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
        return rings.make_ring(struct, slots, self.fill)

    def _enter(
        self, carry: dict[str, Any], phase: Phase, table: jax.Array, moved: tuple[jax.ShapeDtypeStruct, ...]
    ) -> dict[str, Any]:
        """Brings the transfers of the last phase to their end and those of the next one to their start."""
        carry = dict(carry)
        if phase.flush is not None:
            carry = self._write(carry, carry["out"], _row(table[phase.flush])["host_early"])
        if phase.backward:
            carry.pop("out", None)
        elif "out" not in carry:
            carry["out"] = tuple(rings.filled(struct, self.fill) for struct in moved)
        if phase.prefetch is not None:
            slot = _row(table[phase.prefetch])["host_read"]
            carry["in"] = _map(lambda ring: rings.load_host(ring, slot), carry["host"])
        return carry

    def _write(self, carry: dict[str, Any], values: tuple[jax.Array, ...], slot: jax.Array) -> dict[str, Any]:
        return {**carry, "host": _map(lambda ring, value: rings.store_host(ring, value, slot), carry["host"], values)}

    def _tick(self, carry: dict[str, Any], row: Row, phase: Phase) -> dict[str, Any]:
        carry = dict(carry)
        offload = self.program.offload
        arrived = carry.pop("in", ())
        if offload and not phase.backward:
            carry = self._write(carry, carry["out"], row["host_early"])
        if phase.forward:
            carry, later, moved = self._forward(carry, row)
            if offload and phase.backward:
                carry = self._write(carry, moved, row["host_write"])
            elif offload:
                carry["out"] = moved
            row = later
        if phase.backward:
            carry = self._backward(carry, row, arrived)
        return carry

    def _forward_input(self, carry: dict[str, Any], row: Row) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
        """F's input and side inputs: x, the microbatch, the layers' keys, and the carry."""
        carry = dict(carry)
        batch = self.local.microbatch(row["f_microbatch"])
        x, carry["x"] = rings.load(carry["x"], row["f_source"])

        def embed(*_: Any) -> jax.Array:
            return self.functions.embed(self.local.embed, batch, self.local.part_keys(EMBED_KEY, row["f_microbatch"]))

        x = _when(row["f_embed"], embed, x)
        return x, batch, self.local.layer_keys(row["f_chunk"], row["f_microbatch"]), carry

    def _forward(self, carry: dict[str, Any], row: Row) -> tuple[dict[str, Any], Row, tuple[jax.Array, ...]]:
        x, batch, keys, carry = self._forward_input(carry, row)
        chunk = row["f_chunk"]
        count = self.local.chunk_layers[chunk]
        y, aux, values = self.chunk.forward(_pick(self.local.layers, chunk), x, batch, keys, count)
        # B's weights are sliced after F, or XLA slices them beside F's and keeps both.
        y, row = lax.optimization_barrier((y, {**row}))
        carry["loss"] += jnp.where(row["f_valid"] > 0, aux, 0)
        kept, moved = self.chunk.residuals.split(values)
        carry["kept"] = _map(lambda ring, value: rings.store(ring, value, row["f_store"]), carry["kept"], kept)
        carry = self._head(carry, row, y, batch)
        carry["x"] = rings.store(carry["x"], self._send(y, 1), row["f_receive"])
        return carry, row, moved

    def _head(self, carry: dict[str, Any], row: Row, y: jax.Array, batch: Any) -> dict[str, Any]:
        """Loss, and head forward and backward in one go, where F was of the last stage."""

        def head(_: Any, state: Any) -> Any:
            grads, dy, loss, weight = state
            key = self.local.part_keys(HEAD_KEY, row["f_microbatch"])
            (added, weighs), vjp = jax.vjp(lambda p, h: self.functions.head(p, h, batch, key), self.local.head, y)
            dparams, cotangent = vjp((jnp.ones_like(added), jnp.zeros_like(weighs)))
            return (
                _accumulate(grads, dparams),
                rings.store(dy, cotangent, row["head_store"]),
                loss + added,
                weight + weighs,
            )

        state = (carry["grads"]["head"], carry["dy"], carry["loss"], carry["weight"])
        grads, carry["dy"], carry["loss"], carry["weight"] = _when(row["f_head"], head, state)
        carry["grads"] = {**carry["grads"], "head": grads}
        return carry

    def _backward(self, carry: dict[str, Any], row: Row, arrived: tuple[jax.Array, ...]) -> dict[str, Any]:
        chunk, microbatch = row["b_chunk"], row["b_microbatch"]
        batch = self.local.microbatch(microbatch)
        dy, carry["dy"] = rings.load(carry["dy"], row["b_source"])
        loaded = [rings.load(ring, row["b_load"]) for ring in carry["kept"]]
        carry["kept"] = tuple(ring for _, ring in loaded)
        values = self.chunk.residuals.merge(tuple(value for value, _ in loaded), arrived)
        dx, layers = self.chunk.backward(
            _pick(self.local.layers, chunk),
            values,
            dy,
            batch,
            self.local.layer_keys(chunk, microbatch),
            self.local.chunk_layers[chunk],
            row["b_valid"] > 0,
            carry["grads"]["layers"],
            chunk,
        )

        # Once dx is there the residuals are free, and the weight gradients still to be computed. So F's send ends here,
        # and the reads for the next B and B's own send start; without this tie XLA stages what it reads in a copy.
        tied = carry["x"], carry.get("host", ())
        dx, (carry["x"], host) = lax.optimization_barrier((dx, tied))
        if self.program.offload:
            carry["host"] = host
            carry["in"] = _map(lambda ring: rings.load_host(ring, row["host_read"]), host)

        def embed(_: Any, grads: Any) -> Any:
            key = self.local.part_keys(EMBED_KEY, microbatch)
            _, vjp = jax.vjp(lambda p: self.functions.embed(p, batch, key), self.local.embed)
            return _accumulate(grads, vjp(dx)[0])

        embedded = _when(row["b_embed"], embed, carry["grads"]["embed"])
        carry["grads"] = {**carry["grads"], "layers": layers, "embed": embedded}
        carry["dy"] = rings.store(carry["dy"], self._send(dx, -1), row["b_receive"])
        return carry

    def _send(self, value: jax.Array, shift: int) -> jax.Array:
        """Hands an activation to the next device along the ring, or a cotangent to the last one (shift -1)."""
        devices = self.program.schedule.devices
        if devices == 1:
            return value
        return lax.ppermute(value, "pipe", [(d, (d + shift) % devices) for d in range(devices)])


def _when(flag: jax.Array, body: Callable[[Any, Any], Any], operand: Any) -> Any:
    """`body` where flag is 1, else the operand: a loop of one trip or none, which updates its operands in place.

    A `lax.cond` would copy them (DESIGN trap 2). The scope tells a compiled program's readers how often it runs.
    """
    with jax.named_scope(f"{body.__name__}_if_due"):
        return lax.fori_loop(0, flag, body, operand)


def _accumulate(totals: Any, grads: Any) -> Any:
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), totals, grads)


def _pick(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _map(function: Callable[..., jax.Array], *columns: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(function(*items) for items in zip(*columns, strict=True))


def _scan(
    tick: Callable[[dict[str, Any], Row], dict[str, Any]], carry: dict[str, Any], rows: jax.Array
) -> dict[str, Any]:
    return lax.scan(lambda carry, row: (tick(carry, _row(row)), None), carry, rows)[0]


def _row(values: jax.Array) -> Row:
    return {name: values[index] for index, name in enumerate(COLUMNS)}
