"""What every step on one device shares: its parameters and data, its buffers, sends, and evaluation.

Runs inside `shard_map` over the axis `pipe`. How a tick of training runs is said in `lockstep.py` and `staggered.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax import frozen
from pipejax.program import COLUMNS, WAYS, Program
from pipejax.runtime import rings
from pipejax.runtime.ends import AXIS, Ends, Row
from pipejax.runtime.residuals import Layer
from pipejax.runtime.split import Split

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Local:
    """What one device holds during a step.

    Attributes:
      layers: parameters, leaves [chunks, positions, ...].
      batch: leaves [microbatches, ...], the same on every device.
      chunk_layers: int32 [chunks], how many layers each chunk holds.
      uniform: whether every chunk of every device is full.
      layer_keys: (chunk, microbatch) -> a key for each position of the chunk, or None.
    """

    layers: Any
    batch: Any
    chunk_layers: jax.Array
    uniform: bool
    layer_keys: Callable[[jax.Array, jax.Array], Any]

    def microbatch(self, index: jax.Array) -> Any:
        """One microbatch's arrays."""
        return pick(self.batch, index)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass of one tick: which chunk's layers it runs, on what."""

    chunk: jax.Array
    batch: Any
    keys: Any
    valid: jax.Array

    @classmethod
    def read(cls, row: Row, letter: str, local: Local) -> Pass:
        """The pass of one kind, "f", "b" or "w", in a row of the table."""
        chunk, microbatch = row[f"{letter}_chunk"], row[f"{letter}_microbatch"]
        keys = local.layer_keys(chunk, microbatch)
        return cls(chunk, local.microbatch(microbatch), keys, row[f"{letter}_valid"] > 0)


@dataclasses.dataclass(frozen=True)
class Step:
    """One device's part of a step.

    Attributes:
      program: the tables' meaning; the table itself comes in as an argument, sharded.
      ends: embedding and head.
      layer: F of a layer.
      split: its B and its W.
      local: parameters and data.
      x: shape and dtype of one microbatch's activations.
      fill: what rings hold before anything is stored (NaN in tests).
    """

    program: Program
    ends: Ends
    layer: Layer
    split: Split
    local: Local
    x: jax.ShapeDtypeStruct
    fill: float

    def start(self, kept: tuple[jax.ShapeDtypeStruct, ...]) -> State:
        """What a training step carries from tick to tick; `kept` are a layer's residuals that stay on the device."""
        program = self.program
        trained = frozen.keep(self.ends.functions.trained, {**self.ends.params, "layers": self.local.layers})
        return {
            "x": self.ring(self.x, program.forward_arrivals),
            "dy": self.ring(self.x, program.backward_arrivals),
            "kept": tuple(self.ring(self.stacked(struct), program.residual_slots) for struct in kept),
            "grads": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained),
            "loss": jnp.float32(0),
            "weight": jnp.float32(0),
        }

    def evaluate(self, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs the forward passes alone; returns this device's loss sum (auxiliary losses included) and weight."""

        def tick(state: State, row: Row) -> State:
            f = Pass.read(row, "f", self.local)
            x, state = self.take_input(state, row)

            def layer(position: Any, carry: Any) -> Any:
                params = pick(self.local.layers, f.chunk, position)
                y, aux = self.layer.block(params, carry[0], f.batch, pick(f.keys, position))
                return y, carry[1] + aux.astype(jnp.float32)

            y, aux = lax.fori_loop(0, self.local.chunk_layers[f.chunk], layer, (x, jnp.float32(0)))
            totals = state["loss"] + jnp.where(f.valid, aux, 0), state["weight"]
            state["loss"], state["weight"] = self.ends.loss(y, row, totals)
            return self.send_forward(state, row, y)

        start = {
            "x": self.ring(self.x, self.program.forward_arrivals),
            "loss": jnp.float32(0),
            "weight": jnp.float32(0),
        }
        state = scan(tick, start, table)
        return state["loss"], state["weight"]

    def ring(self, struct: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
        """A device ring, filled."""
        return rings.make_ring(struct, slots, self.fill)

    def stacked(self, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """A residual of all positions of a chunk."""
        return jax.ShapeDtypeStruct((self.program.layers, *struct.shape), struct.dtype)

    def take_input(self, state: State, row: Row) -> tuple[jax.Array, State]:
        """F's input, from its arrival slot or embedded."""
        x, ring = rings.load(state["x"], row["f_source"])
        return self.ends.embed(x, row), {**state, "x": ring}

    def holds_a_layer(self, chunk: jax.Array, position: Any) -> jax.Array:
        """False where the position is a filler: other devices run a layer meanwhile, so skipping it saves no time."""
        return position < self.local.chunk_layers[chunk]

    def send_forward(self, state: State, row: Row, y: jax.Array) -> State:
        """Hands F's output to the device of the next stage."""
        return {**state, "x": self._send(state["x"], y, row, "f", self.program.forward_ways)}

    def send_backward(self, state: State, row: Row, dx: jax.Array) -> State:
        """Hands B's output to the device of the stage before."""
        return {**state, "dy": self._send(state["dy"], dx, row, "b", self.program.backward_ways)}

    def _send(self, ring: jax.Array, value: jax.Array, row: Row, letter: str, ways: tuple[int, ...]) -> jax.Array:
        devices = self.program.schedule.devices
        for way in ways:
            pairs = [(device, (device + way) % devices) for device in range(devices)]
            arrived = lax.ppermute(value, AXIS, pairs) if way else value
            ring = rings.store(ring, arrived, row[f"{letter}_from_{WAYS[way]}"])
        return ring

    def add_gradients(self, state: State, dparams: Any, chunk: jax.Array, position: Any, valid: jax.Array) -> State:
        """Adds a layer's weight gradients; a bubble's garbage, NaN perhaps, adds zero."""

        def add(total: jax.Array, grad: jax.Array) -> jax.Array:
            return total.at[chunk, position].add(jnp.where(valid, grad.astype(total.dtype), 0))

        layers = jax.tree.map(add, state["grads"]["layers"], dparams)
        return {**state, "grads": {**state["grads"], "layers": layers}}

    def finish_backward(self, state: State, row: Row, dx: jax.Array) -> State:
        """The embedding's gradients, where B was of the first stage."""
        grads = state["grads"]
        return {**state, "grads": {**grads, "embed": self.ends.unembed(dx, row, grads["embed"])}}

    def finish_forward(self, state: State, row: Row, y: jax.Array) -> State:
        """The head, where F was of the last stage."""
        head = (state["grads"]["head"], state["dy"], state["loss"], state["weight"])
        grads, dy, loss, weight = self.ends.head(y, row, head)
        return {**state, "grads": {**state["grads"], "head": grads}, "dy": dy, "loss": loss, "weight": weight}


def pick(tree: Any, *place: Any) -> Any:
    """One place's values of a tree of stacked arrays."""
    return jax.tree.map(lambda leaf: rings.pick(leaf, *place), tree)


def each(function: Callable[..., jax.Array], *columns: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """A function over tuples of equal length."""
    return tuple(function(*items) for items in zip(*columns, strict=True))


def scan(tick: Callable[[State, Row], State], state: State, rows: jax.Array) -> State:
    """Runs ticks, one for each row of a table."""
    return lax.scan(lambda state, row: (tick(dict(state), named(row)), None), state, rows)[0]


def named(values: jax.Array) -> Row:
    """A row of a table by its columns' names."""
    return {name: values[index] for index, name in enumerate(COLUMNS)}
