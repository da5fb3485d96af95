"""Running the step to lay it beside what was projected; on CPU devices, but for the choice of GPUs."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pipejax as pj
from pipejax.aot import measuring, trainstep
from pipejax.cli import main
from pipejax.models import gpt


@pytest.fixture(scope="module")
def model():
    config = gpt.Config(vocab_size=64, hidden_size=32, num_heads=2, num_layers=4, max_length=16, attention="xla")
    embed, block, head = (functools.partial(part, config) for part in (gpt.Embed, gpt.Block, gpt.Head))
    tokens = jax.ShapeDtypeStruct((16,), jnp.int32)
    return trainstep.Model("mine", embed, block, head, 4, 16, {"tokens": tokens, "targets": tokens})


def test_a_step_is_run_and_timed(model):
    measured = measuring.measure_step(
        model,
        mesh=pj.make_mesh(pipe=2),
        schedule=pj.schedules.Interleaved(chunks=2),
        offload=pj.Offload.full(),
        microbatches=4,
        steps=2,
    )
    assert 0 < measured.step_seconds < 60
    assert measured.device == "cpu"
    assert measured.device_peak_bytes is None  # CPUs do not count
    assert measured.d2h_gbps > 0 < measured.h2d_gbps


def test_no_gpu_is_one_sentence(capsys):
    assert main(["compile", "gpt-tiny", "--pipe", "1", "--measure"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "pipejax compile: --measure runs the step on 1 GPUs and JAX finds none here; leave it out to project.\n"
    )


def test_a_pool_that_is_too_small_is_refused(monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    measuring.check_pool(64 * 10**9)
    with pytest.raises(ValueError, match=r"pins 80 GB .* ends at 64; set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=80 and"):
        measuring.check_pool(80 * 10**9)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "90")
    measuring.check_pool(80 * 10**9)


@pytest.mark.aot
def test_projected_stands_beside_measured(capsys, monkeypatch, model):
    monkeypatch.setattr(measuring, "gpu_mesh_here", pj.make_mesh)
    monkeypatch.setattr(trainstep, "load_model", lambda *_, **__: model)
    assert main(["compile", "mine.py", "--pipe", "1", "--microbatches", "2", "--measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].split() == ["projected", "measured", "on", "cpu"]
    assert [line.split()[0] for line in lines[-4:]] == ["step", "device", "to", "back"]
    assert lines[-3].endswith("not counted")
