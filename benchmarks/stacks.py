"""A stack of blocks through pipejax and through its peers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from jax.sharding import Mesh

import pipejax as pj
from benchmarks import cached, tables
from benchmarks.ours import pipeline
from benchmarks.peers import circular, data_parallel, tensor_parallel
from benchmarks.stack import Program, Sizes
from pipejax import aot

GIB = 2**30
MICROBATCHES = (16, 64)

ROWS: dict[str, Callable[[Sizes, Mesh], Program]] = {
    "circular, autodiff, named activations saved": lambda sizes, mesh: circular(sizes, "naive", mesh),
    "… weights sliced inside the checkpoint": lambda sizes, mesh: circular(sizes, "saved", mesh),
    "… named activations offloaded": lambda sizes, mesh: circular(sizes, "offloaded", mesh),
    "… full recomputation": lambda sizes, mesh: circular(sizes, "full", mesh),
    "… full recomputation, layer input offloaded": lambda sizes, mesh: circular(sizes, "full, input offloaded", mesh),
    "tensor parallel, full recomputation": tensor_parallel,
    "data parallel, full recomputation": data_parallel,
    "pipejax interleaved, no offload": lambda sizes, mesh: pipeline(
        sizes, _interleaved(sizes), pj.Offload.none(), mesh
    ),
    "pipejax interleaved, full offload": lambda sizes, mesh: pipeline(
        sizes, _interleaved(sizes), pj.Offload.full(), mesh
    ),
    "pipejax interleaved, full recomputation": lambda sizes, mesh: pipeline(
        sizes, _interleaved(sizes), pj.Offload(saved=("block_input",), offloaded=(), recomputed=None), mesh
    ),
    "pipejax 1F1B, full offload": lambda sizes, mesh: pipeline(sizes, pj.schedules.OneFOneB(), pj.Offload.full(), mesh),
    "pipejax GPipe, full offload": lambda sizes, mesh: pipeline(
        sizes, pj.schedules.GPipe(chunks=sizes.chunks), pj.Offload.full(), mesh
    ),
}

# The peer's own program, compiled the same way from its own source in an earlier session (DESIGN section 1).
MAXTEXT = (
    "MaxText's own circular pipeline at its best settings is leaner than the plain circular pipeline above: names and "
    "layer input offloaded, 1.84 GiB on the device and 11.0 GiB on the host at m=16, 5.09 and 38.0 at m=64; full "
    "recomputation 2.9 and 9.3 GiB with 22 % more FLOPs."
)


def section() -> list[str]:
    """Compiles all and returns the lines."""
    sizes = Sizes()
    table = tables.Table(
        "program", "m", "device temp GiB", "device GiB", "pinned host GiB", "TFLOP", "sent GiB", "seconds", "hidden"
    )
    longest: list[str] = []
    for name in ROWS:
        for microbatches in MICROBATCHES:
            asked = dataclasses.replace(sizes, microbatches=microbatches)
            cells, sentences = cached.row(f"{name} {asked}", functools.partial(_row, name, asked))
            longest = max(longest, sentences, key=len)
            table.add(*cells)
    return [
        "## A block stack, beside its peers",
        "",
        f"h={sizes.hidden}, s={sizes.length}, bf16, {sizes.layers} layers over {sizes.devices} H100s in {sizes.chunks} "
        "chunks each (1F1B: one of two layers), one sequence a microbatch, m microbatches. No embedding or head, and",
        "an element-wise stand-in for attention (`benchmarks/stack.py`). Per device and step, bubbles included. Device",
        "temp is what the step takes beyond parameters, batch and gradients; device GiB is all of it.",
        "",
        *table.lines,
        "",
        MAXTEXT,
        *tables.assumptions(longest),
    ]


def _row(name: str, sizes: Sizes) -> cached.Row:
    program = ROWS[name](sizes, aot.gpu_mesh(pipe=sizes.devices))
    report = aot.report(aot.compile_for_gpu(program.lower()), devices=sizes.devices)
    projected = report.projected
    cells = [
        name,
        str(sizes.microbatches),
        f"{report.device_temp_bytes / GIB:.2f}",
        f"{report.device_bytes / GIB:.2f}",
        f"{report.host_bytes / GIB:.2f}",
        f"{projected.flops / 1e12:.0f}",
        f"{sum(report.collective_bytes().values()) / GIB:.1f}",
        f"{projected.step_seconds:.2f}",
        f"{projected.hidden_fraction:.1%}" if report.host_bytes else "",
    ]
    return cells, list(projected.assumptions)


def _interleaved(sizes: Sizes) -> pj.schedules.Interleaved:
    return pj.schedules.Interleaved(chunks=sizes.chunks)
