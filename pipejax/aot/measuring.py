"""The real step on real GPUs: what it takes, to lay beside what was projected."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pipejax.aot.flags import xla_flags
from pipejax.aot.reporting import POOL_LIMIT_BYTES, POOL_LIMIT_VARIABLE
from pipejax.aot.targets import Target
from pipejax.aot.trainstep import Model, make_trainer
from pipejax.mesh import make_mesh
from pipejax.offload import Offload
from pipejax.schedules import ScheduleSpec

LINK_BYTES = 2**28
"""Size of what is moved to measure the link: enough that its start does not count."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a step took on this machine.

    Attributes:
      device: its kind, as the driver calls it.
      step_seconds: median over steps after the first.
      device_peak_bytes: the most that was in use at a time on the fullest device, initialisation included; None where
        the platform does not count.
      d2h_gbps, h2d_gbps: GB/s of one large transfer between device and pinned host memory, the link idle otherwise.
    """

    device: str
    step_seconds: float
    device_peak_bytes: int | None
    d2h_gbps: float
    h2d_gbps: float


def gpu_mesh_here(*, pipe: int) -> Mesh:
    """A mesh of this machine's GPUs.

    Raises:
      ValueError: it has none, or fewer than `pipe`.
    """
    # Without a GPU the plugin complains at length that it finds no CUDA libraries.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < pipe:
        there = f"only {len(gpus)}" if gpus else "none"
        raise ValueError(f"--measure runs the step on {pipe} GPUs and JAX finds {there} here; leave it out to project.")
    return make_mesh(pipe=pipe, devices=gpus)


def check_pool(host_bytes: int) -> None:
    """Refuses a step that would not get its pinned memory from XLA's pool.

    Raises:
      ValueError: the pool is smaller, with the variable to set.
    """
    limit = int(os.environ.get(POOL_LIMIT_VARIABLE, POOL_LIMIT_BYTES // 10**9))
    if host_bytes > limit * 10**9:
        raise ValueError(
            f"the step pins {host_bytes / 1e9:.0f} GB of host memory a device and XLA's pool ends at {limit}; set "
            f"{POOL_LIMIT_VARIABLE}={-(-host_bytes // 10**9)} and run it again."
        )


def measure_step(
    model: Model,
    *,
    mesh: Mesh,
    target: Target | None = None,
    schedule: ScheduleSpec,
    offload: Offload,
    microbatches: int,
    microbatch_size: int = 1,
    steps: int = 5,
) -> Measured:
    """Initialises a model and runs its training step, on a batch of zeros: no time depends on what is in it.

    Args:
      model: what to train.
      mesh: of devices that are there.
      target: for whose flags; None for those of any GPU. Other platforms take none.
      schedule: what runs when.
      offload: of activations.
      microbatches: parts of a batch.
      microbatch_size: samples in each.
      steps: how many to time, after one that is not.
    """
    trainer, batch = make_trainer(
        model,
        mesh=mesh,
        schedule=schedule,
        offload=offload,
        microbatches=microbatches,
        microbatch_size=microbatch_size,
    )
    devices = list(mesh.devices.flat)
    state = trainer.init()
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = {name: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), everywhere) for name, leaf in batch.items()}
    options: dict[str, Any] = xla_flags(target).compiler_options if devices[0].platform == "gpu" else {}
    step = trainer.step.lower(state, batch).compile(compiler_options=options)
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    peaks = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    d2h, h2d = measure_link(devices[0])
    return Measured(
        device=devices[0].device_kind,
        step_seconds=statistics.median(times[1:]),
        device_peak_bytes=max(peaks, default=None),
        d2h_gbps=d2h,
        h2d_gbps=h2d,
    )


def measure_link(device: jax.Device, *, size: int = LINK_BYTES, repeats: int = 5) -> tuple[float, float]:
    """GB/s to pinned host memory and back, each the best of some transfers, one at a time."""
    here, host = (SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    array = jax.block_until_ready(jax.device_put(jnp.zeros(size, jnp.int8), here))
    best = {host: float("inf"), here: float("inf")}
    for _ in range(repeats):
        for place in (host, here):
            start = time.perf_counter()
            array = jax.block_until_ready(jax.device_put(array, place))
            best[place] = min(best[place], time.perf_counter() - start)
    return size / best[host] / 1e9, size / best[here] / 1e9
