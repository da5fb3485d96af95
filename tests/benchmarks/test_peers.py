"""The programs that are compared compute the same loss and gradients, so that none is lean by leaving work out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax as pj
from benchmarks import stacks
from benchmarks.stack import Sizes, block, layer_structs, loss

SIZES = Sizes(hidden=16, length=4, devices=2, chunks=2, microbatches=5)


def arrays():
    keys = iter(jax.random.split(jax.random.key(0), 10))
    normal = lambda shape, scale: (scale * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)
    params = {name: normal((SIZES.layers, *leaf.shape), 0.2) for name, leaf in layer_structs(SIZES).items()}
    return params, normal(SIZES.inputs.shape, 1.0), normal(SIZES.inputs.shape, 1.0)


def plain(params, inputs, cotangents):
    def total(params):
        return sum(
            loss(jax.lax.scan(lambda x, layer: (block(layer, x), None), x[None], params)[0], c[None])
            for x, c in zip(inputs, cotangents, strict=True)
        )

    return jax.value_and_grad(total)(params)


def layer_major(name, leaf):
    """Leaves as a program has them to [layers, ...]: stage s = chunk * devices + device."""
    if leaf.shape[0] == SIZES.layers:
        return leaf
    if leaf.shape[1] == 1 and leaf.shape[2] > 1:  # one chunk of several layers
        return leaf[:, 0].reshape(SIZES.layers, *leaf.shape[3:])
    leaf = jnp.swapaxes(leaf, 0, 1)
    return leaf.reshape(SIZES.layers, *layer_structs(SIZES)[name].shape)


def stacked_as(leaf, struct):
    if struct.shape[0] == SIZES.layers:
        return leaf
    if struct.shape[1] == 1:
        return leaf.reshape(struct.shape)
    return jnp.swapaxes(leaf.reshape(SIZES.chunks, SIZES.devices, *leaf.shape[1:]), 0, 1).reshape(struct.shape)


# One of each kind; the others differ from these in what is kept for the backward pass.
QUICK = (
    "circular, autodiff, named activations saved",
    "tensor parallel, full recomputation",
    "data parallel, full recomputation",
    "pipejax interleaved, full offload",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in stacks.ROWS]
)
def test_same_loss_and_gradients(name):
    program = stacks.ROWS[name](SIZES, pj.make_mesh(pipe=SIZES.devices))
    params, inputs, cotangents = arrays()
    value, grads = plain(params, inputs, cotangents)
    structs = program.arguments[0]
    found, found_grads = program.step(
        {key: jax.device_put(stacked_as(leaf, structs[key]), structs[key].sharding) for key, leaf in params.items()},
        inputs,
        cotangents,
    )
    assert float(found) == pytest.approx(float(value), rel=0.02, abs=0.5)
    for key, grad in grads.items():
        mine = np.asarray(layer_major(key, found_grads[key]), np.float32)
        np.testing.assert_allclose(mine, np.asarray(grad, np.float32), atol=0.04 * float(jnp.abs(grad).max()))
