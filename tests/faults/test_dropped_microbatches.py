"""Fault 13: a microbatch that is left out, counted twice, or whose gradients reach the next step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import assert_gradients_close, make_batch, make_pipeline

import pipejax as pj
from pipejax import plain, train

SCHEDULES = {
    "lockstep": {"schedule": pj.schedules.Interleaved(chunks=2), "pipe": 3},
    "staggered": {"schedule": pj.schedules.POH(chunks=2)},
}
COUNT, STEPS = 5, 6


def test_the_gradient_is_the_sum_over_single_microbatches():
    """Each by its weight of tokens; no two microbatches have one weight, and one has none."""
    batch = make_batch(2 * COUNT)
    weights = np.repeat([1.0, 0.5, 0.0, 2.0, 3.0], 2)[:, None] * np.asarray(batch["weights"])
    batch["weights"] = jnp.asarray(weights, jnp.float32)
    pipe = make_pipeline(num_microbatches=COUNT, **SCHEDULES["staggered"])
    single = make_pipeline(num_microbatches=1, **SCHEDULES["lockstep"])
    params = pipe.init(jax.random.key(0), batch)
    loss, grads = pipe.value_and_grad(params, batch)
    layered = pipe.to_layers(params)
    total, sums = 0.0, jax.tree.map(jnp.zeros_like, layered)
    one = jax.tree.map(lambda leaf: leaf[:2], batch)
    single.describe(one)
    params = jax.device_put(single.from_layers(jax.device_get(layered)), single.shardings)
    for index in range(COUNT):
        part = jax.tree.map(lambda leaf, start=2 * index: leaf[start : start + 2], batch)
        weight = float(part["weights"].sum()) or 1.0  # the sum is divided by one where there is no token
        mine, gradient = single.value_and_grad(params, part)
        total += weight * float(mine)
        gradient = jax.device_get(single.to_layers(gradient))
        sums = jax.tree.map(lambda a, b, weight=weight: a + weight * b, jax.device_get(sums), gradient)
    whole = float(weights.sum())
    np.testing.assert_allclose(float(loss), total / whole, rtol=1e-5)
    assert_gradients_close(pipe.to_layers(grads), jax.tree.map(lambda leaf: leaf / whole, sums))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_third_and_last_step_are_the_plain_models(schedule):
    """Nothing is left over from a step: other data each time, the same loss and gradient norm as without a pipeline."""
    optimizer = train.Optimizer(optax.sgd(0.05), lambda step: 0.05)
    pipe = make_pipeline(num_microbatches=4, **SCHEDULES[schedule])
    trainer = train.Trainer(pipe, optimizer, batch=make_batch(8), seed=0)
    state = trainer.init()
    mine = jax.device_get(pipe.to_layers(state.params))

    @jax.jit
    def plain_step(params, batch, key):
        loss, grads = plain.value_and_grad(pipe, params, batch, key)
        return jax.tree.map(lambda leaf, grad: leaf - 0.05 * grad, params, grads), loss, optax.tree.norm(grads)

    for step in range(STEPS):
        batch = make_batch(8, seed=step)
        mine, loss, norm = plain_step(mine, batch, jax.random.fold_in(trainer._dropout_key, step))
        state, metrics = trainer.step(state, batch)
        if step in (0, 2, STEPS - 1):
            np.testing.assert_allclose(float(metrics["loss"]), float(loss), rtol=1e-5)
            np.testing.assert_allclose(float(metrics["grad_norm"]), float(norm), rtol=1e-4)
    assert_gradients_close(pipe.to_layers(state.params), mine)
