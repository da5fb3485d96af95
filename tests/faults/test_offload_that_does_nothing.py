"""Fault 3: an offload that silently moves nothing, or less than it says.

Also: names listed twice and misspelled names in tests/test_offload.py; what XLA makes of it in tests/aot.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from toy import BLOCK, HIDDEN, LENGTH, make_batch, make_pipeline

import pipejax as pj
from pipejax import jaxprs
from pipejax.offload import Placed
from pipejax.runtime import residuals

SAMPLES = 2
ONE = SAMPLES * LENGTH * HIDDEN * 4  # bytes of one activation as wide as the model


def _block(params, key, x, batch):
    """Names at the input, in the middle and at the output; one of them on two values."""
    first = checkpoint_name(jnp.tanh(x * params["scale"]), "mid")
    up = checkpoint_name(first @ params["up"], "up")
    second = checkpoint_name(jax.nn.gelu(up), "mid")
    return checkpoint_name(x + second @ params["down"], "out")


NAMED = pj.Part(init=BLOCK.init, apply=_block)


def make(offload, **changes):
    return make_pipeline(block=NAMED, offload=offload, **changes)


def host_bytes(pipe, batch):
    """Bytes of one layer in one slot of the host rings that the traced step carries."""
    pipe.describe(batch)
    jaxpr = jax.make_jaxpr(pipe.value_and_grad)(pipe.structs, batch).jaxpr
    carried = {}
    for eqn in jaxprs.all_equations(jaxpr):
        if eqn.primitive.name == "scan":
            avals = [var.aval for var in eqn.outvars]
            host = [aval for aval in avals if aval.memory_space == jax.memory.Space.Host]
            carried[len(host)] = sum(aval.size * aval.dtype.itemsize for aval in host)
    return carried[max(carried)] // (pipe.program.host_slots * pipe.program.layers)


@pytest.mark.parametrize(
    ("names", "placed"),
    [
        (["block_input"], {"block_input": Placed("offloaded", device=0, host=ONE)}),
        (["mid"], {"mid": Placed("offloaded", device=0, host=5 * ONE)}),
        (["block_input", "up"], {"up": Placed("offloaded", device=0, host=4 * ONE)}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "schedule", [pj.schedules.Interleaved(chunks=2), pj.schedules.GIS(chunks=2)], ids=["lockstep", "gis"]
)
def test_a_name_moves_what_it_says(names, placed, schedule):
    pipe, batch = make(pj.Offload(offloaded=tuple(names)), schedule=schedule), make_batch(8)
    report = pipe.placed(batch)
    assert set(report) == {"block_input", "mid", "up", "out"}
    assert {name: report[name] for name in placed} == placed
    assert {name for name, found in report.items() if found.host} == set(names)
    assert host_bytes(pipe, batch) == sum(found.host for found in report.values())


def test_the_blocks_input_stays_where_only_what_follows_moves():
    """B starts from something: what is recomputed in name only is kept all the same, and the report says so."""
    report = make(pj.Offload(offloaded=("up",))).placed(make_batch(8))
    assert report["block_input"] == Placed("recomputed", device=ONE, host=0)
    assert report["mid"] == Placed("recomputed", device=0, host=0)


def test_all_names_at_once_count_the_output_as_nothing():
    for offload, place in ((pj.Offload.full(), "host"), (pj.Offload.none(), "device")):
        report = make(offload).placed(make_batch(8))
        found = {name: getattr(placed, place) for name, placed in report.items()}
        assert found == {"block_input": ONE, "mid": 5 * ONE, "up": 4 * ONE, "out": 0}
        assert sum(placed.device + placed.host for placed in report.values()) == 10 * ONE


@pytest.mark.parametrize("names", [("out",), ("up", "out")], ids=str)
def test_a_name_that_would_move_nothing_is_refused(names):
    pattern = "'out' is not among what the backward pass needs, so offloading it would move nothing; leave it out"
    with pytest.raises(ValueError, match=pattern) as caught:
        make(pj.Offload(offloaded=names)).init(jax.random.key(0), make_batch(8))
    assert "\n" not in str(caught.value)


def test_a_misspelled_name_is_refused():
    with pytest.raises(ValueError, match="no activation of the block is named 'upp'; the names there are: block_input"):
        make(pj.Offload(offloaded=("upp",))).init(jax.random.key(0), make_batch(8))


def test_what_is_too_small_to_move_is_counted_on_the_device(monkeypatch):
    monkeypatch.setattr(residuals, "SMALL", 2 * ONE // 4)  # elements
    report = make(pj.Offload.full()).placed(make_batch(8))
    assert report["up"] == Placed("offloaded", device=0, host=4 * ONE)
    assert report["mid"] == Placed("offloaded", device=ONE, host=4 * ONE)


def test_names_within_a_loop_are_counted_for_all_its_trips():
    def block(params, key, x, batch):
        def trip(x, _):
            return x + jnp.tanh(checkpoint_name(x @ params["up"], "inner")) @ params["down"], None

        return jax.lax.scan(trip, x, None, length=3)[0]

    pipe = make_pipeline(block=pj.Part(init=BLOCK.init, apply=block), offload=pj.Offload(offloaded=("inner",)))
    assert pipe.placed(make_batch(8))["inner"] == Placed("offloaded", device=0, host=3 * 4 * ONE)
