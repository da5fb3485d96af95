"""Fault 10: init and checkpoints that depend on the pipeline they were made by.

See also: test_the_same_key_gives_the_same_model_everywhere in tests/test_pipeline.py, and tests/train/test_train.py.
"""

import functools

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax import train
from pipejax.models import gpt

VOCAB, LENGTH = 13, 6  # no number of devices here but one divides the vocabulary
CONFIG = gpt.Config(vocab_size=VOCAB, hidden_size=8, num_heads=2, num_layers=6, max_length=LENGTH)
LAYOUTS = ((2, 2), (4, 1), (1, 4), (1, 1))


def batch(step):
    tokens, targets = jax.random.randint(jax.random.key(step), (2, 8, LENGTH), 0, VOCAB)
    return {"tokens": tokens, "targets": targets}


@functools.cache
def trainer(devices, chunks):
    pipe = pj.Pipeline(
        embed=functools.partial(gpt.Embed, CONFIG),
        block=functools.partial(gpt.Block, CONFIG),
        head=functools.partial(gpt.Head, CONFIG),
        num_layers=CONFIG.num_layers,
        mesh=pj.make_mesh(pipe=devices),
        schedule=pj.schedules.Interleaved(chunks=chunks),
        offload=pj.Offload.full(),
        num_microbatches=4,
    )
    optimizer = train.make_optimizer(train.OptimizerConfig(learning_rate=0.01, warmup_steps=1), steps=10)
    return train.Trainer(pipe, optimizer, batch=batch(0), seed=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two steps at (2, 2), the state in it, and the loss of the step after it."""
    mine = trainer(2, 2)
    state = mine.init()
    for step in range(2):
        state, _ = mine.step(state, batch(step))
    layered = jax.device_get(mine.to_layers(state))
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = train.Checkpoints(folder, mine, identity={})
    checkpoints.save(state)
    checkpoints.close()
    return folder, layered, float(mine.pipe.loss(state.params, batch(2)))


@pytest.mark.parametrize(("devices", "chunks"), LAYOUTS)
def test_what_was_saved_at_one_layout_is_loaded_at_any(saved, devices, chunks):
    """Bitwise: parameters, moments, and the loss that follows from them; rows that fill up a table are in no file."""
    folder, layered, loss = saved
    other = trainer(devices, chunks)
    checkpoints = train.Checkpoints(folder, other, identity={})
    restored = checkpoints.restore()
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.to_layers(restored)), layered)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(layered.params["embed"])} == {VOCAB, LENGTH}
    assert float(other.pipe.loss(restored.params, batch(2))) == loss


def test_one_key_gives_one_model_and_no_two_layers_alike():
    models = [jax.device_get(trainer(*layout).to_layers(trainer(*layout).init()).params) for layout in LAYOUTS]
    for model in models[1:]:
        jax.tree.map(np.testing.assert_array_equal, models[0], model)
    for leaf in jax.tree.leaves(models[0]["layers"]):
        if leaf.ndim > 2:  # vectors start as zeros or ones
            assert len({layer.tobytes() for layer in leaf}) == CONFIG.num_layers
