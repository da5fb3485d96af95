"""Synthesis: never longer than the best named schedule, shorter in some cases, and the solver agrees where it can."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipejax.schedules import Costs, Link
from pipejax.schedules.check_timeline import check_timeline
from pipejax.schedules.schedule import looping, wave
from pipejax.schedules.synthesis import Problem, lower_bound, named, prove, synthesize


def best_named(problem):
    return min((timeline.makespan for _, timeline in named(problem)), default=np.inf)


def search(problem, steps=20_000):
    answer = synthesize(problem, steps=steps)
    check_timeline(answer.timeline)
    assert answer.timeline.peaks().max() <= problem.memory_limit
    assert answer.bound - 1e-9 <= answer.timeline.makespan <= best_named(problem) + 1e-9
    return answer


@pytest.mark.parametrize(
    "problem",
    [
        Problem(devices=4, chunks=1, microbatches=6, memory_limit=4),
        Problem(devices=3, chunks=2, microbatches=4, memory_limit=4),
        Problem(devices=4, chunks=1, microbatches=5, memory_limit=3, costs=Costs(1, 1.5, 0.5)),
        Problem(devices=4, chunks=2, microbatches=6, memory_limit=4, link=Link(k=1)),
        Problem(devices=5, chunks=3, microbatches=7, memory_limit=12),
    ],
    ids=str,
)
def test_never_longer_than_the_best_named_schedule(problem):
    search(problem, steps=20_000 if problem.link is None else 200)  # with a link, each move plans transfers


def test_shorter_than_any_named_schedule_in_some_cases():
    problem = Problem(devices=4, chunks=2, microbatches=6, memory_limit=6)
    answer = search(problem)
    work = 3 * 2 * 6
    assert answer.timeline.makespan - work <= 0.9 * (best_named(problem) - work)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_the_solver_proves_what_the_search_finds(limit):
    problem = Problem(devices=4, chunks=1, microbatches=5, memory_limit=limit)
    answer = search(problem)
    proved = prove(problem, answer, seconds=30)
    assert proved.optimal
    assert proved.gap == 0
    assert proved.timeline.makespan <= answer.timeline.makespan <= 1.05 * proved.timeline.makespan


def test_the_solver_shortens_a_poor_start():
    problem = Problem(devices=3, chunks=1, microbatches=4, memory_limit=3)
    best = synthesize(problem, steps=5_000)
    from pipejax.schedules import by_name, simulate
    from pipejax.schedules.synthesis import Answer

    poor = simulate(by_name("gis", chunks=1).build(devices=3, microbatches=4))
    assert poor.makespan > best.timeline.makespan
    start = Answer(timeline=poor, origin="gis", bound=lower_bound(problem, looping(3, 1)), optimal=False)
    proved = prove(problem, start, seconds=30)
    check_timeline(proved.timeline)
    assert proved.optimal
    assert proved.timeline.makespan == best.timeline.makespan
    assert proved.timeline.peaks().max() <= 3


def test_the_bound_counts_the_wait_for_the_first_forward():
    problem = Problem(devices=4, chunks=2, microbatches=8, memory_limit=99)
    assert lower_bound(problem, looping(4, 2)) == 3 * 8 * 2 + 3
    assert lower_bound(problem, wave(4, 2)) == 3 * 8 * 2 + 3
    alone = Problem(devices=4, chunks=1, microbatches=1, memory_limit=99, costs=Costs(1, 2, 3, send=0.5))
    assert lower_bound(alone, looping(4, 1)) == 4 * 3 + 3 + 2 * 3 * 0.5


def test_what_cannot_be_is_said_in_a_sentence():
    with pytest.raises(ValueError, match="needs 2 chunk-activations at a time, more than the limit of 1"):
        Problem(devices=2, chunks=2, microbatches=2, memory_limit=1)
    with pytest.raises(ValueError, match="devices is 0; pass 1 or more"):
        Problem(devices=0, chunks=2, microbatches=2, memory_limit=1)
    odd = Problem(devices=2, chunks=1, microbatches=2, memory_limit=2, costs=Costs(1, 1.234567, 1))
    with pytest.raises(ValueError, match="multiples of a common step"):
        prove(odd, synthesize(odd, steps=100))


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 6])
def test_the_solver_confirms_every_small_size_of_one_chunk(devices, microbatches):
    for limit in range(1, devices + 1):
        problem = Problem(devices=devices, chunks=1, microbatches=microbatches, memory_limit=limit)
        answer = search(problem)
        proved = prove(problem, answer, seconds=60)
        assert proved.optimal
        assert answer.timeline.makespan == proved.timeline.makespan


def test_the_search_counts_moves_and_repeats_itself():
    problem = Problem(devices=3, chunks=2, microbatches=4, memory_limit=4)
    first, again = (synthesize(problem, steps=3_000, seed=7).timeline for _ in range(2))
    np.testing.assert_array_equal(first.schedule.passes, again.schedule.passes)
    np.testing.assert_array_equal(first.start, again.start)
    with pytest.raises(ValueError, match="steps is -1; pass 0 or more moves"):
        synthesize(problem, steps=-1)


@pytest.mark.full
def test_the_solver_confirms_two_chunks_wherever_a_named_schedule_fits(record_property):
    """Limits below those of all named schedules are searched too, and their proofs counted but not demanded."""
    cases = proofs = compared = shorter = 0
    for devices, microbatches in itertools.product((2, 3, 4), range(1, 7)):
        for limit in range(2, 2 * devices + 1):
            problem = Problem(devices=devices, chunks=2, microbatches=microbatches, memory_limit=limit)
            known = best_named(problem)
            proved = prove(problem, search(problem), seconds=60 if np.isfinite(known) else 5)
            check_timeline(proved.timeline)
            assert proved.timeline.peaks().max() <= limit
            assert proved.timeline.makespan <= known
            cases += 1
            proofs += proved.optimal
            if np.isfinite(known):
                assert proved.optimal, f"{problem}: bound {proved.bound:g}, gap {proved.gap:.1%}"
                work = 6 * microbatches
                compared += 1
                shorter += proved.timeline.makespan - work <= 0.9 * (known - work)
    counts = {"cases": cases, "proofs": proofs, "with a named schedule": compared, "a tenth less bubble": shorter}
    record_property("counts", counts)
    print(counts)
    assert shorter >= 10
