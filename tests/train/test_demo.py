"""The demo's script in processes of its own: it learns, survives SIGKILL bit for bit, and refuses bad input early."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SMALL = [
    "--model.hidden-size=16", "--model.num-layers=5", "--model.dropout=0.1", "--pipeline.devices=2",
    "--pipeline.microbatches=2", "--data.batch-size=4", "--data.length=32", "--steps=12", "--checkpoint-every=3",
]  # fmt: skip


def start(out, *flags):
    command = [sys.executable, "-m", "experiments.gpt_tiny", f"--out={out}", *SMALL, *flags]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def losses(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all({"loss", "tokens_per_second", "step_seconds"} <= line.keys() for line in lines)
    return [line["loss"] for line in lines]


def wait_for_step(out, step):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        path = out / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.01)
    raise TimeoutError(f"no step {step} in {out}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    return out, finish(start(out, "--sample-tokens=20"))


def test_it_learns_and_leaves_what_it_says(undisturbed):
    out, output = undisturbed
    values = losses(out)
    assert len(values) == 12
    assert 5.3 < values[0] < 5.8
    assert values[-1] < values[0] - 0.3
    assert f"Loss: {values[0]:.3f} nats a byte at the first step, {values[-1]:.3f} at the last." in output
    assert "What it writes after 'def '" in output
    assert (out / "schedule.svg").read_text().startswith("<svg")
    assert list((out / "tensorboard").iterdir())


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_stopped_run_goes_on_bit_for_bit(undisturbed, tmp_path, signal_number):
    process = start(tmp_path)
    wait_for_step(tmp_path, 7)
    os.kill(process.pid, signal_number)
    output, _ = process.communicate(timeout=100)
    if signal_number == signal.SIGTERM:
        assert process.returncode == 0
        assert "saved; go on with --resume" in output
    resumed = finish(start(tmp_path, "--resume", "--sample-tokens=0"))
    assert "Resuming after step" in resumed
    assert losses(tmp_path) == losses(undisturbed[0])


def fails(out, *flags):
    output, _ = (process := start(out, *flags)).communicate(timeout=100)
    assert process.returncode == 1, output
    assert output.startswith("error: "), output
    assert output.count("\n") == 1, output
    return output


def test_a_damaged_or_foreign_checkpoint_ends_with_one_sentence(undisturbed, tmp_path):
    shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    assert "holds a run already, 12 steps long; pass --resume" in fails(tmp_path)
    assert "is of a run with seed = 0, and this one has 1; make them equal" in fails(tmp_path, "--resume", "--seed=1")
    newest = tmp_path / "checkpoints" / "12" / "state"
    big = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    big.write_bytes(big.read_bytes()[: big.stat().st_size // 2])
    assert "12 is damaged or foreign" in fails(tmp_path, "--resume")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline.microbatches=3"], "3 microbatches do not divide a batch of 4 samples; change"),
        (["--pipeline.schedule=dapple"], "no schedule is called 'dapple'"),
        (["--pipeline.schedule=seq1f1b"], "cuts sequences into 4 slices"),
        (["--pipeline.offload=most"], "pass none, full, chunks=N"),
        (["--data.folder=/nowhere"], "holds no text that matches"),
        (["--resume"], "no checkpoint to resume from"),
        (["--model.num-heads=3"], "num_heads=3 does not divide hidden_size=16"),
        (["--checkpoint-every=0"], "checkpoint_every is 0; it must be 1 or more"),
        (["--pipeline.devices=9"], "pipe=9 needs that many devices, and there are 8"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_ends_with_one_sentence(tmp_path, flags, message):
    assert message in fails(tmp_path, *flags)
