"""Which schedule and which offload, by what the link between device and host takes: a stack of GPT blocks on 8 GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import pipejax as pj
from benchmarks import cached, tables
from pipejax import aot
from pipejax.aot import streams, trainstep
from pipejax.models import gpt

GIB = 2**30
DEVICES, CHUNKS, MICROBATCHES = 8, 2, 32
HIDDEN = LENGTH = 4096
TFLOPS = 440.0
LAYER_FLOPS = (26 + 55) * HIDDEN**3  # s = h: 24 + 48 bsh² of products, 2 + 7 bs²h of causal attention
RESIDUAL_BYTES = 20 * LENGTH * HIDDEN
LINKS = (0.65, 1.0, 1.5, 2.0)  # k: a round trip of a layer's residuals over its F, B and W

ROWS: tuple[tuple[str, str, pj.Offload], ...] = (
    ("lockstep-interleaved", "none", pj.Offload.none()),
    ("lockstep-interleaved", "full", pj.Offload.full()),
    ("lockstep-interleaved", "half, paced for k = 2", pj.Offload.fraction(0.5, k=2)),
    (
        "lockstep-interleaved",
        "all but the block's input recomputed, that offloaded",
        pj.Offload(offloaded=("block_input",), saved=(), recomputed=None),
    ),
    ("gis", "none", pj.Offload.none()),
    ("gis-h", "none", pj.Offload.none()),
    ("po-h", "half of the chunks", pj.Offload.full()),
    ("po-h", "half of the chunks, paced for k = 2", pj.Offload(offloaded=None, recomputed=(), k=2)),
    ("po-f", "full", pj.Offload.full()),
    ("zb-v", "none", pj.Offload.none()),
    ("v-half", "none", pj.Offload.none()),
)


def section() -> list[str]:
    """Compiles all and returns the lines."""
    seconds = [f"s at k = {k:g}" for k in LINKS]
    table = tables.Table("schedule", "offload", "device temp GiB", "pinned host GiB", "bubble", *seconds)
    sentences: list[str] = []
    for name, offload, fates in ROWS:
        cells, sentences = cached.row(f"choice {name} {offload}", functools.partial(_row, name, offload, fates))
        table.add(*cells)
    return [
        "## Which schedule, which offload",
        "",
        f"A stack of {DEVICES * CHUNKS} GPT blocks with fused attention, h=s={HIDDEN}, bf16, on {DEVICES} H100s in",
        f"{CHUNKS} chunks each, {MICROBATCHES} microbatches; seconds of a step by the link's speed, *projected*.",
        "k is the time of a round trip of a layer's residuals over that of its F, B and W. Bubble: the schedule's own,",
        "for passes of equal length, *simulated*. In a staggered step neighbours exchange in every tick, so a tick",
        "lasts as long as the longest pass of any device, about T_B, where the schedule counts each pass as one slot.",
        "",
        *table.lines,
        "",
        *tables.assumptions(
            [line for line in sentences if "host and device exchange" not in line and "loops" not in line]
        ),
    ]


def _row(name: str, offload: str, fates: pj.Offload) -> cached.Row:
    pipe, program = _compile(name, fates)
    trips = trainstep.loop_trips(pipe)
    times, sentences = [], []
    for k in LINKS:
        link = 2 * RESIDUAL_BYTES / (k * LAYER_FLOPS / (TFLOPS * 1e12)) / 1e9
        target = aot.load_target("h100-80g").with_rates(tflops=TFLOPS, link_gbps=link)
        projected = streams.project(program.module, target, devices=DEVICES, unknown_trips=trips)
        times.append(f"{projected.step_seconds:.2f}")
        sentences = list(projected.assumptions)
    report = aot.report(program, devices=DEVICES, unknown_trips=trips)
    timed = pj.schedules.simulate(pipe.plan)
    return [
        name,
        offload,
        f"{report.device_temp_bytes / GIB:.2f}",
        f"{report.host_bytes / GIB:.2f}",
        f"{timed.bubble / timed.makespan:.0%}",
        *times,
    ], sentences


def _compile(name: str, offload: pj.Offload) -> tuple[pj.Pipeline, Any]:
    config = gpt.Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        num_heads=32,
        num_layers=DEVICES * CHUNKS,
        max_length=LENGTH,
        dtype=jnp.bfloat16,
        attention="fused",
    )
    block = pj.as_part(functools.partial(gpt.Block, config), "block")

    def nothing(*_: Any) -> Any:
        return {"unused": jnp.zeros(DEVICES, jnp.bfloat16)}

    def init(*args: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), block.init(*args))

    def embed(_params: Any, _key: Any, batch: Any) -> jax.Array:
        return batch["x"]

    def head(_params: Any, _key: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x.astype(jnp.float32) * batch["cotangent"].astype(jnp.float32)), jnp.float32(1)

    pipe = pj.Pipeline(
        embed=pj.Part(init=nothing, apply=embed),
        block=pj.Part(init=init, apply=block.apply),
        head=pj.Part(init=nothing, apply=head),
        num_layers=DEVICES * CHUNKS,
        mesh=aot.gpu_mesh(pipe=DEVICES),
        schedule=pj.schedules.by_name(name, chunks=CHUNKS),
        offload=offload,
        num_microbatches=MICROBATCHES,
    )
    x = jax.ShapeDtypeStruct((MICROBATCHES, LENGTH, HIDDEN), jnp.bfloat16)
    batch = {"x": x, "cotangent": x}
    pipe.describe(batch)
    lowered = jax.jit(pipe.value_and_grad).lower(
        aot.abstract(pipe.structs, pipe.shardings), aot.abstract(batch, NamedSharding(pipe.mesh, PartitionSpec()))
    )
    return pipe, aot.compile_for_gpu(lowered)
