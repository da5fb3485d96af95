"""What must be settled before JAX looks for devices."""

from __future__ import annotations

import os
import pathlib


def prepare(*, virtual: int) -> None:
    """Makes the CPU count as so many devices, for where JAX finds no GPU; sets XLA's flags for where it does.

    Settings that the user made in the environment stay.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:  # GPUs, where JAX finds them, are not touched by it
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={virtual}".strip()
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        from pipejax.aot.flags import xla_flags

        xla_flags().set()
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # The plugin that compiles for absent GPUs complains that it finds no CUDA libraries.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
