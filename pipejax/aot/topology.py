"""Meshes of GPUs that are not there, to compile against (DESIGN section 6)."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


def environment() -> dict[str, str]:
    """Environment variables to set before JAX starts in a process that compiles for absent GPUs.

    XLA_FLAGS need adding as well: `--xla_gpu_autotune_level=0`, since there is no GPU to tune on, and what `xla_flags`
    says.
    """
    return {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def gpu_mesh(*, pipe: int, target: str = "h100-80g") -> Mesh:
    """A mesh of `pipe` GPUs with the axis `pipe`.

    Args:
      pipe: devices.
      target: the name of a file in `pipejax/aot/targets`.

    Raises:
      RuntimeError: this process cannot compile for GPUs, with what to change.
      ValueError: there is no such target.
    """
    missing = [name for name, value in environment().items() if os.environ.get(name) != value]
    if "--xla_gpu_autotune_level=0" not in os.environ.get("XLA_FLAGS", ""):
        missing.append("XLA_FLAGS")
    if missing:
        raise RuntimeError(
            f"gpu_mesh: set {', '.join(missing)} before JAX starts, as pj.aot.environment() says, with "
            "XLA_FLAGS=--xla_gpu_autotune_level=0."
        )
    if not any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)):
        raise RuntimeError("gpu_mesh: the plugin that compiles for GPUs is missing; pip install 'pipejax[aot]'.")
    folder = importlib.resources.files("pipejax.aot") / "targets"
    file = folder / f"{target}.txtpb"
    if not file.is_file():
        names = sorted(item.name.removesuffix(".txtpb") for item in folder.iterdir() if item.name.endswith(".txtpb"))
        raise ValueError(f"gpu_mesh: there is no target {target!r}; the targets are: {', '.join(names)}.")
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{pipe}", target_config=file.read_text()
    )
    return Mesh(np.array(topology.devices).reshape(pipe), ("pipe",), axis_types=(AxisType.Auto,))


def abstract(tree: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s with shardings, to lower with; `shardings` is one for all, or a tree of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )
