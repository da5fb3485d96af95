"""Replay: a plan on its own link comes out as planned; a slower or shared one costs time."""

from __future__ import annotations

import numpy as np
import pytest

from pipejax.schedules import POF, Costs, Interleaved, Link, by_name, plan, simulate
from pipejax.schedules.check_timeline import check_timeline
from pipejax.schedules.replay import replay


@pytest.mark.parametrize("name", ["gis", "po-f", "zb-v", "interleaved"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_planned_link_keeps_the_plan(name, lanes):
    link = Link(k=1, lanes=lanes)
    planned = plan(simulate(by_name(name).build(devices=4, microbatches=8), Costs(1, 1.5, 0.5, send=0.25)), link)
    again = replay(planned, link)
    check_timeline(again)
    np.testing.assert_allclose(again.start, planned.start)
    assert again.makespan == pytest.approx(planned.makespan)


def test_a_slower_link_delays_backwards():
    planned = plan(simulate(POF(chunks=2).build(devices=4, microbatches=16)), Link(k=1))
    times = []
    for k in (1, 1.5, 3):
        again = replay(planned, Link(k=k))
        check_timeline(again)
        times.append(again.makespan)
    assert times[0] == planned.makespan
    assert times[0] < times[1] < times[2]


def test_devices_that_meet_on_a_shared_way_slow_each_other_down():
    bare = simulate(POF(chunks=2).build(devices=4, microbatches=16))
    alone = plan(bare, Link(k=1))  # knows of no sharing: pairs meet
    met = replay(alone, Link(k=1, shared=True, paired=0.5))
    check_timeline(met)
    assert met.makespan > alone.makespan
    assert replay(alone, Link(k=1, shared=True, paired=1.0)).makespan == alone.makespan
    # Planned for sharing, pairs take turns in opposite directions and never meet.
    shared = plan(bare, Link(k=1, shared=True))
    assert replay(shared, Link(k=1, shared=True, paired=0.5)).makespan == shared.makespan


def test_lockstep_is_refused():
    with pytest.raises(ValueError, match="is in lockstep"):
        replay(simulate(Interleaved().build(devices=2, microbatches=2)), Link())
