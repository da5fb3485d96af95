"""The pipeline against the plain model, feature by feature, on a toy model; whole models: test_gradients.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import BLOCK, HIDDEN, assert_gradients_close, make_batch, make_pipeline

import pipejax as pj
from pipejax import plain

KEY = jax.random.key(11)


def compare(pipe, batch, key=None):
    params = pipe.init(jax.random.key(0), batch)
    loss, grads = pipe.value_and_grad(params, batch, key)
    layered = pipe.to_layers(params)
    expected_loss, expected = plain.value_and_grad(pipe, layered, batch, key)
    np.testing.assert_allclose(float(loss), float(expected_loss), rtol=1e-6)
    assert_gradients_close(pipe.to_layers(grads), expected)
    return params, loss, grads


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipe": 1, "num_layers": 3},
        {"pipe": 4, "num_layers": 7, "num_microbatches": 3},
        {"pipe": 3, "num_layers": 14, "num_microbatches": 7},
        {"pipe": 8, "num_layers": 5, "schedule": pj.schedules.OneFOneB()},
        {"schedule": pj.schedules.GPipe(chunks=1), "offload": pj.Offload.none()},
        {"offload": pj.Offload.none(recomputed=["up"])},
        {"offload": pj.Offload.full(saved=["normed"])},
        {"offload": pj.Offload(offloaded=("block_input",))},
    ],
    ids=str,
)
def test_gradients_equal_the_plain_model(changes):
    """With dropout, weights per token, a side input per sample, an auxiliary loss, NaN in every ring."""
    pipe = make_pipeline(**changes)
    compare(pipe, make_batch(2 * pipe.num_microbatches), KEY)


def test_fillers_are_zero_and_get_no_gradient():
    pipe = make_pipeline(pipe=4, num_layers=5)
    params, _, grads = compare(pipe, make_batch(8), KEY)
    filler = pipe.layout.layer < 0
    for leaf in jax.tree.leaves((params["layers"], grads["layers"])):
        assert not np.asarray(leaf)[filler].any()
    for leaf in jax.tree.leaves(pipe.to_layers(grads)["layers"]):
        assert all(np.asarray(layer).any() for layer in leaf)


@pytest.mark.parametrize("tie", [{}, {"head.table": "embed.table"}])
@pytest.mark.parametrize("pipe", [1, 4])
def test_tied_weights_sum_both_uses(pipe, tie):
    pipeline = make_pipeline(pipe=pipe, tied=tie)
    params, _, grads = compare(pipeline, make_batch(8))
    assert ("table" in params["head"]) == ("table" in grads["head"]) == (not tie)


def test_the_same_key_gives_the_same_model_everywhere():
    batch = make_batch(4)
    models = []
    for pipe, chunks in ((1, 1), (2, 2), (4, 1), (2, 3)):
        pipeline = make_pipeline(pipe=pipe, num_layers=6, schedule=pj.schedules.Interleaved(chunks=chunks))
        models.append(pipeline.to_layers(pipeline.init(jax.random.key(3), batch)))
    for model in models[1:]:
        jax.tree.map(np.testing.assert_array_equal, models[0], model)
    for leaf in (models[0]["layers"]["up"], models[0]["layers"]["down"]):
        assert len({layer.tobytes() for layer in np.asarray(leaf)}) == 6


def test_embedding_and_head_rest_in_shards():
    """Each device holds its part: 1/4 of a table that 4 devices divide, and its own layers."""
    pipe = make_pipeline(pipe=4)
    params = pipe.init(jax.random.key(0), make_batch(8))
    grads = pipe.value_and_grad(params, make_batch(8))[1]
    for tree in (params, grads):
        for leaf in (tree["embed"]["table"], tree["head"]["table"]):
            assert {shard.data.shape for shard in leaf.addressable_shards} == {(4, HIDDEN)}
        assert {shard.data.shape[0] for shard in tree["layers"]["up"].addressable_shards} == {1}


def test_dropout_does_not_depend_on_the_pipeline():
    batch = make_batch(8)
    losses = []
    for changes in (
        {"pipe": 1, "offload": pj.Offload.none()},
        {"pipe": 4, "schedule": pj.schedules.OneFOneB()},
        {"pipe": 2, "offload": pj.Offload.none(recomputed=["up", "normed"])},
    ):
        pipeline = make_pipeline(**changes)
        params = pipeline.init(jax.random.key(0), batch)
        losses.append(float(pipeline.value_and_grad(params, batch, KEY)[0]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    other = float(pipeline.value_and_grad(params, batch, jax.random.key(12))[0])
    assert abs(other - losses[0]) > 1e-3


def test_the_loss_is_no_mean_of_means():
    """Token losses {1} and {3, 5, 7} in two microbatches give 4, not 3."""
    head = pj.Part(
        init=lambda key, x, batch: {"unused": jnp.zeros(2)},
        apply=lambda params, key, x, batch: (
            jnp.sum(batch["value"] * batch["weights"]) + 0 * jnp.sum(x),
            jnp.sum(batch["weights"]),
        ),
    )
    block = pj.Part(init=BLOCK.init, apply=lambda params, key, x, batch: x + params["scale"])
    batch = {
        **make_batch(2),
        "value": jnp.array([[1.0, 0, 0], [3, 5, 7]]),
        "weights": jnp.array([[1.0, 0, 0], [1, 1, 1]]),
    }
    for microbatches in (1, 2):
        pipe = make_pipeline(head=head, block=block, num_microbatches=microbatches)
        assert float(pipe.loss(pipe.init(KEY, batch), batch)) == 4.0


def test_loss_and_gradients_do_not_depend_on_the_number_of_microbatches():
    batch = make_batch(8)
    results = []
    for microbatches in (1, 2, 8):
        pipe = make_pipeline(num_microbatches=microbatches)
        results.append(pipe.value_and_grad(pipe.init(jax.random.key(0), batch), batch))
    for loss, grads in results[1:]:
        np.testing.assert_allclose(float(loss), float(results[0][0]), rtol=1e-6)
        assert_gradients_close(grads, results[0][1])


def test_evaluation_between_training_steps():
    pipe = make_pipeline(pipe=4, num_layers=6)
    batch = make_batch(8)
    params = pipe.init(jax.random.key(0), batch)
    for _ in range(2):
        evaluated = float(pipe.loss(params, batch))
        loss, grads = pipe.value_and_grad(params, batch)
        np.testing.assert_allclose(evaluated, float(loss), rtol=1e-6)
        params = jax.tree.map(lambda leaf, grad: leaf - 1e-3 * grad, params, grads)
    assert float(pipe.loss(params, batch)) < evaluated


def test_bfloat16_parameters_accumulate_float32_gradients():
    def cast(part):
        return pj.Part(
            init=lambda *args: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), part.init(*args)), apply=part.apply
        )

    def block(params, key, x, batch):
        return x + jnp.tanh(x @ params["up"] @ params["down"])

    def head(params, key, x, batch):
        return jnp.sum(x.astype(jnp.float32) ** 2), jnp.float32(x.size)

    pipe = make_pipeline(
        embed=cast(make_pipeline().embed),
        block=cast(pj.Part(init=BLOCK.init, apply=block)),
        head=pj.Part(init=lambda key, x, batch: {"unused": jnp.zeros(HIDDEN, jnp.bfloat16)}, apply=head),
    )
    batch = make_batch(8)
    params = pipe.init(jax.random.key(0), batch)
    _, grads = pipe.value_and_grad(params, batch)
    _, expected = plain.value_and_grad(pipe, pipe.to_layers(params), batch)
    for mine, theirs in zip(jax.tree.leaves(pipe.to_layers(grads)), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, theirs.astype(jnp.float32), atol=2e-2 * float(jnp.max(jnp.abs(mine)) + 1e-6))


def test_no_equation_grows_with_microbatches_or_devices():
    """The program is as long for 32 microbatches as for 8, and for 8 devices as for 2."""
    counts = set()
    for devices, microbatches in ((2, 8), (2, 32), (8, 16), (8, 64)):
        pipe = make_pipeline(pipe=devices, num_layers=2 * devices, num_microbatches=microbatches)
        batch = make_batch(microbatches)
        params = pipe.init(jax.random.key(0), batch)
        closed = jax.make_jaxpr(pipe.value_and_grad)(params, batch)
        counts.add(sum(1 for _ in pj.jaxprs.all_equations(closed.jaxpr)))
    assert len(counts) == 1


class TestRefusals:
    """Bad input ends before anything is compiled, with one sentence that says what to change."""

    def refused(self, match, samples=8, **changes):
        with pytest.raises(ValueError, match=match) as caught:
            make_pipeline(**changes).init(KEY, make_batch(samples))
        assert "\n" not in str(caught.value)

    def test_batch_not_divided(self):
        self.refused("4 microbatches do not divide a batch of 6 samples; change", samples=6)

    def test_uneven_leaves(self):
        with pytest.raises(ValueError, match="same leading axis"):
            make_pipeline().init(KEY, {**make_batch(8), "mask": jnp.zeros(3)})

    def test_mesh_without_pipe(self):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        self.refused("none named 'pipe'; make it with pj.make_mesh", mesh=mesh)

    def test_unknown_schedule(self):
        self.refused("pass one of pj.schedules", schedule="interleaved")
        with pytest.raises(ValueError, match="interleaved"):
            pj.schedules.by_name("interleavd", chunks=2)

    def test_no_offload_given(self):
        self.refused("pass pj.Offload", offload="full")

    def test_unknown_name(self):
        self.refused(
            "no activation of the block is named 'upp'; the names there are", offload=pj.Offload.full(saved=["upp"])
        )

    def test_no_microbatch(self):
        self.refused("must be 1 or more", num_microbatches=0)

    def test_more_devices_than_there_are(self):
        with pytest.raises(ValueError, match="pipe=9 needs that many devices, and there are 8"):
            pj.make_mesh(pipe=9)

    def test_block_that_changes_shape(self):
        block = pj.Part(init=BLOCK.init, apply=lambda params, key, x, batch: x[..., :4])
        self.refused(r"turns float32\[2, 5, 8\] into float32\[2, 5, 4\]", block=block)

    def test_block_that_changes_dtype(self):
        block = pj.Part(init=BLOCK.init, apply=lambda params, key, x, batch: x.astype(jnp.bfloat16))
        self.refused("make shape and dtype of its output those of its input", block=block)

    def test_head_that_returns_token_losses(self):
        head = pj.Part(init=lambda *_: {}, apply=lambda params, key, x, batch: (x[..., 0], jnp.float32(1)))
        self.refused("losses and weights are scalars", head=head)

    def test_ties_that_do_not_match(self):
        self.refused("there is no parameter head.tabel; the head has: table", tied={"head.tabel": "embed.table"})
        self.refused("must read 'head.<path>'", tied={"table": "embed.table"})
