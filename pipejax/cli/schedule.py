"""`python -m pipejax schedule`: generate, check, time and draw a schedule."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from pipejax.schedules import NAMES, Costs, Link, Schedule, Timeline, by_name, check, plan, simulate
from pipejax.schedules.actions import read, to_csv
from pipejax.schedules.check_timeline import check_timeline
from pipejax.schedules.names import options_of, summary

AUTO = "auto"
_FILE_WIDTH = 4000  # characters of a line in a file, which need not fit a screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a schedule's name; --list shows them")
    parser.add_argument("--list", action="store_true", help="show the names and stop")
    parser.add_argument("--compare", metavar="NAME,NAME,...", help="a table of several schedules instead of one")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="a custom schedule: PyTorch's action text, CSV or JSON"
    )
    size = parser.add_argument_group("size")
    size.add_argument("--devices", type=int, metavar="D")
    size.add_argument(
        "--chunks", type=int, metavar="V", help="chunks on each device (default: as usual for the schedule)"
    )
    size.add_argument("--microbatches", type=int, metavar="M")
    size.add_argument("--group", type=int, metavar="G", help="microbatches of a group (gis)")
    size.add_argument("--split-weights", action="store_true", default=None, help="W on its own, aligned (lockstep-...)")
    size.add_argument("--slices", type=int, metavar="S", help="slices of a sequence (seq1f1b)")
    costs = parser.add_argument_group("times")
    costs.add_argument(
        "--times", type=_times, default=(1.0, 1.0, 1.0), metavar="F,B,W", help="of one chunk (default 1,1,1)"
    )
    costs.add_argument("--send", type=float, default=0.0, metavar="T", help="time to send to a neighbour (default 0)")
    offload = parser.add_argument_group("offload")
    which = offload.add_mutually_exclusive_group()
    which.add_argument(
        "--offload-chunks", type=int, metavar="N", help="offload the N longest-lived chunks of each device"
    )
    which.add_argument("--offload", choices=[AUTO], help="offload by need: the longest lifespans first, as many as fit")
    offload.add_argument(
        "--k", type=float, default=1.0, help="round trip over the time of a chunk's passes (default 1)"
    )
    offload.add_argument(
        "--lanes", type=int, choices=(1, 2), default=1, help="1: in turns (default); 2: both ways at a time"
    )
    offload.add_argument("--shared", action="store_true", help="pairs of devices share the way to the host")
    offload.add_argument(
        "--paired", type=float, default=0.5, metavar="X", help="speed of a pair going the same way (0.5)"
    )
    offload.add_argument("--memory-limit", type=float, metavar="X", help="chunk-activations that a device can hold")
    search = parser.add_argument_group("synthesis")
    search.add_argument(
        "--synthesize",
        type=int,
        metavar="STEPS",
        help="instead of a named schedule, try so many moves (such as 20000) to find the shortest one within "
        "--memory-limit (--offload auto lets it offload)",
    )
    search.add_argument(
        "--prove", type=float, metavar="SECONDS", help="then let a solver look for a shorter one so long"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--format", choices=("text", "json", "svg", "trace", "csv"), default="text")
    out.add_argument("-o", "--output", type=Path, metavar="FILE", help="write here instead of to the terminal")


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand.

    Returns:
      0; 1 where a schedule does not stay below --memory-limit.
    """
    if arguments.list:
        _write("\n".join(f"{name:<22}{summary(name)}" for name in NAMES), arguments.output)
        return 0
    if arguments.compare:
        names = [name.strip() for name in arguments.compare.split(",") if name.strip()]
        timelines = [_timeline(_build(name, arguments), arguments) for name in names]
        _write(_comparison(timelines, arguments), arguments.output)
        return 0
    if arguments.synthesize is not None:
        timeline = _synthesize(arguments)
    else:
        timeline = _timeline(_custom(arguments) if arguments.table else _build(_name(arguments), arguments), arguments)
    _write(_render(timeline, arguments), arguments.output)
    peak, limit = float(timeline.peaks().max()), arguments.memory_limit
    if limit is not None and peak > limit:
        print(
            f"pipejax schedule: {timeline.schedule.name} holds {peak:g} chunk-activations, more than the limit of "
            f"{limit:g}; offload more, or choose a schedule with a lower peak.",
            file=sys.stderr,
        )
        return 1
    return 0


def _times(text: str) -> tuple[float, float, float]:
    try:
        forward, backward, weights = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers, such as 1,1,1") from None
    return forward, backward, weights


def _name(arguments: argparse.Namespace) -> str:
    if arguments.name is None:
        raise ValueError("name a schedule, or pass --list, --compare or --table.")
    return str(arguments.name)


def _custom(arguments: argparse.Namespace) -> Schedule:
    if arguments.name is not None:
        raise ValueError(f"both a name ({arguments.name}) and --table are given; pass one of them.")
    return read(arguments.table)


def _synthesize(arguments: argparse.Namespace) -> Timeline:
    """The shortest schedule found; how far it is from the bound goes to standard error."""
    from pipejax.schedules.synthesis import Problem, prove, synthesize

    for option in ("devices", "chunks", "microbatches", "memory_limit"):
        if getattr(arguments, option) is None:
            raise ValueError(f"--synthesize needs --{option.replace('_', '-')}.")
    problem = Problem(
        devices=arguments.devices,
        chunks=arguments.chunks,
        microbatches=arguments.microbatches,
        memory_limit=arguments.memory_limit,
        costs=_costs(arguments),
        link=_link(arguments) if arguments.offload == AUTO else None,
    )
    answer = synthesize(problem, steps=arguments.synthesize)
    if arguments.prove is not None and not answer.optimal:
        answer = prove(problem, answer, seconds=arguments.prove)
    check_timeline(answer.timeline)
    verdict = "no schedule is shorter" if answer.optimal else f"the bound is {answer.bound:g}, {answer.gap:.1%} below"
    print(f"found from {answer.origin}: time {answer.timeline.makespan:g}; {verdict}", file=sys.stderr)
    return answer.timeline


def _build(name: str, arguments: argparse.Namespace) -> Schedule:
    for option in ("devices", "microbatches"):
        if getattr(arguments, option) is None:
            raise ValueError(f"--{option} is missing.")
    options = {
        key: getattr(arguments, key)
        for key in ("group", "slices", "split_weights")
        if getattr(arguments, key) is not None
    }
    if "costs" in options_of(name):
        options["costs"] = _costs(arguments)
    spec = by_name(name, chunks=arguments.chunks, **options)
    moves = name.startswith("lockstep-") and (arguments.offload or arguments.offload_chunks)
    schedule = spec.build(
        devices=arguments.devices, microbatches=arguments.microbatches, transfer_ticks=2 if moves else 0
    )
    check(schedule)
    return schedule


def _costs(arguments: argparse.Namespace) -> Costs:
    forward, backward, weights = arguments.times
    return Costs(forward=forward, backward=backward, weights=weights, send=arguments.send)


def _link(arguments: argparse.Namespace) -> Link:
    return Link(k=arguments.k, lanes=arguments.lanes, shared=arguments.shared, paired=arguments.paired)


def _timeline(schedule: Schedule, arguments: argparse.Namespace) -> Timeline:
    timeline = simulate(schedule, _costs(arguments))
    link = _link(arguments)
    if arguments.offload == AUTO:
        timeline = plan(timeline, link, memory_limit=arguments.memory_limit)
    else:
        asked = arguments.offload_chunks
        chunks = schedule.offload_chunks if asked is None else asked
        if chunks:
            timeline = plan(timeline, link, chunks=chunks)
    check_timeline(timeline)
    return timeline


def report(timeline: Timeline) -> dict[str, Any]:
    """The figures of a timeline that passed its checks, as JSON has them.

    Times are in the unit of --times, memory in chunk-activations. `busy` is the time that the busiest device
    computes, `bubble` the rest of the makespan.
    """
    schedule = timeline.schedule
    return {
        "name": schedule.name,
        "devices": schedule.devices,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "valid": True,
        "peak_activations": [_number(peak) for peak in timeline.peaks()],
        "peak_host_activations": [_number(peak) for peak in timeline.peaks(where="host")],
        "makespan": _number(timeline.makespan),
        "busy": _number(timeline.busy.max()),
        "bubble": _number(timeline.bubble),
        "offloaded_fraction": _number(timeline.offloaded_fraction),
    }


def _number(value: float) -> int | float:
    value = round(float(value), 9)
    return int(value) if value.is_integer() else value


def _render(timeline: Timeline, arguments: argparse.Namespace) -> str:
    from pipejax.schedules import draw

    if arguments.format == "json":
        return json.dumps(report(timeline), indent=2)
    if arguments.format == "svg":
        return draw.svg(timeline)
    if arguments.format == "trace":
        return draw.trace(timeline)
    if arguments.format == "csv":
        return to_csv(timeline.schedule).rstrip("\n")
    terminal = arguments.output is None and sys.stdout.isatty()
    width = shutil.get_terminal_size((160, 24)).columns if terminal else _FILE_WIDTH
    return draw.text(timeline, width=width, colour=terminal)


def _comparison(timelines: list[Timeline], arguments: argparse.Namespace) -> str:
    reports = [report(timeline) for timeline in timelines]
    if arguments.format == "json":
        return json.dumps(reports, indent=2)
    if arguments.format != "text":
        raise ValueError(f"--compare writes text or json, not {arguments.format}.")
    rows = [("schedule", "chunks", "time", "bubble", "bubble %", "peak", "host peak", "offloaded")]
    for figures in reports:
        rows.append(
            (
                figures["name"],
                str(figures["chunks"]),
                f"{figures['makespan']:g}",
                f"{figures['bubble']:g}",
                f"{figures['bubble'] / figures['makespan']:.1%}",
                f"{max(figures['peak_activations']):g}",
                f"{max(figures['peak_host_activations']):g}",
                f"{figures['offloaded_fraction']:.0%}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
