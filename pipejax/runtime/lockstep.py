"""A training step in lockstep: phases of ticks, each tick an F and a B, layer by layer.

The order within a tick is that of `pipejax.program_lockstep`. All layers of a chunk but the last run in a loop, and the
last by itself, so that what it sends to the neighbours has compute beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.jaxprs import Midway
from pipejax.program import Phase
from pipejax.runtime import rings
from pipejax.runtime.ends import Row
from pipejax.runtime.step import Pass, State, Step, each, named, pick, scan


@dataclasses.dataclass(frozen=True)
class Lockstep(Step):
    """One device's part of a step in which all devices run the same kinds of work."""

    def train(self, table: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Runs all phases.

        Args:
          table: int32 [ticks, len(COLUMNS)], this device's rows.

        Returns:
          Gradients of this device's loss sum as {"embed", "layers", "head"} in float32, its loss sum (auxiliary
          losses included) and its weight.
        """
        state = self._begin()
        for phase in self.program.phases:
            state = self._enter(state, phase, table)
            state = scan(functools.partial(self._tick, phase=phase), state, table[phase.start : phase.stop])
        return state["grads"], state["loss"], state["weight"]

    def _begin(self) -> State:
        kept, moved = self.layer.residuals.split(self.layer.residuals.structs)
        if not self.program.offload:
            return self.start(kept)
        slots = self.program.host_slots
        host = (rings.make_host_ring(self.stacked(struct), slots, self.fill) for struct in moved)
        return {**self.start(kept), "host": tuple(host)}

    def _enter(self, state: State, phase: Phase, table: jax.Array) -> State:
        """Brings the transfers of the last phase to their end and those of the next one to their start."""
        if not self.program.offload:
            return state
        state = dict(state)
        if phase.flush:
            state = self._write(state, *state["out"])
        if phase.backward:
            state.pop("out", None)
        elif "out" not in state:
            # Nothing is waiting to be written: the first write puts the filling where it is already.
            _, moved = self.layer.residuals.split(self.layer.residuals.structs)
            nothing = tuple(rings.filled(struct, self.fill) for struct in moved)
            state["out"] = nothing, named(table[phase.start])["host_write"], jnp.int32(0)
        if phase.backward and not phase.forward:
            state = self._read_ahead(state, named(table[phase.start])["host_load"], self.program.layers - 1)
        return state

    def _write(self, state: State, values: tuple[jax.Array, ...], slot: Any, position: Any) -> State:
        """Starts the way of a layer's residuals to the host."""
        host = each(lambda ring, value: rings.store_host(ring, value, slot, position), state["host"], values)
        return {**state, "host": host}

    def _read(self, state: State, slot: jax.Array, position: Any) -> tuple[jax.Array, ...]:
        """Starts the way of a layer's residuals back from the host."""
        return each(lambda ring: rings.load_host(ring, slot, position), state["host"])

    def _read_ahead(self, state: State, slot: jax.Array, position: Any) -> State:
        """The same for the layer whose B comes next, in a phase without F."""
        return {**state, "in": self._read(state, slot, position), "in_slot": slot}

    def _tick(self, state: State, row: Row, phase: Phase) -> State:
        state = dict(state)
        f = b = None
        if phase.forward:
            f = Pass.read(row, "f", self.local)
            x, state = self.take_input(state, row)
            state["forward"] = x
        if phase.backward:
            b = Pass.read(row, "b", self.local)
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
            state = self.finish_backward(state, row, state.pop("backward"))
        if phase.forward:
            state = self.finish_forward(state, row, state.pop("forward"))
        return state

    def _layer(self, position: Any, state: State, row: Row, f: Pass | None, b: Pass | None, *, last: bool) -> State:
        """F of the chunk's layer at a position, and B of that as far from the chunk's end."""
        state, mirrored = dict(state), self.program.layers - 1 - position
        offload = self.program.offload
        if offload and f is not None and b is None:
            state = self._write(state, *state["out"])
        if offload and f is not None and b is not None:
            state["in"] = self._read(state, row["host_load"], mirrored)
        if f is not None:
            state, values = self._forward(position, state, f)
            kept, moved = self.layer.residuals.split(values)
            state["kept"] = each(
                lambda ring, value: rings.store(ring, value, row["f_store"], position), state["kept"], kept
            )
            if offload and b is None:
                state["out"] = moved, row["host_write"], jnp.int32(position)
            elif offload:
                # The reads run beside F, the writes from here on: in turns, and in place.
                tied = state["forward"], state["in"], state["host"]
                state["forward"], state["in"], state["host"] = lax.optimization_barrier(tied)
                state = self._write(state, moved, row["host_write"], position)
            if last:
                state = self.send_forward(state, row, state["forward"])
        if b is not None:
            loaded = [rings.load(ring, row["b_load"], mirrored) for ring in state["kept"]]
            state["kept"] = tuple(ring for _, ring in loaded)
            values = self.layer.residuals.merge(tuple(value for value, _ in loaded), state.pop("in", ()))
            ahead = functools.partial(self._next, mirrored, row, last=last) if offload and f is None else None
            state = self._backward(mirrored, state, b, values, after_forward=f is not None, ahead=ahead, last=last)
            if last:
                state = self.send_backward(state, row, state["backward"])
        return state

    def _next(self, position: Any, row: Row, state: State, *, last: bool) -> State:
        """Starts the read for the layer whose B follows that at a position."""
        if last:
            return self._read_ahead(state, row["host_next"], self.program.layers - 1)
        return self._read_ahead(state, state["in_slot"], position - 1)

    def _forward(
        self, position: Any, state: State, f: Pass, *, midway: Midway | None = None
    ) -> tuple[State, tuple[jax.Array, ...]]:
        """F of one layer; also returns its residuals."""
        x = state["forward"]
        params = pick(self.local.layers, f.chunk, position)
        y, aux, values = self.layer.forward(params, x, f.batch, pick(f.keys, position), midway=midway)
        there = self.holds_a_layer(f.chunk, position)
        state = {
            **state,
            "forward": y if self.local.uniform else jnp.where(there, y, x),
            "loss": state["loss"] + jnp.where(f.valid & there, aux, 0),
        }
        return state, values

    def _backward(
        self,
        position: Any,
        state: State,
        b: Pass,
        values: tuple[jax.Array, ...],
        *,
        after_forward: bool,
        ahead: Callable[[State], State] | None = None,
        midway: Midway | None = None,
        last: bool,
    ) -> State:
        """B and W of one layer; `ahead` starts the read for the next B."""
        if after_forward:
            # B's weights are sliced after F, or XLA slices them beside F's and keeps both.
            state["forward"], chunk = lax.optimization_barrier((state["forward"], b.chunk))
            b = dataclasses.replace(b, chunk=chunk)
        dy = state["backward"]
        params, keys = pick(self.local.layers, b.chunk, position), pick(b.keys, position)
        dx, stash = self.split.backward(params, values, dy, b.batch, keys, midway=midway)
        there = self.holds_a_layer(b.chunk, position)
        dx = dx if self.local.uniform else jnp.where(there, dx, dy)

        # Weight gradients come after dx, whatever XLA would choose: F's send ends and B's own starts here, and in a
        # phase without F the reads for the next B, into what the residuals leave free.
        tied = state["x"] if last else (), state["host"] if ahead else ()
        (state["backward"], stash), (arrived, host) = lax.optimization_barrier(((dx, stash), tied))
        if last:
            state["x"] = arrived
        if ahead:
            state = ahead({**state, "host": host})
        dparams = self.split.weights(params, values, stash, b.batch, keys)
        return self.add_gradients(state, dparams, b.chunk, position, b.valid & there)
