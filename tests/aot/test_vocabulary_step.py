"""A large vocabulary, compiled for H100s: each device has its share of embedding and head; none waits for another."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pipejax as pj
from pipejax import aot
from pipejax.aot import trainstep
from pipejax.models import gpt
from pipejax.schedules import by_name

pytestmark = pytest.mark.aot

PIPE, HIDDEN, LENGTH, MICROBATCHES = 8, 4096, 4096, 16
# Links so fast that no transfer is waited for: what the head costs must not hide behind them.
TARGET = aot.load_target("h100-80g").with_rates(link_gbps=1000)


@functools.cache
def step(vocabulary):
    config = gpt.Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        num_heads=32,
        num_layers=2 * PIPE,
        max_length=LENGTH,
        dtype=jnp.bfloat16,
        attention="fused",
    )
    tokens = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
    parts = (functools.partial(getattr(gpt, name), config) for name in ("Embed", "Block", "Head"))
    model = trainstep.Model("gpt", *parts, config.num_layers, LENGTH, {"tokens": tokens, "targets": tokens})
    return trainstep.compile_step(
        model,
        target=TARGET,
        pipe=PIPE,
        schedule=by_name("lockstep-interleaved", chunks=2),
        offload=pj.Offload.full(),
        microbatches=MICROBATCHES,
    ).report


def test_each_device_has_its_share_of_the_head():
    small, large = step(1024), step(131072)
    share = MICROBATCHES * 6 * LENGTH * HIDDEN * (131072 - 1024) / PIPE
    assert large.projected.flops - small.projected.flops == pytest.approx(share, rel=1e-3)
    ratio = large.projected.step_seconds / (small.projected.step_seconds + share / TARGET.matmul_flops["bf16"])
    print(
        f"a vocabulary of 131072 takes {ratio:.3f} times the step of 1024 and the products it adds, spread (projected)"
    )
    assert ratio <= 1.03


def test_logits_are_not_kept():
    """131072 words by 4096 tokens are 2 GiB in float32, an eighth of them 256 MiB."""
    assert step(131072).activation_bytes - step(1024).activation_bytes <= 2**29
