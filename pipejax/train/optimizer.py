"""AdamW with warm-up, cosine decay and clipping by the global norm, all of it optax."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated."""

    learning_rate: float = 3e-4
    """The highest learning rate, reached at the end of the warm-up."""
    final_fraction: float = 0.1
    """The learning rate at the last step, as a fraction of the highest."""
    warmup_steps: int = 100
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors (biases, norms) have none."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""


class Optimizer(NamedTuple):
    """How parameters change.

    Attributes:
      transformation: gradients to updates, for parameters as `pj.Pipeline` holds them.
      learning_rate: by step, from 0; what the metrics show.
    """

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule


def _decayed(params: Any) -> Any:
    """Which leaves are matrices in the model; layers are stacked behind three axes, [pipe, chunks, positions]."""
    return {
        part: jax.tree.map(lambda leaf, stacked=3 * (part == "layers"): leaf.ndim - stacked >= 2, tree)
        for part, tree in params.items()
    }


def make_optimizer(config: OptimizerConfig, steps: int) -> Optimizer:
    """The optimizer of a run of so many steps."""
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, max(steps - 1, 1)),
        decay_steps=max(steps, 2),
        end_value=config.learning_rate * config.final_fraction,
    )
    adamw = optax.adamw(learning_rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=_decayed)
    return Optimizer(optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw), learning_rate)
