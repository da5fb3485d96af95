"""Fates of named activations: who is saved, who moves, who is recomputed, and what F really hands to B."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from pipejax.offload import BLOCK_INPUT, Offload, activation_names
from pipejax.runtime.residuals import analyse

NAMES = ("block_input", "mid", "up")
X = jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)
PARAMS = {"w": jax.ShapeDtypeStruct((128, 256), jnp.bfloat16), "v": jax.ShapeDtypeStruct((256, 128), jnp.float32)}


def block(params, x, batch, key):
    x = checkpoint_name(x, BLOCK_INPUT)
    mid = checkpoint_name(jnp.tanh(x), "mid")
    up = checkpoint_name(mid @ params["w"].astype(jnp.float32), "up")
    return x + jax.nn.gelu(up) @ params["v"], jnp.float32(0)


def test_names_are_found():
    assert activation_names(block, PARAMS, X, None, None) == NAMES


@pytest.mark.parametrize(
    ("offload", "saved", "offloaded", "recomputed"),
    [
        (Offload.none(), NAMES, (), ()),
        (Offload.full(), (), NAMES, ()),
        (Offload.full(saved=["mid"]), ("mid",), ("block_input", "up"), ()),
        (Offload.full(recomputed=["up"]), (), ("block_input", "mid"), ("up",)),
        (Offload.none(recomputed=["mid"]), ("block_input", "up"), (), ("mid",)),
        (Offload(offloaded=("up",)), (), ("up",), ("block_input", "mid")),
    ],
)
def test_every_name_gets_one_fate(offload, saved, offloaded, recomputed):
    fates = offload.fates(NAMES)
    assert (fates.saved, fates.offloaded, fates.recomputed) == (saved, offloaded, recomputed)


def test_a_name_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"named 'mlp_upp'; the names there are: block_input, mid, up\."):
        Offload.full(saved=["mlp_upp"]).fates(NAMES)


def test_two_fates_are_refused():
    with pytest.raises(ValueError, match="mid is listed twice"):
        Offload(saved=("mid",), offloaded=("mid",))
    with pytest.raises(ValueError, match="only one of"):
        Offload(saved=None, offloaded=None)
    with pytest.raises(ValueError, match="as a tuple"):
        Offload(saved="mid")


def test_full_offload_moves_all_named_activations_and_no_weights():
    residuals = analyse(block, Offload.full().fates(NAMES), PARAMS, X, None, None)
    moved = [struct.shape for struct, flag in zip(residuals.structs, residuals.offloaded, strict=True) if flag]
    assert sorted(moved) == [(2, 8, 128), (2, 8, 128), (2, 8, 256)]
    assert all(residuals.offloaded)


def test_no_offload_keeps_them_on_the_device():
    residuals = analyse(block, Offload.none().fates(NAMES), PARAMS, X, None, None)
    assert len(residuals.structs) == 3
    assert not any(residuals.offloaded)


def test_recomputed_activations_are_not_kept():
    residuals = analyse(block, Offload.none(recomputed=["up", "mid"]).fates(NAMES), PARAMS, X, None, None)
    assert [struct.shape for struct in residuals.structs] == [(2, 8, 128)]


def test_small_activations_stay(monkeypatch):
    monkeypatch.setattr("pipejax.runtime.residuals.SMALL", 1024)
    small = jax.ShapeDtypeStruct((1, 2, 128), jnp.float32)
    residuals = analyse(block, Offload.full().fates(NAMES), PARAMS, small, None, None)
    assert not any(residuals.offloaded)


def test_offloads_from_a_command_line():
    assert Offload.parse("none") == Offload.none()
    assert Offload.parse("full") == Offload.full()
    assert Offload.parse("chunks=2") == Offload.chunks(2)
    assert Offload.parse("fraction=0.5") == Offload.fraction(0.5)
    assert Offload.parse("auto=1.6") == Offload.auto(k=1.6)


@pytest.mark.parametrize("text", ["", "all", "chunks", "chunks=x", "chunks=0", "fraction=1.5", "auto=-1", "full=1"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match=r"pass none, full, chunks=N, fraction=A with A up to 1, or auto=K\.$"):
        Offload.parse(text)
