"""Devices of GPUs that are not there: enough of them to lower and compile against."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from pipejax.aot.targets import Target, load_target
from pipejax.mesh import make_mesh


class PluginMissingError(RuntimeError):
    """JAX's GPU compiler is not installed."""


def gpu_devices(count: int, *, target: str | Target = "h100-80g") -> list[jax.Device]:
    """Compile-only devices of a target.

    Nodes are filled in order; a count below a node's GPUs is one node.

    Args:
      count: how many.
      target: a name, a TOML file, or a `Target`.

    Raises:
      PluginMissingError: the plugin that holds XLA's GPU compiler is not installed; says how to install it.
    """
    target = target if isinstance(target, Target) else load_target(target)
    per_node = min(count, target.node_gpus)
    if count % per_node:
        raise ValueError(f"{count} devices do not fill nodes of {per_node} GPUs; take a multiple of {per_node}.")
    # Without it the plugin looks for CUDA's libraries, which only running needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x{count // per_node}x{per_node}",
            target_config=target.target_config,
        )
    except NotImplementedError as error:
        raise PluginMissingError(_how_to_install()) from error
    return list(topology.devices)


def gpu_mesh(*, pipe: int, target: str | Target = "h100-80g") -> Mesh:
    """A mesh like `pj.make_mesh`'s, of GPUs that are not there; see `gpu_devices`."""
    return make_mesh(pipe=pipe, devices=gpu_devices(pipe, target=target))


def abstract(tree: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s with shardings, to lower with; `shardings` is one for all, or a tree of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


def _how_to_install() -> str:
    version = importlib.metadata.version("jaxlib")
    return (
        "compiling for GPUs needs JAX's GPU compiler, without any CUDA library: "
        f"pip install jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    )
