"""What synthesis is asked for, what it answers, and how good any answer can be."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipejax.schedules.costs import UNIT, Costs
from pipejax.schedules.schedule import Placement
from pipejax.schedules.timeline import Timeline
from pipejax.schedules.transfers import Link


@dataclasses.dataclass(frozen=True)
class Problem:
    """Find the order, and what to offload, that takes the least time.

    Attributes:
      devices, chunks, microbatches: p, v, m.
      costs: the times of the passes.
      memory_limit: chunk-activations that each device can hold.
      link: the way to the host; None where nothing can be offloaded.
    """

    devices: int
    chunks: int
    microbatches: int
    memory_limit: float
    costs: Costs = UNIT
    link: Link | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "chunks", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"Problem: {name} is {getattr(self, name)}; pass 1 or more.")
        if self.memory_limit < self.chunks and self.link is None:
            raise ValueError(
                f"Problem: with {self.chunks} chunks on a device a microbatch needs {self.chunks} chunk-activations at "
                f"a time, more than the limit of {self.memory_limit:g}; raise it, or pass a link to offload."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """A timeline within the memory limit.

    Attributes:
      timeline: what was found.
      origin: the named schedule that it was found from, or "exact".
      bound: no schedule can take less time: of this placement, or after `prove` of this, the looping and the wave one.
      optimal: whether the answer is proved to take the least time.
    """

    timeline: Timeline
    origin: str
    bound: float
    optimal: bool

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a share of it."""
        return self.timeline.makespan / self.bound - 1


def lower_bound(problem: Problem, placement: Placement) -> float:
    """A time that no schedule can beat, whatever the memory.

    A device must wait for its first F, then do all its work; after its last pass of a kind, what follows on other
    devices remains. W's can fill the end, so only the shortest tail counts. A single microbatch's chain is a bound too.
    """
    costs, stages = problem.costs, placement.stages
    scale = np.asarray(costs.stage_scale or (1.0,) * stages)
    hops = (np.diff(placement.device) != 0) * costs.send
    forward, backward, weights = (time * scale for time in (costs.forward, costs.backward, costs.weights))
    heads = np.concatenate([[0.0], np.cumsum(forward[:-1] + hops)])  # earliest start of each stage's first F
    work = (forward + backward + weights) * problem.microbatches
    chain = float(forward.sum() + backward.sum() + 2 * hops.sum() + weights[0])
    bounds = [chain]
    for device in range(problem.devices):
        mine = np.flatnonzero(placement.device == device)
        bounds.append(float(heads[mine].min() + work[mine].sum()))
    return max(bounds)
