"""Local search for an order, and what to offload, from the named schedules."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import numpy as np

from pipejax.schedules.check import ScheduleError, check
from pipejax.schedules.graph import DeadlockError, device_orders, edges, run_orders
from pipejax.schedules.greedy import greedy
from pipejax.schedules.names import NAMES, by_name
from pipejax.schedules.refill import refill
from pipejax.schedules.schedule import Kind, Schedule, looping, sort_passes, wave
from pipejax.schedules.simulate import compact, simulate
from pipejax.schedules.synthesis.problem import Answer, Problem, lower_bound
from pipejax.schedules.timeline import Timeline
from pipejax.schedules.transfers import plan

_REACH = 6  # how many places a pass moves in its device's order at most
_ROUND = 4000  # moves of a round of annealing
_HEAT = 0.6  # how much worse, in time, a move may make it at the start of a round (on average)


def synthesize(problem: Problem, *, steps: int = 20_000, seed: int = 0) -> Answer:
    """The shortest schedule that the search finds within the memory limit.

    It starts from every named schedule that has so many chunks (B and W split where they are not), and from list
    schedules at the limit itself, and moves passes within the devices' orders. No answer is longer than the best
    named schedule that stays within the limit.

    Args:
      problem: what is asked for.
      steps: how many moves to try in all. A number of moves, not a time, so that a busy machine changes no answer.
        Thousands of moves take a second; with a link, tens, since each plans transfers.
      seed: of the random moves; the same seed gives the same answer.

    Raises:
      ValueError: `steps` below 0, or nothing that it starts from stays within the limit.
    """
    if steps < 0:
        raise ValueError(f"synthesize: steps is {steps}; pass 0 or more moves.")
    starts = [(name, timeline) for name, timeline in candidates(problem)]
    if not starts:
        raise ValueError(
            f"no schedule of {problem.chunks} chunks on {problem.devices} devices stays within "
            f"{problem.memory_limit:g} chunk-activations; raise the limit, or lower k."
        )
    starts.sort(key=lambda start: start[1].makespan)
    best_name, best = starts[0]
    # The best ones that can be moved; a placement of its own each, where they differ.
    tries = [
        (name, timeline)
        for name, timeline in starts[:4]
        if timeline.schedule.split_backward and timeline.schedule.slices == 1
    ]
    for name, timeline in tries:
        improved = _Climb(problem, timeline, random.Random(seed)).run(steps // len(tries))
        if improved.makespan < best.makespan - 1e-9:
            best_name, best = name, improved
    bound = lower_bound(problem, best.schedule.placement)
    return Answer(timeline=best, origin=best_name, bound=bound, optimal=best.makespan <= bound + 1e-6)


def named(problem: Problem) -> Iterator[tuple[str, Timeline]]:
    """The named schedules that have so many chunks and stay within the limit, offloading by need."""
    for name in NAMES:
        if name.startswith("lockstep-") or name == "seq1f1b":
            continue  # ticks and slices are other units of work
        try:
            schedule = by_name(name, chunks=problem.chunks).build(
                devices=problem.devices, microbatches=problem.microbatches
            )
        except ValueError:
            continue  # not with so many chunks
        if (timeline := fit(problem, schedule)) is not None:
            yield name, timeline


def candidates(problem: Problem) -> Iterator[tuple[str, Timeline]]:
    """Where the search starts: named schedules, the same with B and W split and W's moved, list schedules."""
    limit = int(problem.memory_limit)
    for name, timeline in named(problem):
        yield name, timeline
        split = _split(timeline.schedule)
        for schedule in (split, refill(split, limit) if problem.link is None else None):
            if schedule is not None and (found := fit(problem, schedule)) is not None:
                yield name, found
    for placement in {
        p.name: p for p in (looping(problem.devices, problem.chunks), wave(problem.devices, problem.chunks))
    }.values():
        for room in range(problem.chunks, limit + 1):
            schedule = greedy(
                "list",
                placement,
                devices=problem.devices,
                microbatches=problem.microbatches,
                limits=[room] * problem.devices,
                split_backward=True,
                costs=problem.costs,
            )
            if (found := fit(problem, schedule)) is not None:
                yield f"list schedule, {placement.name} placement", found


def fit(problem: Problem, schedule: Schedule) -> Timeline | None:
    """The schedule in time, offloading what it must to stay within the limit; None where that is not enough."""
    check(schedule)
    timeline = simulate(schedule, problem.costs)
    if timeline.peaks().max() > problem.memory_limit and problem.link is not None:
        timeline = plan(timeline, problem.link, memory_limit=problem.memory_limit)
    return timeline if timeline.peaks().max() <= problem.memory_limit + 1e-9 else None


def _split(schedule: Schedule) -> Schedule:
    """The same order, each backward cut into B and the W right after it."""
    if schedule.split_backward:
        return schedule
    passes = schedule.passes.copy()
    passes["slot"] *= 2
    weights = passes[passes["kind"] == Kind.B].copy()
    weights["kind"] = Kind.W
    weights["slot"] += 1
    both = sort_passes(np.concatenate([passes, weights]))
    return compact(dataclasses.replace(schedule, passes=both, split_backward=True))


class _Climb:
    """Random moves of passes within devices' orders; what is no worse is kept."""

    def __init__(self, problem: Problem, timeline: Timeline, rng: random.Random) -> None:
        self.problem, self.rng, self.first = problem, rng, timeline
        schedule = timeline.schedule
        self.schedule = schedule
        need = edges(schedule)
        self.before = need.before.tolist()
        self.lags = np.where(need.far, problem.costs.send, 0.0).tolist()
        self.durations = problem.costs.durations(schedule).tolist()
        passes = schedule.passes
        self.kind = passes["kind"].tolist()
        stage = schedule.placement.stage[passes["device"], passes["chunk"]]
        self.lane = (passes["kind"] * schedule.placement.stages + stage).tolist()  # passes that keep their order
        # On the device: what a pass needs, and the stage of the microbatch it belongs to.
        self.own = list(zip(stage.tolist(), passes["microbatch"].tolist(), strict=True))
        self.change = np.where(passes["kind"] == Kind.F, 1, np.where(passes["kind"] == Kind.W, -1, 0)).tolist()
        self.orders = [list(rows) for rows in device_orders(schedule)]

    def run(self, steps: int) -> Timeline:
        """Rounds of simulated annealing, each from the best order so far, for so many moves or up to the bound."""
        best, best_orders = self.first, [list(order) for order in self.orders]
        begin = self._score(best_orders)
        bound = lower_bound(self.problem, self.schedule.placement)
        for step in range(steps):
            if best.makespan <= bound + 1e-9:
                break
            if step % _ROUND == 0:
                orders, score = [list(order) for order in best_orders], begin
            heat = _HEAT * (1 - step % _ROUND / _ROUND) ** 2
            if not self._move(orders) or (new := self._score(orders)) is None:
                self._undo(orders)
                continue
            if score is not None and new[1] > score[1] - heat * math.log(self.rng.random() or 1.0):
                self._undo(orders)
                continue
            score = new
            if new[0] < best.makespan - 1e-9 and (found := self._timeline(orders)) is not None:
                best, best_orders, begin = found, [list(order) for order in orders], new
        return best

    def _move(self, orders: list[list[int]]) -> bool:
        """Moves one pass; False where its own microbatch or its lane forbids the new place."""
        device = self.rng.randrange(len(orders))
        order = orders[device]
        source = self.rng.randrange(len(order))
        target = min(max(source + self.rng.choice((-1, 1)) * self.rng.randint(1, _REACH), 0), len(order) - 1)
        self.last = (device, source, target)
        row = order[source]
        passed = order[source + 1 : target + 1] if target > source else order[target:source]
        order.insert(target, order.pop(source))
        return target != source and not any(
            self.own[row] == self.own[other] or self.lane[row] == self.lane[other] for other in passed
        )

    def _undo(self, orders: list[list[int]]) -> None:
        device, source, target = self.last
        orders[device].insert(source, orders[device].pop(target))

    def _score(self, orders: list[list[int]]) -> tuple[float, float] | None:
        """Makespan, and what the search descends on; None where the orders deadlock or take too much memory.

        That passes start early on average tells orders of equal makespan apart, and counts a little.
        """
        if self.problem.link is None:
            for order in orders:
                held = 0
                for row in order:
                    held += self.change[row]
                    if held > self.problem.memory_limit:
                        return None
        try:
            start = run_orders(orders, self.before, self.lags, self.durations)
        except DeadlockError:
            return None
        stops = [start[order[-1]] + self.durations[order[-1]] for order in orders]
        if self.problem.link is not None and self._timeline(orders) is None:
            return None
        return max(stops), max(stops) + sum(start) / len(start)

    def _timeline(self, orders: list[list[int]]) -> Timeline | None:
        passes = self.schedule.passes.copy()
        for order in orders:
            passes["slot"][order] = np.arange(len(order))
        try:
            schedule = compact(dataclasses.replace(self.schedule, name="synthesized", passes=sort_passes(passes)))
        except ScheduleError:
            return None
        return fit(self.problem, schedule)
