"""Eight CPU devices and strict JAX, set before JAX is imported anywhere."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The flags for GPUs (pipejax/aot/flags.py) serve the tests that compile for them; there is no GPU to tune on.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_experimental_parallel_async_compute_limit=16",
        "--xla_gpu_experimental_parallel_collective_overlap_limit=2",
        "--xla_disable_hlo_passes=rematerialization",
    ]
)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# Programs here are tiny and compile for longer than they run; numerics are those of the unoptimised program.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# The plugin that compiles for GPUs without one finds no CUDA libraries here, and must not say so at each import.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import pytest

from pipejax.runtime import residuals


@pytest.fixture(autouse=True)
def every_named_residual_moves(request, monkeypatch):
    """Leaves of the tests' tiny models are smaller than what is worth a transfer: move them all the same."""
    if "aot" not in request.keywords:
        monkeypatch.setattr(residuals, "SMALL", 0)
