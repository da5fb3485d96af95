"""The same stack through pipejax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pipejax as pj
from benchmarks.stack import Program, Sizes, block, layer_structs, loss
from pipejax import aot
from pipejax.schedules import ScheduleSpec


def pipeline(sizes: Sizes, schedule: ScheduleSpec, offload: pj.Offload, mesh: Mesh) -> Program:
    """Loss and gradients of the stack; embedding and head hold a vector that nothing uses."""

    def nothing(*_: Any) -> Any:
        return {"unused": jnp.zeros(sizes.devices, jnp.bfloat16)}

    def init(*_: Any) -> Any:
        return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in layer_structs(sizes).items()}

    def embed(_params: Any, _key: Any, batch: Any) -> jax.Array:
        return batch["x"]

    def one_block(params: Any, _key: Any, x: jax.Array, _batch: Any) -> jax.Array:
        return block(params, x)

    def head(_params: Any, _key: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        return loss(x, batch["cotangent"]), jnp.float32(1 / sizes.microbatches)  # the peers divide by nothing

    pipe = pj.Pipeline(
        embed=pj.Part(init=nothing, apply=embed),
        block=pj.Part(init=init, apply=one_block),
        head=pj.Part(init=nothing, apply=head),
        num_layers=sizes.layers,
        mesh=mesh,
        schedule=schedule,
        offload=offload,
        num_microbatches=sizes.microbatches,
    )
    batch = {"x": sizes.inputs, "cotangent": sizes.inputs}
    pipe.describe(batch)
    params = aot.abstract(pipe.structs, pipe.shardings)
    inputs = aot.abstract(sizes.inputs, NamedSharding(mesh, PartitionSpec()))

    unused = {name: nothing() for name in ("embed", "head")}

    def step(layers: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        value, grads = pipe.value_and_grad({**unused, "layers": layers}, {"x": x, "cotangent": cotangent})
        return value, grads["layers"]

    return Program(jax.jit(step), (params["layers"], inputs, inputs))
