"""What is read off compiled programs is what the programs were written to do; each trap is found where it is laid."""

import pytest
from programs import (
    SIZE,
    SLOT_BYTES,
    SLOTS,
    TICKS,
    add,
    keep_the_old_ring,
    keep_the_old_ring_in_a_branch,
    loop_around_ring,
    read_then_write,
    report,
    send_around,
    write_then_read,
)

from pipejax import aot

pytestmark = pytest.mark.aot


def loop_of(report):
    (loop,) = (section for section in report.sections if section.trips == TICKS)
    return loop


def test_a_host_ring_is_written_and_read_once_a_tick():
    found = report(write_then_read)
    loop = loop_of(found)
    assert loop.moved("d2h") == SLOT_BYTES
    assert loop.moved("h2d") == SLOT_BYTES
    assert loop.moved("h2h") == 0
    assert loop.dots == 2
    assert all(transfer.asynchronous for transfer in loop.transfers)
    assert found.host_bytes == SLOTS * SLOT_BYTES
    aot.assert_no_ring_copies(found)


def test_bytes_of_a_step_count_trips():
    found = report(write_then_read)
    assert found.moved("d2h") >= TICKS * SLOT_BYTES
    assert found.moved("h2d") == TICKS * SLOT_BYTES


def test_a_ring_read_before_it_is_written_is_found_out():
    found = report(read_then_write)
    assert any(copy.on_host and copy.bytes == SLOTS * SLOT_BYTES for copy in found.ring_copies)
    with pytest.raises(AssertionError, match=rf"copies whole rings each trip: .*bf16\[{SLOTS},{SIZE},{SIZE}\]"):
        aot.assert_no_ring_copies(found)


@pytest.mark.parametrize("program", [keep_the_old_ring, keep_the_old_ring_in_a_branch], ids=lambda p: p.__name__)
def test_a_copied_device_ring_is_found_out(program):
    with pytest.raises(AssertionError, match="copies whole rings"):
        aot.assert_no_ring_copies(report(program))


def test_a_ring_updated_in_place_is_not_called_copied():
    aot.assert_no_ring_copies(report(loop_around_ring))


def test_sends_are_counted_with_their_partners():
    found = report(send_around, devices=2)
    loop = loop_of(found)
    (collective,) = loop.collectives
    assert (collective.kind, collective.bytes) == ("collective-permute", SLOT_BYTES)
    assert sorted(collective.pairs) == [(0, 1), (1, 0)]
    assert found.collective_bytes() == {"collective-permute": TICKS * SLOT_BYTES}


def test_a_loop_that_only_the_data_count_has_no_trip_count():
    assert None in [section.trips for section in report(loop_around_ring).sections]


def test_donated_memory_counts_once():
    kept, given = (report(add, arguments=2, donate=donate) for donate in ((), (0,)))
    assert kept.device_bytes - given.device_bytes == SLOT_BYTES


@pytest.mark.parametrize("program", [write_then_read, loop_around_ring, add], ids=lambda program: program.__name__)
def test_the_parts_of_memory_sum_to_what_xla_says(program):
    found = report(program, arguments=2 if program is add else 1)
    assert sum(part.bytes for part in found.parts) == found.device_bytes
    with pytest.raises(AssertionError, match="inputs"):
        aot.assert_device_bytes(found, found.device_bytes - 1)
    aot.assert_device_bytes(found, found.device_bytes)


def test_rings_on_the_device_are_told_from_workspace():
    parts = {part.purpose: part.bytes for part in report(loop_around_ring).parts}
    assert parts["rings"] == SLOTS * SLOT_BYTES
    assert "rings" not in {part.purpose for part in report(write_then_read).parts}
