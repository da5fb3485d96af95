"""Fault 4: numbers of microbatches that a schedule silently gets wrong, or hangs on, for so many devices and chunks.

Every schedule runs any number: the only refusals are of chunks that a schedule does not have, and of slices. Programs
are proven for all sizes in every run. Real steps: a few here, in a process of their own with a time limit, since what
hangs never fails; more in tests/test_staggered.py and tests/test_gradients.py; all with the marker `full`.
"""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from pipejax import program_lockstep, program_staggered
from pipejax.offload import Offload, wanted
from pipejax.program import ProgramError
from pipejax.program_check import check_program
from pipejax.schedules import NAMES, by_name, check

SECONDS = 240  # for what takes about 4 seconds a case
TESTS = pathlib.Path(__file__).parent.parent


def sizes(name):
    """(p, v, m) for one schedule, those that are refused among them."""
    for devices, chunks in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        for microbatches in sorted({1, devices - 1, devices, devices + 1, 2 * devices + 1, 10} - {0}):
            yield devices, chunks, microbatches


def build(name, devices, chunks, microbatches):
    """The schedule, or the message that refuses it."""
    try:
        return by_name(name, chunks=chunks).build(devices=devices, microbatches=microbatches), None
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "seq1f1b"])
def test_every_size_is_proven_or_refused(name):
    proven = refused = 0
    for devices, chunks, microbatches in sizes(name):
        schedule, message = build(name, devices, chunks, microbatches)
        if schedule is None:
            assert re.fullmatch(f"schedule '{name}' has . chunks? on each device, not {chunks}; leave .*", message)
            refused += 1
            continue
        check(schedule)
        for offload in (Offload.none(), Offload.full()):
            check_program(program_of(name, schedule, offload))
        proven += 1
    assert proven >= 21
    assert proven + refused == len(list(sizes(name)))


def test_slices_of_sequences_are_refused_at_every_size():
    for size in sizes("seq1f1b"):
        schedule, _ = build("seq1f1b", *size)
        with pytest.raises(ProgramError, match="cuts sequences into 4 slices"):
            program_of("seq1f1b", schedule, Offload.none())


def program_of(name, schedule, offload):
    if schedule.lockstep:
        spec = by_name(name, chunks=schedule.chunks)
        size = {"devices": schedule.devices, "microbatches": schedule.microbatches}
        spread = spec.build(**size, transfer_ticks=program_lockstep.TRANSFER_TICKS)
        return program_lockstep.build(spread, offload=offload.moves, layers=1)
    moves = wanted(offload, schedule) if offload.moves else None
    return program_staggered.build(schedule, wanted=moves, layers=1)


def run(cases):
    """Runs steps against the plain model in another process; what hangs there fails here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "faults"), str(TESTS.parent)])}
    script = f"import conftest, {pathlib.Path(__file__).stem} as here; here.main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(cases),
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == len(cases)


def main():
    """Runs the cases on the standard input: each a step whose loss and gradients must be the plain model's."""
    import jax  # in the process of its own, after conftest has set it up
    import numpy as np
    from toy import assert_gradients_close, make_batch, make_pipeline

    from pipejax import plain
    from pipejax.runtime import residuals

    residuals.SMALL = 0
    for name, devices, chunks, microbatches, offload in json.load(sys.stdin):
        pipe = make_pipeline(
            pipe=devices,
            schedule=by_name(name, chunks=chunks),
            num_layers=devices * chunks + 1,
            num_microbatches=microbatches,
            offload=Offload.full() if offload else Offload.none(),
        )
        batch = make_batch(microbatches)
        params = pipe.init(jax.random.key(0), batch)
        loss, grads = pipe.value_and_grad(params, batch, jax.random.key(1))
        layered = pipe.to_layers(params)
        expected, wanted = jax.jit(lambda *args, pipe=pipe: plain.value_and_grad(pipe, *args))(
            layered, batch, jax.random.key(1)
        )
        np.testing.assert_allclose(float(loss), float(expected), rtol=2e-6)
        assert_gradients_close(pipe.to_layers(grads), wanted)
        print("equal", name, devices, chunks, microbatches, flush=True)


def test_a_few_sizes_run():
    run([("interleaved", 4, 3, 1, True), ("lockstep-interleaved", 3, 2, 7, True)])


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "seq1f1b"])
def test_all_sizes_run(name, devices):
    cases = [
        (name, *size, index % 2 == 0)
        for index, size in enumerate(sizes(name))
        if size[0] == devices and build(name, *size)[0] is not None
    ]
    for start in range(0, len(cases), 6):
        run(cases[start : start + 6])
