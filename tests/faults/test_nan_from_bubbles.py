"""Fault 9: a bubble's garbage that turns into NaN, in a result or for whoever looks for NaN.

See also test_garbage_never_reaches_a_result in tests/test_program_shape.py, for the toy block in lockstep.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import BLOCK, assert_gradients_close, make_batch, make_pipeline

import pipejax as pj
from pipejax import plain


def _block(params, key, x, batch):
    """x/|x|, sqrt and log, which no zero, negative number, NaN or infinity survives, in value or in gradient."""
    normed = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    rooted = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    logs = jnp.log(jax.nn.softplus(normed @ params["up"]) * jnp.min(rooted))
    return normed * params["scale"] + 0.1 * logs @ params["down"], 0.01 * jnp.sum(jnp.log(rooted))


NAMED = pj.Part(init=BLOCK.init, apply=_block)
SCHEDULES = {
    "lockstep": {"pipe": 4, "num_layers": 7, "num_microbatches": 3},
    "staggered": {"schedule": pj.schedules.POH(chunks=2), "num_layers": 3, "num_microbatches": 3},
    "split, V": {"schedule": pj.schedules.ZBV(), "num_layers": 5, "pipe": 3, "offload": pj.Offload.none()},
}


@pytest.mark.parametrize(
    ("schedule", "fill"), [("lockstep", "nan"), ("lockstep", "inf"), ("staggered", "nan"), ("split, V", "inf")]
)
def test_garbage_reaches_no_result(schedule, fill):
    """`jax_debug_nans` looks at each result, and stays silent on a healthy model."""
    pipe = make_pipeline(block=NAMED, ring_fill=float(fill), **SCHEDULES[schedule])
    batch = make_batch(2 * pipe.num_microbatches)
    params = pipe.init(jax.random.key(0), batch)
    with jax.debug_nans(True):
        loss, grads = pipe.value_and_grad(params, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, grads)))
    expected, wanted = plain.value_and_grad(pipe, pipe.to_layers(params), batch)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)
    assert_gradients_close(pipe.to_layers(grads), wanted)


def test_a_models_own_nan_is_not_hidden():
    pipe = make_pipeline(block=NAMED, num_microbatches=2)
    batch = make_batch(4)
    params = pipe.init(jax.random.key(0), batch)
    params["embed"]["table"] = params["embed"]["table"].at[:].set(0)
    assert not np.isfinite(float(pipe.loss(params, batch)))
