"""The training step on one device of the pipeline: phases of ticks, each tick an F and a B, layer by layer.

Runs inside `shard_map` over the axis `pipe`. The order within a tick is that of `pipejax.program`. All layers of a
chunk but the last run in a loop, and the last by itself, so that what it sends to the neighbours has compute beside it.
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
        return _pick(self.batch, index)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """An F or a B of one tick: which chunk's layers it runs, on what."""

    chunk: jax.Array
    batch: Any
    keys: Any
    valid: jax.Array

    @classmethod
    def read(cls, row: Row, letter: str, local: Local) -> _Pass:
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

    def train(self, table: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Runs all phases.

        Args:
          table: int32 [ticks, len(COLUMNS)], this device's rows.

        Returns:
          Gradients of this device's loss sum as {"embed", "layers", "head"} in float32, its loss sum (auxiliary
          losses included) and its weight.
        """
        program, residuals = self.program, self.layer.residuals
        kept, moved = residuals.split(residuals.structs)
        state: State = {
            "x": self._ring(self.x, program.forward_arrivals),
            "dy": self._ring(self.x, program.backward_arrivals),
            "kept": tuple(self._ring(_stacked(struct, program.layers), program.residual_slots) for struct in kept),
            "grads": jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, jnp.float32), {**self.ends.params, "layers": self.local.layers}
            ),
            "loss": jnp.float32(0),
            "weight": jnp.float32(0),
        }
        if program.offload:
            state["host"] = tuple(
                rings.make_host_ring(_stacked(struct, program.layers), program.host_slots, self.fill)
                for struct in moved
            )
        for phase in program.phases:
            if program.offload:
                state = self._enter(state, phase, table, moved)
            state = _scan(functools.partial(self._tick, phase=phase), state, table[phase.start : phase.stop])
        return state["grads"], state["loss"], state["weight"]

    def evaluate(self, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs the forward passes alone; returns this device's loss sum (auxiliary losses included) and weight."""

        def tick(state: State, row: Row) -> State:
            f = _Pass.read(row, "f", self.local)
            x, state = self._take_input(state, row)

            def layer(position: Any, carry: Any) -> Any:
                params = _pick(self.local.layers, f.chunk, position)
                y, aux = self.layer.block(params, carry[0], f.batch, _pick(f.keys, position))
                return y, carry[1] + aux.astype(jnp.float32)

            y, aux = lax.fori_loop(0, self.local.chunk_layers[f.chunk], layer, (x, jnp.float32(0)))
            totals = state["loss"] + jnp.where(f.valid, aux, 0), state["weight"]
            state["loss"], state["weight"] = self.ends.loss(y, row, totals)
            state["x"] = rings.store(state["x"], self._send(y, 1), row["f_receive"])
            return state

        start = {
            "x": self._ring(self.x, self.program.forward_arrivals),
            "loss": jnp.float32(0),
            "weight": jnp.float32(0),
        }
        state = _scan(tick, start, table)
        return state["loss"], state["weight"]

    def _ring(self, struct: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
        return rings.make_ring(struct, slots, self.fill)

    def _enter(self, state: State, phase: Phase, table: jax.Array, moved: tuple[jax.ShapeDtypeStruct, ...]) -> State:
        """Brings the transfers of the last phase to their end and those of the next one to their start."""
        state = dict(state)
        if phase.flush:
            state = self._write(state, *state["out"])
        if phase.backward:
            state.pop("out", None)
        elif "out" not in state:
            # Nothing is waiting to be written: the first write puts the filling where it is already.
            nothing = tuple(rings.filled(struct, self.fill) for struct in moved)
            state["out"] = nothing, _row(table[phase.start])["host_write"], jnp.int32(0)
        if phase.backward and not phase.forward:
            state = self._read_ahead(state, _row(table[phase.start])["host_load"], self.program.layers - 1)
        return state

    def _write(self, state: State, values: tuple[jax.Array, ...], slot: Any, position: Any) -> State:
        """Starts the way of a layer's residuals to the host."""
        host = _map(lambda ring, value: rings.store_host(ring, value, slot, position), state["host"], values)
        return {**state, "host": host}

    def _read(self, state: State, slot: jax.Array, position: Any) -> tuple[jax.Array, ...]:
        """Starts the way of a layer's residuals back from the host."""
        return _map(lambda ring: rings.load_host(ring, slot, position), state["host"])

    def _read_ahead(self, state: State, slot: jax.Array, position: Any) -> State:
        """The same for the layer whose B comes next, in a phase without F."""
        return {**state, "in": self._read(state, slot, position), "in_slot": slot}

    def _tick(self, state: State, row: Row, phase: Phase) -> State:
        state = dict(state)
        f = b = None
        if phase.forward:
            f = _Pass.read(row, "f", self.local)
            x, state = self._take_input(state, row)
            state["forward"] = x
        if phase.backward:
            b = _Pass.read(row, "b", self.local)
            state["backward"], state["dy"] = rings.load(state["dy"], row["b_source"])

        def layer(position: Any, state: State) -> State:
            return self._layer(position, state, row, f, b, last=False)

        last = self.program.layers - 1
        if last:
            # XLA would unroll a loop of one trip, and mix the transfers of two layers (compiled: half as much memory
            # again, a fourth of the transfers exposed).
            trips = lax.optimization_barrier(jnp.int32(1)) if last == 1 else last
            state = lax.fori_loop(0, trips, layer, state)
        state = self._layer(last, state, row, f, b, last=True)
        if phase.backward:
            dx = state.pop("backward")
            state["grads"] = {**state["grads"], "embed": self.ends.unembed(dx, row, state["grads"]["embed"])}
        if phase.forward:
            head = (state["grads"]["head"], state["dy"], state["loss"], state["weight"])
            grads, state["dy"], state["loss"], state["weight"] = self.ends.head(state.pop("forward"), row, head)
            state["grads"] = {**state["grads"], "head": grads}
        return state

    def _take_input(self, state: State, row: Row) -> tuple[jax.Array, State]:
        x, ring = rings.load(state["x"], row["f_source"])
        return self.ends.embed(x, row), {**state, "x": ring}

    def _layer(self, position: Any, state: State, row: Row, f: _Pass | None, b: _Pass | None, *, last: bool) -> State:
        """F of the chunk's layer at a position, and B of that as far from the chunk's end."""
        state, mirrored = dict(state), self.program.layers - 1 - position
        offload = self.program.offload
        if offload and f is not None and b is None:
            state = self._write(state, *state["out"])
        if offload and f is not None and b is not None:
            state["in"] = self._read(state, row["host_load"], mirrored)
        if f is not None:
            state, moved = self._forward(position, state, row, f)
            if offload and b is None:
                state["out"] = moved, row["host_write"], jnp.int32(position)
            elif offload:
                # The reads run beside F, the writes from here on: in turns, and in place.
                tied = state["forward"], state["in"], state["host"]
                state["forward"], state["in"], state["host"] = lax.optimization_barrier(tied)
                state = self._write(state, moved, row["host_write"], position)
            if last:
                state["x"] = rings.store(state["x"], self._send(state["forward"], 1), row["f_receive"])
        if b is not None:
            if f is not None:
                # B's weights are sliced after F, or XLA slices them beside F's and keeps both.
                state["forward"], chunk = lax.optimization_barrier((state["forward"], b.chunk))
                b = dataclasses.replace(b, chunk=chunk)
            state = self._backward(mirrored, state, row, b, ahead=offload and f is None, last=last)
            if last:
                state["dy"] = rings.store(state["dy"], self._send(state["backward"], -1), row["b_receive"])
        return state

    def _forward(self, position: Any, state: State, row: Row, f: _Pass) -> tuple[State, tuple[jax.Array, ...]]:
        """F of one layer; also returns the residuals that are to go to the host."""
        x = state["forward"]
        params = _pick(self.local.layers, f.chunk, position)
        y, aux, values = self.layer.forward(params, x, f.batch, _pick(f.keys, position))
        there = self._holds_a_layer(f.chunk, position)
        kept, moved = self.layer.residuals.split(values)
        state = {
            **state,
            "forward": y if self.local.uniform else jnp.where(there, y, x),
            "loss": state["loss"] + jnp.where(f.valid & there, aux, 0),
            "kept": _map(lambda ring, value: rings.store(ring, value, row["f_store"], position), state["kept"], kept),
        }
        return state, moved

    def _backward(self, position: Any, state: State, row: Row, b: _Pass, *, ahead: bool, last: bool) -> State:
        """B and W of one layer; `ahead` starts the read for the next B."""
        dy = state["backward"]
        loaded = [rings.load(ring, row["b_load"], position) for ring in state["kept"]]
        state["kept"] = tuple(ring for _, ring in loaded)
        values = self.layer.residuals.merge(tuple(value for value, _ in loaded), state.pop("in", ()))
        params, keys = _pick(self.local.layers, b.chunk, position), _pick(b.keys, position)
        dx, stash = self.split.backward(params, values, dy, b.batch, keys)
        there = self._holds_a_layer(b.chunk, position)
        dx = dx if self.local.uniform else jnp.where(there, dx, dy)

        # Weight gradients come after dx, whatever XLA would choose: F's send ends and B's own starts here, and in a
        # phase without F the reads for the next B, into what the residuals leave free.
        tied = state["x"] if last else (), state["host"] if ahead else ()
        (state["backward"], stash), (arrived, host) = lax.optimization_barrier(((dx, stash), tied))
        if last:
            state["x"] = arrived
        if ahead:
            state["host"] = host
            following = (row["host_next"], self.program.layers - 1) if last else (state["in_slot"], position - 1)
            state = self._read_ahead(state, *following)
        dparams = self.split.weights(params, stash, b.batch, keys)
        layers = jax.tree.map(
            lambda total, grad: _add(total, grad, (b.chunk, position), b.valid & there),
            state["grads"]["layers"],
            dparams,
        )
        state["grads"] = {**state["grads"], "layers": layers}
        return state

    def _holds_a_layer(self, chunk: jax.Array, position: Any) -> jax.Array:
        """False where the position is a filler: other devices run a layer meanwhile, so skipping it saves no time."""
        return position < self.local.chunk_layers[chunk]

    def _send(self, value: jax.Array, shift: int) -> jax.Array:
        """Hands an activation to the next device along the ring, or a cotangent to the last one (shift -1)."""
        devices = self.program.schedule.devices
        if devices == 1:
            return value
        return lax.ppermute(value, AXIS, [(d, (d + shift) % devices) for d in range(devices)])


def _stacked(struct: jax.ShapeDtypeStruct, layers: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((layers, *struct.shape), struct.dtype)


def _pick(tree: Any, *place: Any) -> Any:
    return jax.tree.map(lambda leaf: rings.pick(leaf, *place), tree)


def _add(total: jax.Array, grad: jax.Array, place: tuple[Any, ...], valid: jax.Array) -> jax.Array:
    """Adds a gradient to one place of its accumulator; a bubble's garbage, NaN perhaps, adds zero."""
    return total.at[place].add(jnp.where(valid, grad.astype(total.dtype), 0))


def _map(function: Callable[..., jax.Array], *columns: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(function(*items) for items in zip(*columns, strict=True))


def _scan(tick: Callable[[State, Row], State], state: State, rows: jax.Array) -> State:
    return lax.scan(lambda state, row: (tick(dict(state), _row(row)), None), state, rows)[0]


def _row(values: jax.Array) -> Row:
    return {name: values[index] for index, name in enumerate(COLUMNS)}
