"""`python -m pipejax schedule`: what it prints, what it refuses, and that it starts without JAX."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from pipejax.cli import main
from pipejax.schedules import NAMES

KEYS = ["name", "devices", "chunks", "microbatches", "valid", "peak_activations", "peak_host_activations", "makespan"]
KEYS += ["busy", "bubble", "offloaded_fraction"]


def call(capsys, *words):
    status = main(["schedule", *words])
    out = capsys.readouterr()
    return status, out.out, out.err


def figures(capsys, *words):
    status, out, _ = call(capsys, *words, "--format", "json")
    assert status == 0
    return json.loads(out)


def test_json_of_gis(capsys):
    got = figures(capsys, "gis", "--devices", "4", "--chunks", "2", "--microbatches", "8")
    assert list(got) == KEYS
    assert got["makespan"] == 54
    assert got["busy"] == 48
    assert got["bubble"] == 6
    assert got["peak_activations"] == [8, 7, 6, 5]
    assert got["valid"] is True


def test_offload_follows_the_schedule_the_options_and_the_limit(capsys):
    size = ("--devices", "4", "--chunks", "2", "--microbatches", "16")
    assert figures(capsys, "po-h", *size)["offloaded_fraction"] == 0.5
    assert figures(capsys, "po-h", *size, "--offload-chunks", "0")["offloaded_fraction"] == 0
    auto = figures(capsys, "gis", *size, "--offload", "auto", "--memory-limit", "5", "--k", "0.5", "--lanes", "2")
    assert max(auto["peak_activations"]) <= 5
    assert max(auto["peak_host_activations"]) > 0
    full = figures(capsys, "lockstep-interleaved", *size, "--offload-chunks", "2", "--lanes", "2", "--k", "0.5")
    assert full["offloaded_fraction"] > 0.9


def test_group_times_and_slices(capsys):
    size = ("--devices", "4", "--microbatches", "8")
    assert max(figures(capsys, "gis", *size, "--group", "2")["peak_activations"]) == 6
    assert figures(capsys, "1f1b", *size, "--times", "1,2,0.5")["makespan"] == 8 * 3.5 + 3 * 3.5
    assert figures(capsys, "seq1f1b", *size, "--slices", "2")["bubble"] == 4.5
    assert figures(capsys, "lockstep-interleaved", *size, "--split-weights")["bubble"] == 6


def test_other_formats(capsys, tmp_path):
    size = ("--devices", "4", "--microbatches", "8")
    assert "dev 3" in call(capsys, "gis", *size)[1]
    ET.fromstring(call(capsys, "gis", *size, "--format", "svg")[1])
    assert "traceEvents" in json.loads(call(capsys, "gis", *size, "--format", "trace")[1])
    table = tmp_path / "table.csv"
    assert call(capsys, "zb-v", *size, "--format", "csv", "-o", str(table)) == (0, "", "")
    assert figures(capsys, "--table", str(table))["makespan"] == figures(capsys, "zb-v", *size)["makespan"]


def test_list_and_compare(capsys):
    listed = call(capsys, "--list")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(NAMES)
    rows = call(capsys, "--compare", "1f1b,gis, po-f", "--devices", "4", "--microbatches", "8")[1].splitlines()
    assert [row.split()[0] for row in rows] == ["schedule", "1f1b", "gis", "po-f"]
    assert len({len(row) for row in rows}) == 1


def test_synthesis(capsys):
    size = ("--devices", "3", "--chunks", "1", "--microbatches", "4", "--memory-limit", "2")
    status, out, err = call(capsys, "--synthesize", "10000", "--prove", "20", *size, "--format", "json")
    assert status == 0
    assert max(json.loads(out)["peak_activations"]) <= 2
    assert "no schedule is shorter" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("zb", "--devices", "4", "--microbatches", "8"), "no schedule is called 'zb'"),
        (("gis", "--microbatches", "8"), "--devices is missing"),
        (("1f1b", "--devices", "4", "--chunks", "2", "--microbatches", "8"), "has 1 chunk on each device, not 2"),
        ((), "name a schedule"),
        (("gis", "--devices", "4", "--microbatches", "8", "--memory-limit", "3"), "more than the limit of 3"),
        (("--synthesize", "1", "--devices", "4"), "--synthesize needs --chunks"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(capsys, words, text):
    status, _, err = call(capsys, *words)
    assert status == 1
    assert text in err


def test_it_starts_without_jax_and_scipy():
    code = (
        "import sys; from pipejax.cli import main; import pipejax.schedules.synthesis\n"
        "main(['schedule', 'gis', '--devices', '2', '--microbatches', '4', '--format', 'svg'])\n"
        "sys.exit(','.join(name for name in ('jax', 'jaxlib', 'scipy', 'flax') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
