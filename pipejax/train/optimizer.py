"""AdamW with warm-up, cosine decay and clipping by the global norm, all of it optax."""

from __future__ import annotations

import dataclasses
from typing import Any

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


def _decayed(params: Any) -> Any:
    """Which leaves are matrices in the model; layers are stacked behind three axes, [pipe, chunks, positions]."""
    return {
        part: jax.tree.map(lambda leaf, stacked=3 * (part == "layers"): leaf.ndim - stacked >= 2, tree)
        for part, tree in params.items()
    }


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by step, for a run of so many steps."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, max(steps - 1, 1)),
        decay_steps=max(steps, 2),
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of so many steps, for parameters as `pj.Pipeline` holds them."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=_decayed
        ),
    )
