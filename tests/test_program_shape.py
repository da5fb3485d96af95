"""What the traced step may not hold: weights saved by tick, collectives in a branch, NaN from bubbles."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import HIDDEN, VOCAB, make_batch, make_pipeline

import pipejax as pj
from pipejax import jaxprs


def traced(**changes):
    pipe = make_pipeline(**changes)
    batch = make_batch(2 * pipe.num_microbatches)
    pipe.describe(batch)
    return jax.make_jaxpr(pipe.value_and_grad)(pipe.structs, batch, jax.random.key(0)).jaxpr


@pytest.mark.parametrize("offload", [pj.Offload.full(), pj.Offload.none()], ids=["full", "none"])
def test_no_ring_and_no_scan_output_holds_a_weight(offload):
    """Autodiff through a scanned pipeline saves each device's slice of the weights for every tick."""
    jaxpr = traced(offload=offload, num_microbatches=8)
    weights = {(HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (VOCAB, HIDDEN)}
    most = 2 * 2  # the parameters themselves: devices times chunks
    for eqn in jaxprs.all_equations(jaxpr):
        for var in eqn.outvars:
            shape = getattr(var.aval, "shape", ())
            if shape[-2:] in weights:
                assert math.prod(shape[:-2]) <= most, f"{eqn.primitive}: {shape}"


def test_no_collective_stands_in_a_branch():
    """Which device embeds or runs the head differs along `pipe`: a collective there would wait for ever."""
    collectives = {"ppermute", "psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "pmax", "pmin"}
    branches = seen = 0
    for eqn in jaxprs.all_equations(traced(num_layers=3)):
        seen += eqn.primitive.name in collectives
        if eqn.primitive.name in ("while", "cond"):
            branches += 1
            inner = [e.primitive.name for body in jaxprs.sub_jaxprs(eqn) for e in jaxprs.all_equations(body)]
            assert not collectives & set(inner)
    assert branches >= 6
    assert seen >= 6


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_garbage_never_reaches_a_result(fill):
    """Also under `jax_debug_nans`, which looks at each result."""
    pipe = make_pipeline(pipe=4, num_layers=7, num_microbatches=3, ring_fill=fill)
    clean = make_pipeline(pipe=4, num_layers=7, num_microbatches=3, ring_fill=0.0)
    batch = make_batch(6)
    params = pipe.init(jax.random.key(0), batch)
    with jax.debug_nans(True):
        loss, grads = pipe.value_and_grad(params, batch)
    expected, wanted = clean.value_and_grad(params, batch)
    assert float(loss) == float(expected)
    jax.tree.map(np.testing.assert_array_equal, grads, wanted)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
