"""The block stack of `test_block_stack.py` under staggered schedules, compiled for H100s."""

import pytest
from test_block_stack import RESIDUAL_BYTES, compiled

from pipejax import aot
from pipejax.schedules import simulate

pytestmark = pytest.mark.aot


def in_activations(report):
    return report.device_temp_bytes / RESIDUAL_BYTES


@pytest.mark.parametrize(("schedule", "spare"), [("gis-h", 3.8), ("gis", 4.2)])
def test_memory_is_the_simulated_peak_and_a_pass(schedule, spare):
    """Beyond the residuals: what a pass works on, what B hands to W (0.9), and what waits for its pass (0.1 each).

    3.0 and 3.6 on JAX 0.12.0.1, 3.7 and 4.1 on 0.10.2.
    """
    report, pipe = compiled(schedule=schedule, offload="none")
    peak = simulate(pipe.plan).peaks().max()
    print(f"{schedule} p=8 v=2: {in_activations(report):.2f} chunk-activations, simulated peak {peak:.0f}")
    assert in_activations(report) <= peak + spare
    aot.assert_no_ring_copies(report)


def test_half_of_the_chunks_offloaded():
    report, pipe = compiled(schedule="po-h")
    slots = pipe.program.moving_slots
    print(f"po-h p=8 v=2: {in_activations(report):.2f} chunk-activations in {slots} slots, {pipe.program.parts} parts")
    assert slots <= 7
    assert in_activations(report) <= slots + 4.5
    assert report.host_bytes == pipe.program.host_slots * RESIDUAL_BYTES
    aot.assert_no_ring_copies(report)


def test_every_pass_hides_its_part():
    """F, B and W each move a part each way; a tick without a pass has nothing to hide it behind, nor to delay."""
    report, _ = compiled(schedule="po-h")
    moving = [section for section in report.sections if section.moved("d2h") and section.moved("h2d")]
    passes = [section for section in moving if section.dots or section.kernels]
    assert (len(moving), len(passes)) == (4, 3)
    for section in passes:
        aot.assert_hidden(report, 0.99, section=section.name)
