"""Fault 5: layers that are dropped, run twice or out of order where the stages do not divide them.

See also test_fillers_are_zero_and_get_no_gradient in tests/test_pipeline.py, and in tests/train/test_train.py
test_weight_decay_leaves_vectors_and_fillers_alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import EMBED, make_batch, make_pipeline

import pipejax as pj
from pipejax import layout, train
from pipejax.schedules.schedule import looping

DEVICES = 4
SIZES = [(chunks, layers) for chunks in (1, 2) for layers in range(1, DEVICES * chunks + 4)]
FEW = [(1, 1), (1, 6), (2, 3), (2, 11)]

# x -> 2x + own number, mod 1021: which layers ran, and in which order, can be read from the result.
PRIME = 1021
BLOCK = pj.Part(
    init=lambda key, x, batch: {"number": jax.random.randint(key, (), 1, PRIME).astype(jnp.float32)},
    apply=lambda params, key, x, batch: jnp.mod(2 * x + params["number"], PRIME),
)
HEAD = pj.Part(
    init=lambda *_: {"gain": jnp.ones(())},
    apply=lambda params, key, x, batch: (params["gain"] * jnp.sum(x), jnp.float32(x.size)),
)


@pytest.mark.parametrize(("chunks", "layers"), SIZES)
def test_every_layer_has_one_place_and_they_follow_one_another(chunks, layers):
    spread = layout.spread(num_layers=layers, placement=looping(DEVICES, chunks))
    stages = [spread.layer[device, chunk] for chunk in range(chunks) for device in range(DEVICES)]
    assert [layer for stage in stages for layer in stage if layer >= 0] == list(range(layers))
    assert max(spread.counts) - min(spread.counts) <= 1


def run(chunks, layers):
    embed = pj.Part(init=EMBED.init, apply=lambda params, key, batch: batch["start"] + 0 * params["table"][0, 0])
    pipe = make_pipeline(
        embed=embed,
        block=BLOCK,
        head=HEAD,
        pipe=DEVICES,
        num_layers=layers,
        schedule=pj.schedules.Interleaved(chunks=chunks),
        num_microbatches=2,
    )
    batch = {**make_batch(2), "start": jnp.ones(2)}
    params = pipe.init(jax.random.key(0), batch)
    loss, grads = pipe.value_and_grad(params, batch)
    numbers = np.asarray(pipe.to_layers(params)["layers"]["number"]).tolist()
    assert len(set(numbers)) == len(numbers) == layers
    assert float(loss) == functools.reduce(lambda x, number: (2 * x + number) % PRIME, numbers, 1.0)
    # Of the layer n from the last 2^n, mean over samples: each ran once, and none but these has any.
    gradients = np.asarray(pipe.to_layers(grads)["layers"]["number"])
    np.testing.assert_array_equal(gradients, 2.0 ** np.arange(layers)[::-1])
    for tree in (params, grads):
        assert not np.asarray(tree["layers"]["number"])[pipe.layout.layer < 0].any()


@pytest.mark.parametrize(("chunks", "layers"), FEW)
def test_every_layer_runs_once_in_order_with_a_gradient(chunks, layers):
    run(chunks, layers)


@pytest.mark.full
@pytest.mark.parametrize(("chunks", "layers"), [size for size in SIZES if size not in FEW])
def test_every_layer_runs_once_in_order_with_a_gradient_everywhere(chunks, layers):
    run(chunks, layers)


def test_thirty_layers_on_four_stages_run_thirty():
    run(1, 30)


def test_fillers_are_in_no_checkpoint():
    pipe = make_pipeline(pipe=DEVICES, num_layers=5)
    optimizer = train.make_optimizer(train.OptimizerConfig(), steps=10)
    trainer = train.Trainer(pipe, optimizer, batch=make_batch(8), seed=0)
    layered = jax.eval_shape(trainer.to_layers, trainer.structs)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(layered.params["layers"])} == {5}
    moments = [leaf.shape for leaf in jax.tree.leaves(layered.opt_state)]
    assert not any(shape[:3] == (4, 2, 1) for shape in moments)
    assert sum(shape[:1] == (5,) for shape in moments) == 2 * len(jax.tree.leaves(layered.params["layers"]))
