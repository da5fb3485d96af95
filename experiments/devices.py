"""What must be settled before JAX starts. Imports no JAX."""

from __future__ import annotations

import os
import pathlib


def prepare(*, virtual: int) -> None:
    """On a machine without an NVIDIA GPU, makes JAX run on so many virtual CPU devices.

    Settings that the user made in the environment stay.
    """
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={virtual}".strip()
