"""The same model with no pipeline: the yardstick for gradients, and what sampling runs on.

Shares nothing with the runtime but the parts themselves: JAX differentiates a scan over layers, microbatch by
microbatch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax import frozen
from pipejax.pipeline import Pipeline
from pipejax.runtime.ends import EMBED_KEY, HEAD_KEY
from pipejax.runtime.execute import fold_key


def hidden(pipe: Pipeline, params: Any, batch: Any, key: jax.Array | None = None, microbatch: Any = 0) -> Any:
    """The last block's output and the sum of auxiliary losses.

    Args:
      pipe: whose parts to use.
      params: layer-major, from `pipe.to_layers`.
      batch: one microbatch.
      key: seeds dropout as in `pipe.value_and_grad`; None for evaluation.
      microbatch: its index, folded into the key.

    Returns:
      x as the head takes it, and a float32 scalar.
    """
    x = pipe.embed.apply(params["embed"], _fold(key, pipe.num_layers + EMBED_KEY, microbatch), batch)

    def layer(carry: Any, item: Any) -> Any:
        x, total = carry
        index, layer_params = item
        out = pipe.block.apply(layer_params, _fold(key, index, microbatch), x, batch)
        y, aux = out if isinstance(out, tuple) else (out, jnp.float32(0))
        return (y, total + aux.astype(jnp.float32)), None

    layers = (jnp.arange(pipe.num_layers, dtype=jnp.int32), params["layers"])
    return lax.scan(layer, (x, jnp.float32(0)), layers)[0]


def loss(pipe: Pipeline, params: Any, batch: Any, key: jax.Array | None = None) -> jax.Array:
    """The loss of a whole batch, a float32 scalar; arguments as for `value_and_grad`."""

    def one(totals: Any, item: Any) -> Any:
        index, batch = item
        x, aux = hidden(pipe, params, batch, key, index)
        head = pipe.ties.join(params)["head"]
        total, weight = pipe.head.apply(head, _fold(key, pipe.num_layers + HEAD_KEY, index), x, batch)
        return (totals[0] + total.astype(jnp.float32) + aux, totals[1] + jnp.asarray(weight, jnp.float32)), None

    microbatches = (jnp.arange(pipe.num_microbatches, dtype=jnp.int32), pipe.split_batch(batch))
    (total, weight), _ = lax.scan(jax.checkpoint(one), (jnp.float32(0), jnp.float32(0)), microbatches)
    weight = lax.stop_gradient(weight)
    return total / jnp.where(weight == 0, 1, weight)


def value_and_grad(pipe: Pipeline, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, Any]:
    """What `pipe.value_and_grad` must equal, by `jax.grad`.

    Args:
      pipe: whose parts, number of layers and of microbatches to use.
      params: layer-major, from `pipe.to_layers`.
      batch: the whole batch.
      key: seeds dropout.

    Returns:
      The loss and its gradients, layer-major; None where nothing is trained.
    """
    trained = pipe.trained
    return jax.value_and_grad(lambda kept: loss(pipe, frozen.fill(trained, kept, params), batch, key))(
        frozen.keep(trained, params)
    )


def _fold(key: jax.Array | None, layer: Any, microbatch: Any) -> jax.Array | None:
    return None if key is None else fold_key(key, layer, microbatch)
