"""The training loop: steps, metrics, checkpoints, and what to do when asked to stop."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import signal
import time
from typing import Any

import jax

from pipejax.data.loader import Loader
from pipejax.train.checkpoint import Checkpoints
from pipejax.train.metrics import MetricsWriter
from pipejax.train.progress import Progress
from pipejax.train.state import Trainer, TrainState


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run."""

    out: pathlib.Path
    """Folder for metrics, checkpoints and pictures."""
    steps: int
    """Optimizer steps in the whole run, those before a resume included."""
    checkpoint_every: int = 100
    """Steps between checkpoints; one more is saved at the end."""

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more.")


def train(
    trainer: Trainer, loader: Loader, checkpoints: Checkpoints, config: RunConfig, *, start: TrainState | None
) -> tuple[TrainState, list[float]]:
    """Runs steps until there are `config.steps`, or until SIGTERM, which saves and ends cleanly.

    Args:
      trainer: the step.
      loader: the data; its batch number is the step.
      checkpoints: where states go.
      config: the run.
      start: a restored state; None starts anew.

    Returns:
      The last state, and the loss of each step run.

    Raises:
      TrainingError: loss or gradients are no longer finite; the last checkpoint is from before that.
    """
    state = trainer.init() if start is None else start
    done, losses = int(state.step), []
    stop = _StopOnSigterm()
    with stop, MetricsWriter(config.out, step=done) as metrics, Progress(total=config.steps, done=done) as progress:
        before = time.perf_counter()
        for step in range(done, config.steps):
            state, values = trainer.step(state, loader.batch(step))
            values = {name: float(value) for name, value in jax.device_get(values).items()}
            now = time.perf_counter()
            seconds, before = now - before, now
            speed = {"tokens_per_second": loader.tokens_per_batch / seconds, "step_seconds": seconds}
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                checkpoints.wait()
                raise TrainingError(
                    f"step {step + 1} gave a loss of {values['loss']} and a gradient norm of {values['grad_norm']}; "
                    "lower the learning rate, warm up for longer, or look for bad values in the data."
                )
            losses.append(values["loss"])
            metrics.write(step + 1, {**values, **speed})
            progress.update(step + 1, loss=values["loss"], **speed)
            last = step + 1 == config.steps or stop.asked
            if last or (step + 1) % config.checkpoint_every == 0:
                checkpoints.save(state)
            if stop.asked:
                break
        checkpoints.wait()
    return state, losses


class _StopOnSigterm:
    """Notes a SIGTERM, such as SLURM's before it takes a node away, in place of dying from it."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _StopOnSigterm:
        self._previous: Any = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _note(self, *_: object) -> None:
        self.asked = True
