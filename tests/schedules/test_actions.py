"""Custom tables: PyTorch's action text in and out, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipejax.schedules import NAMES, ScheduleError, by_name, check
from pipejax.schedules.actions import from_actions, read, to_actions, to_csv

ONE = [["0F0", "0F1", "", "0B0", "0B1"], ["", "1F0", "1B0", "1F1", "1B1"]]


def test_a_table_by_hand():
    schedule = from_actions(ONE)
    check(schedule)
    assert (schedule.devices, schedule.chunks, schedule.microbatches) == (2, 1, 2)
    assert not schedule.split_backward
    assert to_actions(schedule) == [["0F0", "0F1", "", "0B0", "", "0B1"], ["", "1F0", "1B0", "1F1", "1B1", ""]]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("lockstep") and name != "seq1f1b"])
def test_every_schedule_survives_the_round_trip(name, tmp_path):
    schedule = by_name(name).build(devices=3, microbatches=5)
    csv, by_rank = tmp_path / "table.csv", tmp_path / "table.json"
    csv.write_text(to_csv(schedule))
    by_rank.write_text(json.dumps({str(rank): row for rank, row in enumerate(to_actions(schedule))}))
    for path in (csv, by_rank):
        again = read(path)
        np.testing.assert_array_equal(again.passes, schedule.passes)
        np.testing.assert_array_equal(again.placement.stage, schedule.placement.stage)
        assert again.split_backward == schedule.split_backward


def test_newer_letters_and_whole_backwards_among_split_ones():
    schedule = from_actions([["0F0", "0F1", "0I0", "0W0", "0B1"]])
    assert to_actions(schedule) == [["0F0", "0F1", "0B0", "0W0", "0B1", "0W1"]]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([["0F0", "0X0"]], "rank 0: '0X0' is no action"),
        ([[""]], "holds no actions"),
        ([["0F0", "0B0"], ["0F1", "0B1"]], "stage 0 is on ranks 0 and 1"),
        ([["0F0", "0B0", "1F0", "1B0"], ["2F0", "2B0"]], "3 stages do not fill 2 ranks evenly"),
    ],
)
def test_what_is_no_table_is_refused(table, text):
    with pytest.raises(ValueError, match=text):
        from_actions(table)


@pytest.mark.parametrize(
    ("table", "rule", "text"),
    [
        ([["0F0", "0F1", "0B0"]], "missing pass", "B of microbatch 1, chunk 0 on device 0"),
        ([["0F0", "0F0", "0B0"]], "repeated pass", "F of microbatch 0, chunk 0 on device 0"),
        ([["0B0", "0F0"]], "deadlock", "device 0 cannot run B of microbatch 0, chunk 0 before F of microbatch 0"),
        (
            [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],
            "deadlock",
            "the devices wait for each other: device 0 cannot run .* on device 1, and device 1 cannot run",
        ),
        ([["0F0", "0B0"], ["2F0", "2B0"], ["1F0", "1B0"], ["3F0", "3B0"]], "neighbours", "stage 0 on device 0"),
    ],
)
def test_broken_tables_are_refused_by_rule(table, rule, text):
    with pytest.raises(ScheduleError, match=text) as error:
        from_actions(table)
    assert error.value.rule == rule


def test_what_the_text_has_no_words_for():
    for name, text in (("seq1f1b", "slices"), ("lockstep-1f1b", "ticks")):
        with pytest.raises(ValueError, match=text):
            to_actions(by_name(name).build(devices=2, microbatches=2))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text("0F0")
    with pytest.raises(ValueError, match=r"is a \.csv or a \.json file"):
        read(path)
