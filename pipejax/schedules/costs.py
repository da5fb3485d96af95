"""How long each pass takes. NumPy only."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax.schedules.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of one chunk's passes, in any unit.

    Attributes:
      forward, backward, weights: T_F, T_B, T_W. An unsplit backward takes T_B + T_W.
      send: from the end of a pass to when a neighbouring device can use what it sent.
      stage_scale: what multiplies the three times of each virtual stage, in the order of the model; empty for 1.
    """

    forward: float = 1.0
    backward: float = 1.0
    weights: float = 1.0
    send: float = 0.0
    stage_scale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weights"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Costs: {name} is {getattr(self, name)}; a pass takes a time above 0.")
        if self.send < 0 or any(not scale > 0 for scale in self.stage_scale):
            raise ValueError("Costs: send must be 0 or more, and each stage_scale above 0.")

    @property
    def chunk(self) -> float:
        """T_c, the time of all three passes of one chunk."""
        return self.forward + self.backward + self.weights

    def by_kind(self, *, split_backward: bool) -> np.ndarray:
        """float64 [3], the times of F, B and W of a chunk of scale 1."""
        return np.array(
            [self.forward, self.backward + (0.0 if split_backward else self.weights), self.weights], np.float64
        )

    def durations(self, schedule: Schedule) -> np.ndarray:
        """float64 [passes], how long each pass of a schedule takes; a slice takes its share of a microbatch."""
        passes = schedule.passes
        times = self.by_kind(split_backward=schedule.split_backward)[passes["kind"]] / schedule.slices
        if not self.stage_scale:
            return times
        stages = schedule.placement.stages
        if len(self.stage_scale) != stages:
            raise ValueError(f"Costs: stage_scale has {len(self.stage_scale)} values for {stages} stages.")
        return times * np.asarray(self.stage_scale)[schedule.placement.stage[passes["device"], passes["chunk"]]]


UNIT = Costs()
"""One for each pass: the slots of the papers."""
