"""Fault 7: side inputs that reach a layer with another microbatch's activations, or are cut where they must not be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import BLOCK, EMBED, HIDDEN, LENGTH, assert_gradients_close, make_batch, make_pipeline

import pipejax as pj
from pipejax import plain

KINDS = 3


def _embed(params, key, batch):
    return params["table"][batch["tokens"]] + jnp.sin(batch["positions"])[..., None]


def _block(params, key, x, batch):
    """A mixer over positions with a mask, an additive bias and segment ids of each sample, in every layer."""
    scores = x @ params["up"][:, :HIDDEN] @ x.swapaxes(-1, -2) + params["table"][batch["kind"]]
    same = batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None, :]
    scores = jnp.where(same & batch["mask"][:, None, :], scores, -1e9)
    mixed = jax.nn.softmax(scores) @ x
    return x + jnp.tanh(mixed @ params["down"][:HIDDEN]) + 0.1 * batch["shift"][:, None, None]


def _block_init(key, x, batch):
    return {**BLOCK.init(key, x, batch), "table": jax.random.normal(key, (KINDS, LENGTH, LENGTH))}


def _head(params, key, x, batch):
    """Weights so uneven that each sample's own output shows in the loss."""
    return jnp.sum(x * batch["probe"][:, None, None]), jnp.float32(1)


PARTS = {
    "embed": pj.Part(init=EMBED.init, apply=_embed),
    "block": pj.Part(init=_block_init, apply=_block),
    "head": pj.Part(init=lambda *_: {}, apply=_head),
}


def batch_of(samples):
    """No two samples have the same side inputs; `kind` picks the bias, whose gradient is a sum over samples."""
    keys = jax.random.split(jax.random.key(3), 4)
    lengths = 2 + jnp.arange(samples, dtype=jnp.int32) % (LENGTH - 1)
    return {
        "tokens": make_batch(samples)["tokens"],
        "positions": jax.random.uniform(keys[0], (samples, LENGTH)),
        "mask": jnp.arange(LENGTH) < lengths[:, None],
        "segment_ids": jnp.cumsum(jax.random.bernoulli(keys[1], 0.3, (samples, LENGTH)), axis=1),
        "kind": jnp.arange(samples, dtype=jnp.int32) % KINDS,
        "shift": jax.random.normal(keys[2], (samples,)),
        "probe": 2.0 ** jnp.arange(samples, dtype=jnp.float32),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"pipe": 3, "num_layers": 7, "num_microbatches": 5},
        {"schedule": pj.schedules.POH(chunks=2), "num_layers": 5, "num_microbatches": 6},
    ],
    ids=["interleaved", "po-h"],
)
def test_every_layer_sees_its_own_samples_side_inputs(changes):
    pipe = make_pipeline(**PARTS, **changes)
    batch = batch_of(2 * pipe.num_microbatches)
    params = pipe.init(jax.random.key(0), batch)
    loss, grads = pipe.value_and_grad(params, batch)
    expected, wanted = plain.value_and_grad(pipe, pipe.to_layers(params), batch)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)
    grads = pipe.to_layers(grads)
    assert_gradients_close(grads, wanted)
    assert np.abs(grads["layers"]["table"]).max(axis=(2, 3)).min() > 0  # every kind, in every layer


def test_each_samples_output_is_its_own():
    """The loss is linear in the probe, so that each sample's output shows by itself."""
    pipe = make_pipeline(**PARTS, pipe=3, num_layers=7, num_microbatches=4)
    batch = batch_of(8)
    params = pipe.init(jax.random.key(0), batch)
    layered = pipe.to_layers(params)
    x, _ = jax.jit(lambda params, batch: plain.hidden(pipe, params, batch))(layered, batch)
    for sample in range(8):
        probe = jnp.zeros(8).at[sample].set(1.0)
        alone = float(pipe.loss(params, {**batch, "probe": probe}))
        np.testing.assert_allclose(alone * 4, float(jnp.sum(x[sample])), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("cu_seqlens", np.array([0, 2, 5, 7, 10], np.int32)),
        ("mask", np.ones((LENGTH, LENGTH), bool)),
        ("temperature", np.float32(1)),
    ],
)
def test_what_has_no_axis_of_samples_is_refused_and_never_cut(name, leaf):
    with pytest.raises(ValueError, match="needs the same leading axis, its samples") as caught:
        make_pipeline().init(jax.random.key(0), {**make_batch(8), name: leaf})
    message = str(caught.value)
    assert f"'{name}']\": {len(leaf) if leaf.ndim else 0}" in message
    assert "What all samples share, compute in the part" in message
    assert "cumulative offsets pass segment ids of each sample" in message
    assert "\n" not in message


def test_offsets_rebuilt_from_segment_ids_are_those_of_the_microbatch():
    """Samples of 2, 3, 2 and 3 tokens, two in a microbatch: [0, 2, 5] in each, and never [7, 10]."""
    seen = []

    def embed(params, key, batch):
        lengths = jnp.sum(batch["mask"], axis=1, dtype=jnp.int32)
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])
        jax.debug.callback(lambda value: seen.append(value.tolist()), offsets)
        return params["table"][batch["tokens"]]

    pipe = make_pipeline(embed=pj.Part(init=EMBED.init, apply=embed), num_microbatches=2)
    batch = {**make_batch(4), "mask": jnp.arange(LENGTH) < jnp.array([2, 3, 2, 3])[:, None]}
    params = pipe.init(jax.random.key(0), batch)
    seen.clear()
    pipe.loss(params, batch).block_until_ready()
    jax.effects_barrier()
    assert seen == [[0, 2, 5], [0, 2, 5]]
