"""The whole training step of a model, lowered from shapes alone for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import math
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipejax import train
from pipejax.aot.compiling import compile_for_gpu
from pipejax.aot.reporting import Report, report
from pipejax.aot.targets import Target
from pipejax.aot.topology import abstract, gpu_mesh
from pipejax.models.attention import Implementation
from pipejax.models.named import named_models
from pipejax.offload import Offload
from pipejax.pipeline import Pipeline
from pipejax.schedules import Costs, ScheduleSpec, simulate

# The narrowest head that Pallas' attention takes.
_LEAST_FUSED_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Model:
    """What is compiled: the parts of a model, and shapes to run it at.

    Attributes:
      name: for messages.
      embed, block, head: as `pj.Pipeline` takes them.
      num_layers: blocks.
      length: tokens in a sequence.
      batch: `jax.ShapeDtypeStruct`s of one sample, by name, without the sample axis.
    """

    name: str
    embed: Any
    block: Any
    head: Any
    num_layers: int
    length: int
    batch: dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A compiled training step: what the program takes, and what it is worth.

    Attributes:
      report: of the program.
      tokens: in the batch.
      model_flops: of a step over all devices, 6 a parameter and token, and 12·layers·hidden·length a token for
        attention (arXiv 2204.02311, appendix B); nothing recomputed counts, nor the embedding's table.
      mfu: projected; model FLOPs over what the devices' data sheet promises in the projected time.
      bubble: the share of the schedule's time in which a device has nothing to do, F, B and W taken as equal.
    """

    report: Report
    tokens: int
    model_flops: float
    mfu: float
    bubble: float


def load_model(name: str, *, length: int | None) -> Model:
    """A model by its name, or from a Python file.

    A file defines `embed`, `block`, `head` and `num_layers`, as `pj.Pipeline` takes them, and `batch`: a function from
    a sequence length to the `jax.ShapeDtypeStruct`s of one sample, by name. `length`, if it defines one, is used where
    none is asked for.

    Raises:
      ValueError: no such model, or a file that lacks something, with what to change.
    """
    models = named_models()
    if name in models:
        model = models[name]
        length = length or model.length
        tokens = jax.ShapeDtypeStruct((length,), jnp.int32)
        implementation: Implementation = "fused" if model.head_width >= _LEAST_FUSED_WIDTH else "xla"
        embed, block, head = model.parts(length, implementation)
        return Model(name, embed, block, head, model.num_layers, length, {"tokens": tokens, "targets": tokens})
    if not name.endswith(".py"):
        raise ValueError(f"there is no model {name!r}; give one of {', '.join(models)}, or a Python file.")
    try:
        found = runpy.run_path(name)
    except OSError:
        raise
    except Exception as error:  # whatever the user's code does
        raise ValueError(f"{name} does not run: {type(error).__name__}: {error}.") from error
    missing = [wanted for wanted in ("embed", "block", "head", "num_layers", "batch") if wanted not in found]
    if missing:
        raise ValueError(f"{name} does not define {', '.join(missing)}; see pipejax.aot.trainstep.load_model.")
    length = length or found.get("length")
    if length is None:
        raise ValueError(f"{name} defines no length; pass --seq.")
    try:
        batch = dict(found["batch"](length))
    except Exception as error:
        raise ValueError(f"{name}: batch({length}) does not run: {type(error).__name__}: {error}.") from error
    return Model(name, found["embed"], found["block"], found["head"], found["num_layers"], length, batch)


def compile_step(
    model: Model,
    *,
    target: Target,
    pipe: int,
    schedule: ScheduleSpec,
    offload: Offload,
    microbatches: int,
    microbatch_size: int = 1,
) -> StepReport:
    """Compiles forward, backward and AdamW, the state donated, and reads the program.

    Args:
      model: what to train.
      target: for which GPU.
      pipe: devices in the pipeline.
      schedule: what runs when.
      offload: of activations.
      microbatches: parts of a batch.
      microbatch_size: samples in each.
    """
    mesh = gpu_mesh(pipe=pipe, target=target)
    trainer, batch = make_trainer(
        model,
        mesh=mesh,
        schedule=schedule,
        offload=offload,
        microbatches=microbatches,
        microbatch_size=microbatch_size,
    )
    pipeline = trainer.pipe
    lowered = trainer.step.lower(
        abstract(trainer.structs, trainer.shardings), abstract(batch, NamedSharding(mesh, PartitionSpec()))
    )
    trips = loop_trips(pipeline)
    compiled = report(compile_for_gpu(lowered), target=target, devices=pipe, unknown_trips=trips)
    tokens = microbatches * microbatch_size * model.length
    flops = _model_flops(pipeline, batch, tokens, model)
    timeline = simulate(pipeline.plan, Costs())
    seconds = compiled.projected.step_seconds
    return StepReport(
        report=compiled,
        tokens=tokens,
        model_flops=flops,
        mfu=flops / (pipe * target.peak_bf16_flops * seconds),
        bubble=float(timeline.bubble / timeline.makespan),
    )


def loop_trips(pipeline: Pipeline) -> dict[str, float]:
    """How often the loops of a step run in a tick whose count only the tables tell, by parts of their names."""
    program = pipeline.program
    ticks = program.table.shape[1]
    found = {}
    if program.predicated:
        # Neighbours exchange at each tick's end, so a tick lasts as long as its longest pass on any device.
        split = program.schedule.split_backward
        scopes = {
            "b": "backward" if split else "backward_and_weights",
            "f": "forward",
            **({"w": "weights"} if split else {}),
        }
        left = np.ones(ticks, bool)
        for letter, scope in scopes.items():
            longest = left & program.column(f"{letter}_valid").any(axis=0)
            found[f"{scope}_if_due"] = float(longest.mean()) * program.layers
            left &= ~longest
        found["nothing_if_due"] = float(left.mean()) * program.layers
        found["receive_if_due"] = float(program.column("in_valid").mean())
    # Embedding and head, once a microbatch, whichever device has them; as many ticks run an F as run a B.
    forward = sum(phase.stop - phase.start for phase in program.phases if phase.forward)
    return {**found, "_if_due": pipeline.num_microbatches / forward}


def make_trainer(
    model: Model,
    *,
    mesh: Mesh,
    schedule: ScheduleSpec,
    offload: Offload,
    microbatches: int,
    microbatch_size: int,
) -> tuple[train.Trainer, dict[str, jax.ShapeDtypeStruct]]:
    """The step of a model with AdamW on a mesh, and the batch that it takes, as shapes."""
    pipeline = Pipeline(
        embed=model.embed,
        block=model.block,
        head=model.head,
        num_layers=model.num_layers,
        mesh=mesh,
        schedule=schedule,
        offload=offload,
        num_microbatches=microbatches,
    )
    samples = microbatches * microbatch_size
    batch = {name: jax.ShapeDtypeStruct((samples, *leaf.shape), leaf.dtype) for name, leaf in model.batch.items()}
    return train.Trainer(pipeline, train.make_optimizer(train.OptimizerConfig(), 1000), batch=batch, seed=0), batch


def _model_flops(pipeline: Pipeline, batch: Any, tokens: int, model: Model) -> float:
    structs = {name: tree for name, tree in pipeline.structs.items() if name != "embed"}
    per_layer = sum(math.prod(leaf.shape[3:]) for leaf in jax.tree.leaves(structs["layers"]))
    head = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structs["head"]))
    one = {name: leaf.update(shape=(1, *leaf.shape[1:])) for name, leaf in batch.items()}
    x = jax.eval_shape(lambda params, b: pipeline.embed.apply(params, None, b), pipeline.structs["embed"], one)
    parameters = model.num_layers * per_layer + head
    return tokens * (6.0 * parameters + 12.0 * model.num_layers * x.shape[-1] * model.length)
