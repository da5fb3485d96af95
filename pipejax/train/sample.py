"""Text from a trained model, token by token, by the plain model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import plain
from pipejax.pipeline import Pipeline


def sample(
    pipe: Pipeline, params: Any, prompt: np.ndarray, *, tokens: int, window: int, temperature: float, key: jax.Array
) -> np.ndarray:
    """Continues a prompt.

    Args:
      pipe: whose model; its head needs a method `logits`.
      params: as the pipeline holds them.
      prompt: int [n], n >= 1.
      tokens: how many to add.
      window: how many of the last tokens the model sees.
      temperature: 0 takes the likeliest token each time.
      key: of the draws.

    Returns:
      int32 [n + tokens], the prompt and what follows it.
    """
    # One device is enough for this, and a plain model knows no mesh.
    layered = jax.device_put(jax.device_get(pipe.to_layers(params)), jax.devices()[0])

    @jax.jit
    def logits(params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
        x, _ = plain.hidden(pipe, params, {"tokens": tokens[None]})
        head = pipe.ties.join(params)["head"]
        return pipe.head.apply(head, None, x, method="logits")[0, last]

    text = list(map(int, prompt))
    for index in range(tokens):
        seen = text[-window:]
        padded = np.zeros(window, np.int32)  # a causal model's last logits do not see the padding behind them
        padded[: len(seen)] = seen
        values = logits(layered, jnp.asarray(padded), jnp.int32(len(seen) - 1))
        drawn = (
            jax.random.categorical(jax.random.fold_in(key, index), values / temperature)
            if temperature > 0
            else jnp.argmax(values)
        )
        text.append(int(drawn))
    return np.array(text, np.int32)
