"""Small programs with rings in host or device memory, lowered for GPUs that are not there."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pipejax import aot

SIZE, SLOTS, TICKS = 2048, 5, 12
SLOT_BYTES = 2 * SIZE * SIZE


def lower(function, *, devices=1, donate=(), arguments=1):
    """Lowers a function of [SIZE, SIZE] bf16 arrays, each device with arrays of its own."""
    mesh = aot.gpu_mesh(pipe=devices)
    spec = PartitionSpec("pipe")
    mapped = jax.shard_map(
        lambda *xs: function(*(x[0] for x in xs))[None],
        mesh=mesh,
        in_specs=(spec,) * arguments,
        out_specs=spec,
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((devices, SIZE, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped, donate_argnums=donate).lower(*(x,) * arguments)


@functools.cache
def compiled(function, *, devices, donate, arguments):
    return aot.compile_for_gpu(lower(function, devices=devices, donate=donate, arguments=arguments))


def report(function, *, devices=1, donate=(), arguments=1, **options):
    program = compiled(function, devices=devices, donate=donate, arguments=arguments)
    return aot.report(program, devices=devices, **options)


def host_ring(x):
    return lax.broadcast(jax.device_put(x, jax.memory.Space.Host), (SLOTS,))


def store(ring, value, slot):
    return lax.dynamic_update_index_in_dim(ring, jax.device_put(value, jax.memory.Space.Host), slot, 0)


def load(ring, slot):
    return jax.device_put(lax.dynamic_index_in_dim(ring, slot, keepdims=False), jax.memory.Space.Device)


def write_then_read(x):
    """Each tick writes to a host ring and reads for the next tick: in place, one write and one read."""

    def tick(carry, i):
        ring, x, older = carry
        ring = store(ring, x, i % SLOTS)
        y = jnp.tanh(x @ older)
        ring, y = lax.optimization_barrier((ring, y))  # the write lasts until y is there, the read begins then
        return (ring, jnp.tanh(y @ y), load(ring, (i + 2) % SLOTS)), None

    (_, x, older), _ = lax.scan(tick, (host_ring(x), x, x), jnp.arange(TICKS, dtype=jnp.int32))
    return x + older


def read_then_write(x):
    """DESIGN trap 4: the ring is read as it was before the write, so XLA keeps both."""

    def tick(carry, i):
        ring, x = carry
        older = load(ring, (i + 2) % SLOTS)
        y = jnp.tanh(x @ x)
        written = store(ring, y, i % SLOTS)
        return (written, jnp.tanh(y @ older) + load(ring, (i + 1) % SLOTS)), None

    (_, x), _ = lax.scan(tick, (host_ring(x), x), jnp.arange(TICKS, dtype=jnp.int32))
    return x


def keep_the_old_ring(x):
    """Where to read in the old ring depends on what was read in the new one, so there must be two at a time."""

    def tick(carry, i):
        ring, x = carry
        written = lax.dynamic_update_index_in_dim(ring, x, i % SLOTS, 0)
        y = x @ lax.dynamic_index_in_dim(written, (i + 2) % SLOTS, keepdims=False)
        slot = jnp.where(y[0, 0] > 0, jnp.int32(1), jnp.int32(2))
        return (written, jnp.tanh(y @ lax.dynamic_index_in_dim(ring, slot, keepdims=False))), None

    ring = jnp.zeros((SLOTS, SIZE, SIZE), jnp.bfloat16)
    (ring, x), _ = lax.scan(tick, (ring, x), jnp.arange(TICKS, dtype=jnp.int32))
    return x + ring.sum(0)


def keep_the_old_ring_in_a_branch(x):
    """The same, in one branch of two (DESIGN trap 2)."""

    def tick(carry, i):
        ring, x = carry

        def branch(ring, x):
            written = lax.dynamic_update_index_in_dim(ring, x, i % SLOTS, 0)
            y = x @ lax.dynamic_index_in_dim(written, (i + 2) % SLOTS, keepdims=False)
            slot = jnp.where(y[0, 0] > 0, jnp.int32(1), jnp.int32(2))
            return written, jnp.tanh(y @ lax.dynamic_index_in_dim(ring, slot, keepdims=False))

        return lax.cond(x[0, 0] > 0, branch, lambda *same: same, ring, x), None

    ring = jnp.zeros((SLOTS, SIZE, SIZE), jnp.bfloat16)
    (ring, x), _ = lax.scan(tick, (ring, x), jnp.arange(TICKS, dtype=jnp.int32))
    return x + ring.sum(0)


def loop_around_ring(x):
    """A loop of one trip or none updates a ring in place, whatever the version of XLA (DESIGN trap 2)."""

    def tick(carry, i):
        ring, x = carry
        flag = (i % 2 == 0).astype(jnp.int32)
        ring = lax.fori_loop(0, flag, lambda _, r: lax.dynamic_update_index_in_dim(r, x, i % SLOTS, 0), ring)
        older, ring = lax.optimization_barrier((lax.dynamic_index_in_dim(ring, (i + 2) % SLOTS, keepdims=False), ring))
        return (ring, jnp.tanh(x @ older)), None

    ring = jnp.zeros((SLOTS, SIZE, SIZE), jnp.bfloat16)
    (ring, x), _ = lax.scan(tick, (ring, x), jnp.arange(TICKS, dtype=jnp.int32))
    return x + ring.sum(0)


def send_around(x):
    """Each tick hands its result to the next device."""

    def tick(x, _):
        return lax.ppermute(jnp.tanh(x @ x), "pipe", [(0, 1), (1, 0)]), None

    return lax.scan(tick, x, None, length=TICKS)[0]


def add(x, y):
    return x + y
