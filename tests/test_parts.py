"""Flax linen modules, nnx factories and plain functions as pure functions, and through the pipeline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from toy import EMBED, HEAD, HIDDEN, assert_gradients_close, make_batch, make_pipeline

import pipejax as pj
from pipejax import plain
from pipejax.models.vocabulary import token_loss

WORDS = 17  # not divided by 2 devices
X = jax.random.normal(jax.random.key(0), (2, 5, HIDDEN))


class NnxBlock(nnx.Module):
    def __init__(self, rate=0.5, *, rngs):
        self.layers = nnx.List([nnx.Linear(HIDDEN, HIDDEN, rngs=rngs) for _ in range(2)])
        self.dropouts = nnx.List([nnx.Dropout(rate, rngs=rngs) for _ in range(2)])

    def __call__(self, x, batch):
        for layer, dropout in zip(self.layers, self.dropouts, strict=True):
            x = x + dropout(jnp.tanh(checkpoint_name(layer(x), "inner")))
        return x

    def doubled(self, x):
        return 2 * x

    def masks(self, x):
        return [dropout(jnp.ones_like(x)) for dropout in self.dropouts]


class LinenBlock(linen.Module):
    rate: float = 0.5

    @linen.compact
    def __call__(self, x, batch, deterministic):
        x = x + jnp.tanh(checkpoint_name(linen.Dense(HIDDEN)(x), "inner"))
        return linen.Dropout(self.rate, deterministic=deterministic)(x)


BLOCKS = {"nnx": NnxBlock, "linen": LinenBlock()}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_parameters_are_nested_dicts_and_follow_from_the_key(block):
    part = pj.as_part(block, "block")
    one, two, other = (part.init(jax.random.key(seed), X, {}) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert all(isinstance(key.key, str) for path, _ in jax.tree_util.tree_leaves_with_path(one) for key in path)
    kernels = [tree[next(iter(tree))] for tree in (one, other)]
    assert not np.array_equal(jax.tree.leaves(kernels[0])[-1], jax.tree.leaves(kernels[1])[-1])


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_keys_switch_dropout(block):
    part = pj.as_part(block, "block")
    params = part.init(jax.random.key(1), X, {})
    apply = jax.jit(lambda key: part.apply(params, key, X, {}))
    np.testing.assert_array_equal(apply(None), apply(None))
    np.testing.assert_array_equal(apply(jax.random.key(1)), apply(jax.random.key(1)))
    assert not np.array_equal(apply(jax.random.key(1)), apply(jax.random.key(2)))
    assert not np.array_equal(apply(jax.random.key(1)), apply(None))


def test_no_two_dropouts_of_a_module_are_alike():
    part = pj.as_part(functools.partial(NnxBlock, 0.5), "block")
    first, second = part.apply(part.init(jax.random.key(0)), jax.random.key(1), X, method="masks")
    assert not np.array_equal(first, second)


def test_other_methods_can_be_called():
    part = pj.as_part(NnxBlock, "block")
    np.testing.assert_array_equal(part.apply(part.init(jax.random.key(0)), None, X, method="doubled"), 2 * X)


def test_parts_pass_as_they_are():
    assert pj.as_part(EMBED, "embed") is EMBED


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_gradients_through_the_pipeline(block):
    pipe = make_pipeline(embed=EMBED, block=block, head=HEAD, num_layers=5)
    batch, key = make_batch(8), jax.random.key(3)
    params = pipe.init(jax.random.key(0), batch)
    loss, grads = pipe.value_and_grad(params, batch, key)
    expected, wanted = plain.value_and_grad(pipe, pipe.to_layers(params), batch, key)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-6)
    assert_gradients_close(pipe.to_layers(grads), wanted)


class NnxBatchNorm(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)


class LinenBatchNorm(linen.Module):
    @linen.compact
    def __call__(self, x, batch):
        return linen.BatchNorm(use_running_average=False)(x)


class NnxConstant(nnx.Module):
    def __init__(self, *, rngs):
        self.table = jnp.arange(3.0)  # nnx takes it for a static value: as_part's trace would leak into apply
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)


def test_state_besides_parameters_is_refused_in_one_sentence():
    for block, names in ((NnxBatchNorm, r"norm\.mean, norm\.var"), (NnxConstant, "table")):
        sentence = rf"^block: {block.__name__} keeps state besides its parameters \({names}\); [^\n]*\.$"
        with pytest.raises(ValueError, match=sentence):
            pj.as_part(block, "block")
    with pytest.raises(ValueError, match="block: LinenBatchNorm keeps batch_stats besides its parameters"):
        pj.as_part(LinenBatchNorm(), "block").init(jax.random.key(0), X, {})


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"head: pass a linen module, .* not int"):
        pj.as_part(3, "head")
    with pytest.raises(ValueError, match=r"not NnxBlock"):
        pj.as_part(NnxBlock(rngs=nnx.Rngs(0)), "block")
    with pytest.raises(ValueError, match="block: LinenBlock is a linen class; pass an instance"):
        pj.as_part(LinenBlock, "block")
    with pytest.raises(ValueError, match="does not take the keyword `rngs`"):
        pj.as_part(lambda: None, "block")
    with pytest.raises(ValueError, match=r"must return an nnx\.Module"):
        pj.as_part(lambda rngs: 3, "block")


def test_a_factorys_own_mistakes_are_its_own():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'rngs'"):
        pj.as_part(lambda rngs: nnx.Linear(3, 3), "block")


class NnxOddities(nnx.Module):
    """One layer under two names, an integer parameter, a random stream of its own."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.second = self.first
        self.count = nnx.Param(jnp.arange(3))
        self.rngs = rngs

    def __call__(self, x, batch):
        return self.second(self.first(x)) + jax.random.normal(self.rngs.noise(), x.shape)


def test_shared_layers_integers_and_streams_of_any_name():
    part = pj.as_part(NnxOddities, "block")
    params = part.init(jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.dtype.name, params) == {
        "first": {"bias": "float32", "kernel": "float32"},
        "count": "int32",
    }
    noisy = [part.apply(params, jax.random.key(seed), X, {}) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert not np.allclose(noisy[0], noisy[2])


class NnxHead(nnx.Module):
    split_parameters = ("inner.table",)

    def __init__(self, *, rngs):
        self.inner = nnx.Module()
        self.inner.table = nnx.Param(jax.random.normal(rngs.params(), (WORDS, HIDDEN)))

    def __call__(self, x, batch, *, axis=None):
        return token_loss(x, self.inner.table[...], batch, vocab_size=WORDS, axis=axis)


class LinenHead(linen.Module):
    split_parameters = ("table",)

    @linen.compact
    def __call__(self, x, batch, deterministic, axis=None):
        rows = WORDS if axis is None else -(-WORDS // jax.lax.axis_size(axis))
        table = self.param("table", linen.initializers.normal(1.0), (rows, HIDDEN))
        return token_loss(x, table, batch, vocab_size=WORDS, axis=axis)


def _plain_head(params, key, x, batch, axis=None):
    return token_loss(x, params["table"], batch, vocab_size=WORDS, axis=axis)


HEADS = {
    "nnx": NnxHead,
    "linen": LinenHead(),
    "plain": pj.Part(
        init=lambda key, *_: {"table": jax.random.normal(key, (WORDS, HIDDEN))}, apply=_plain_head, split=("table",)
    ),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_parts_whose_parameters_are_cut_over_devices(head):
    """Parameters are made whole, whoever made the part; its functions take any share of them."""
    pipe = make_pipeline(embed=EMBED, block=BLOCKS["nnx"], head=head, num_layers=2)
    part, batch = pipe.head, make_batch(8)
    whole = part.init(jax.random.key(0), X, make_batch(2))
    assert [leaf.shape for leaf in jax.tree.leaves(whole)] == [(WORDS, HIDDEN)]
    params = pipe.init(jax.random.key(0), batch)
    loss, grads = pipe.value_and_grad(params, batch)
    expected, wanted = plain.value_and_grad(pipe, pipe.to_layers(params), batch)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-6)
    assert_gradients_close(pipe.to_layers(grads), wanted)


class NoAxis(NnxHead):
    def __call__(self, x, batch):
        return super().__call__(x, batch)


class StringSplit(NnxHead):
    split_parameters = "table"


class LinenWhole(linen.Module):
    split_parameters = ("table",)

    @linen.compact
    def __call__(self, x, batch, axis=None):
        return x @ self.param("table", linen.initializers.normal(1.0), (WORDS, HIDDEN))


def test_splits_that_cannot_work_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"^head: NoAxis splits inner\.table over devices, but its __call__ does not"):
        pj.as_part(NoAxis, "head")
    with pytest.raises(ValueError, match=r"^head: StringSplit splits the string 'table'; .* as in \('table',\)\.$"):
        pj.as_part(StringSplit, "head")
    with pytest.raises(ValueError, match=r"^pj\.Part splits table over devices, but its apply does not take"):
        pj.Part(init=lambda key: {}, apply=lambda params, key, x, batch: x, split=("table",))
    part = pj.as_part(LinenWhole(), "head")
    with pytest.raises(ValueError, match=r"^LinenWhole asks for whole parameters though `axis` is given; let it ask"):
        jax.eval_shape(
            lambda table: part.apply({"table": table}, None, X, {}, axis="pipe"),
            jax.ShapeDtypeStruct((3, HIDDEN), jnp.float32),
        )


def test_nothing_is_allocated_to_know_a_module():
    class Huge(nnx.Module):
        def __init__(self, *, rngs):
            self.table = nnx.Param(jnp.zeros((2**20, 2**20)))

    shapes = jax.eval_shape(pj.as_part(Huge, "embed").init, jax.random.key(0))
    assert shapes["table"].shape == (2**20, 2**20)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_parts_stand_under_any_transformation_and_leak_nothing(block):
    """As the pipeline uses them: vmap over layers to make, scan, checkpoint, gradient and jit to run."""
    part = pj.as_part(block, "block")

    def loss(params, key):
        def layer(x, item):
            params, key = item
            return jax.checkpoint(lambda p, x: part.apply(p, key, x, {}))(params, x), None

        return jnp.sum(jax.lax.scan(layer, X, (params, jax.random.split(key, 3)))[0])

    with jax.checking_leaks():
        params = jax.jit(jax.vmap(lambda key: part.init(key, X, {})))(jax.random.split(jax.random.key(0), 3))
        grads = jax.jit(jax.grad(loss))(params, jax.random.key(1))
    assert all(leaf.shape[0] == 3 and np.any(leaf) for leaf in jax.tree.leaves(grads))
