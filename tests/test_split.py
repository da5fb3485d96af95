"""B and W of a layer: the same gradients as the unsplit backward, bit by bit, and no matrix product twice."""

import collections
import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import strategies
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import pipejax as pj
from pipejax import jaxprs
from pipejax.models import gpt, llama
from pipejax.models.fused_attention import fused_attention
from pipejax.offload import activation_names
from pipejax.runtime.residuals import Layer, analyse
from pipejax.runtime.split import split

X = jnp.array([1.1, -0.7])
W = jnp.array([[0.4, -0.2], [0.7, 0.3]])
SAMPLES, LENGTH, H = 2, 16, 64
CONFIGS = {
    "gpt": (gpt, gpt.Config(vocab_size=32, hidden_size=H, num_heads=4, num_layers=2, max_length=LENGTH)),
    "gpt-dropout": (gpt, gpt.Config(32, hidden_size=H, num_heads=4, num_layers=2, max_length=LENGTH, dropout=0.2)),
    "llama": (llama, llama.Config(vocab_size=32, hidden_size=H, num_heads=4, num_kv_heads=2, mlp_size=96)),
}


def backward_of(block):
    """The backward of block(params, x, batch, key), with its input as the only residual."""

    def backward(params, values, dy, batch, key):
        return jax.vjp(lambda params, x: block(params, x, batch, key), params, values[0])[1](dy)

    return backward


def arguments(block, params, x=X, batch=None, key=None):
    y = jax.eval_shape(lambda: block(params, x, batch, key))
    dy = jax.tree.map(lambda leaf: jnp.linspace(0.5, 1.5, leaf.size).reshape(leaf.shape).astype(leaf.dtype), y)
    return params, (x,), dy, batch, key


def both(halves, params, values, dy, batch, key):
    dx, stash = halves.backward(params, values, dy, batch, key)
    assert [(leaf.shape, leaf.dtype) for leaf in stash] == [(leaf.shape, leaf.dtype) for leaf in halves.stash]
    return halves.weights(params, values, stash, batch, key), dx


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(mine, theirs)


def check(backward, args, run=lambda function: function):
    """Splits a backward; the parts give what the whole does, and all that is heavy is in one of them."""
    halves = split(backward, *args)
    assert_same(run(functools.partial(both, halves))(*args), run(backward)(*args))
    assert not [eqn for eqn in halves.first if eqn in halves.second and jaxprs.is_heavy(eqn)]
    assert counts(halves.backward, *args) + counts(halves.weights, *args[:2], halves.stash, *args[3:]) == counts(
        backward, *args
    )
    return halves


def counts(function, *args):
    """How often a function runs each kind of heavy equation; what its results do not need is left out."""
    jaxpr = jaxprs.flatten(function, *args).jaxpr
    live, found = {id(var) for var in jaxpr.outvars}, collections.Counter()
    for eqn in reversed(jaxpr.eqns):
        if any(id(var) in live for var in eqn.outvars):
            live.update(map(id, eqn.invars))
            found[eqn.primitive.name] += jaxprs.is_heavy(eqn)
    return +found


def stash_bytes(halves):
    return sum(struct.size * struct.dtype.itemsize for struct in halves.stash)


# Blocks of all sorts


def twice(params, x, batch, key):
    return x @ params @ params


def two_halves(params, x, batch, key):
    gate, up = jnp.split(x @ params["up"], 2, axis=-1)
    return jax.nn.silu(gate) * up @ params["down"]


def several_outputs(params, x, batch, key):
    hidden = jnp.tanh(x @ params)
    return {"y": hidden @ params, "aux": jnp.sum(hidden * hidden), "same": hidden}


def no_influence(params, x, batch, key):
    return x @ params["used"]


def whole_numbers(params, x, batch, key):
    return x @ (params["base"].astype(jnp.float32) * params["scale"]) + params["shift"]


def loop_inside(params, x, batch, key):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["loop"])[0] @ params["last"]


def branch_inside(params, x, batch, key):
    return lax.cond(batch["flag"], lambda x: jnp.sin(x @ params), lambda x: 2 * x, x)


def ignores_its_input(params, x, batch, key):
    return params["bias"] * jnp.ones_like(x)


def dropout(params, x, batch, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ params), 0) @ params


@jax.custom_vjp
def _product(x, w):
    return x @ w


_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda rest, dy: (dy @ rest[1].T, jnp.outer(rest[0], dy)))


def calls(params, x, batch, key):
    """Calls of every kind that is opened, and a `custom_vjp` whose forward rule and backward rule are ours."""
    inner = jax.checkpoint(jax.jit(lambda x, w: jax.nn.relu(jax.jit(jnp.matmul)(x, w))))
    return _product(jax.nn.silu(inner(x, params)), params) + lax.stop_gradient(_product(x, params))


BLOCKS = {
    "a weight used twice": (twice, W, {}),
    "an output in two used halves": (
        two_halves,
        {"up": jnp.linspace(-1, 1, 16).reshape(2, 8), "down": jnp.concatenate([W, -W])},
        {},
    ),
    "several outputs": (several_outputs, W, {}),
    "no weights": (lambda params, x, batch, key: jnp.sin(x), {}, {}),
    "the input itself": (lambda params, x, batch, key: x, {}, {}),
    "input plus weight": (lambda params, x, batch, key: x + params, X, {}),
    "weights of no influence": (no_influence, {"used": W, "matrix": W, "scalar": jnp.float32(3)}, {}),
    "integer weights": (
        whole_numbers,
        {"base": jnp.arange(4, dtype=jnp.int8).reshape(2, 2), "scale": X, "shift": X},
        {},
    ),
    "a loop": (loop_inside, {"loop": jnp.stack([W, -W, 2 * W]), "last": W}, {}),
    "a branch": (branch_inside, W, {"batch": {"flag": jnp.bool_(True)}}),
    "an input without influence": (ignores_its_input, {"bias": X}, {}),
    "dropout": (dropout, W, {"key": jax.random.key(3)}),
    "dropout by a side input": (
        lambda params, x, batch, key: dropout(params, x, None, batch["key"]),
        W,
        {"batch": {"key": jax.random.key(3)}},
    ),
    "calls": (calls, W, {}),
}


def test_the_gradient_by_hand():
    """y = x w w, summed: dw = xᵀ(1 wᵀ) + (x w)ᵀ1."""
    params, values, _, *rest = arguments(twice, W)
    halves = split(backward_of(twice), params, values, jnp.ones(2), *rest)
    dw, dx = both(halves, params, values, jnp.ones(2), *rest)
    np.testing.assert_allclose(dw, [[0.17, 1.05], [-0.57, -1.13]], rtol=1e-6)
    np.testing.assert_allclose(dx, [-0.12, 0.44], rtol=1e-6)
    products = [sum(eqn.primitive.name == "dot_general" for eqn in part) for part in (halves.first, halves.second)]
    # B: the two cotangents. W: x w again, since the input is the only residual here, and the two outer products.
    assert products == [2, 3]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_all_sorts(name):
    block, params, more = BLOCKS[name]
    check(backward_of(block), arguments(block, params, **more))


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - {"integer weights"}))  # no compiled function returns float0
def test_blocks_of_all_sorts_compiled(name):
    block, params, more = BLOCKS[name]
    check(backward_of(block), arguments(block, params, **more), jax.jit)


def test_a_block_without_weights_needs_no_stash():
    block, params, _ = BLOCKS["no weights"]
    args = arguments(block, params)
    halves = split(backward_of(block), *args)
    assert (halves.stash, halves.second, halves.weights({}, (X,), (), None, None)) == ((), (), {})


def test_weights_of_no_influence_get_zeros_and_integers_get_none():
    for name, leaf, dtype in (
        ("weights of no influence", "scalar", jnp.float32),
        ("integer weights", "base", jax.dtypes.float0),
    ):
        block, params, _ = BLOCKS[name]
        args = arguments(block, params)
        gradient = both(split(backward_of(block), *args), *args)[0][leaf]
        assert (gradient.dtype, gradient.shape) == (dtype, params[leaf].shape)
        assert dtype == jax.dtypes.float0 or not np.any(gradient)


# Layers as the pipeline runs them


def layer_of(part, params, x, batch, key):
    def block(params, x, batch, key):
        y = part.apply(params, key, checkpoint_name(x, "block_input"), batch)
        return y if isinstance(y, tuple) else (y, jnp.float32(0))

    fates = pj.Offload.none().fates(activation_names(block, params, x, batch, key))
    return Layer(block=block, fates=fates, residuals=analyse(block, fates, params, x, batch, key))


@functools.cache
def model_layer(model, dtype):
    module, config = CONFIGS[model]
    part = pj.as_part(functools.partial(module.Block, dataclasses.replace(config, dtype=dtype)), "block")
    params = part.init(jax.random.key(0))
    key = jax.random.key(4) if model == "gpt-dropout" else None
    batch = {"segment_ids": jnp.repeat(jnp.array([[0, 1]] * SAMPLES, jnp.int32), LENGTH // 2, axis=1)}
    x, dy = (jax.random.normal(jax.random.key(seed), (SAMPLES, LENGTH, H), dtype) for seed in (1, 2))
    layer = layer_of(part, params, x, batch, key)
    with jax.numpy_dtype_promotion("standard"):  # JAX's lowering of bfloat16 attention promotes, in any model
        _, _, values = jax.jit(layer.forward)(params, x, batch, key)
    return layer, (params, values, dy, batch, key)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("model", CONFIGS)
def test_models(model, dtype):
    layer, args = model_layer(model, dtype)
    with jax.numpy_dtype_promotion("standard"):
        halves = check(layer.backward, args, jax.jit)
    # Two of each of four matrices, one in B and one in W; attention's scores again, and the four of its backward.
    products = [sum(eqn.primitive.name == "dot_general" for eqn in part) for part in (halves.first, halves.second)]
    assert products == [4 + 5, 4]


@pytest.mark.parametrize("model", CONFIGS)
def test_what_models_hand_over(model):
    """The cotangents of each matrix' output (of what a gate multiplies, not of both factors), and next to no more."""
    layer, args = model_layer(model, jnp.bfloat16)
    halves = split(layer.backward, *args)
    h, mlp, qkv = H, *{"llama": (96, 2 * H)}.get(model, (4 * H, 3 * H))
    large = 2 * SAMPLES * LENGTH * (h + mlp + h + qkv)
    # By token, mean and deviation of each norm. By feature, gradients of scales and biases.
    assert large <= stash_bytes(halves) <= large + 4 * (4 * SAMPLES * LENGTH + 8 * h)
    assert {struct.dtype for struct in halves.stash if struct.size >= SAMPLES * LENGTH * H} == {jnp.dtype("bfloat16")}


def test_the_toy_block():
    x = jax.random.normal(jax.random.key(0), (SAMPLES, toy.LENGTH, toy.HIDDEN))
    batch, key = toy.make_batch(SAMPLES), jax.random.key(5)
    params = toy.BLOCK.init(key, x, batch)
    layer = layer_of(toy.BLOCK, params, x, batch, key)
    _, _, values = layer.forward(params, x, batch, key)
    check(layer.backward, (params, values, 2 * x, batch, key), jax.jit)


def test_a_kernel_runs_once():
    """A fused kernel is taken whole: B runs its backward, and W gets what that gives."""
    shape = (1, 16, 2, 16)

    def block(params, x, batch, key):
        query, key, value = (jnp.reshape(x @ w, shape) for w in params)
        return fused_attention(query, key, value, None, True, True).reshape(x.shape)

    params = tuple(jax.random.normal(jax.random.key(seed), (32, 32)) / 8 for seed in range(3))
    x = jax.random.normal(jax.random.key(4), (1, 16, 32))
    halves = check(backward_of(block), arguments(block, params, x), jax.jit)
    names = [[eqn.primitive.name for eqn in part] for part in (halves.first, halves.second)]
    assert "pallas_call" in names[0]
    assert "pallas_call" not in names[1]


# What is handed over


def test_views_of_one_value_are_handed_over_once():
    def block(params, x, batch, key):
        return x @ params["a"] + (x.reshape(4, 8).T.reshape(32) @ params["b"]).astype(jnp.float32)

    params = {"a": jnp.ones((32, 32)), "b": jnp.ones((32, 32))}
    halves = check(backward_of(block), arguments(block, params, jnp.linspace(0, 1, 32)))
    assert [struct.shape for struct in halves.stash] == [(32,)]


def sines(x, times):
    for _ in range(times):
        x = jnp.sin(x)
    return x


def test_what_depends_on_weights_and_side_inputs_alone_is_not_handed_over():
    """However long it takes to make it again."""

    def block(params, x, batch, key):
        noise = sines(jax.random.uniform(key, x.shape) * jnp.exp(batch), times=50)
        return x * (noise @ params)

    args = arguments(block, jnp.ones((32, 32)), jnp.ones((64, 32)), jnp.ones((64, 32)), jax.random.key(0))
    halves = check(backward_of(block), args)
    assert [struct.shape for struct in halves.stash] == [(64, 32)]  # dy x
    assert sum(eqn.primitive.name == "sin" for eqn in halves.second) == 50


@pytest.mark.parametrize(("times", "handed"), [(5, 1), (50, 2)])
def test_what_takes_long_to_make_again_is_handed_over(times, handed):
    """Besides dy: what the matrix multiplies, once it is many equations away from the residuals."""

    def block(params, x, batch, key):
        return sines(x, times) @ params

    halves = check(backward_of(block), arguments(block, jnp.ones((32, 32)), jnp.ones((64, 32))))
    assert [struct.shape for struct in halves.stash] == [(64, 32)] * handed
    assert sum(eqn.primitive.name == "sin" for eqn in halves.second) == (times if handed == 1 else 0)


def test_sums_are_handed_over_and_not_what_is_summed():
    def block(params, x, batch, key):
        return jnp.tanh(x * params["scale"] + params["bias"]) @ params["w"]

    params = {"w": jnp.eye(32), "scale": jnp.ones(32), "bias": jnp.ones(32)}
    halves = check(backward_of(block), arguments(block, params, jnp.ones((64, 32))))
    assert sorted(struct.size for struct in halves.stash) == [32, 32, 64 * 32]


def test_keys_can_be_handed_over():
    """A key that comes out of a loop over what B alone has."""

    def block(params, x, batch, key):
        turns = lax.stop_gradient(x).astype(jnp.int32).ravel()[:3]
        key, _ = lax.scan(lambda key, turn: (jax.random.fold_in(key, turn), None), key, turns)
        return (x * jax.random.uniform(key, x.shape)) @ params

    args = arguments(block, W, jnp.linspace(-3, 3, 64).reshape(32, 2), key=jax.random.key(1))
    halves = check(backward_of(block), args, jax.jit)
    assert [struct for struct in halves.stash if jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key)]


def test_the_stash_has_one_order():
    """That of the program, on every process alike."""
    layer, args = model_layer("gpt", jnp.float32)
    halves = split(layer.backward, *args)
    order = [*halves.jaxpr.invars, *(var for eqn in halves.jaxpr.eqns for var in eqn.outvars)]
    positions = [order.index(var) for var in halves.handed]
    assert positions == sorted(positions)


# Where it runs


def test_shapes_are_enough_to_split():
    layer, args = model_layer("llama", jnp.float32)
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    halves = split(layer.backward, *structs)
    assert_same(jax.jit(functools.partial(both, halves))(*args), jax.jit(layer.backward)(*args))


def scaled(w):
    return backward_of(lambda params, x, batch, key: jnp.tanh(x @ params) * jnp.sum(w))


def whole_step(w, x):
    return scaled(w)(w, (x,), jnp.ones(2), None, None)


def split_step(w, x):
    args = (w, (x,), jnp.ones(2), None, None)
    return both(split(scaled(w), *args), *args)


def test_inside_loops_closing_over_what_changes():
    def descend(step):
        return jax.jit(
            lambda: lax.fori_loop(0, 3, lambda _, now: jax.tree.map(jnp.subtract, now, step(*now)), (W, X))
        )()

    assert_same(descend(split_step), descend(whole_step))


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_shard_map_with_collectives(check_vma):
    def block(params, x, batch, key):
        return lax.psum(jnp.tanh(x @ params), "i") @ params

    def on_devices(step):
        def device(w, x):
            return jax.tree.map(lambda leaf: leaf[None], step(w[0], (x[0],), 2 * x[0], None, None))

        spec = PartitionSpec("i")
        mapped = jax.shard_map(device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=check_vma)
        return jax.jit(mapped)(jnp.stack([W, 2 * W]), jnp.stack([X, -X]))

    def by_parts(*args):
        halves = split(backward_of(block), *args)
        split_runs.append(
            [sum(eqn.primitive.name.startswith("psum") for eqn in part) for part in (halves.first, halves.second)]
        )
        return both(halves, *args)

    mesh, split_runs = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,)), []
    assert_same(on_devices(by_parts), on_devices(backward_of(block)))
    # One where the block has it, which only W needs, and its transpose on the way to dx (an equation of another name
    # where JAX tracks what varies).
    assert split_runs[0] in ([1, 1], [0, 1])


def test_side_effects_are_refused():
    def block(params, x, batch, key):
        jax.debug.print("{}", x)
        return x @ params

    with pytest.raises(ValueError, match=r"side effects \['Debug'\]; take prints and callbacks out of the block\.$"):
        split(backward_of(block), *arguments(block, W))


@pytest.mark.parametrize("model", ["gpt", "no matrix product", "no weights"])
def test_midway_is_called_once_by_each_part(model):
    if model == "gpt":
        layer, args = model_layer("gpt", jnp.float32)
        backward = layer.backward
    else:
        weights = {"no matrix product": X, "no weights": {}}[model]
        block = {"no matrix product": lambda params, x, batch, key: x * params}.get(model, BLOCKS["no weights"][0])
        backward, args = backward_of(block), arguments(block, weights)
    halves, seen = split(backward, *args), []

    def midway(value):
        seen.append(value.shape)
        return value

    def halfway(params, values, dy, batch, key):
        dx, stash = halves.backward(params, values, dy, batch, key, midway=midway)
        assert len(seen) == 1
        return halves.weights(params, values, stash, batch, key, midway=midway), dx

    assert_same(jax.jit(halfway)(*args), jax.jit(backward)(*args))
    assert len(seen) == 2


# Of JAX's own, what pipejax.jaxprs leans on


def closed(function, *args):
    return {eqn.primitive.name for eqn in jaxprs.flatten(function, *args).jaxpr.eqns if list(jaxprs.sub_jaxprs(eqn))}


def test_calls_are_opened():
    """A JAX that renames one of them fails here, and not by more in the stash than need be."""
    assert closed(calls, W, X, None, None) == {"custom_vjp_call"}
    assert closed(backward_of(calls), *arguments(calls, W)) == set()
    layer, args = model_layer("gpt-dropout", jnp.float32)
    assert closed(layer.backward, *args) == set()


def test_equations_keep_the_names_that_profiles_show():
    def block(params, x, batch, key):
        with jax.named_scope("mine"):
            return jnp.tanh(x @ params)

    args = arguments(block, W)
    halves = split(backward_of(block), *args)
    for part in (halves.first, halves.second):
        assert any("mine" in str(eqn.source_info.name_stack) for eqn in part)
    text = jax.jit(lambda *args: both(halves, *args)).lower(*args).as_text(debug_info=True)
    assert "mine" in text


# Random blocks

STEPS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from(["matrix", "scale", "bias", "tanh", "gate", "norm", "add"]), strategies.integers(0, 2)
    ),
    min_size=1,
    max_size=7,
)


def random_step(step, index, params, x, other):
    matrix, vector = params["matrices"][index], params["vectors"][index]
    return {
        "matrix": lambda: x @ matrix,
        "scale": lambda: x * vector,
        "bias": lambda: x + vector,
        "tanh": lambda: jnp.tanh(x),
        "gate": lambda: x * jax.nn.sigmoid(other),
        "norm": lambda: x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3),
        "add": lambda: x + other,
    }[step]()


@hypothesis.given(STEPS)
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_random_blocks(steps):
    def block(params, x, batch, key):
        earlier = [x]
        for step, index in steps:
            earlier.append(random_step(step, index, params, earlier[-1], earlier[index % len(earlier)]))
        return earlier[-1]

    params = {"matrices": jnp.linspace(-1, 1, 48).reshape(3, 4, 4), "vectors": jnp.linspace(0.5, 2, 12).reshape(3, 4)}
    check(backward_of(block), arguments(block, params, jnp.linspace(-2, 2, 24).reshape(6, 4)))
