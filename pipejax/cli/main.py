"""Picks the subcommand. Nothing here imports JAX: a command that needs it does so when it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# What each subcommand does; its module has `add_arguments(parser)` and `run(arguments) -> exit status`.
COMMANDS = {
    "compile": "compile a training step for GPUs that are not there, and say what it takes",
    "schedule": "generate, check, time and draw a schedule",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
      arguments: the words after the program's name; None for those of this process.

    Returns:
      The exit status: 0, or 1 where what was asked for cannot be done (with a sentence on standard error).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="pipejax", description="Pipeline parallelism for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if words[:1] == [name]:
            module = importlib.import_module(f"pipejax.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    parsed = parser.parse_args(words)
    try:
        return int(parsed.run(parsed))
    except BrokenPipeError:
        # Whoever read the output (head, a pager) has seen enough; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"pipejax {parsed.command}: {error}", file=sys.stderr)
        return 1
