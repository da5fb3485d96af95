"""Buffers of slots that live through a scan: in device memory or in pinned host memory.

The forms below are those that XLA for GPUs updates in place, found by compiling (DESIGN traps 2 to 5): a host ring is
one block broadcast on the host side, so it never occupies the device; a device ring that is read and written in one
body has each read sealed by a barrier, or it would be copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device


def filled(struct: jax.ShapeDtypeStruct, fill: float) -> jax.Array:
    """An array of one value; integer arrays take zero in place of NaN or infinity."""
    inexact = jnp.issubdtype(struct.dtype, jnp.inexact)
    return jnp.full(struct.shape, fill if inexact else 0, struct.dtype)


def make_ring(struct: jax.ShapeDtypeStruct, slots: int, fill: float) -> jax.Array:
    """A device ring [slots, *struct.shape]."""
    return filled(jax.ShapeDtypeStruct((slots, *struct.shape), struct.dtype), fill)


def make_host_ring(struct: jax.ShapeDtypeStruct, slots: int, fill: float) -> jax.Array:
    """A ring [slots, *struct.shape] in pinned host memory."""
    return lax.broadcast(jax.device_put(filled(struct, fill), HOST), (slots,))


def store(ring: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """The ring with one slot overwritten."""
    return lax.dynamic_update_index_in_dim(ring, value, slot, 0)


def load(ring: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One slot's value, and the ring, to be used from here on in place of the one passed in."""
    return lax.optimization_barrier((lax.dynamic_index_in_dim(ring, slot, keepdims=False), ring))


def store_host(ring: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Starts a device-to-host copy into one slot."""
    return store(ring, jax.device_put(value, HOST), slot)


def load_host(ring: jax.Array, slot: jax.Array) -> jax.Array:
    """Starts a host-to-device copy of one slot; write the ring before this in a tick, not after (DESIGN trap 4)."""
    return jax.device_put(lax.dynamic_index_in_dim(ring, slot, keepdims=False), DEVICE)
