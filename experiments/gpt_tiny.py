"""A byte-level GPT trained on Python's own library through a pipeline of 8 devices: what `make demo` runs.

On a machine without GPUs the devices are virtual. Activations of every block go through pinned host memory.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
import sysconfig
from typing import NoReturn

import tyro

from experiments.devices import prepare

prepare(virtual=8)

import jax  # noqa: E402  (devices are settled first)

import pipejax as pj  # noqa: E402
from pipejax import data, lanes, train  # noqa: E402
from pipejax.models import gpt  # noqa: E402
from pipejax.schedules import draw  # noqa: E402


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the GPT; its vocabulary is bytes."""

    num_layers: int = 16
    """Blocks."""
    hidden_size: int = 64
    """Width."""
    num_heads: int = 4
    """Attention heads; they divide the width."""
    dropout: float = 0.0
    """Dropout rate."""
    init_std: float = 0.06
    """Standard deviation of initial weights; more than GPT-2's 0.02, which is for wider models."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut and what runs when."""

    devices: int = 8
    """Devices in the pipeline."""
    chunks: int = 2
    """Chunks on each device."""
    schedule: str = "lockstep-interleaved"
    """A name from pipejax.schedules.NAMES."""
    microbatches: int = 16
    """Parts that a batch is cut into; they divide it."""
    offload: str = "full"
    """Which activations wait in pinned host memory for their backward: full, none, chunks=N, fraction=A or auto=K."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    folder: pathlib.Path = pathlib.Path(sysconfig.get_paths()["stdlib"])
    """A folder of text; Python's own library by default, so nothing is downloaded."""
    pattern: str = "*.py"
    """Which of its files."""
    batch_size: int = 32
    """Windows in a batch."""
    length: int = 64
    """Bytes in a window."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a small GPT through a pipeline."""

    out: pathlib.Path = pathlib.Path("runs/gpt_tiny")
    """Folder for metrics, checkpoints, the schedule's picture and the tokens."""
    steps: int = 300
    """Optimizer steps."""
    seed: int = 0
    """Of parameters, dropout, data order and the sample."""
    resume: bool = False
    """Go on from the newest checkpoint in `out`, as if the run had never stopped."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    sample_tokens: int = 200
    """Bytes of text to write at the end; 0 for none."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: train.OptimizerConfig = dataclasses.field(
        default_factory=lambda: train.OptimizerConfig(learning_rate=5e-3, warmup_steps=20)
    )


def make_pipeline(config: Config) -> pj.Pipeline:
    """The model in its pipeline."""
    model = gpt.Config(vocab_size=data.VOCAB_SIZE, max_length=config.data.length, **dataclasses.asdict(config.model))
    return pj.Pipeline(
        embed=functools.partial(gpt.Embed, model),
        block=functools.partial(gpt.Block, model),
        head=functools.partial(gpt.Head, model),
        num_layers=model.num_layers,
        mesh=pj.make_mesh(pipe=config.pipeline.devices),
        schedule=pj.schedules.by_name(config.pipeline.schedule, chunks=config.pipeline.chunks),
        offload=pj.Offload.parse(config.pipeline.offload),
        num_microbatches=config.pipeline.microbatches,
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has been checked: nothing is compiled yet."""

    pipe: pj.Pipeline
    loader: data.Loader
    trainer: train.Trainer
    checkpoints: train.Checkpoints
    loop: train.RunConfig
    start: train.TrainState | None


def set_up(config: Config) -> Run:
    """Builds everything from the configuration.

    Raises:
      ValueError: something in it cannot work, with what to change.
    """
    loop = train.RunConfig(out=config.out, steps=config.steps, checkpoint_every=config.checkpoint_every)
    pipe = make_pipeline(config)
    tokens = data.tokenize_folder(config.data.folder, config.out / "tokens.bin", pattern=config.data.pattern)
    loader = data.Loader(tokens, batch_size=config.data.batch_size, length=config.data.length, seed=config.seed)
    optimizer = train.make_optimizer(config.optimizer, config.steps)
    trainer = train.Trainer(pipe, optimizer, batch=loader.batch(0), seed=config.seed)
    identity = {
        "model": dataclasses.asdict(config.model),
        "optimizer": dataclasses.asdict(config.optimizer),
        "seed": config.seed,
        "steps": config.steps,
        "microbatches": config.pipeline.microbatches,
        "batch_size": config.data.batch_size,
        "length": config.data.length,
        "text": f"{len(tokens.tokens)} tokens with CRC {tokens.crc32:08x}",
    }
    checkpoints = train.Checkpoints(config.out / "checkpoints", trainer, identity=identity)
    if not config.resume and checkpoints.latest is not None:
        raise ValueError(
            f"{config.out} holds a run already, {checkpoints.latest} steps long; pass --resume to go on with it, or "
            "another --out."
        )
    start = checkpoints.restore() if config.resume else None
    return Run(pipe, loader, trainer, checkpoints, loop, start)


def describe(config: Config, run: Run) -> str:
    """Two lines on what is about to run."""
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(run.pipe.to_layers, run.pipe.structs)))
    pipeline = config.pipeline
    return (
        f"GPT of {count:,} parameters, {config.model.num_layers} layers, on {pipeline.devices} "
        f"{jax.devices()[0].platform} devices: {pipeline.schedule}, {pipeline.chunks} chunks each, "
        f"{pipeline.microbatches} microbatches, offload {pipeline.offload}.\n"
        f"Text: {config.data.folder}/{config.data.pattern}, {run.loader.windows:,} windows of {config.data.length} "
        f"bytes, {run.loader.tokens_per_batch:,} bytes a step."
    )


def write_sample(config: Config, run: Run, state: train.TrainState) -> None:
    """Prints what the model writes."""
    text = train.sample(
        run.pipe,
        state.params,
        data.encode("def "),
        tokens=config.sample_tokens,
        window=config.data.length,
        temperature=0.7,
        key=jax.random.key(config.seed),
    )
    print("\nWhat it writes after 'def ':\n\n    " + data.decode(text).replace("\n", "\n    "))


def go(config: Config, run: Run) -> None:
    """Trains, draws the schedule, and writes a sample."""
    print(describe(config, run))
    picture = config.out / "schedule.svg"
    picture.write_text(draw.svg(lanes.timeline(run.pipe.program)))
    if run.start is not None:
        print(f"Resuming after step {int(run.start.step)}.")
    state, losses = train.train(run.trainer, run.loader, run.checkpoints, run.loop, start=run.start)
    run.checkpoints.close()
    if losses:
        print(f"Loss: {losses[0]:.3f} nats a byte at the first step, {losses[-1]:.3f} at the last.")
    if int(state.step) < config.steps:
        print(f"Stopped after step {int(state.step)}, saved; go on with --resume.")
    elif config.sample_tokens:
        write_sample(config, run, state)
    print(
        f"\nMetrics      {config.out}/metrics.jsonl, and tensorboard --logdir {config.out}/tensorboard\n"
        f"Schedule     {picture}, with its transfer lanes and the memory of each device\n"
        f"Checkpoints  {config.out}/checkpoints"
    )


def give_up(error: Exception) -> NoReturn:
    """Ends the process with one sentence."""
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
    # At once: after a failed read of a checkpoint, orbax's other reads would each print a traceback on the way out.
    os._exit(1)


def main() -> None:
    """Reads the flags and runs; a mistake in them ends with one sentence."""
    config = tyro.cli(Config, description=__doc__)
    try:
        run = set_up(config)
    except ValueError as error:
        give_up(error)
    try:
        go(config, run)
    except train.TrainingError as error:
        give_up(error)


if __name__ == "__main__":
    main()
