"""Device meshes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(*, pipe: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axis `pipe`, which the pipeline's stages are spread over.

    Args:
      pipe: devices in the pipeline.
      devices: which devices to take, in order; the first of all devices by default.

    Raises:
      ValueError: there are fewer devices than `pipe`.
    """
    available = list(jax.devices() if devices is None else devices)
    if not 1 <= pipe <= len(available):
        raise ValueError(
            f"make_mesh: pipe={pipe} needs that many devices, and there are {len(available)}; lower pipe, or on CPU "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={max(pipe, 1)} before JAX starts."
        )
    return jax.make_mesh((pipe,), ("pipe",), axis_types=(AxisType.Auto,), devices=available[:pipe])
