"""`Pipeline`: a Flax model cut into stages and trained through one scanned pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipejax import frozen, program_forward, program_lockstep, program_staggered
from pipejax import layout as layouts
from pipejax.offload import BLOCK_INPUT, Offload, Placed, activation_names, wanted
from pipejax.parts import Part, as_part
from pipejax.program import Program
from pipejax.runtime.ends import AXIS, Functions
from pipejax.runtime.execute import Executor
from pipejax.runtime.residuals import placed
from pipejax.schedules import Schedule, ScheduleSpec, check
from pipejax.tied import Ties
from pipejax.vocabulary import Cuts

_EMBED, _HEAD, _LAYERS = range(3)  # what the init key is folded with


class Pipeline:
    """A model of `embed`, `num_layers` times `block`, and `head`, pipelined over the mesh axis `pipe`.

    Each part is a Flax linen module, an nnx factory (a class or partial that takes `rngs`), or a `pj.Part` of plain
    functions. `batch` is a dict of arrays whose leading axis is the sample; every part gets the whole dict of one
    microbatch, so that masks, positions or segment ids reach every block:

      embed(batch) -> x
      block(x, batch) -> x, or (x, auxiliary loss sum)
      head(x, batch) -> (loss sum, weight), float32 scalars; the weight, a token count, is no function of parameters

    The loss is (sum of losses + sum of auxiliary losses) / (sum of weights) over the whole batch, whatever the number
    of microbatches.

    Parameters are {"embed", "layers", "head"}. Leaves of "layers" are [pipe, chunks, layers_per_chunk, ...], sharded
    over `pipe`; where the stages do not divide the layers, fillers are zeros that stay zero. Leaves of the other two
    rest in shards over `pipe` along the first axis that it divides, and are gathered for a step; those that a part
    declares in `split` (the tables of the models in `pipejax.models`) are used as they rest, by all devices at once.
    """

    def __init__(
        self,
        *,
        embed: Any,
        block: Any,
        head: Any,
        num_layers: int,
        mesh: Mesh,
        schedule: ScheduleSpec,
        offload: Offload,
        num_microbatches: int,
        tied: dict[str, str] | None = None,
        trained: Callable[[str], bool] | None = None,
        ring_fill: float = 0.0,
    ) -> None:
        """Checks the configuration and builds the schedule and its program; compiles nothing.

        Args:
          embed, block, head: the model's parts.
          num_layers: how many blocks.
          mesh: has an axis `pipe`, see `pj.make_mesh`.
          schedule: what runs when, from `pj.schedules`.
          offload: what happens to the blocks' named activations between F and B.
          num_microbatches: how many parts the batch is cut into; it must divide the batch.
          tied: parameters of the head that are parameters of the embedding, as {"head.path": "embed.path"}; both have
            one shape.
          trained: dot path of a parameter, such as "layers.adapter.up" -> whether it has a gradient; None for all.
            Integers never have. What is not trained costs no gradient, no accumulator and no optimizer state.
          ring_fill: what buffers hold before anything is stored. The result must not depend on it: tests pass NaN.

        Raises:
          ValueError: an argument that cannot work, with what to change.
        """
        if AXIS not in mesh.axis_names:
            raise ValueError(
                f"Pipeline: the mesh has the axes {tuple(mesh.axis_names)} and none named 'pipe'; "
                "make it with pj.make_mesh(pipe=...)."
            )
        if not isinstance(schedule, ScheduleSpec):
            raise ValueError(
                f"Pipeline: schedule is {schedule!r}; pass one of pj.schedules, such as "
                "pj.schedules.Interleaved(chunks=2), or pj.schedules.by_name(...)."
            )
        if not isinstance(offload, Offload):
            raise ValueError(f"Pipeline: offload is {offload!r}; pass pj.Offload.none() or pj.Offload.full().")
        _check_count(num_microbatches)
        self.embed, self.block, self.head = as_part(embed, "embed"), as_part(block, "block"), as_part(head, "head")
        self.mesh, self.offload, self.num_microbatches = mesh, offload, num_microbatches
        self.num_layers = num_layers
        self.ties = Ties.parse(tied or {})
        self._choice = trained
        self.cuts = Cuts.of(self.embed, self.head, devices=mesh.shape[AXIS])
        self._schedule = schedule
        self.plan: Schedule = self._build_schedule(num_microbatches)
        self.layout = layouts.spread(num_layers=num_layers, placement=self.plan.placement)
        self.program = self._build_program()
        self._forward_programs = {num_microbatches: program_forward.build(self.plan)}
        self._ring_fill = ring_fill
        self._structs: Any = None
        self._whole: Any = None
        self._described: set[Any] = set()
        self._value_and_grad = jax.jit(self._traced_value_and_grad)
        self._loss = jax.jit(self._traced_loss, static_argnums=2)

    def _build_schedule(self, microbatches: int) -> Schedule:
        """In lockstep a tick lies between F and B; other schedules have passes of their own time."""
        size = {"devices": self.mesh.shape[AXIS], "microbatches": microbatches}
        plan = self._schedule.build(**size)
        if plan.lockstep:
            plan = self._schedule.build(**size, transfer_ticks=program_lockstep.TRANSFER_TICKS)
        check(plan)
        return plan

    def _build_program(self) -> Program:
        layers = self.layout.layers_per_chunk
        offload = self.offload
        moves = wanted(offload, self.plan) if offload.moves else None
        if program_lockstep.suits(self.plan):
            some = moves if offload.partial else None
            return program_lockstep.build(self.plan, offload=offload.moves, layers=layers, wanted=some, k=offload.k)
        return program_staggered.build(self.plan, wanted=moves, layers=layers, k=offload.k)

    def init(self, key: jax.Array, batch: Any) -> Any:
        """Initialises the parameters, each where it rests.

        Layers are initialised by their index in the model: one key gives one model, whatever the pipeline.

        Args:
          key: a PRNG key.
          batch: a batch, or `jax.ShapeDtypeStruct`s of one.

        Returns:
          {"embed", "layers", "head"}.
        """
        self.describe(batch)
        microbatch = self._microbatch(batch)
        return jax.jit(lambda key: self.cuts.pad(self._init(key, batch=microbatch)), out_shardings=self.shardings)(key)

    def value_and_grad(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """The loss and its gradients.

        Args:
          params: from `init` or `from_layers`.
          batch: a dict of arrays, leading axis `num_microbatches` times the microbatch.
          key: seeds dropout, folded with layer and microbatch; fold the step into it. None runs the modules in
            evaluation mode.

        Returns:
          The loss, a float32 scalar, and float32 gradients shaped and sharded as `params`, with None in the places of
          parameters that are not trained. Give an optimizer `pipe.keep(params)`, which has the same places empty, and
          put what it makes of them back with `pipe.fill(kept, params)`.
        """
        self.describe(batch)
        return self._value_and_grad(params, batch, key)

    def loss(self, params: Any, batch: Any, *, num_microbatches: int | None = None) -> jax.Array:
        """The loss alone, forward only and in evaluation mode.

        Args:
          params: from `init` or `from_layers`.
          batch: as for `value_and_grad`, of any number of samples.
          num_microbatches: how many parts this batch is cut into; None for as many as in training. Each number and
            size of microbatches is compiled once.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        _check_count(count)
        self._describe(self._microbatch(batch, count))
        if count not in self._forward_programs:
            self._forward_programs[count] = program_forward.build(self._build_schedule(count))
        return self._loss(params, batch, count)

    def keep(self, params: Any) -> Any:
        """Parameters, or a tree of their structure, with None where nothing is trained: what an optimizer is given."""
        return frozen.keep(self.trained, params)

    def fill(self, kept: Any, params: Any) -> Any:
        """The inverse of `keep`: trained parameters from one tree, the rest from another."""
        return frozen.fill(self.trained, kept, params)

    @property
    def trained(self) -> Any:
        """A tree of bools like the parameters: whether each has a gradient."""
        return frozen.mask(self.structs, self._choice)

    def to_layers(self, params: Any) -> Any:
        """Parameters, or any tree of their structure, whole: "layers" leaves are [num_layers, ...] in model order.

        Known once `init` or `describe` has seen a batch.
        """
        layered = {**params, "layers": jax.tree.map(self.layout.to_layers, params["layers"])}
        return self.cuts.strip(layered, self._known(self._whole))

    def from_layers(self, params: Any) -> Any:
        """The inverse of `to_layers`, whatever layout the tree came from; put the result under `shardings`."""
        return self.cuts.pad({**params, "layers": jax.tree.map(self.layout.from_layers, params["layers"])})

    @property
    def shardings(self) -> Any:
        """A tree of `NamedSharding` for the parameters; known once `init` or `describe` has seen a batch."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self._specs(), is_leaf=_is_spec)

    @property
    def structs(self) -> Any:
        """A tree of `jax.ShapeDtypeStruct` for the parameters; known once `init` or `describe` has seen a batch."""
        return self._known(self._structs)

    def _known(self, structs: Any) -> Any:
        if structs is None:
            raise RuntimeError("Pipeline: call init(key, batch) or describe(batch) first; shapes follow from a batch.")
        return structs

    def describe(self, batch: Any) -> None:
        """Works out all shapes from a batch, without computing anything, and checks that the parts fit together.

        Raises:
          ValueError: the batch or a part does not fit, with what to change.
        """
        self._describe(self._microbatch(batch))

    def _describe(self, microbatch: Any) -> None:
        if _signature(microbatch) in self._described:
            return
        whole = jax.eval_shape(functools.partial(self._init, batch=microbatch, mapped=False), jax.random.key(0))
        x = jax.eval_shape(self._embed, whole["embed"], microbatch, None)
        layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[3:], leaf.dtype), whole["layers"])
        self._check_parts(whole, layer, x, microbatch)
        self._whole, self._structs = whole, jax.eval_shape(self.cuts.pad, whole)
        self.fates = self.offload.fates(activation_names(self._block, layer, x, microbatch, None))
        trained = frozen.mask(whole, self._choice)["layers"]
        self._placed = placed(self._block, self.fates, layer, x, microbatch, None, trained=trained)
        for name in self.offload.offloaded or ():
            if not sum(self._placed[name][1:]):
                raise ValueError(
                    f"Offload: {name!r} is not among what the backward pass needs, so offloading it would move "
                    "nothing; leave it out, or name a value that another equation uses."
                )
        self._described.add(_signature(microbatch))

    def placed(self, batch: Any) -> dict[str, Placed]:
        """For each named activation of the block, its fate and the bytes of a layer and microbatch in either memory.

        Args:
          batch: as for `value_and_grad`, or `jax.ShapeDtypeStruct`s.
        """
        self.describe(batch)
        return self._placed

    def executor(self) -> Executor:
        """The runtime for this pipeline; `describe` must have seen a batch."""
        functions = Functions(
            embed=functools.partial(self._embed, **_over_devices(self.embed)),
            head=functools.partial(self._head, **_over_devices(self.head)),
            cut=self.cuts.mask(self.ties.join(self.structs)),
            trained=self.ties.join(self.trained),
        )
        return Executor(
            mesh=self.mesh,
            layout=self.layout,
            functions=functions,
            block=self._block,
            fates=self.fates,
            specs=self.ties.join(self._specs()),
            fill=self._ring_fill,
        )

    def split_batch(self, batch: Any, num_microbatches: int | None = None) -> Any:
        """[num_microbatches * microbatch, ...] → [num_microbatches, microbatch, ...], samples in order."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)

    def _traced_value_and_grad(self, params: Any, batch: Any, key: Any) -> tuple[jax.Array, Any]:
        whole = self.ties.join(params)
        executor = self.executor()
        loss, grads, _ = executor.value_and_grad(self.program, whole, self.split_batch(batch), key)
        return loss, self.ties.split_gradients(grads)

    def _traced_loss(self, params: Any, batch: Any, count: int) -> jax.Array:
        program = self._forward_programs[count]
        return self.executor().loss(program, self.ties.join(params), self.split_batch(batch, count))

    def _embed(self, params: Any, batch: Any, key: Any, **axis: Any) -> jax.Array:
        return self.embed.apply(params, key, batch, **axis)

    def _block(self, params: Any, x: jax.Array, batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        out = self.block.apply(params, key, checkpoint_name(x, BLOCK_INPUT), batch)
        return out if isinstance(out, tuple) else (out, jnp.float32(0))

    def _head(self, params: Any, x: jax.Array, batch: Any, key: Any, **axis: Any) -> tuple[jax.Array, jax.Array]:
        loss, weight = self.head.apply(params, key, x, batch, **axis)
        return loss.astype(jnp.float32), jnp.asarray(weight, jnp.float32)

    def _init(self, key: jax.Array, *, batch: Any, mapped: bool = True) -> Any:
        """Parameters at rest; `mapped` initialises each device's layers on that device."""
        embed = self.embed.init(jax.random.fold_in(key, _EMBED), batch)
        x = jax.eval_shape(self._embed, embed, batch, None)
        head = self.head.init(jax.random.fold_in(key, _HEAD), x, batch)

        def layers(key: jax.Array, index: Any) -> Any:
            stacked = jax.vmap(lambda layer: self.block.init(jax.random.fold_in(key, layer), x, batch))(
                index.reshape(-1)
            )
            return jax.tree.map(lambda leaf: _blank(leaf, index), stacked)

        if mapped:
            specs = (PartitionSpec(), PartitionSpec(AXIS))
            layers = jax.shard_map(layers, mesh=self.mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
        params = {"embed": embed, "layers": layers(jax.random.fold_in(key, _LAYERS), self.layout.layer), "head": head}
        self.ties.check(params)
        self.cuts.check(params, self.ties)
        return self.ties.strip(params)

    def _specs(self) -> Any:
        pipe = self.mesh.shape[AXIS]
        cut = self.cuts.mask(self.structs)

        def spec(leaf: Any, cut: bool) -> PartitionSpec:
            return PartitionSpec(AXIS) if cut else layouts.rest_spec(leaf.shape, pipe)

        rest = {part: jax.tree.map(spec, self.structs[part], cut[part]) for part in ("embed", "head")}
        return {**rest, "layers": jax.tree.map(lambda _: PartitionSpec(AXIS), self.structs["layers"])}

    def _microbatch(self, batch: Any, num_microbatches: int | None = None) -> Any:
        """Shapes of one microbatch, after checking that the batch can be cut."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        sizes = {jax.tree_util.keystr(path): leaf.shape[0] if leaf.ndim else 0 for path, leaf in leaves}
        if not all(sizes.values()) or len(set(sizes.values())) != 1:
            raise ValueError(
                f"Pipeline: every array of the batch needs the same leading axis, its samples; these have {sizes}. "
                "What all samples share, compute in the part; in place of a packed batch's cumulative offsets pass "
                "segment ids of each sample."
            )
        samples = next(iter(sizes.values()))
        if samples % count:
            raise ValueError(
                f"Pipeline: {count} microbatches do not divide a batch of {samples} samples; "
                "change the batch size or num_microbatches."
            )
        size = samples // count
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), batch)

    def _check_parts(self, structs: Any, layer: Any, x: Any, batch: Any) -> None:
        if not isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(f"Pipeline: embed must return one array, the first block's input; it returns {x}.")
        leaves = jax.tree_util.tree_leaves_with_path(structs)
        for path, leaf in leaves:
            if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.floating, jnp.integer)):
                raise ValueError(
                    f"Pipeline: the parameter {jax.tree_util.keystr(path, simple=True, separator='.')} is "
                    f"{leaf.dtype}; parameters are floating-point, or integers that are not trained, so compute it in "
                    "the call or pass it in the batch."
                )
        if self._choice is not None and not any(jax.tree.leaves(frozen.mask(structs, self._choice))):
            paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
            raise ValueError(
                f"Pipeline: trained chooses none of the parameters: {', '.join(paths)}; let it choose some."
            )
        y, aux = jax.eval_shape(self._block, layer, x, batch, None)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"Pipeline: the block turns {x.dtype}{list(x.shape)} into {y.dtype}{list(y.shape)}; blocks follow one "
                "another, so make shape and dtype of its output those of its input."
            )
        head = self.ties.join(structs)["head"]
        loss, weight = jax.eval_shape(self._head, head, x, batch, None)
        if aux.shape or loss.shape or weight.shape:
            raise ValueError(
                f"Pipeline: losses and weights are scalars, sums over a microbatch; the auxiliary loss has shape "
                f"{aux.shape}, the head's loss {loss.shape}, its weight {weight.shape}."
            )


def _check_count(num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise ValueError(f"Pipeline: num_microbatches is {num_microbatches}; it must be 1 or more.")


def _over_devices(part: Part) -> dict[str, Any]:
    return {"axis": AXIS} if part.split else {}


def _blank(leaf: jax.Array, index: jax.Array) -> jax.Array:
    """Stacked layers [positions, ...] shaped as `index`, zero where a position is a filler."""
    filler = (index.reshape(-1) < 0).reshape((-1,) + (1,) * (leaf.ndim - 1))
    return jnp.where(filler, jnp.zeros((), leaf.dtype), leaf).reshape(*index.shape, *leaf.shape[1:])


def _signature(microbatch: Any) -> Any:
    leaves, tree = jax.tree.flatten(microbatch)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
