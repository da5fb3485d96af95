"""The block stack compiled for H100s: flat memory, no ring copies, one write and one read of each residual.

h=4096, s=4096, bf16, one layer per chunk, fused attention, no embedding or head to speak of.
"""

import functools
import os
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pipejax as pj
from pipejax import aot
from pipejax.models import gpt

pytestmark = pytest.mark.aot

GIB = 2**30
HIDDEN = LENGTH = 4096
CONFIG = gpt.Config(
    vocab_size=64,
    hidden_size=HIDDEN,
    num_heads=32,
    num_layers=16,
    max_length=LENGTH,
    dtype=jnp.bfloat16,
    attention="fused",
)
# What a block keeps in bf16: block_input, qkv, attn_out, residual, mlp_up; and the log-sum-exp in float32.
RESIDUAL_BYTES = 20 * LENGTH * HIDDEN + 4 * 32 * LENGTH


@pytest.fixture(autouse=True)
def optimised():
    """The other tests compile without most optimizations; these are about them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def compiled(*, pipe=8, chunks=2, microbatches=16, offload="full"):
    """The pipeline's report, the pipeline, and the seconds that compiling took."""
    block = pj.as_part(functools.partial(gpt.Block, CONFIG), "block")
    tiny = lambda *_: {"unused": jnp.zeros(32, jnp.bfloat16)}  # noqa: E731
    pipe_ = pj.Pipeline(
        embed=pj.Part(init=tiny, apply=lambda params, key, batch: batch["x"]),
        block=pj.Part(
            init=lambda *args: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), block.init(*args)),
            apply=block.apply,
        ),
        head=pj.Part(
            init=tiny,
            apply=lambda params, key, x, batch: (
                jnp.sum(x.astype(jnp.float32) * batch["cotangent"].astype(jnp.float32)),
                jnp.float32(1),
            ),
        ),
        num_layers=pipe * chunks,
        mesh=aot.gpu_mesh(pipe=pipe),
        schedule=pj.schedules.Interleaved(chunks=chunks),
        offload=pj.Offload.full() if offload == "full" else pj.Offload.none(),
        num_microbatches=microbatches,
    )
    x = jax.ShapeDtypeStruct((microbatches, LENGTH, HIDDEN), jnp.bfloat16)
    batch = {"x": x, "cotangent": x}
    pipe_.describe(batch)
    lowered = jax.jit(pipe_.value_and_grad).lower(
        aot.abstract(pipe_.structs, pipe_.shardings),
        aot.abstract(batch, NamedSharding(pipe_.mesh, PartitionSpec())),
    )
    start = time.perf_counter()
    report = aot.read(lowered.compile())
    return report, pipe_, time.perf_counter() - start


def test_full_offload_takes_a_gibibyte_and_a_half():
    report, pipe, _ = compiled()
    print(f"p=8 v=2 m=16: device temp {report.device_temp_bytes / GIB:.2f} GiB, host {report.host_temp_bytes / GIB:.2f}")
    assert report.device_temp_bytes <= 1.55 * GIB
    assert report.host_temp_bytes == pipe.program.host_slots * RESIDUAL_BYTES


@pytest.mark.parametrize("sizes", [{"pipe": 32, "microbatches": 64}, {"microbatches": 64}], ids=str)
def test_memory_and_compile_time_are_flat(sizes):
    base, _, base_seconds = compiled()
    report, _, seconds = compiled(**sizes)
    assert report.device_temp_bytes <= 1.05 * base.device_temp_bytes
    assert len(report.transfers) == len(base.transfers)
    assert len(report.copies) == len(base.copies)
    assert seconds <= 2 * base_seconds + 2  # a shared machine; a program that grew with m would take 4 times as long


def test_no_ring_is_copied():
    for offload in ("full", "none"):
        report, pipe, _ = compiled(offload=offload)
        slots = {pipe.program.residual_slots, pipe.program.host_slots}
        assert report.ring_copies(slots) == ()


def test_no_tick_with_forward_and_backward_stages_a_residual():
    """The loop that runs nearly all of the time copies no leaf on its way to or from the host."""
    report, _, _ = compiled()
    (both,) = {name for name in report.sends if report.sends.count(name) == 2}
    big = [copy for copy in report.copies if copy.computation == both and copy.bytes > RESIDUAL_BYTES / 8]
    assert big == []


def test_each_residual_is_written_once_and_read_once():
    """Three loops: F alone writes, F and B write and read, B alone reads; nothing else moves but flush and prefetch."""
    report, _, _ = compiled()
    moved = {}
    for transfer in report.transfers:
        moved.setdefault(transfer.computation, {True: 0, False: 0})[transfer.to_host] += transfer.bytes
    once = RESIDUAL_BYTES
    assert sorted((sides[True], sides[False]) for sides in moved.values()) == [(0, once), (once, 0), (once, once), (once, once)]


def test_without_offload_nothing_goes_to_the_host_and_memory_grows_with_devices():
    report, pipe, _ = compiled(offload="none")
    assert report.host_temp_bytes == 0
    assert report.transfers == ()
    assert report.device_temp_bytes >= pipe.program.residual_slots * RESIDUAL_BYTES
    assert report.device_temp_bytes > 3 * compiled()[0].device_temp_bytes


def test_each_tick_sends_once_in_each_direction():
    report, _, _ = compiled()
    counts = sorted(report.sends.count(name) for name in set(report.sends))
    assert counts == [1, 1, 2]


def test_backward_does_not_run_the_attention_kernel_again():
    """Trap 15: output and log-sum-exp are named inside the kernel's forward rule."""
    _, pipe, _ = compiled()
    batch = {name: jax.ShapeDtypeStruct((16, LENGTH, HIDDEN), jnp.bfloat16) for name in ("x", "cotangent")}
    text = str(jax.make_jaxpr(pipe.value_and_grad)(pipe.structs, batch))
    assert os.environ["XLA_FLAGS"]
    # F alone, F and B: one forward kernel each. B's stand-in F is dead code: XLA drops it, the jaxpr still shows it.
    assert text.count("name=mha_backward") == 2


def test_bad_targets_are_refused():
    with pytest.raises(ValueError, match="no target 'h900'; the targets are: h100-80g"):
        aot.gpu_mesh(pipe=2, target="h900")


def test_flags_are_accepted_by_this_jax():
    assert set(aot.xla_flags()) == set(aot.FLAGS)
