"""`python -m pipejax compile`: will it fit, how much pinned memory, what is exposed — without the GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import Any

GIB = 2**30
_ABOVE_ZERO = ("pipe", "chunks", "seq", "microbatches", "microbatch-size", "tflops", "link-gbps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a model's name (--list) or a Python file with one")
    parser.add_argument("--list", action="store_true", help="show the models and the targets, and stop")
    parser.add_argument("--target", default="h100-80g", metavar="NAME", help="a GPU's name or a TOML file (h100-80g)")
    parser.add_argument("--pipe", type=int, metavar="P", help="devices in the pipeline")
    parser.add_argument("--chunks", type=int, metavar="V", help="chunks on each device (default: layers / P)")
    parser.add_argument("--schedule", default="lockstep-interleaved", metavar="NAME", help="(lockstep-interleaved)")
    parser.add_argument(
        "--offload",
        default="full",
        metavar="WHAT",
        help="of named activations: full, none, chunks=N, fraction=A, auto=K for a link of that k (full)",
    )
    parser.add_argument("--seq", type=int, metavar="S", help="tokens in a sequence (default: the model's)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="parts of a batch (default: 2 P)")
    parser.add_argument("--microbatch-size", type=int, default=1, metavar="B", help="samples in each (1)")
    rates = parser.add_argument_group("rates to project with, instead of the target's")
    rates.add_argument("--tflops", type=float, metavar="X", help="sustained by bf16 matrix products")
    rates.add_argument("--link-gbps", type=float, metavar="X", help="GB/s between host and device, in one direction")
    parser.add_argument("--measure", action="store_true", help="run the step on this machine's GPUs as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand.

    Returns:
      0; 1 where the step does not fit the target.

    Raises:
      ValueError: something cannot work, with what to change.
    """
    # XLA warns that it makes the rings by computing on the host, which it then does not; JAX reads this at its import.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from pipejax.aot.targets import load_target, target_names
    from pipejax.models.named import named_models

    if arguments.list:
        print("\n".join(f"{model.name:<12}{model.summary}" for model in named_models().values()))
        print("targets: " + ", ".join(target_names()))
        return 0
    if arguments.config is None or arguments.pipe is None:
        raise ValueError("name a model (--list shows them) and pass --pipe, as in: compile gpt-10.5b --pipe 8.")
    for option in _ABOVE_ZERO:
        value = getattr(arguments, option.replace("-", "_"))
        if value is not None and not value > 0:
            raise ValueError(f"--{option} is {value}; it must be above 0.")
    target = load_target(arguments.target).with_rates(tflops=arguments.tflops, link_gbps=arguments.link_gbps)

    from pipejax.aot import measuring, trainstep
    from pipejax.aot.topology import PluginMissingError
    from pipejax.offload import Offload
    from pipejax.schedules import by_name

    model = trainstep.load_model(arguments.config, length=arguments.seq)
    how: dict[str, Any] = {
        "schedule": by_name(arguments.schedule, chunks=arguments.chunks or _chunks(arguments, model.num_layers)),
        "offload": Offload.parse(arguments.offload),
        "microbatches": arguments.microbatches or 2 * arguments.pipe,
        "microbatch_size": arguments.microbatch_size,
    }
    mesh = measuring.gpu_mesh_here(pipe=arguments.pipe) if arguments.measure else None
    try:
        step = trainstep.compile_step(model, target=target, pipe=arguments.pipe, **how)
    except PluginMissingError as error:
        raise ValueError(str(error)) from error
    figures = summary(step)
    if mesh is not None:
        measuring.check_pool(step.report.host_bytes)
        figures["measured"] = dataclasses.asdict(measuring.measure_step(model, mesh=mesh, target=target, **how))
    print(json.dumps(figures, indent=2) if arguments.json else _text(figures))
    if not figures["fits"]:
        print(f"pipejax compile: the step does not fit {target.name}; see the totals.", file=sys.stderr)
    return 0 if figures["fits"] else 1


def _chunks(arguments: argparse.Namespace, layers: int) -> int | None:
    """One layer a chunk where the schedule takes any number of chunks; the schedule's own number elsewhere."""
    if arguments.schedule not in ("lockstep-interleaved", "lockstep-gpipe"):
        return None
    return -(-layers // int(arguments.pipe))


def summary(step: Any) -> dict[str, Any]:
    """The figures of a `StepReport`, as JSON has them. Bytes are of one device, and of a step where they move."""
    from pipejax.aot.reporting import POOL_LIMIT_BYTES, POOL_LIMIT_VARIABLE

    report = step.report
    projected, target = report.projected, report.target
    return {
        "target": target.name,
        "devices": report.devices,
        "tokens": step.tokens,
        "fits": report.fits,
        "peak_device_bytes": report.device_bytes,
        "device_limit_bytes": target.hbm_bytes,
        "device_parts": {part.purpose: part.bytes for part in report.parts},
        "activation_bytes": report.activation_bytes,
        "host_bytes": {
            "device": report.host_bytes,
            "node": report.node_host_bytes,
            "node_limit": target.node_host_bytes,
            "pool_limit": POOL_LIMIT_BYTES,
            "set": f"{POOL_LIMIT_VARIABLE}={-(-report.host_bytes // 10**9)}"
            if report.host_bytes > POOL_LIMIT_BYTES
            else "",
        },
        "compile_seconds": report.compile_seconds,
        "link_gbps": target.pcie_rate / 1e9,
        "collectives": report.collective_bytes(),
        "ring_copies": [f"{copy.name} {copy.shape}" for copy in report.ring_copies],
        "transfers": {
            "d2h_bytes": report.moved("d2h"),
            "h2d_bytes": report.moved("h2d"),
            "exposed_seconds": projected.exposed_transfer_seconds,
            "hidden_fraction": projected.hidden_fraction,
        },
        "projected": {
            "step_seconds": projected.step_seconds,
            "mfu": step.mfu,
            "bubble": step.bubble,
            "assumptions": list(projected.assumptions),
        },
    }


def _text(figures: dict[str, Any]) -> str:
    host, moved, projected = figures["host_bytes"], figures["transfers"], figures["projected"]
    lines = [
        f"{figures['devices']} x {figures['target']}, compiled in {figures['compile_seconds']:.0f} s: "
        + ("fits" if figures["fits"] else "DOES NOT FIT"),
        "",
        f"device memory {_gib(figures['peak_device_bytes'])} of {_gib(figures['device_limit_bytes'])}, of which",
        *(f"  {purpose:<16}{_gib(size)}" for purpose, size in figures["device_parts"].items()),
        f"  all but parameters, optimizer and gradients: {_gib(figures['activation_bytes'])}",
        f"pinned host memory {_gib(host['device'])} each, {_gib(host['node'])} of a node's {_gib(host['node_limit'])}",
    ]
    if host["set"]:
        lines.append(f"  more than XLA's pool of {_gib(host['pool_limit'])}: set {host['set']} before JAX starts")
    lines += [
        f"moved in a step: {_gib(moved['d2h_bytes'])} to the host, {_gib(moved['h2d_bytes'])} back",
        *(f"  {kind}: {_gib(size)}" for kind, size in figures["collectives"].items()),
        f"whole rings copied: {', '.join(figures['ring_copies']) or 'none'}",
        "",
        f"projected: {projected['step_seconds']:.3f} s a step, MFU {projected['mfu']:.1%}, "
        f"bubble {projected['bubble']:.1%}",
        f"  host transfers: {moved['hidden_fraction']:.1%} hidden, {moved['exposed_seconds']:.3f} s exposed",
        "assuming that",
        *(f"  {sentence}" for sentence in projected["assumptions"]),
    ]
    if "measured" in figures:
        lines += ["", *_beside(figures)]
    return "\n".join(lines)


def _beside(figures: dict[str, Any]) -> list[str]:
    """Projected beside measured."""
    measured, seconds = figures["measured"], figures["projected"]["step_seconds"]
    peak = measured["device_peak_bytes"]
    rows = [
        ("step", f"{seconds:.3f} s", f"{measured['step_seconds']:.3f} s"),
        ("device memory", _gib(figures["peak_device_bytes"]), "not counted" if peak is None else _gib(peak)),
        ("to the host", f"{figures['link_gbps']:.1f} GB/s", f"{measured['d2h_gbps']:.1f} GB/s"),
        ("back", f"{figures['link_gbps']:.1f} GB/s", f"{measured['h2d_gbps']:.1f} GB/s"),
    ]
    head = ("", "projected", f"measured on {measured['device']}")
    return [f"{name:<16}{ours:<16}{theirs}" for name, ours, theirs in (head, *rows)]


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
