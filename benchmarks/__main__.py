"""Compiles every program of the tables and writes `benchmarks/RESULTS.md`."""

from __future__ import annotations

import pathlib
import platform

import jax

from benchmarks import against_paper, choice, paper, stacks

OUT = pathlib.Path(__file__).with_name("RESULTS.md")
HEADER = f"""# Results

Written by `make bench` with JAX {jax.__version__} and Python {platform.python_version()}, on a machine without GPUs.

*Compiled*: memory, FLOPs and moved bytes are read from the programs that XLA compiled for the GPUs named.
*Projected*: seconds, MFU and the share of transfers that compute hides are modelled; what they assume stands below
each table.
"""


def main() -> None:
    """Compiles, prints rows as they come, writes the file."""
    sections = [HEADER, *stacks.section(), *choice.section(), *paper.section(), *against_paper.section(), ""]
    OUT.write_text("\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
