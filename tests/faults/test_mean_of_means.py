"""Fault 6: losses averaged per microbatch or per shard, so that they depend on how tokens fall.

See also tests/test_pipeline.py: test_the_loss_is_no_mean_of_means (4.0 and not 3.0, forward only) and
test_loss_and_gradients_do_not_depend_on_the_number_of_microbatches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from toy import BLOCK, HEAD, assert_gradients_close, make_batch, make_pipeline

import pipejax as pj

HEAD_OF_VALUES = pj.Part(
    init=lambda key, x, batch: {"gain": jnp.ones(())},
    apply=lambda params, key, x, batch: (
        params["gain"] * jnp.sum(batch["value"] * batch["weights"]) + 0 * jnp.sum(x),
        jnp.sum(batch["weights"]),
    ),
)
SCHEDULES = {
    "lockstep": {},
    "staggered": {"schedule": pj.schedules.GIS(chunks=2), "offload": pj.Offload.none()},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_token_losses_1_and_3_5_7_give_4(schedule):
    """Their gradient in a gain is 4 too: 16 over 4 tokens, and not (1 + 5) / 2."""
    batch = {
        **make_batch(2),
        "value": jnp.array([[1.0, 0, 0], [3, 5, 7]]),
        "weights": jnp.array([[1.0, 0, 0], [1, 1, 1]]),
    }
    pipe = make_pipeline(
        head=HEAD_OF_VALUES,
        block=pj.Part(init=BLOCK.init, apply=lambda params, key, x, batch: x + params["scale"]),
        num_microbatches=2,
        **SCHEDULES[schedule],
    )
    loss, grads = pipe.value_and_grad(pipe.init(jax.random.key(0), batch), batch)
    assert float(loss) == float(grads["head"]["gain"]) == 4.0


@functools.cache
def results(microbatches, scale=1.0, order=None, shards=1):
    head = pj.Part(init=HEAD.init, apply=lambda *args: (scale * HEAD.apply(*args)[0], HEAD.apply(*args)[1]))
    block = pj.Part(init=BLOCK.init, apply=lambda *args: (BLOCK.apply(*args)[0], scale * BLOCK.apply(*args)[1]))
    axes, auto = ("data", "pipe"), (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((shards, 2), axes, axis_types=auto, devices=jax.devices()[: 2 * shards])
    pipe = make_pipeline(head=head, block=block, num_microbatches=microbatches, mesh=mesh)
    batch = make_batch(8)
    # Half of the samples have nearly no weights, and come first or spread.
    batch["weights"] = batch["weights"].at[jnp.arange(8) < 4].multiply(0.1)
    if order:
        batch = jax.tree.map(lambda leaf: leaf[np.array(order)], batch)
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    return pipe.value_and_grad(pipe.init(jax.random.key(0), batch), batch)


def assert_same(one, other, factor=1.0):
    np.testing.assert_allclose(float(one[0]), factor * float(other[0]), rtol=1e-6)
    assert_gradients_close(one[1], jax.tree.map(lambda grad: factor * grad, other[1]))
    np.testing.assert_allclose(float(optax.tree.norm(one[1])), factor * float(optax.tree.norm(other[1])), rtol=1e-5)


def test_nothing_depends_on_which_tokens_share_a_microbatch():
    assert_same(results(2, order=(0, 4, 1, 5, 2, 6, 3, 7)), results(2))


def test_nothing_depends_on_how_tokens_fall_over_shards_of_data():
    """The other axes of a mesh are the compiler's: it spreads the samples, and sums what it must."""
    assert_same(results(2, shards=2), results(2))


def test_a_loss_of_ten_times_has_gradients_of_ten_times():
    assert_same(results(2, scale=10.0), results(2), factor=10.0)
