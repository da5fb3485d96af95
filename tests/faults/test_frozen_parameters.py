"""Fault 11: integer and frozen parameters that cost as much as trained ones, or reach optax as float0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import EMBED, HEAD, HIDDEN, VOCAB, assert_gradients_close, make_batch, make_pipeline

import pipejax as pj
from pipejax import jaxprs, plain, train

RANK = 2


def _block_init(key, x, batch):
    """A base of int8 with a scale each row, and an adapter of rank 2 in float32 (as in QLoRA)."""
    base, up, down = jax.random.split(key, 3)
    return {
        "base": jax.random.randint(base, (HIDDEN, HIDDEN), -127, 128, jnp.int8),
        "scale": jnp.full(HIDDEN, 0.3 / 127),
        "adapter": {
            "up": jax.random.normal(up, (HIDDEN, RANK)),
            "down": 0.1 * jax.random.normal(down, (RANK, HIDDEN)),
        },
    }


def _block(params, key, x, batch):
    weights = params["base"].astype(jnp.float32) * params["scale"]
    return x + jnp.tanh(x @ weights + x @ params["adapter"]["up"] @ params["adapter"]["down"])


BLOCK = pj.Part(init=_block_init, apply=_block)
INT8_TABLE = pj.Part(
    init=lambda key, batch: {"table": jax.random.randint(key, (VOCAB, HIDDEN), -127, 128, jnp.int8)},
    apply=lambda params, key, batch: params["table"][batch["tokens"]].astype(jnp.float32) / 127,
)
EVERYTHING = pj.Part(  # of which nothing has a gradient
    init=lambda key, x, batch: {"base": BLOCK.init(key, x, batch)["base"]},
    apply=lambda params, key, x, batch: jnp.tanh(x @ (params["base"].astype(jnp.float32) / 127)),
)


def adapters(path):
    return "adapter" in path


@functools.cache
def run(name):
    options = {
        "int8 base": {"block": BLOCK},
        "int8 base, staggered": {"block": BLOCK, "schedule": pj.schedules.GIS(chunks=2), "num_layers": 5},
        "int8 embedding": {"block": BLOCK, "embed": INT8_TABLE, "pipe": 3},
        "int8 blocks": {"block": EVERYTHING},
        "adapters alone": {"block": BLOCK, "trained": adapters, "offload": pj.Offload.none()},
        "tied int8": {"block": BLOCK, "embed": INT8_TABLE, "head": HEAD_OF_INT8, "tied": {"head.table": "embed.table"}},
    }[name]
    pipe = make_pipeline(**options)
    batch = make_batch(8)
    params = pipe.init(jax.random.key(0), batch)
    return pipe, batch, params, *pipe.value_and_grad(params, batch)


HEAD_OF_INT8 = pj.Part(
    init=lambda key, x, batch: {"table": jnp.zeros((VOCAB, HIDDEN), jnp.int8)},
    apply=lambda params, key, x, batch: HEAD.apply({"table": params["table"].astype(jnp.float32) / 127}, key, x, batch),
)
NAMES = ("int8 base", "int8 base, staggered", "int8 embedding", "int8 blocks", "adapters alone", "tied int8")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_gets_the_plain_models_gradients(name):
    pipe, batch, params, loss, grads = run(name)
    expected, wanted = plain.value_and_grad(pipe, pipe.to_layers(params), batch)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-6)
    if name == "tied int8":
        assert not jax.tree.leaves((grads["embed"], grads["head"]))
    assert_gradients_close(pipe.to_layers(grads), wanted)
    for leaf in jax.tree.leaves(grads):
        assert leaf.dtype == jnp.float32
        assert np.asarray(leaf).any()


@pytest.mark.parametrize(("name", "missing"), [("int8 base", 1), ("int8 embedding", 2), ("adapters alone", 4)])
def test_what_is_not_trained_is_missing_from_the_gradients(name, missing):
    pipe, _, params, _, grads = run(name)
    assert len(jax.tree.leaves(params)) - len(jax.tree.leaves(grads)) == missing
    assert grads["layers"]["base"] is None
    jax.tree.map(lambda leaf, grad: None, pipe.keep(params), grads)  # the same places are empty
    assert jax.tree.structure(pipe.fill(grads, params)) == jax.tree.structure(params)


def test_what_is_not_trained_costs_no_product_and_no_accumulator():
    """Accumulators are what the scan over ticks carries."""
    carried, products = {}, {}
    for name, choice in (("all", None), ("adapters", adapters)):
        pipe = make_pipeline(block=BLOCK, trained=choice)
        pipe.describe(make_batch(8))
        eqns = list(jaxprs.all_equations(jax.make_jaxpr(pipe.value_and_grad)(pipe.structs, make_batch(8)).jaxpr))
        scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        carried[name] = {(var.aval.shape, str(var.aval.dtype)) for eqn in scans for var in eqn.outvars}
        products[name] = sum(eqn.primitive.name == "dot_general" for eqn in eqns)
    chunks = (2, 1)  # of a device, and layers of a chunk
    adapter = {((*chunks, HIDDEN, RANK), "float32"), ((*chunks, RANK, HIDDEN), "float32")}
    frozen = {((*chunks, HIDDEN), "float32"), ((VOCAB, HIDDEN), "float32")}
    base = ((*chunks, HIDDEN, HIDDEN), "float32")
    assert base not in carried["all"] | carried["adapters"]
    assert carried["all"] >= adapter | frozen
    assert carried["adapters"] >= adapter
    assert not carried["adapters"] & frozen
    # One product for the scales in each of the two phases with B, one for the head's table in each with F.
    assert products["all"] - products["adapters"] == 4


def test_training_changes_adapters_and_no_bit_of_the_rest(tmp_path):
    """Through optimizer and checkpoint: no moments for integers, no decay, restored in another layout."""

    def make(**changes):
        pipe = make_pipeline(block=BLOCK, num_layers=6, **changes)
        optimizer = train.make_optimizer(train.OptimizerConfig(learning_rate=0.05, warmup_steps=1), steps=10)
        return train.Trainer(pipe, optimizer, batch=make_batch(8), seed=0)

    trainer = make()
    state = trainer.init()
    before = jax.device_get(state.params)
    assert not [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == jnp.int8]
    for step in range(3):
        state, metrics = trainer.step(state, make_batch(8, seed=step))
        assert np.isfinite(float(metrics["loss"]))
    np.testing.assert_array_equal(state.params["layers"]["base"], before["layers"]["base"])
    assert np.any(np.asarray(state.params["layers"]["adapter"]["up"]) != before["layers"]["adapter"]["up"])

    layered = jax.device_get(trainer.to_layers(state))
    checkpoints = train.Checkpoints(tmp_path, trainer, identity={})
    checkpoints.save(state)
    checkpoints.close()
    elsewhere = make(pipe=3, schedule=pj.schedules.OneFOneB())
    checkpoints = train.Checkpoints(tmp_path, elsewhere, identity={})
    restored = elsewhere.to_layers(checkpoints.restore())
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), layered)


def test_parameters_of_other_kinds_are_refused():
    block = pj.Part(init=lambda *_: {"flags": jnp.zeros(3, bool)}, apply=lambda params, key, x, batch: x)
    with pytest.raises(ValueError, match=r"the parameter layers\.flags is bool; parameters are floating-point, or int"):
        make_pipeline(block=block).init(jax.random.key(0), make_batch(8))


def test_a_choice_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"trained chooses none of the parameters: embed\.table, "):
        make_pipeline(embed=EMBED, trained=lambda path: "adaptor" in path).init(jax.random.key(0), make_batch(8))


def test_an_embedding_with_nothing_to_train_has_no_backward():
    counts = []
    for embed in (EMBED, INT8_TABLE):
        pipe = make_pipeline(block=BLOCK, embed=embed)
        pipe.describe(make_batch(8))
        jaxpr = jax.make_jaxpr(pipe.value_and_grad)(pipe.structs, make_batch(8)).jaxpr
        counts.append(sum(eqn.primitive.name == "while" for eqn in jaxprs.all_equations(jaxpr)))
    assert counts[1] == counts[0] - 2  # one in each of the two phases with B
