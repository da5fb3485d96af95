"""The stream model: what waits for what, on a compiled program with rates turned up and down."""

import dataclasses

import pytest
from programs import SIZE, SLOT_BYTES, TICKS, report, send_around, write_then_read

from pipejax import aot
from pipejax.aot import costs, hlo, streams

pytestmark = pytest.mark.aot

TARGET = aot.load_target("h100-80g")


def projected(**rates):
    return report(write_then_read, target=TARGET.with_rates(**rates)).projected


def main_loop(projection):
    return max((phase for phase in projection.phases if phase.trips == TICKS), key=lambda phase: phase.seconds)


def test_flops_are_those_of_the_products():
    assert projected().flops == TICKS * 2 * 2 * SIZE**3


def test_a_fast_link_is_hidden_and_a_slow_one_is_not():
    fast, slow = projected(tflops=100, link_gbps=1000), projected(tflops=100, link_gbps=1)
    assert main_loop(fast).hidden_fraction > 0.99
    # Both ways in turns: at 1 GB/s a tick moves for 16 ms and computes for 0.3 ms.
    assert main_loop(slow).hidden_fraction < 0.1
    assert slow.step_seconds == pytest.approx(TICKS * 2 * SLOT_BYTES / 1e9, rel=0.1)
    assert slow.step_seconds > 10 * fast.step_seconds


def test_compute_bounds_the_step_where_the_link_is_fast():
    one, two = projected(tflops=50, link_gbps=1000), projected(tflops=100, link_gbps=1000)
    assert one.step_seconds == pytest.approx(2 * two.step_seconds, rel=0.1)
    assert one.step_seconds >= one.flops / 50e12


def test_duplex_links_carry_both_ways_at_once():
    """By hand: a write and a read of 1 GB start together, then a second write; nothing is computed."""
    array = lambda space: hlo.Shape("s8", (10**9,), space, (), 8)
    start = lambda *arrays: hlo.Shape("tuple", (), 0, (hlo.Shape("tuple", (), 0, arrays[:1], 0), *arrays[1:]), 0)
    device, host = array(0), array(hlo.HOST_SPACE)
    instructions = (
        instruction(1, "parameter", device),
        instruction(2, "parameter", host),
        instruction(3, "async-start", start(device, host), 1),
        instruction(4, "async-start", start(host, device), 2),
        instruction(5, "async-start", start(device, host), 1),
        instruction(6, "async-done", host, 3),
        instruction(7, "async-done", device, 4),
        instruction(8, "async-done", host, 5),
    )
    empty = hlo.Computation(0, "moves", (instruction(9, "parameter", device),), 9)
    module = hlo.Module("by hand", {0: empty, 1: hlo.Computation(1, "main", instructions, 8)}, 1)
    turns = TARGET.with_rates(link_gbps=1)
    both = dataclasses.replace(turns, pcie_duplex=True)
    one, two = (streams.project(module, target, devices=1) for target in (turns, both))
    assert one.step_seconds == pytest.approx(3.0)
    assert two.step_seconds == pytest.approx(2.0)
    assert one.transfer_seconds == two.transfer_seconds == pytest.approx(3.0)
    assert one.hidden_fraction == pytest.approx(0.0)
    assert two.hidden_fraction == pytest.approx(1 / 3)  # what one way takes is hidden behind the other


def test_an_update_in_place_costs_its_slice_however_it_is_wrapped():
    """By hand: a fusion that writes one slot of a ring of 1000, seen through a bitcast, started asynchronously."""
    ring, slot = hlo.Shape("s8", (1000, 10**6), 0, (), 8), hlo.Shape("s8", (1, 10**6), 0, (), 8)
    index = hlo.Shape("s32", (), 0, (), 32)
    shapes = (ring, slot, index)
    parameters = tuple(instruction(number, "parameter", shape) for number, shape in enumerate(shapes, 1))
    update = instruction(5, "dynamic-update-slice", ring, 4, 2, 3)
    fused = hlo.Computation(3, "fused", (*parameters, instruction(4, "bitcast", ring, 1), update), 5)
    fusion = dataclasses.replace(instruction(4, "fusion", ring, 1, 2, 3), called=(3,))
    wrapped = hlo.Computation(2, "wrapped", (*parameters, fusion), 4)
    start = dataclasses.replace(instruction(4, "async-start", ring, 1, 2, 3), called=(2,))
    main = hlo.Computation(1, "main", (*parameters, start), 4)
    module = hlo.Module("by hand", {1: main, 2: wrapped, 3: fused}, 1)
    for computation, part in ((wrapped, fusion), (main, start)):
        cost = costs.instruction_cost(module, computation, part)
        assert cost.bytes == pytest.approx(2 * 10**6, abs=100)  # the slot is read and written


def instruction(identifier, opcode, shape, *operands):
    return hlo.Instruction(
        id=identifier,
        name=f"{opcode}.{identifier}",
        opcode=opcode,
        shape=shape,
        operands=operands,
        called=(0,) if opcode == "async-start" else (),
        op_name="",
        target="",
        tuple_index=0,
        parameter_number=identifier - 1,
        contracting=(),
        pairs=(),
        _config=b"",
    )


def test_the_assertion_bites_and_prints_its_assumptions():
    slow = report(write_then_read, target=TARGET.with_rates(link_gbps=1))
    with pytest.raises(AssertionError, match=r"0\.99 was asked for .*1 GB/s in a direction, the two"):
        aot.assert_hidden(slow, 0.99)
    fast = report(write_then_read, target=TARGET.with_rates(tflops=100, link_gbps=1000))
    aot.assert_hidden(fast, 0.99, section=main_loop(fast.projected).name)


def test_sends_cost_what_the_link_between_gpus_takes():
    slow = dataclasses.replace(TARGET, nvlink_rate=1e9)
    projection = report(send_around, devices=2, target=slow).projected
    assert projection.exposed_collective_seconds == pytest.approx(TICKS * SLOT_BYTES / 1e9, rel=0.01)
    assert projection.hidden_fraction == 1.0
