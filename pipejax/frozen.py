"""Parameters that are not trained: integers, and floating-point ones that the user freezes.

They have no gradient, no accumulator and no optimizer state. In a tree of gradients, or of what an optimizer is given,
their places hold None, which JAX and optax take for nothing at all (`jax.grad` would put a `float0` array there, which
optax cannot use, and zeros would cost as much as the parameters).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# The dot path of a parameter, such as "layers.adapter.up" -> whether it is trained.
Choice = Callable[[str], bool]


def mask(params: Any, choice: Choice | None) -> Any:
    """A tree like the parameters': whether each is trained; integers never are.

    Args:
      params: arrays or their shapes.
      choice: None for all.
    """

    def one(path: Any, leaf: Any) -> bool:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return bool(floating and (choice is None or choice(jax.tree_util.keystr(path, simple=True, separator="."))))

    return jax.tree_util.tree_map_with_path(one, params)


def keep(trained: Any, tree: Any) -> Any:
    """A tree like the mask with None where nothing is trained; what the tree has there may be missing already."""
    return jax.tree.map(lambda flag, leaf: leaf if flag else None, trained, tree)


def fill(trained: Any, kept: Any, whole: Any) -> Any:
    """The inverse of `keep`: what is trained from one tree, the rest from another."""
    return jax.tree.map(lambda flag, mine, other: mine if flag else other, trained, kept, whole)
