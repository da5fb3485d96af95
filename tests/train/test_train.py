"""Training: the optimizer's mask, checkpoints across layouts, metrics, sampling."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import make_batch, make_pipeline

import pipejax as pj
from pipejax import train
from pipejax.train.metrics import MetricsWriter


def make_trainer(**changes):
    pipe = make_pipeline(**{"num_layers": 6, **changes})
    optimizer = train.make_optimizer(train.OptimizerConfig(learning_rate=0.01, warmup_steps=1), steps=10)
    return train.Trainer(pipe, optimizer, batch=make_batch(8), seed=0)


def run(trainer, state, steps):
    losses = []
    for step in steps:
        state, metrics = trainer.step(state, make_batch(8, seed=step))
        losses.append(float(metrics["loss"]))
    return state, losses


def restore(folder, trainer, identity):
    checkpoints = train.Checkpoints(folder, trainer, identity=identity)
    try:
        return checkpoints.restore()
    finally:
        checkpoints.close()


def assert_same(one, two):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, two)


def test_weight_decay_leaves_vectors_and_fillers_alone():
    config = train.OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5, clip_norm=1e9)
    trainer = train.Trainer(
        make_pipeline(num_layers=5), train.make_optimizer(config, steps=10), batch=make_batch(8), seed=0
    )
    state = trainer.init()
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = trainer.optimizer.transformation.update(zeros, state.opt_state, state.params)
    layers, params = updates["layers"], state.params["layers"]
    np.testing.assert_allclose(layers["up"], -0.05 * params["up"], rtol=1e-5)
    assert not np.asarray(layers["scale"]).any()
    filler = trainer.pipe.layout.layer < 0
    assert filler.sum() == 3
    state, _ = run(trainer, state, range(3))
    for leaf in jax.tree.leaves(state.params["layers"]):
        assert not np.asarray(leaf)[filler].any()
        assert np.asarray(leaf)[~filler].any()


@pytest.mark.parametrize("other", [{"pipe": 1}, {"pipe": 4}, {"pipe": 2, "schedule": pj.schedules.OneFOneB()}], ids=str)
def test_a_checkpoint_restores_at_any_layout(tmp_path, other):
    trainer = make_trainer()
    state, _ = run(trainer, trainer.init(), range(2))
    layered = jax.device_get(trainer.to_layers(state))  # the step donates what it is given
    checkpoints = train.Checkpoints(tmp_path, trainer, identity={"model": "toy"})
    checkpoints.save(state)
    checkpoints.close()

    elsewhere = make_trainer(**other)
    restored = restore(tmp_path, elsewhere, {"model": "toy"})
    assert_same(elsewhere.to_layers(restored), layered)
    jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), restored, elsewhere.shardings
    )
    _, there = run(elsewhere, restored, range(2, 4))
    _, here = run(trainer, state, range(2, 4))
    np.testing.assert_allclose(there, here, rtol=2e-5)


def test_resuming_in_the_same_layout_is_exact(tmp_path):
    trainer = make_trainer()
    state, _ = run(trainer, trainer.init(), range(2))
    checkpoints = train.Checkpoints(tmp_path, trainer, identity={}, keep=1)
    checkpoints.save(state)
    checkpoints.close()
    _, expected = run(trainer, state, range(2, 5))
    again = make_trainer()
    _, losses = run(again, restore(tmp_path, again, {}), range(2, 5))
    assert losses == expected


@pytest.fixture
def swept():
    """Whatever a test left for the garbage collector is gone before the next test."""
    yield
    gc.collect()


def after_a_failed_read(test):
    """A failed read leaves work behind in orbax's own event loop, which closes before that work notices."""
    quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    return pytest.mark.usefixtures("swept")(quiet(test))


@after_a_failed_read
def test_unusable_checkpoints_are_refused(tmp_path):
    trainer = make_trainer()
    with pytest.raises(train.CheckpointError, match="no checkpoint to resume from; run without --resume"):
        restore(tmp_path, trainer, {})
    checkpoints = train.Checkpoints(tmp_path, trainer, identity={"seed": 1})
    checkpoints.save(trainer.init())
    checkpoints.close()
    with pytest.raises(train.CheckpointError, match="of a run with seed = 1, and this one has 2; make them equal"):
        restore(tmp_path, trainer, {"seed": 2})
    wider = make_trainer(num_layers=7)
    with pytest.raises(train.CheckpointError, match=r"damaged or foreign .*; remove that folder"):
        restore(tmp_path, wider, {"seed": 1})


@after_a_failed_read
def test_a_damaged_checkpoint_is_refused(tmp_path):
    trainer = make_trainer()
    checkpoints = train.Checkpoints(tmp_path, trainer, identity={})
    checkpoints.save(trainer.init())
    checkpoints.close()
    big = max(
        (path for path in (tmp_path / "0" / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    big.write_bytes(big.read_bytes()[: big.stat().st_size // 2])
    with pytest.raises(train.CheckpointError, match="damaged or foreign") as caught:
        restore(tmp_path, trainer, {})
    assert "\n" not in str(caught.value)


@after_a_failed_read
def test_a_wrong_bit_in_a_checkpoint_is_noticed(tmp_path):
    trainer = make_trainer()
    state = trainer.init()
    expected = jax.device_get(trainer.to_layers(state))
    checkpoints = train.Checkpoints(tmp_path, trainer, identity={})
    checkpoints.save(state)
    checkpoints.close()
    files = [path for path in (tmp_path / "0" / "state").rglob("*") if path.is_file()]
    messages = []
    for path in sorted(files, key=lambda path: path.stat().st_size)[-2:]:
        whole = path.read_bytes()
        for part in (0.3, 0.5, 0.7):
            at = int(part * len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            try:
                assert_same(trainer.to_layers(restore(tmp_path, trainer, {})), expected)
            except train.CheckpointError as error:
                messages.append(str(error))
        path.write_bytes(whole)
    assert any("its arrays are not those that were saved" in message for message in messages)


def test_what_is_saved_is_the_state_of_then(tmp_path):
    """Saving goes on in the background while the next steps overwrite the state's memory."""
    trainer = make_trainer()
    state, expected = trainer.init(), {}
    checkpoints = train.Checkpoints(tmp_path, trainer, identity={}, keep=9)
    for step in range(6):
        expected[step] = jax.tree.map(np.copy, jax.device_get(trainer.to_layers(state)))
        checkpoints.save(state)
        state, _ = run(trainer, state, [step])
    checkpoints.close()
    for step in reversed(range(6)):
        assert_same(trainer.to_layers(restore(tmp_path, trainer, {})), expected[step])
        shutil.rmtree(tmp_path / str(step))


class Batches:
    """A loader whose batches are spoilt from one step on."""

    tokens_per_batch = 40

    def __init__(self, spoilt):
        self._spoilt = spoilt

    def batch(self, step):
        batch = make_batch(8, seed=step)
        return {**batch, "bias": batch["bias"] * jnp.nan} if step >= self._spoilt else batch


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path):
    trainer = make_trainer()
    checkpoints = train.Checkpoints(tmp_path / "checkpoints", trainer, identity={})
    config = train.RunConfig(out=tmp_path, steps=5, checkpoint_every=1)
    with pytest.raises(train.TrainingError, match=r"step 3 gave a loss of nan .*; lower the learning rate"):
        train.train(trainer, Batches(spoilt=2), checkpoints, config, start=None)
    checkpoints.close()
    assert checkpoints.latest == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    np.testing.assert_allclose([line["learning_rate"] for line in lines], [0, 0.01])


def test_metrics_after_a_resume_have_one_line_a_step(tmp_path):
    with MetricsWriter(tmp_path, step=0) as metrics:
        for step in range(1, 6):
            metrics.write(step, {"loss": float(step)})
    with metrics.path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    with MetricsWriter(tmp_path, step=3) as metrics:
        metrics.write(4, {"loss": 40.0})
    lines = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
