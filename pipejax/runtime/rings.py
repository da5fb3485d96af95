"""Buffers of slots that live through a scan: in device memory or in pinned host memory.

The forms below are those that XLA for GPUs updates in place, found by compiling (DESIGN traps 2 to 5): a host ring is
one block broadcast on the host side, so it never occupies the device; a device ring that is read and written in one
body has each read sealed by a barrier, or it would be copied.
"""

from __future__ import annotations

from typing import Any

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


def store(ring: jax.Array, value: jax.Array, *place: Any) -> jax.Array:
    """The ring with one place overwritten: a slot, or a layer of a slot."""
    block = lax.expand_dims(value, range(len(place)))
    return lax.dynamic_update_slice(ring, block, _start(ring, place))


def load(ring: jax.Array, *place: Any) -> tuple[jax.Array, jax.Array]:
    """One place's value, and the ring, to be used from here on in place of the one passed in."""
    return lax.optimization_barrier((pick(ring, *place), ring))


def pick(ring: jax.Array, *place: Any) -> jax.Array:
    """One place's value of an array that nothing writes to."""
    sizes = (1,) * len(place) + ring.shape[len(place) :]
    return lax.squeeze(lax.dynamic_slice(ring, _start(ring, place), sizes), range(len(place)))


def store_host(ring: jax.Array, value: jax.Array, *place: Any) -> jax.Array:
    """Starts a device-to-host copy into one place."""
    return store(ring, jax.device_put(value, HOST), *place)


def load_host(ring: jax.Array, *place: Any) -> jax.Array:
    """Starts a host-to-device copy of one place; write the ring before this in a tick, not after (DESIGN trap 4)."""
    return jax.device_put(pick(ring, *place), DEVICE)


def _start(ring: jax.Array, place: tuple[Any, ...]) -> tuple[Any, ...]:
    index = [jnp.asarray(each, jnp.int32) for each in place]
    return (*index, *[jnp.int32(0)] * (ring.ndim - len(place)))
