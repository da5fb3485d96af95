"""GPUs to compile for, as data: what XLA's compiler must know of them, and what projections reckon with.

Each target is a TOML file in this folder; a user's own file of the same form works wherever a target's name does.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
import pathlib
import re
import tomllib
from typing import Any

_FIELDS = {
    "tflops": ("bf16", "tf32", "f8", "sustained"),
    "memory": ("hbm_bytes", "hbm_gbps", "sustained"),
    "links": (
        "nvlink_gbps",
        "nvlink_sustained",
        "network_gbps",
        "pcie_generation",
        "pcie_shared_by",
        "pcie_gbps",
        "pcie_sustained",
        "pcie_duplex",
    ),
    "node": ("gpus", "host_bytes"),
    "xla": ("target_config",),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of GPU in one kind of node. Rates are peaks of the data sheet times the share that is sustained.

    Attributes:
      name: of the target.
      matmul_flops: FLOP/s of matrix products by element type; those of f32 run in TF32.
      hbm_bytes: device memory.
      hbm_rate: bytes/s of device memory.
      nvlink_rate: bytes/s in one direction between GPUs of a node.
      network_rate: bytes/s in one direction of one GPU between nodes.
      pcie_rate: bytes/s in one direction between host and device, while all that share the way use it.
      pcie_generation: 4 for PCIe 4.0.
      pcie_shared_by: GPUs at one switch, which share the way to the host.
      pcie_duplex: whether both directions run at that rate at once; else they take turns.
      node_gpus, node_host_bytes: GPUs and host memory of a node.
      target_config: `GpuTargetConfigProto` in text form, for XLA's compiler.
      peak_bf16_flops: the data sheet's peak, which MFU is measured against.
    """

    name: str
    matmul_flops: dict[str, float]
    hbm_bytes: int
    hbm_rate: float
    nvlink_rate: float
    network_rate: float
    pcie_rate: float
    pcie_generation: int
    pcie_shared_by: int
    pcie_duplex: bool
    node_gpus: int
    node_host_bytes: int
    target_config: str
    peak_bf16_flops: float

    @property
    def compute_capability(self) -> int:
        """CUDA's major compute capability; 0 where `target_config` names none."""
        found = re.search(r"cuda_compute_capability\s*\{\s*major:\s*(\d+)", self.target_config)
        return int(found[1]) if found else 0

    def with_rates(self, *, tflops: float | None = None, link_gbps: float | None = None) -> Target:
        """The same target with a sustained bf16 rate in TFLOP/s, or a host link in GB/s and direction, of one's own."""
        changes: dict[str, Any] = {}
        if tflops is not None:
            scale = tflops * 1e12 / self.matmul_flops["bf16"]
            changes["matmul_flops"] = {dtype: rate * scale for dtype, rate in self.matmul_flops.items()}
        if link_gbps is not None:
            changes["pcie_rate"] = link_gbps * 1e9
        return dataclasses.replace(self, **changes)


def target_names() -> tuple[str, ...]:
    """The targets that come with pipejax."""
    folder = importlib.resources.files(__name__)
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_target(target: str | os.PathLike[str]) -> Target:
    """A target by its name, or from a TOML file of the form that those in pipejax/aot/targets have.

    Raises:
      ValueError: no such target, or a file that lacks something, with what to change.
    """
    if isinstance(target, str) and target in target_names():
        text = importlib.resources.files(__name__).joinpath(f"{target}.toml").read_text()
    elif pathlib.Path(target).is_file():
        text = pathlib.Path(target).read_text()
    else:
        raise ValueError(
            f"there is no target {str(target)!r}; give one of {', '.join(target_names())}, or a TOML file."
        )
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"target {str(target)!r} is not a TOML file: {error}.") from error
    missing = [f"{table}.{key}" for table, keys in _FIELDS.items() for key in keys if key not in data.get(table, {})]
    if missing:
        raise ValueError(
            f"target {str(target)!r} lacks {', '.join(missing)}; pipejax/aot/targets/h100-80g.toml shows all there is."
        )
    return _target(data.get("name", pathlib.Path(target).stem), data)


def _target(name: str, data: dict[str, Any]) -> Target:
    tflops, memory, links, node = data["tflops"], data["memory"], data["links"], data["node"]
    tensor, giga = 1e12 * tflops["sustained"], 1e9
    return Target(
        name=name,
        matmul_flops={
            "bf16": tflops["bf16"] * tensor,
            "f16": tflops["bf16"] * tensor,
            "f8": tflops["f8"] * tensor,
            "f32": tflops["tf32"] * tensor,
        },
        hbm_bytes=memory["hbm_bytes"],
        hbm_rate=memory["hbm_gbps"] * giga * memory["sustained"],
        nvlink_rate=links["nvlink_gbps"] * giga * links["nvlink_sustained"],
        network_rate=links["network_gbps"] * giga * links["nvlink_sustained"],
        pcie_rate=links["pcie_gbps"] * giga * links["pcie_sustained"],
        pcie_generation=links["pcie_generation"],
        pcie_shared_by=links["pcie_shared_by"],
        pcie_duplex=links["pcie_duplex"],
        node_gpus=node["gpus"],
        node_host_bytes=node["host_bytes"],
        target_config=data["xla"]["target_config"],
        peak_bf16_flops=tflops["bf16"] * 1e12,
    )
