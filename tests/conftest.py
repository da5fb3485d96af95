"""Eight CPU devices and strict JAX, set before JAX is imported anywhere."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# Programs here are tiny and compile for longer than they run; numerics are those of the unoptimised program.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# The plugin that compiles for GPUs without one finds no CUDA libraries here, and must not say so at each import.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
