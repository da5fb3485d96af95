"""The block stack compiled for H100s: flat memory, no ring copies, one write and one read of each residual.

h=4096, s=4096, bf16, one layer per chunk, fused attention, no embedding or head to speak of.
"""

import functools

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
# Rates at which k, the round trip of a layer's residuals over the time of its F, B and W, is 0.65.
LAYER_FLOPS = (26 + 55) * HIDDEN**3  # s = h: 24 + 48 bsh² of products, 2 + 7 bs²h of causal attention
TARGET = aot.load_target("h100-80g").with_rates(tflops=440)
K = 0.65
# What a block keeps in bf16: block_input, qkv, attn_out, residual, mlp_up; and the log-sum-exp in float32.
RESIDUAL_BYTES = 20 * LENGTH * HIDDEN + 4 * 32 * LENGTH
TARGET = TARGET.with_rates(link_gbps=2 * RESIDUAL_BYTES / (K * LAYER_FLOPS / 440e12) / 1e9)


@functools.cache
def compiled(*, pipe=8, chunks=2, layers=16, microbatches=16, offload="full", schedule="lockstep-interleaved"):
    """What the pipeline compiles to, and the pipeline."""
    block = pj.as_part(functools.partial(gpt.Block, CONFIG), "block")
    tiny = lambda *_: {"unused": jnp.zeros(32, jnp.bfloat16)}
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
        num_layers=layers,
        mesh=aot.gpu_mesh(pipe=pipe),
        schedule=pj.schedules.by_name(schedule, chunks=chunks),
        offload={"full": pj.Offload.full(), "none": pj.Offload.none()}.get(offload, offload),
        num_microbatches=microbatches,
    )
    x = jax.ShapeDtypeStruct((microbatches, LENGTH, HIDDEN), jnp.bfloat16)
    batch = {"x": x, "cotangent": x}
    pipe_.describe(batch)
    lowered = jax.jit(pipe_.value_and_grad).lower(
        aot.abstract(pipe_.structs, pipe_.shardings),
        aot.abstract(batch, NamedSharding(pipe_.mesh, PartitionSpec())),
    )
    return aot.report(aot.compile_for_gpu(lowered), target=TARGET, devices=pipe), pipe_


def sends(section):
    return [collective for collective in section.collectives if collective.kind == "collective-permute"]


def test_full_offload_takes_a_gibibyte_and_a_third():
    report, pipe = compiled()
    print(f"p=8 v=2 m=16: device temp {report.device_temp_bytes / GIB:.2f} GiB, host {report.host_bytes / GIB:.2f}")
    assert report.device_temp_bytes <= 1.35 * GIB
    assert report.host_bytes == pipe.program.host_slots * RESIDUAL_BYTES


@pytest.mark.parametrize("sizes", [{"pipe": 32, "layers": 64, "microbatches": 64}, {"microbatches": 64}], ids=str)
def test_memory_and_compile_time_are_flat(sizes):
    base, _ = compiled()
    report, _ = compiled(**sizes)
    assert report.device_temp_bytes <= 1.1 * base.device_temp_bytes
    for what in ("transfers", "copies", "kernels"):
        assert [len(getattr(s, what)) for s in report.sections] == [len(getattr(s, what)) for s in base.sections]
    # A shared machine; a program that grew with m would take 4 times as long.
    assert report.compile_seconds <= 2 * base.compile_seconds + 2


@pytest.mark.parametrize("offload", ["full", "none"])
def test_no_ring_is_copied(offload):
    aot.assert_no_ring_copies(compiled(offload=offload)[0])


def test_no_tick_with_forward_and_backward_stages_a_residual():
    """The loop that runs nearly all of the time copies no leaf on its way to or from the host, only an arrival."""
    report, _ = compiled()
    (both,) = (section for section in report.sections if len(sends(section)) == 2)
    large = [copy.shape for copy in both.copies if copy.bytes > 2**20]
    assert large == [f"bf16[1,1,{LENGTH},{HIDDEN}]"]  # one slot of the arrivals; no residual has that shape


def test_each_residual_is_written_once_and_read_once():
    """Three loops: F alone writes, F and B write and read, B alone reads; nothing else moves but flush and prefetch."""
    report, _ = compiled()
    moved = [(section.moved("d2h"), section.moved("h2d")) for section in report.sections if section.transfers]
    once = RESIDUAL_BYTES
    assert sorted(moved) == [(0, once), (once, 0), (once, once), (once, once)]
    assert not any(section.moved("h2h") for section in report.sections)


def test_without_offload_nothing_goes_to_the_host_and_memory_grows_with_devices():
    report, pipe = compiled(offload="none")
    assert report.host_bytes == 0
    assert not any(section.transfers for section in report.sections)
    assert report.device_temp_bytes >= pipe.program.residual_slots * RESIDUAL_BYTES
    assert report.device_temp_bytes > 3 * compiled()[0].device_temp_bytes


def test_each_tick_sends_once_in_each_direction():
    report, _ = compiled()
    assert sorted(len(sends(section)) for section in report.sections if sends(section)) == [1, 1, 2]


def test_backward_does_not_run_the_attention_kernel_again():
    """Trap 15: output and log-sum-exp are named inside the kernel's forward rule, so a tick runs each kernel once."""
    report, _ = compiled()
    forward, backward = ("mha_forward",), ("mha_preprocess_backward", "mha_backward")
    assert [section.kernels for section in report.sections if sends(section)] == [
        forward,
        forward + backward,
        backward,
    ]


@pytest.mark.parametrize("layers", [14, 32, 48])
def test_device_memory_is_flat_in_the_layers_of_a_chunk(layers):
    """Residuals move layer by layer: chunks of two or three take no more than those of one; nor do uneven ones."""
    report, pipe = compiled(layers=layers)
    positions = pipe.program.layers
    # Weight gradients grow with the layers, and which of them are temporary XLA decides: so all but those.
    print(f"{layers} layers, {positions} a chunk: beyond weights and gradients {report.activation_bytes / GIB:.2f} GiB")
    assert report.activation_bytes <= 1.1 * compiled()[0].activation_bytes
    assert report.host_bytes == pipe.program.host_slots * positions * RESIDUAL_BYTES
    aot.assert_no_ring_copies(report)
    # The loop over layers and the tick with both F and B, which run most of the time.
    both = [section for section in report.sections if section.moved("d2h") and section.moved("h2d") and section.depth]
    assert len(both) == (1 if positions == 1 else 2)
    for section in both:
        aot.assert_hidden(report, 0.99, section=section.name)


def test_transfers_are_hidden():
    """All but the flush and the prefetch between phases, whose share falls with the microbatches."""
    report, _ = compiled(microbatches=64)
    for section in report.sections:
        if section.trips and section.trips > 1:
            aot.assert_hidden(report, 0.99, section=section.name)
    aot.assert_hidden(report, 0.99)
    assert report.projected.flops == pytest.approx((2 * 64 + 7) * LAYER_FLOPS)  # bubbles compute too
