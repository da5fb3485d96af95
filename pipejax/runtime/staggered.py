"""A training step in which devices do different kinds of work in a tick: F, B and W each under a predicate.

The order within a tick is that of `pipejax.program_staggered`. A pass is a loop over the layers of its chunk, of no
trip where the device has nothing to do: it updates rings and gradients in place, which a `lax.cond` would copy
(DESIGN trap 2).

Transfers stand inside the passes, since nothing runs beside a loop but what is in it: what comes from the host comes
beside the first half of a layer's pass, what goes there goes beside the second. A tick without a pass has them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax.jaxprs import Midway
from pipejax.runtime import rings
from pipejax.runtime.ends import Row
from pipejax.runtime.step import Pass, State, each, pick, scan
from pipejax.runtime.transfers import StepInParts

# (state, which it may change; the row; the pass; the layer's position in its chunk; what to call midway) -> state
_Body = Callable[[State, Row, Pass, Any, Midway | None], State]


@dataclasses.dataclass(frozen=True)
class Staggered(StepInParts):
    """One device's part of a step of any schedule."""

    def train(self, table: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Runs all ticks; arguments and results as of `Lockstep.train`."""
        kept, _ = self.sort_residuals(self.layer.residuals.structs)
        state = {**self.start(kept), **self.start_parts()}
        state["stash"] = tuple(self.ring(self.stacked(struct), self.program.stash_slots) for struct in self.split.stash)
        state = scan(self._tick, state, table)
        return state["grads"], state["loss"], state["weight"]

    def _tick(self, state: State, row: Row) -> State:
        x, state = self.take_input(state, row)
        dy, state["dy"] = rings.load(state["dy"], row["b_source"])
        state = {**state, "forward": x, "backward": dy}
        bodies: dict[str, _Body] = {"f": self._forward, "b": self._backward, "w": self._weights}
        if not self.program.schedule.split_backward:
            # One pass, so that a tick has one round of transfers.
            bodies = {"f": self._forward, "b": self._backward_and_weights}
        for letter, body in bodies.items():
            state = self._run(row, row[f"{letter}_valid"], letter, body, state)
        if self.program.offload:
            idle = 1 - sum((row[f"{letter}_valid"] for letter in bodies), start=jnp.int32(0))
            state = self._run(row, idle, "f", self._nothing, state)
        y, dx = state.pop("forward"), state.pop("backward")
        state = self.finish_forward(self.finish_backward(state, row, dx), row, y)
        return self.send_backward(self.send_forward(state, row, y), row, dx)

    def _run(self, row: Row, due: jax.Array, letter: str, body: _Body, state: State) -> State:
        """Runs a pass over the positions of its chunk, if it is due."""
        layers = self.program.layers
        work = Pass.read(row, letter, self.local)

        def layer(step: Any, state: State) -> State:
            state = dict(state)
            # Passes of all kinds move the layers in one order: the part of an activation is complete in one tick.
            midway = self.move_parts(state, row, step) if self.program.offload else None
            return body(state, row, work, layers - 1 - step if letter == "b" else step, midway)

        with jax.named_scope(f"{body.__name__.strip('_')}_if_due"):
            return lax.fori_loop(0, due * layers, layer, state)

    def _nothing(self, state: State, row: Row, work: Pass, position: Any, midway: Midway | None) -> State:
        """A tick of transfers alone."""
        del row, work, position
        if midway is not None:
            midway(jnp.float32(0))
        return state

    def _forward(self, state: State, row: Row, f: Pass, position: Any, midway: Midway | None) -> State:
        params, keys = pick(self.local.layers, f.chunk, position), pick(f.keys, position)
        y, aux, values = self.layer.forward(params, state["forward"], f.batch, keys, midway=midway)
        there = self.holds_a_layer(f.chunk, position)
        state["forward"] = jnp.where(there, y, state["forward"])
        state["loss"] += jnp.where(there, aux, 0)
        self.store_residuals(state, row, position, values)
        return state

    def _backward(self, state: State, row: Row, b: Pass, position: Any, midway: Midway | None) -> State:
        params, keys = pick(self.local.layers, b.chunk, position), pick(b.keys, position)
        values = self.load_residuals(state, row, "b", position)
        dx, stash = self.split.backward(params, values, state["backward"], b.batch, keys, midway=midway)
        state["backward"] = jnp.where(self.holds_a_layer(b.chunk, position), dx, state["backward"])
        state["stash"] = each(
            lambda ring, value: rings.store(ring, value, row["stash_store"], position), state["stash"], stash
        )
        return state

    def _weights(self, state: State, row: Row, w: Pass, position: Any, midway: Midway | None) -> State:
        params, keys = pick(self.local.layers, w.chunk, position), pick(w.keys, position)
        values = self.load_residuals(state, row, "w", position)
        stash = pick(state["stash"], row["w_stash"], position)
        dparams = self.split.weights(params, values, stash, w.batch, keys, midway=midway)
        return self.add_gradients(state, dparams, w.chunk, position, self.holds_a_layer(w.chunk, position))

    def _backward_and_weights(self, state: State, row: Row, b: Pass, position: Any, midway: Midway | None) -> State:
        """One pass of both, where the schedule does not split them: a tick has one round of transfers."""
        params, keys = pick(self.local.layers, b.chunk, position), pick(b.keys, position)
        values = self.load_residuals(state, row, "b", position)
        dx, stash = self.split.backward(params, values, state["backward"], b.batch, keys, midway=midway)
        dx, stash = lax.optimization_barrier((dx, stash))
        there = self.holds_a_layer(b.chunk, position)
        state["backward"] = jnp.where(there, dx, state["backward"])
        dparams = self.split.weights(params, values, stash, b.batch, keys)
        return self.add_gradients(state, dparams, b.chunk, position, there)
