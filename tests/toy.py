"""A small model of plain functions whose every feature can go wrong in a pipeline.

Blocks divide by a norm (NaN on garbage), take a side input per sample, drop activations by key, and return an
auxiliary loss; token losses are weighted, unevenly over samples.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import pipejax as pj
from pipejax import plain

VOCAB, HIDDEN, LENGTH = 16, 8, 5


def _embed_init(key, batch):
    return {"table": jax.random.normal(key, (VOCAB, HIDDEN))}


def _embed(params, key, batch):
    return params["table"][batch["tokens"]]


def _block_init(key, x, batch):
    up, down = jax.random.split(key)
    return {
        "up": 0.3 * jax.random.normal(up, (HIDDEN, 4 * HIDDEN)),
        "down": 0.3 * jax.random.normal(down, (4 * HIDDEN, HIDDEN)),
        "scale": jnp.ones(HIDDEN),
    }


def _block(params, key, x, batch):
    normed = checkpoint_name(x / jnp.linalg.norm(x, axis=-1, keepdims=True) * params["scale"], "normed")
    up = checkpoint_name(normed @ params["up"] + batch["bias"][:, None, None], "up")
    down = jax.nn.gelu(up) @ params["down"]
    if key is not None:
        down = jnp.where(jax.random.bernoulli(key, 0.8, down.shape), down / 0.8, 0)
    y = x + down
    return y, 0.01 * jnp.sum(down * down)


def _head_init(key, x, batch):
    return {"table": jax.random.normal(key, (VOCAB, HIDDEN))}


def _head(params, key, x, batch):
    logs = jax.nn.log_softmax(x @ params["table"].T)
    losses = -jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


EMBED = pj.Part(init=_embed_init, apply=_embed)
BLOCK = pj.Part(init=_block_init, apply=_block)
HEAD = pj.Part(init=_head_init, apply=_head)


def make_batch(samples, seed=0):
    """A batch in which no two samples are alike."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (samples, LENGTH)
    return {
        "tokens": jax.random.randint(keys[0], shape, 0, VOCAB),
        "targets": jax.random.randint(keys[1], shape, 0, VOCAB),
        "weights": (jax.random.uniform(keys[2], shape) > 0.4).astype(jnp.float32),
        "bias": jax.random.normal(keys[3], (samples,)),
    }


def make_pipeline(**changes):
    """A pipeline of the toy model with rings full of NaN; `pipe` is the number of devices."""
    options = {
        "embed": EMBED,
        "block": BLOCK,
        "head": HEAD,
        "num_layers": 4,
        "mesh": pj.make_mesh(pipe=changes.pop("pipe", 2)),
        "schedule": pj.schedules.Interleaved(chunks=2),
        "offload": pj.Offload.full(),
        "num_microbatches": 4,
        "ring_fill": float("nan"),
    }
    return pj.Pipeline(**{**options, **changes})


def assert_equals_plain(pipe):
    """Loss and gradients of a step, with dropout, against the same model without a pipeline."""
    batch, key = make_batch(2 * pipe.num_microbatches), jax.random.key(7)
    params = pipe.init(jax.random.key(0), batch)
    loss, grads = pipe.value_and_grad(params, batch, key)
    expected, wanted = jax.jit(functools.partial(plain.value_and_grad, pipe))(pipe.to_layers(params), batch, key)
    np.testing.assert_allclose(float(loss), float(expected), rtol=2e-6)
    assert_gradients_close(pipe.to_layers(grads), wanted)


def assert_gradients_close(actual, expected):
    """max|Δ| <= 2e-5 max(the leaf's largest, 1e-3 of the tree's largest), leaf by leaf."""
    actual, expected = jax.device_get((actual, expected))
    top = max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(expected))
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, mine), theirs in pairs:
        limit = 2e-5 * max(float(np.max(np.abs(theirs))), 1e-3 * top)
        worst = float(np.max(np.abs(mine - theirs)))
        assert worst <= limit, f"{jax.tree_util.keystr(path)}: {worst:.2e} > {limit:.2e}"
