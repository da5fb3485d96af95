"""Exact synthesis of small schedules with SciPy's HiGHS, in the spirit of OptPipe (arXiv 2510.05186).

Time is cut into steps; a binary says whether a pass of a kind and stage, or a transfer, starts in a step. Which
microbatch it is for is left out: microbatches are alike, and where a stage's n-th pass waits for the n-th one of what
it needs, numbering them in order gives a schedule. That makes the model small and its relaxation tight.

With transfers the counts only say that some activation is there for each B. The answer is then numbered (the last to be
needed leaves, the first comes back) and checked; that no shorter one exists is proved either way.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pipejax.schedules.blocks import from_slots
from pipejax.schedules.check import ScheduleError
from pipejax.schedules.check_timeline import check_timeline
from pipejax.schedules.schedule import Kind, Placement, looping, wave
from pipejax.schedules.simulate import simulate
from pipejax.schedules.synthesis.problem import Answer, Problem, lower_bound
from pipejax.schedules.timeline import TRANSFER_DTYPE, Direction, Timeline

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult  # type: ignore[import-untyped]

_FINEST = 12  # steps in a unit of time at most
_OUT, _BACK = 3, 4  # after the three kinds of pass


def prove(problem: Problem, answer: Answer, *, seconds: float = 60.0) -> Answer:
    """Looks for a schedule that takes a step less, again and again, until there is none.

    Looks at the placement of the answer, the looping one and the wave.

    Args:
      problem: what is asked for; its times must be multiples of a common step (at least a twelfth of a unit).
      answer: a schedule to start from.
      seconds: how long each look may take.

    Returns:
      The best schedule found. It is `optimal` where the solver showed for each placement that no shorter one exists; if
      time ran out for any, it is not, and `bound` is what is known.

    Raises:
      ValueError: times without a common step, or times that differ between stages.
    """
    size = problem.devices, problem.chunks
    placements: list[Placement] = []
    for placement in (answer.timeline.schedule.placement, looping(*size), wave(*size)):
        if not any(np.array_equal(placement.stage, other.stage) for other in placements):
            placements.append(placement)
    open_bounds = []
    for placement in placements:
        answer, settled = _shorten(problem, answer, placement, seconds)
        if not settled:
            open_bounds.append(lower_bound(problem, placement))
    bound = min([*open_bounds, answer.timeline.makespan])
    return dataclasses.replace(answer, bound=bound, optimal=bound >= answer.timeline.makespan - 1e-6)


def _shorten(problem: Problem, answer: Answer, placement: Placement, seconds: float) -> tuple[Answer, bool]:
    """The best found with a placement or before, and whether that placement has none shorter."""
    model, bound = _Model(problem, placement), lower_bound(problem, placement)
    while answer.timeline.makespan > bound + 1e-6:
        target = int(np.ceil(answer.timeline.makespan * model.steps - 1e-6)) - 1
        result = model.solve(target, seconds)
        if result.status == 2:  # infeasible
            return answer, True
        if result.x is None:
            return answer, False
        timeline = model.timeline(np.rint(result.x), target)
        if timeline is None or timeline.makespan >= answer.timeline.makespan - 1e-9:
            return answer, False
        answer = dataclasses.replace(answer, timeline=timeline, origin="exact")
    return answer, True


class _Model:
    """The mixed-integer programme for one problem and placement; a horizon is chosen at each solve."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        if problem.costs.stage_scale:
            raise ValueError("the exact solve knows no times that differ between stages; use the search alone.")
        self.problem, self.placement = problem, placement
        costs = problem.costs
        times = [costs.forward, costs.backward, costs.weights, costs.send]
        self.kinds = 3
        if problem.link is not None:
            if problem.link.shared:
                raise ValueError("the exact solve knows no shared links; use the search alone.")
            times.append(problem.link.k * costs.chunk / 2)
            self.kinds = 5
        whole = [q for q in range(1, _FINEST + 1) if all(abs(x * q - round(x * q)) < 1e-9 for x in times)]
        if not whole:
            raise ValueError(f"the exact solve needs times that are multiples of a common step, not {times}.")
        self.steps = whole[0]
        lengths = [round(x * self.steps) for x in times]
        self.length = lengths[:3] + [lengths[-1]] * 2
        self.send = lengths[3]

    def solve(self, horizon: int, seconds: float) -> OptimizeResult:
        """Whether a schedule of at most so many steps exists."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        rows = _Rows()
        self._counts(rows, horizon)
        self._dependencies(rows, horizon)
        for device in range(self.problem.devices):
            self._capacity(rows, horizon, device)
            self._memory(rows, horizon, device)
        count = self.kinds * self.placement.stages * horizon
        matrix, low, high = rows.matrix(count)
        return milp(
            np.zeros(count),
            constraints=LinearConstraint(matrix, low, high),
            integrality=np.ones(count),
            bounds=Bounds(0, self._allowed(horizon)),
            options={"time_limit": seconds},
        )

    def timeline(self, started: np.ndarray, horizon: int) -> Timeline | None:
        """The solution as a timeline; None where its transfers cannot be numbered."""
        problem = self.problem
        table = started.reshape(self.kinds, self.placement.stages, horizon)
        slots = {
            kind: np.stack([np.repeat(np.arange(horizon), row.astype(int)) for row in table[kind]]) for kind in Kind
        }
        schedule = from_slots(
            "synthesized", self.placement, slots, devices=problem.devices, microbatches=problem.microbatches
        )
        if problem.link is None:
            return simulate(schedule, problem.costs)
        start = schedule.passes["slot"] / self.steps
        moved = self._numbered(table, slots)
        order = np.lexsort((moved["start"], moved["lane"], moved["device"]))
        timeline = Timeline(
            schedule=schedule,
            costs=problem.costs,
            start=start,
            stop=start + problem.costs.durations(schedule),
            transfers=moved[order],
        )
        try:
            check_timeline(timeline)
        except ScheduleError:
            return None
        return timeline if timeline.peaks().max() <= problem.memory_limit + 1e-9 else None

    def _numbered(self, table: np.ndarray, slots: dict[Kind, np.ndarray]) -> np.ndarray:
        """Which activation each transfer moves: out goes the last to be needed, back comes the first."""
        rows = []
        two = self.problem.link is not None and self.problem.link.lanes == 2
        length = self.length[_OUT]
        for stage in range(self.placement.stages):
            device, chunk = int(self.placement.device[stage]), int(self.placement.chunk[stage])
            events = sorted((int(t), way) for way in Direction for t in np.flatnonzero(table[_OUT + way, stage]))
            done = slots[Kind.F][stage] + self.length[Kind.F]
            away: set[int] = set()
            back: set[int] = set()
            for step, way in events:
                if way == Direction.OFFLOAD:
                    here = [i for i in np.flatnonzero(done <= step).tolist() if i not in away | back]
                    here = [i for i in here if slots[Kind.B][stage, i] >= step + 2 * length]
                    if not here:
                        continue
                    unit = max(here)
                    away.add(unit)
                else:
                    if not away:
                        continue
                    unit = min(away)
                    away.remove(unit)
                    back.add(unit)
                lane = int(way) if two else 0
                rows.append((device, lane, way, chunk, unit, 0, step / self.steps, (step + length) / self.steps))
        return np.array(rows, TRANSFER_DTYPE)

    def _index(self, kind: int, stage: int, horizon: int) -> np.ndarray:
        """The variables of a kind and stage, one for each step."""
        first = (kind * self.placement.stages + stage) * horizon
        return np.arange(first, first + horizon)

    def _hop(self, stage: int, other: int) -> int:
        return self.send if self.placement.device[stage] != self.placement.device[other] else 0

    def _allowed(self, horizon: int) -> np.ndarray:
        """1 for each step in which a pass can start at all, given the shortest way to it and from it."""
        f, b, w = self.length[:3]
        stages = self.placement.stages
        hops = np.concatenate([[0], np.cumsum([self._hop(s, s + 1) for s in range(stages - 1)])]).astype(int)
        stage = np.arange(stages)
        there = stages * f + hops[-1]
        head = [stage * f + hops, there + (stages - 1 - stage) * b + hops[-1] - hops]
        head.append(head[1] + b)
        tail = [(stages - stage) * f + stages * b + w + 2 * hops[-1] - hops, (stage + 1) * b + w + hops, 0 * stage + w]
        transfer = self.length[_OUT]
        head += [head[0] + f, head[0] + f + transfer]
        tail += [2 * transfer + tail[1], transfer + tail[1]]
        step = np.arange(horizon)
        inside = [
            (step >= h) & (step + t <= horizon)
            for hs, ts in zip(head[: self.kinds], tail[: self.kinds], strict=True)
            for h, t in zip(hs, ts, strict=True)
        ]
        return np.concatenate(inside).astype(float)

    def _counts(self, rows: _Rows, horizon: int) -> None:
        for stage in range(self.placement.stages):
            for kind in range(3):
                rows.add([(self._index(kind, stage, horizon), 1)], self.problem.microbatches, self.problem.microbatches)
            if self.kinds == 5:
                out, back = (self._index(kind, stage, horizon) for kind in (_OUT, _BACK))
                rows.add([(out, 1), (back, -1)], 0, 0)

    def _dependencies(self, rows: _Rows, horizon: int) -> None:
        """By each step no more have started than what they need has ended."""
        last = self.placement.stages - 1
        for stage in range(last + 1):
            needs = [(int(Kind.W), int(Kind.B), stage), (int(Kind.B), int(Kind.F), stage)]
            if stage > 0:
                needs.append((int(Kind.F), int(Kind.F), stage - 1))
            if stage < last:
                needs.append((int(Kind.B), int(Kind.B), stage + 1))
            if self.kinds == 5:
                needs += [(_OUT, int(Kind.F), stage), (_BACK, _OUT, stage)]
            for kind, source, other in needs:
                wait = self.length[source] + self._hop(stage, other)
                mine, theirs = self._index(kind, stage, horizon), self._index(source, other, horizon)
                for step in range(horizon):
                    rows.add([(mine[: step + 1], 1), (theirs[: max(step - wait + 1, 0)], -1)], -np.inf, 0)
            if self.kinds == 5:
                self._residents(rows, horizon, stage)

    def _residents(self, rows: _Rows, horizon: int, stage: int) -> None:
        """A B, and an offload, takes an activation that is on the device."""
        f, b, out, back = (self._index(kind, stage, horizon) for kind in (Kind.F, Kind.B, _OUT, _BACK))
        for step in range(horizon):
            done, returned = (max(step - self.length[kind] + 1, 0) for kind in (Kind.F, _BACK))
            terms = [(b[: step + 1], 1), (out[: step + 1], 1), (f[:done], -1), (back[:returned], -1)]
            rows.add(terms, -np.inf, 0)

    def _running(self, kind: int, stage: int, step: int, horizon: int) -> np.ndarray:
        return self._index(kind, stage, horizon)[max(0, step - self.length[kind] + 1) : step + 1]

    def _capacity(self, rows: _Rows, horizon: int, device: int) -> None:
        mine = np.flatnonzero(self.placement.device == device).tolist()
        groups: list[tuple[int, ...]] = [(0, 1, 2)]
        if self.problem.link is not None:
            groups += [(_OUT,), (_BACK,)] if self.problem.link.lanes == 2 else [(_OUT, _BACK)]
        for kinds in groups:
            for step in range(horizon):
                rows.add([(self._running(kind, s, step, horizon), 1) for kind in kinds for s in mine], -np.inf, 1)

    def _memory(self, rows: _Rows, horizon: int, device: int) -> None:
        mine = np.flatnonzero(self.placement.device == device).tolist()
        for step in range(horizon):
            terms = []
            for s in mine:
                for kind, sign, ends in ((Kind.F, 1, False), (Kind.W, -1, True), (_BACK, 1, False), (_OUT, -1, True)):
                    if kind < self.kinds:
                        stop = step + 1 - (self.length[kind] if ends else 0)
                        terms.append((self._index(kind, s, horizon)[: max(stop, 0)], sign))
            rows.add(terms, -np.inf, self.problem.memory_limit)


class _Rows:
    """Rows of a sparse constraint matrix, as they come."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.sizes: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: list[tuple[np.ndarray, int]], low: float, high: float) -> None:
        """Adds low <= sum of sign * variables <= high."""
        self.columns += [columns for columns, _ in terms]
        self.values += [np.full(len(columns), float(sign)) for columns, sign in terms]
        self.sizes.append(sum(len(columns) for columns, _ in terms))
        self.low.append(low)
        self.high.append(high)

    def matrix(self, variables: int) -> tuple[object, np.ndarray, np.ndarray]:
        """SciPy's sparse matrix [rows, variables], and the two sides."""
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        bounds = np.concatenate([[0], np.cumsum(self.sizes)])
        data = (np.concatenate(self.values), np.concatenate(self.columns), bounds)
        return csr_array(data, shape=(len(self.sizes), variables)), np.array(self.low), np.array(self.high)
