"""The same stack by other means: autodiff through a scanned circular pipeline, tensor and data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.stack import NAMES, Program, Sizes, block, layer_structs, loss, pick
from pipejax import aot

Remat = Literal["naive", "saved", "offloaded", "full", "full, input offloaded"]

_POLICIES: dict[str, Callable[[], Any]] = {
    "naive": lambda: jax.checkpoint_policies.save_only_these_names(*NAMES),
    "saved": lambda: jax.checkpoint_policies.save_only_these_names(*NAMES),
    "offloaded": lambda: _offloaded(NAMES),
    "full": lambda: jax.checkpoint_policies.save_only_these_names("block_input"),
    "full, input offloaded": lambda: _offloaded(("block_input",)),
}


def _offloaded(names: tuple[str, ...]) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def circular(sizes: Sizes, remat: Remat, mesh: Mesh) -> Program:
    """Autodiff through a circular pipeline, as MaxText's: all microbatches go round once for each chunk.

    Device d runs chunk n div m of microbatch n mod m at tick n + d. What the last device hands on waits in a buffer of
    the first until its next round.

    Args:
      sizes: at least as many microbatches as devices.
      remat: which residuals are kept. "naive" slices the weights outside of the checkpoint, so that autodiff keeps a
        slice for each tick; all others slice them inside.
      mesh: with the axis `pipe`.
    """
    p, v, m = sizes.devices, sizes.chunks, sizes.microbatches
    checkpoint = lambda function: jax.checkpoint(function, policy=_POLICIES[remat](), prevent_cse=False)
    named = lambda params, x: block(params, checkpoint_name(x, "block_input"))
    inside = checkpoint(lambda params, chunk, x: named(pick(params, chunk), x))
    outside = checkpoint(named)

    def forward(params: Any, inputs: jax.Array, cotangents: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf[0], params)
        device = lax.axis_index("pipe")
        first, last = device == 0, device == p - 1

        def tick(carry: Any, t: jax.Array) -> Any:
            arrived, waiting, total = carry
            n = jnp.clip(t - device, 0, m * v - 1)
            chunk, microbatch = n // m, n % m
            fresh = jnp.where(chunk == 0, pick(inputs, microbatch), pick(waiting, microbatch))
            x = jnp.where(first, fresh[None], arrived)
            y = outside(pick(params, chunk), x) if remat == "naive" else inside(params, chunk, x)
            due = last & (chunk == v - 1) & (t - device == n)
            total += jnp.where(due, loss(y, pick(cotangents, microbatch)), 0)
            arrived = lax.ppermute(y, "pipe", [(d, (d + 1) % p) for d in range(p)])
            slot = jnp.clip(t - (p - 1), 0, m * v - 1) % m
            waiting = lax.dynamic_update_index_in_dim(waiting, arrived[0], slot, 0)
            return (arrived, waiting, total), None

        start = (jnp.zeros(sizes.activation.shape, jnp.bfloat16), jnp.zeros_like(inputs), jnp.float32(0))
        (_, _, total), _ = lax.scan(tick, start, jnp.arange(m * v + p - 1, dtype=jnp.int32))
        return lax.psum(total, "pipe")

    rest, stacked = PartitionSpec(), PartitionSpec("pipe")
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=(stacked, rest, rest), out_specs=rest, check_vma=False)
    structs = {
        name: jax.ShapeDtypeStruct((p, v, *leaf.shape), leaf.dtype, sharding=NamedSharding(mesh, stacked))
        for name, leaf in layer_structs(sizes).items()
    }
    inputs = aot.abstract(sizes.inputs, NamedSharding(mesh, rest))
    return Program(jax.jit(jax.value_and_grad(mapped)), (structs, inputs, inputs))


def tensor_parallel(sizes: Sizes, mesh: Mesh) -> Program:
    """Megatron's tensor parallelism by GSPMD, every layer recomputed from its input, microbatches one by one.

    Args:
      sizes: of the stack; its devices are those of the mesh.
      mesh: with the axis `pipe`, used here for the parts of each layer.
    """
    columns, rows = PartitionSpec(None, None, "pipe"), PartitionSpec(None, "pipe", None)
    specs = {"qkv": columns, "up": columns, "out": rows, "down": rows}
    structs = {
        name: jax.ShapeDtypeStruct(
            (sizes.layers, *leaf.shape), leaf.dtype, sharding=NamedSharding(mesh, specs.get(name, PartitionSpec()))
        )
        for name, leaf in layer_structs(sizes).items()
    }
    layer = jax.checkpoint(block, prevent_cse=False)

    def total(params: Any, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, params)
        return loss(y, cotangent)

    def step(params: Any, inputs: jax.Array, cotangents: jax.Array) -> Any:
        def one(carry: Any, item: Any) -> Any:
            value, grads = jax.value_and_grad(total)(params, item[0][None], item[1][None])
            return (carry[0] + value, jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[1], grads)), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return lax.scan(one, (jnp.float32(0), zeros), (inputs, cotangents))[0]

    inputs = aot.abstract(sizes.inputs, NamedSharding(mesh, PartitionSpec()))
    shardings = {name: leaf.sharding for name, leaf in structs.items()}
    out = (NamedSharding(mesh, PartitionSpec()), shardings)
    return Program(jax.jit(step, out_shardings=out), (structs, inputs, inputs))


def data_parallel(sizes: Sizes, mesh: Mesh) -> Program:
    """Every device has all layers and a share of the microbatches, one by one, every layer recomputed from its input.

    Gradients are summed over the devices once, at the end of the step.

    Args:
      sizes: of the stack; its devices are those of the mesh. Where they do not divide the microbatches, some run on
        zeros.
      mesh: with the axis `pipe`, used here for the shares of the batch.
    """
    layer = jax.checkpoint(block, prevent_cse=False)

    def total(params: Any, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, params)
        return loss(y, cotangent)

    def share(params: Any, inputs: jax.Array, cotangents: jax.Array) -> Any:
        def one(carry: Any, item: Any) -> Any:
            value, grads = jax.value_and_grad(total)(params, item[0][None], item[1][None])
            return (carry[0] + value, jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[1], grads)), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return lax.psum(lax.scan(one, (jnp.float32(0), zeros), (inputs, cotangents))[0], "pipe")

    rest, shared = PartitionSpec(), PartitionSpec("pipe")
    mapped = jax.shard_map(share, mesh=mesh, in_specs=(rest, shared, shared), out_specs=rest, check_vma=False)

    def step(params: Any, inputs: jax.Array, cotangents: jax.Array) -> Any:
        missing = -sizes.microbatches % sizes.devices
        filled = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) if missing else x for x in (inputs, cotangents))
        return mapped(params, *filled)

    replicated = NamedSharding(mesh, rest)
    structs = {
        name: jax.ShapeDtypeStruct((sizes.layers, *leaf.shape), leaf.dtype, sharding=replicated)
        for name, leaf in layer_structs(sizes).items()
    }
    inputs = aot.abstract(sizes.inputs, replicated)
    return Program(jax.jit(step, out_shardings=replicated), (structs, inputs, inputs))
