"""Normalisation in float32 whatever the activations' dtype."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def normalise(norm: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """A float32 norm of x, in x's dtype."""
    return norm(x.astype(jnp.float32)).astype(x.dtype)
