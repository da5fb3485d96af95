"""F and B of a block with fused attention, compiled for a GPU that is not there: what kernels and products they run."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import pipejax as pj
from pipejax import aot
from pipejax.models import gpt, llama
from pipejax.offload import activation_names
from pipejax.runtime import residuals

pytestmark = pytest.mark.aot

LENGTH = 384  # no power of two, and whole tiles of 128
# Heads of 256 in bf16 and of 128 in float32 need smaller tiles, or the kernel asks for too much shared memory.
BLOCKS = {
    "gpt": (
        gpt.Block,
        gpt.Config(
            vocab_size=8,
            hidden_size=512,
            num_heads=2,
            num_layers=1,
            max_length=LENGTH,
            dropout=0.1,
            dtype=jnp.bfloat16,
            attention="fused",
        ),
    ),
    "llama": (
        llama.Block,
        llama.Config(vocab_size=8, hidden_size=512, num_heads=4, num_kv_heads=2, mlp_size=768, attention="fused"),
    ),
}
BATCH = {"segment_ids": jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)}


def kernels(function, *arguments):
    """How often a function compiled for one A100 runs a matrix product, and each part of the attention kernel."""
    mesh = aot.gpu_mesh(pipe=1, target="a100-40g")
    spec = PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = aot.compile_for_gpu(jax.jit(mapped).lower(*aot.abstract(arguments, NamedSharding(mesh, spec))))
    counts = collections.Counter()
    for computation in compiled.module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "custom-call":
                counts.update(name for name in ("mha_forward", "mha_backward") if name in instruction.op_name)
            counts["product"] += instruction.opcode == "dot" or "gemm" in instruction.target
    return counts


@pytest.mark.parametrize("model", BLOCKS)
def test_forward_and_backward_run_each_product_and_kernel_once(model):
    """Trap 15: B has no forward kernel and no product of F's, only the two that each of four weights asks for."""
    factory, config = BLOCKS[model]
    part = pj.as_part(functools.partial(factory, config), "block")

    def block(params, x, batch, key):
        return part.apply(params, key, checkpoint_name(x, "block_input"), batch), jnp.float32(0)

    params, key = jax.eval_shape(part.init, jax.random.key(0)), jax.eval_shape(lambda: jax.random.key(1))
    x = jax.ShapeDtypeStruct((1, LENGTH, config.hidden_size), config.dtype)
    fates = pj.Offload.none().fates(activation_names(block, params, x, BATCH, key))
    kept = residuals.analyse(block, fates, params, x, BATCH, key)
    layer = residuals.Layer(block=block, fates=fates, residuals=kept)
    assert kernels(layer.forward, params, x, BATCH, key) == {"product": 4, "mha_forward": 1}
    assert kernels(layer.backward, params, kept.structs, x, BATCH, key) == {"product": 8, "mha_backward": 1}
