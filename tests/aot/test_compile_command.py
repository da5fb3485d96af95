"""`python -m pipejax compile`: the whole training step of a model, from shapes alone."""

import json

import pytest

from pipejax.cli import main

pytestmark = pytest.mark.aot

MODEL = """
import functools
import jax
import jax.numpy as jnp
from pipejax.models import gpt

config = gpt.Config(vocab_size=512, hidden_size=256, num_heads=4, num_layers=4, max_length=256,
                    attention="xla")
embed, block, head = (functools.partial(part, config) for part in (gpt.Embed, gpt.Block, gpt.Head))
num_layers = 4
length = 128


def batch(length):
    tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
    return {"tokens": tokens, "targets": tokens}
"""
LAYER = 12 * 256**2 + 13 * 256  # weights, biases and norms of a block


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "mine.py"
    path.write_text(MODEL)
    return str(path)


def run(capsys, *words):
    status = main(["compile", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_json_of_a_users_own_model(capsys, model):
    status, out, err = run(capsys, model, "--pipe", "2", "--chunks", "2", "--microbatches", "4", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (status, found["fits"], found["devices"], found["target"]) == (0, True, 2, "h100-80g")
    parts = found["device_parts"]
    assert sum(parts.values()) == found["peak_device_bytes"]
    # Two layers and a half of embedding and head, in float32; AdamW keeps two moments.
    tables = (512 + 256) * 256 + 512 * 256 + 2 * 256
    assert parts["parameters"] == pytest.approx(4 * (2 * LAYER + tables / 2), rel=0.01)
    assert parts["optimizer"] == pytest.approx(2 * parts["parameters"], rel=0.01)
    kept = sum(parts[name] for name in ("parameters", "optimizer", "gradients"))
    assert found["activation_bytes"] == found["peak_device_bytes"] - kept
    assert found["host_bytes"]["device"] > 0
    assert found["host_bytes"]["node"] == 2 * found["host_bytes"]["device"]
    # Each residual goes once each way; bubbles move garbage too.
    assert found["transfers"]["d2h_bytes"] == found["transfers"]["h2d_bytes"] > 0
    assert found["collectives"]["collective-permute"] > 0
    assert found["ring_copies"] == []
    assert found["tokens"] == 4 * 128
    assert 0 < found["projected"]["mfu"] < 1
    assert 0 < found["projected"]["bubble"] < 0.5


def test_text_says_what_it_rests_on(capsys, model):
    status, out, _ = run(capsys, model, "--pipe", "2", "--offload", "none", "--tflops", "123", "--seq", "256")
    assert status == 0
    assert "matrix products sustain 123 TFLOP/s in bf16" in out
    assert "pinned host memory 0.00 GiB each" in out


def test_what_does_not_fit_says_so(capsys, model, tmp_path):
    import importlib.resources

    text = importlib.resources.files("pipejax.aot.targets").joinpath("h100-80g.toml").read_text()
    small = tmp_path / "small.toml"
    small.write_text(text.replace("hbm_bytes = 80000000000", "hbm_bytes = 1000000"))
    status, out, err = run(capsys, model, "--pipe", "2", "--target", str(small))
    assert status == 1
    assert "DOES NOT FIT" in out
    assert "does not fit h100-80g" in err


def test_lists(capsys):
    status, out, _ = run(capsys, "--list")
    assert status == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert names[:-1] == [
        "gpt-tiny",
        "gpt-5.8b",
        "gpt-10.5b",
        "gpt-18.1b",
        "gpt-42.9b",
        "gpt-66.6b",
        "gpt-83.8b",
        "llama3-8b",
        "llama3-70b",
    ]
    assert "h100-80g" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpt-9b", "--pipe", "2"], "there is no model 'gpt-9b'; give one of gpt-tiny, "),
        (["gpt-tiny"], "name a model (--list shows them) and pass --pipe"),
        (["gpt-tiny", "--pipe", "2", "--target", "h900"], "there is no target 'h900'; give one of a100-40g, "),
        (["gpt-tiny", "--pipe", "2", "--schedule", "zb-9"], "no schedule is called 'zb-9'; the names are gpipe, "),
        (["nothing.py", "--pipe", "2"], "nothing.py"),
        (["gpt-tiny", "--pipe", "0"], "--pipe is 0; it must be above 0."),
        (["gpt-tiny", "--pipe", "2", "--tflops", "0"], "--tflops is 0.0; it must be above 0."),
        (["gpt-tiny", "--pipe", "2", "--link-gbps", "-1"], "--link-gbps is -1.0; it must be above 0."),
        (["gpt-tiny", "--pipe", "12"], "12 devices do not fill nodes of 8 GPUs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_input_ends_in_one_sentence(capsys, words, sentence):
    status, _, err = run(capsys, *words)
    assert status == 1
    assert sentence in err
    assert err.count("\n") == 1


LINEN = """
import flax.linen as nn
import jax
import jax.numpy as jnp


class Embed(nn.Module):
    @nn.compact
    def __call__(self, batch):
        return nn.Embed(100, 64)(batch["tokens"])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, batch):
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))


class Head(nn.Module):
    @nn.compact
    def __call__(self, x, batch):
        scores = jax.nn.log_softmax(nn.Dense(100)(x))
        found = jnp.take_along_axis(scores, batch["tokens"][..., None], -1)
        return -found.sum(), jnp.float32(batch["tokens"].size)


embed, block, head = Embed(), Block(), Head()
num_layers = 8


def batch(length):
    return {"tokens": jax.ShapeDtypeStruct((length,), jnp.int32)}
"""


def test_a_linen_model_that_names_nothing(capsys, tmp_path):
    path = tmp_path / "linen.py"
    path.write_text(LINEN)
    status, _, err = run(capsys, str(path), "--pipe", "2")
    assert (status, err) == (1, f"pipejax compile: {path} defines no length; pass --seq.\n")
    status, out, err = run(capsys, str(path), "--pipe", "2", "--seq", "32", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["tokens"] == 4 * 32
    assert found["host_bytes"]["device"] >= 4 * 4 * 32 * 64  # the inputs of four blocks, in float32


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import no_such_module", "mine.py does not run: ModuleNotFoundError: No module named 'no_such_module'."),
        ("def f(:", "mine.py does not run: SyntaxError: invalid syntax"),
        (
            "embed = block = head = None\nnum_layers = 4\nlength = 8\nbatch = lambda length: length / 0",
            "mine.py: batch(8) does not run: ZeroDivisionError: division by zero.",
        ),
    ],
)
def test_what_a_file_does_wrong_is_one_sentence(capsys, tmp_path, text, sentence):
    path = tmp_path / "mine.py"
    path.write_text(text)
    status, _, err = run(capsys, str(path), "--pipe", "2")
    assert status == 1
    assert sentence in err
    assert err.count("\n") == 1


def test_a_file_without_a_model_is_refused(capsys, tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("embed = None\n")
    status, _, err = run(capsys, str(path), "--pipe", "2")
    assert status == 1
    assert "does not define block, head, num_layers, batch" in err
