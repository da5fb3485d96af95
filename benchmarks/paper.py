"""The PipeOffload paper's models (arXiv 2503.01328) as whole training steps, beside its figures."""

from __future__ import annotations

import dataclasses
import functools

import pipejax as pj
from benchmarks import cached, tables
from pipejax import aot
from pipejax.aot import trainstep

TARGET = "a100-80g"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the paper's table: model, size, and PO-F's activation memory in GB and MFU in percent, if given."""

    model: str
    devices: int
    chunks: int
    length: int
    paper_gb: float | None
    paper_mfu: float | None


CELLS = (
    Cell("gpt-10.5b", 8, 5, 4096, None, None),
    Cell("gpt-10.5b", 8, 5, 8192, None, None),
    Cell("gpt-10.5b", 8, 5, 16384, 9, 59),
    Cell("gpt-18.1b", 16, 3, 16384, 9, 61),
    Cell("gpt-42.9b", 32, 2, 4096, 5, 58),
    Cell("gpt-42.9b", 32, 2, 8192, 8, 60),
    Cell("gpt-42.9b", 32, 2, 16384, 12, 65),
    Cell("gpt-66.6b", 32, 2, 8192, None, None),
)


def section() -> list[str]:
    """Compiles all and returns the lines."""
    table = tables.Table(
        "model",
        "p, v, s",
        "activations GB",
        "paper's PO-F",
        "device GB",
        "pinned GB, device / node",
        "MFU",
        "paper's",
        "hidden",
        "compile s",
    )
    longest: list[str] = []
    for cell in CELLS:
        cells, sentences = cached.row(f"{TARGET} {cell}", functools.partial(_row, cell))
        longest = max(longest, sentences, key=len)
        table.add(*cells)
    return [
        "## The paper's models, whole training steps",
        "",
        f"Forward, backward and AdamW with float32 state for {TARGET}, full offload in lockstep, microbatch 1, m = 2p:",
        "fewer microbatches than the paper's, so more bubble. Activations are all device bytes at the peak but",
        "parameters, optimizer state and gradients; logits and the gathered tables of embedding and head are in them.",
        "",
        *table.lines,
        *tables.assumptions(longest),
    ]


def _row(cell: Cell) -> cached.Row:
    step = trainstep.compile_step(
        trainstep.load_model(cell.model, length=cell.length),
        target=aot.load_target(TARGET),
        pipe=cell.devices,
        schedule=pj.schedules.Interleaved(chunks=cell.chunks),
        offload=pj.Offload.full(),
        microbatches=2 * cell.devices,
    )
    report = step.report
    cells = [
        cell.model,
        f"{cell.devices}, {cell.chunks}, {cell.length}",
        f"{report.activation_bytes / 1e9:.1f}",
        "" if cell.paper_gb is None else f"{cell.paper_gb:g}",
        f"{report.device_bytes / 1e9:.1f}",
        f"{report.host_bytes / 1e9:.0f} / {report.node_host_bytes / 1e9:.0f}",
        f"{step.mfu:.0%}",
        "" if cell.paper_mfu is None else f"{cell.paper_mfu:g}%",
        f"{report.projected.hidden_fraction:.0%}",
        f"{report.compile_seconds:.0f}",
    ]
    return cells, list(report.projected.assumptions)
