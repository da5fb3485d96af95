"""Fault 12: evaluation that runs another model than training, disturbs it, or is bound to its microbatches."""

import jax
import numpy as np
import pytest
from toy import make_batch, make_pipeline

import pipejax as pj

SCHEDULES = {
    "lockstep": {"pipe": 4, "num_layers": 6},
    "V": {"schedule": pj.schedules.ZBV(), "pipe": 3, "num_layers": 7, "offload": pj.Offload.none()},
}


@pytest.fixture(scope="module", params=SCHEDULES)
def pipe(request):
    return make_pipeline(**SCHEDULES[request.param])


def test_the_loss_is_that_of_training_on_every_device(pipe):
    """eval, train, eval, train: twice the same numbers as without evaluation, and one value on all devices."""
    batches = [make_batch(8, seed=step) for step in range(2)]

    def run(evaluate):
        params, losses = pipe.init(jax.random.key(0), batches[0]), []
        for batch in batches:
            if evaluate:
                evaluated = pipe.loss(params, batch)
            loss, grads = pipe.value_and_grad(params, batch)
            if evaluate:
                np.testing.assert_allclose(float(evaluated), float(loss), rtol=1e-6)
                values = {float(shard.data) for shard in evaluated.addressable_shards}
                assert len(evaluated.addressable_shards) == pipe.mesh.size
                assert len(values) == 1
            losses.append(float(loss))
            params = jax.tree.map(lambda leaf, grad: leaf - 1e-2 * grad, params, grads)
        return losses

    assert run(evaluate=True) == run(evaluate=False)


def test_another_number_of_microbatches(pipe):
    """A larger set in microbatches of the same size, a smaller one, and a last bit of a set: all the same model."""
    batch = make_batch(24)
    params = pipe.init(jax.random.key(0), make_batch(8))
    whole = float(pipe.loss(params, batch, num_microbatches=12))
    parts = [jax.tree.map(lambda leaf, start=start: leaf[start : start + 8], batch) for start in (0, 8, 16)]
    weights = [float(part["weights"].sum()) for part in parts]
    losses = [float(pipe.loss(params, part)) for part in parts]
    np.testing.assert_allclose(whole, np.dot(losses, weights) / np.sum(weights), rtol=1e-6)
    np.testing.assert_allclose(float(pipe.loss(params, parts[0], num_microbatches=1)), losses[0], rtol=1e-6)
    last = jax.tree.map(lambda leaf: leaf[:3], batch)
    assert np.isfinite(float(pipe.loss(params, last, num_microbatches=3)))
    before = pipe.value_and_grad(params, parts[0])[0]
    np.testing.assert_allclose(float(before), losses[0], rtol=1e-6)


def test_each_number_is_compiled_once():
    pipe = make_pipeline(pipe=1, num_layers=1, schedule=pj.schedules.OneFOneB())
    params = pipe.init(jax.random.key(0), make_batch(8))
    for _ in range(2):
        for microbatches in (4, 2):
            pipe.loss(params, make_batch(2 * microbatches), num_microbatches=microbatches)
    assert pipe._loss._cache_size() == 2


def test_a_number_that_does_not_divide_is_refused():
    pipe = make_pipeline()
    params = pipe.init(jax.random.key(0), make_batch(8))
    with pytest.raises(ValueError, match="3 microbatches do not divide a batch of 8 samples; change"):
        pipe.loss(params, make_batch(8), num_microbatches=3)
    with pytest.raises(ValueError, match="num_microbatches is 0; it must be 1 or more"):
        pipe.loss(params, make_batch(8), num_microbatches=0)
