"""The language-modelling loss that the heads share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def token_loss(logits: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the next token, summed, and what to divide it by.

    Args:
      logits: [batch, length, vocab], any float dtype; the loss is float32.
      batch: has "targets", int32 [batch, length], and may have "weights", float32 [batch, length], 0 where a target
        does not count.

    Returns:
      The summed loss in nats and the summed weight, float32 scalars.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"])
    weights = batch.get("weights")
    if weights is None:
        return jnp.sum(losses), jnp.float32(losses.size)
    return jnp.sum(losses * weights), jnp.sum(weights)
