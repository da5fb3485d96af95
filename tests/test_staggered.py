"""Schedules in which devices do different work at a time, run for real: loss and gradients equal the plain model's.

The toy model: distinct data and weights, dropout, side inputs, an auxiliary loss, uneven layers, buffers full of NaN.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from toy import assert_equals_plain, make_batch, make_pipeline

import pipejax as pj
from pipejax import program_staggered
from pipejax.offload import wanted
from pipejax.program import COLUMNS, ProgramError
from pipejax.program_check import check_program
from pipejax.schedules import NAMES, by_name
from pipejax.schedules.names import options_of

STAGGERED = [name for name in NAMES if not name.startswith("lockstep-") and name != "seq1f1b"]
CHUNKS = {name: (1, 2, 4) if "chunks" in options_of(name) else (None,) for name in STAGGERED}
OFFLOADS = {
    "none": pj.Offload.none(),
    "full": pj.Offload.full(),
    "chunks": pj.Offload.chunks(1),
    "half": pj.Offload.fraction(0.5),
    "auto": pj.Offload.auto(k=1.5),
}
# One size for each schedule and two offloads; the whole grid runs with the marker `full`.
FEW = [
    (name, 2 + i % 3, CHUNKS[name][i % len(CHUNKS[name])], 3 + 2 * (i % 3), tuple(OFFLOADS)[(i + shift) % 5])
    for shift in (0, 1)
    for i, name in enumerate(STAGGERED)
]
ALL = [
    (name, devices, chunks, (1, devices + 1, 2 * devices)[i % 3], offload)
    for i, (name, devices, chunks, offload) in enumerate(
        (name, devices, chunks, offload)
        for name in STAGGERED
        for devices, chunks, offload in itertools.product((1, 2, 3, 4, 8), CHUNKS[name], OFFLOADS)
    )
]


def make(name, devices, chunks, microbatches, offload):
    spec = by_name(name, chunks=chunks)
    stages = devices * spec.build(devices=devices, microbatches=microbatches).chunks
    return make_pipeline(
        pipe=devices,
        schedule=spec,
        num_microbatches=microbatches,
        offload=OFFLOADS[offload],
        num_layers=stages + stages % 3 - 1 or 1,  # as many as stages, one more and one fewer
    )


@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_plain_model(case):
    assert_equals_plain(make(*case))


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_plain_model_everywhere(case):
    assert_equals_plain(make(*case))


@pytest.mark.parametrize("chunks", [1, 2])
def test_weight_gradients_of_their_own_in_lockstep(chunks):
    schedule = pj.schedules.Interleaved(chunks=chunks, split_weights=True)
    pipe = make_pipeline(pipe=3, schedule=schedule, offload=pj.Offload.none(), num_microbatches=4, num_layers=7)
    assert pipe.program.predicated
    assert_equals_plain(pipe)


def test_evaluation_runs_the_placement_of_the_schedule():
    pipe = make("zb-v", 3, None, 4, "none")
    batch = make_batch(8)
    params = pipe.init(jax.random.key(0), batch)
    loss, _ = pipe.value_and_grad(params, batch)
    np.testing.assert_allclose(float(pipe.loss(params, batch)), float(loss), rtol=2e-6)


@pytest.mark.parametrize("name", STAGGERED)
def test_every_read_finds_what_it_wants(name):
    for devices, chunks in itertools.product((1, 2, 3, 4, 8), CHUNKS[name]):
        for microbatches in {1, devices, devices + 1, 2 * devices + 3}:
            schedule = by_name(name, chunks=chunks).build(devices=devices, microbatches=microbatches)
            for offload in OFFLOADS.values():
                moves = wanted(offload, schedule) if offload.moves else None
                check_program(program_staggered.build(schedule, wanted=moves, layers=1, k=offload.k))


def test_residual_slots_are_the_simulated_peak():
    """An activation lives from F to W: the schedule's own measure, one slot each."""
    for name in ("gis", "gis-h", "po"):
        schedule = by_name(name, chunks=2).build(devices=8, microbatches=32)
        program = program_staggered.build(schedule, wanted=None, layers=1)
        assert program.residual_slots == pj.schedules.simulate(schedule).peaks().max()


@pytest.mark.parametrize(("chunks", "devices", "published"), [(2, 8, 6), (4, 8, 9), (8, 8, 13), (2, 16, 10)])
def test_selective_offload_needs_what_the_paper_does(chunks, devices, published):
    """PO-H, FACTS' generator column for k = 1, in slots of the compiled step; one more at p = 8, v = 2 by default."""
    schedule = by_name("po-h", chunks=chunks).build(devices=devices, microbatches=4 * devices)
    moves = wanted(pj.Offload.full(), schedule)
    paced = program_staggered.build(schedule, wanted=moves, layers=1, k=1.0)
    assert paced.moving_slots <= published
    assert program_staggered.build(schedule, wanted=moves, layers=1).moving_slots <= published + 1


@pytest.mark.parametrize("column", ["f_move", "b_move", "w_move", "out_load", "out_store", "in_load", "in_store"])
def test_a_wrong_slot_is_found(column):
    schedule = by_name("po-h", chunks=2).build(devices=3, microbatches=6)
    program = program_staggered.build(schedule, wanted=wanted(pj.Offload.full(), schedule), layers=1)
    table = program.table.copy()
    table[:, :, COLUMNS.index(column)] = 0
    with pytest.raises(ProgramError, match=r"moving slot .* and holds"):
        check_program(dataclasses.replace(program, table=table))


def test_ticks_of_several_passes_cannot_move_a_part():
    schedule = pj.schedules.Interleaved(chunks=2, split_weights=True)
    with pytest.raises(ProgramError, match="runs several passes in a tick"):
        make_pipeline(schedule=schedule, offload=pj.Offload.full())


def test_more_chunks_than_there_are_are_refused():
    with pytest.raises(ValueError, match="first_chunks is 3; the schedule has 2 chunks"):
        make_pipeline(schedule=by_name("gis"), offload=pj.Offload.chunks(3))


def test_slices_of_sequences_are_refused():
    with pytest.raises(ProgramError, match="cuts sequences into 4 slices"):
        make_pipeline(schedule=by_name("seq1f1b"))
