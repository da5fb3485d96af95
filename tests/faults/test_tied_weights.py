"""Fault 8: copies of tied weights that drift apart, or count twice in a norm.

See also test_tied_weights_sum_both_uses in tests/test_pipeline.py. A tied parameter rests once, with the embedding, and
is put into the head for a step.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import HIDDEN, assert_gradients_close, make_batch, make_pipeline

import pipejax as pj
from pipejax import plain, train
from pipejax.models import gpt

TIE = {"head.table": "embed.table"}
PLACES = {
    "one device": {"pipe": 1},
    "three devices": {"pipe": 3},  # which do not divide the table: each holds a copy
    "V": {"pipe": 3, "schedule": pj.schedules.ZBV(), "offload": pj.Offload.none()},
    "dualpipe-v": {"pipe": 2, "schedule": pj.schedules.DualPipeV(), "offload": pj.Offload.none()},
}


def make_trainer(optimizer, **changes):
    pipe = make_pipeline(tied=TIE, num_layers=6, **changes)
    return train.Trainer(pipe, optimizer, batch=make_batch(8), seed=0)


ADAM = train.Optimizer(optax.adam(1e-2), lambda step: 1e-2)


@pytest.fixture(scope="module")
def expected():
    """The table after three steps of the plain model."""
    trainer = make_trainer(ADAM, pipe=1)
    params = trainer.pipe.to_layers(trainer.init().params)
    moments = ADAM.transformation.init(params)

    @jax.jit
    def step(params, moments, batch, key):
        _, grads = plain.value_and_grad(trainer.pipe, params, batch, key)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = ADAM.transformation.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    for index in range(3):
        key = jax.random.fold_in(trainer._dropout_key, index)
        params, moments = step(params, moments, make_batch(8, seed=index), key)
    return np.asarray(params["embed"]["table"])


@pytest.mark.parametrize("place", ["one device", "three devices", "dualpipe-v"])
def test_copies_stay_equal_and_train_as_in_the_plain_model(place, expected):
    """Three steps of Adam: the gradient is the sum of both uses, and all copies are bitwise one."""
    trainer = make_trainer(ADAM, **PLACES[place])
    state = trainer.init()
    assert "table" not in state.params["head"]
    for step in range(3):
        state, _ = trainer.step(state, make_batch(8, seed=step))
    table = state.params["embed"]["table"]
    copies = {}
    for shard in table.addressable_shards:
        copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(values) == 1 for values in copies.values())
    np.testing.assert_allclose(table, expected, atol=2e-4)  # Adam divides by small second moments


VOCAB = 100  # times HIDDEN is 800


def _flat_pipeline(**changes):
    """Every entry of the table has a gradient of 1: a half from the embedding, a half from the head."""
    table = {"table": jnp.zeros((VOCAB, HIDDEN))}
    return make_pipeline(
        embed=pj.Part(
            init=lambda *_: table,
            apply=lambda params, key, batch: batch["one"][:, None] * params["table"].reshape(1, -1),
        ),
        block=pj.Part(init=lambda *_: {"scale": jnp.ones(1)}, apply=lambda params, key, x, batch: x * params["scale"]),
        head=pj.Part(
            init=lambda *_: table,
            apply=lambda params, key, x, batch: (
                0.5 * jnp.sum(x) + 0.5 * jnp.sum(params["table"]) * jnp.sum(batch["one"]),
                jnp.sum(batch["one"]),
            ),
        ),
        tied=TIE,
        **changes,
    )


@pytest.mark.parametrize("place", PLACES)
def test_the_norm_counts_a_tied_table_once(place):
    pipe = _flat_pipeline(**PLACES[place])
    batch = {"one": jnp.ones(8)}
    params = pipe.init(jax.random.key(0), batch)
    _, grads = pipe.value_and_grad(params, batch)
    np.testing.assert_array_equal(grads["embed"]["table"], 1)
    norm = float(optax.tree.norm(grads))
    np.testing.assert_allclose(norm, math.sqrt(VOCAB * HIDDEN), rtol=1e-6)
    assert round(norm, 3) == 28.284


def test_clipping_scales_every_stage_by_one_factor():
    transformation = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    trainer = make_trainer(train.Optimizer(transformation, lambda step: 1.0), pipe=3, num_microbatches=4)
    state = trainer.init()
    before, batch = jax.device_get(state.params), make_batch(8)
    _, grads = trainer.pipe.value_and_grad(before, batch, jax.random.fold_in(trainer._dropout_key, 0))
    state, metrics = trainer.step(state, batch)
    norm = float(metrics["grad_norm"])
    assert norm > 1
    changes = jax.tree.map(lambda old, new: (old - np.asarray(new)) * norm / 0.5, before, state.params)
    for change, grad in zip(jax.tree.leaves(changes), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(change, grad, atol=1e-4 * float(np.abs(grad).max()) + 2e-6 * norm)


def test_the_sum_of_both_uses_in_v_placement():
    pipe = make_pipeline(tied=TIE, num_layers=6, **PLACES["V"])
    batch = make_batch(8)
    params = pipe.init(jax.random.key(0), batch)
    _, grads = pipe.value_and_grad(params, batch)
    assert_gradients_close(pipe.to_layers(grads), plain.value_and_grad(pipe, pipe.to_layers(params), batch)[1])


def test_a_tied_table_that_is_cut_over_the_devices():
    """13 words on 2 devices: each holds 7 rows, used by embedding and head at once, none of them twice."""
    config = gpt.Config(vocab_size=13, hidden_size=8, num_heads=2, num_layers=2, max_length=6)
    pipe = pj.Pipeline(
        embed=functools.partial(gpt.Embed, config),
        block=functools.partial(gpt.Block, config),
        head=functools.partial(gpt.Head, config),
        num_layers=2,
        mesh=pj.make_mesh(pipe=2),
        schedule=pj.schedules.OneFOneB(),
        offload=pj.Offload.none(),
        num_microbatches=2,
        tied={"head.table": "embed.table"},
        ring_fill=float("nan"),
    )
    tokens, targets = jax.random.randint(jax.random.key(1), (2, 4, 6), 0, 13)
    batch = {"tokens": tokens, "targets": targets}
    params = pipe.init(jax.random.key(0), batch)
    _, grads = pipe.value_and_grad(params, batch)
    assert_gradients_close(pipe.to_layers(grads), plain.value_and_grad(pipe, pipe.to_layers(params), batch)[1])
