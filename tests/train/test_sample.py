"""Sampling: each token is what the model, seeing no padding, makes of the tokens before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax as pj
from pipejax import plain, train
from pipejax.models import gpt

WINDOW, VOCAB = 8, 11


@pytest.fixture(scope="module")
def model():
    """A pipeline over two devices, and parameters large enough for its logits to be far apart."""
    config = gpt.Config(vocab_size=VOCAB, hidden_size=16, num_heads=2, num_layers=3, max_length=WINDOW, dropout=0.5)
    pipe = pj.Pipeline(
        embed=functools.partial(gpt.Embed, config),
        block=functools.partial(gpt.Block, config),
        head=functools.partial(gpt.Head, config),
        num_layers=3,
        mesh=pj.make_mesh(pipe=2),
        schedule=pj.schedules.OneFOneB(),
        offload=pj.Offload.none(),
        num_microbatches=2,
    )
    batch = {name: jax.ShapeDtypeStruct((2, WINDOW), jnp.int32) for name in ("tokens", "targets")}
    return pipe, jax.tree.map(lambda leaf: 10 * leaf, pipe.init(jax.random.key(0), batch))


def logits(model, tokens):
    pipe, params = model
    layered = jax.device_get(pipe.to_layers(params))
    x, _ = plain.hidden(pipe, layered, {"tokens": jnp.asarray(tokens, jnp.int32)[None]})
    return pipe.head.apply(layered["head"], None, x, method="logits")[0, -1]


def draw(model, *, tokens, temperature=0.0, seed=0):
    pipe, params = model
    key = jax.random.key(seed)
    return train.sample(
        pipe, params, np.array([3, 1]), tokens=tokens, window=WINDOW, temperature=temperature, key=key
    ).tolist()


def test_without_temperature_the_likeliest_token_follows(model):
    text = draw(model, tokens=10)
    assert len(text) == 12
    assert text[:2] == [3, 1]
    for index in (2, 5, 8, 11):  # the window fills up at 8
        assert text[index] == int(jnp.argmax(logits(model, text[max(0, index - WINDOW) : index])))


def test_with_temperature_tokens_follow_the_key(model):
    assert draw(model, tokens=8, temperature=2.0) == draw(model, tokens=8, temperature=2.0)
    assert draw(model, tokens=8, temperature=2.0) != draw(model, tokens=8, temperature=2.0, seed=1)
