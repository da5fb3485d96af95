"""Whole models through the pipeline against the plain model, over a grid of schedules and sizes.

Distinct data in every microbatch, distinct weights in every layer, rings full of NaN. The default run takes a subset in
which every pair of values of two factors occurs; the whole grid runs with the marker `full`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import assert_gradients_close

import pipejax as pj
from pipejax import plain
from pipejax.models import gpt, llama

VOCAB, LENGTH = 13, 6
MODELS = {
    "gpt": (gpt, gpt.Config(vocab_size=VOCAB, hidden_size=8, num_heads=2, num_layers=4, max_length=LENGTH)),
    "llama": (llama, llama.Config(vocab_size=VOCAB, hidden_size=8, num_heads=2, num_kv_heads=1, mlp_size=12)),
}
OFFLOADS = {"none": pj.Offload.none(), "full": pj.Offload.full()}
FACTORS = {
    "schedule": ("gpipe", "1f1b", "interleaved"),
    "devices": (1, 2, 4, 8),
    "chunks": (1, 2, 3),
    "microbatches": ("1", "p-1", "p", "p+1", "2p+3"),
    "offload": ("none", "full"),
    "model": ("gpt", "llama"),
}


def all_cases():
    for case in itertools.product(*FACTORS.values()):
        schedule, devices, chunks, microbatches, _, _ = case
        if schedule == "1f1b" and chunks > 1:
            continue  # one chunk is what makes it 1F1B
        if devices == 1 and microbatches in ("p-1", "p"):
            continue  # none, and 1 again
        yield case


def covering(cases):
    """Few cases that hold every pair of values that any case holds, greedily."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    cases = list(cases)
    left = set().union(*map(pairs, cases))
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        yield best


CASES = list(all_cases())
PAIRWISE = list(covering(CASES))


def make_batch(microbatches):
    tokens, targets = jax.random.randint(jax.random.key(5), (2, microbatches * 2, LENGTH), 0, VOCAB)
    weights = jax.random.bernoulli(jax.random.key(6), 0.7, tokens.shape).astype(jnp.float32)
    return {"tokens": tokens, "targets": targets, "weights": weights}


def make_pipeline(case):
    schedule, devices, chunks, microbatches, offload, model = case
    module, config = MODELS[model]
    count = {"1": 1, "p-1": devices - 1, "p": devices, "p+1": devices + 1, "2p+3": 2 * devices + 3}[microbatches]
    # As many layers as stages, one more and one fewer, in turn.
    layers = max(1, devices * chunks + CASES.index(case) % 3 - 1)
    specs = {"gpipe": pj.schedules.GPipe(chunks=chunks), "interleaved": pj.schedules.Interleaved(chunks=chunks)}
    return pj.Pipeline(
        embed=functools.partial(module.Embed, config),
        block=functools.partial(module.Block, config),
        head=functools.partial(module.Head, config),
        num_layers=layers,
        mesh=pj.make_mesh(pipe=devices),
        schedule=specs.get(schedule, pj.schedules.OneFOneB()),
        offload=OFFLOADS[offload],
        num_microbatches=count,
        ring_fill=float("nan"),
    )


@functools.cache
def expected(model, layers, microbatches):
    """The plain model's loss and gradients, shared by all pipelines of so many layers and microbatches."""
    module, config = MODELS[model]
    pipe = pj.Pipeline(
        embed=functools.partial(module.Embed, config),
        block=functools.partial(module.Block, config),
        head=functools.partial(module.Head, config),
        num_layers=layers,
        mesh=pj.make_mesh(pipe=1),
        schedule=pj.schedules.GPipe(chunks=1),
        offload=pj.Offload.none(),
        num_microbatches=microbatches,
    )
    batch = make_batch(microbatches)
    params = pipe.to_layers(pipe.init(jax.random.key(0), batch))
    loss, grads = jax.jit(functools.partial(plain.value_and_grad, pipe))(params, batch)
    return params, float(loss), grads


def check(case):
    pipe = make_pipeline(case)
    batch = make_batch(pipe.num_microbatches)
    params, loss, grads = expected(case[-1], pipe.num_layers, pipe.num_microbatches)
    pipe.describe(batch)
    mine, my_grads = pipe.value_and_grad(jax.device_put(pipe.from_layers(params), pipe.shardings), batch)
    np.testing.assert_allclose(float(mine), loss, rtol=2e-6)
    assert_gradients_close(pipe.to_layers(my_grads), grads)


@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_plain_model(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gradients_equal_the_plain_model_everywhere(case):
    check(case)


def test_the_subset_covers_every_pair():
    def pairs(cases):
        return set().union(*(itertools.combinations(enumerate(case), 2) for case in cases))

    assert pairs(PAIRWISE) == pairs(CASES)
    assert len(PAIRWISE) < len(CASES) / 10
