"""XLA flags that a pipeline on GPUs wants, as far as this JAX knows them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

# Each flag, and why.
FLAGS = {
    "--xla_gpu_experimental_parallel_async_compute_limit=16": (
        "copies to and from host memory may spread over compute: by default a copy ends right after it starts"
    ),
    "--xla_gpu_experimental_parallel_collective_overlap_limit=2": (
        "F's and B's sends may both run beside the weight gradients: by default one waits for the other"
    ),
    "--xla_disable_hlo_passes=rematerialization": (
        "XLA's own rematerialization counts pinned host buffers as device memory and recomputes for nothing"
    ),
}


@functools.cache
def _accepted(flag: str) -> bool:
    # An unknown flag aborts the process, so it is tried in one of its own.
    code = "import jax; jax.jit(lambda x: x + 1).lower(1.0).compile()"
    environment = {**os.environ, "XLA_FLAGS": flag}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False).returncode == 0


def xla_flags() -> tuple[str, ...]:
    """The flags of `FLAGS` that the installed JAX accepts, to be put into XLA_FLAGS before JAX starts.

    Takes some seconds: each flag is tried in a process of its own.
    """
    return tuple(flag for flag in FLAGS if _accepted(flag))
