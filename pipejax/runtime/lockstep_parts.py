"""A training step in lockstep of which only some activations move, a part of one each way in a tick.

Those that stay and those that are on their way share a device ring. A part comes beside F and one leaves beside B; in a
tick of one pass, beside its two halves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pipejax.program import Phase
from pipejax.runtime.ends import Row
from pipejax.runtime.lockstep import Lockstep
from pipejax.runtime.step import Pass, State
from pipejax.runtime.transfers import StepInParts


@dataclasses.dataclass(frozen=True)
class LockstepInParts(Lockstep, StepInParts):
    """One device's part of such a step."""

    def _begin(self) -> State:
        kept, _ = self.sort_residuals(self.layer.residuals.structs)
        return {**self.start(kept), **self.start_parts()}

    def _enter(self, state: State, phase: Phase, table: jax.Array) -> State:
        del phase, table  # nothing is on its way between ticks
        return state

    def _layer(self, position: Any, state: State, row: Row, f: Pass | None, b: Pass | None, *, last: bool) -> State:
        state, mirrored = dict(state), self.program.layers - 1 - position
        midway = self.move_parts(state, row, position)
        both = f is not None and b is not None
        if f is not None:
            computed, values = self._forward(position, state, f, midway=None if both else midway)
            state.update(forward=computed["forward"], loss=computed["loss"])
            self.store_residuals(state, row, position, values)
            if both:
                state["forward"] = midway(state["forward"])
            if last:
                state = self.send_forward(state, row, state["forward"])
        if b is not None:
            values = self.load_residuals(state, row, "b", mirrored)
            hook = None if both else midway
            state = self._backward(mirrored, state, b, values, after_forward=both, midway=hook, last=last)
            if last:
                state = self.send_backward(state, row, state["backward"])
        return state
