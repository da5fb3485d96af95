"""What a step changes, and the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from pipejax.pipeline import Pipeline
from pipejax.train.optimizer import Optimizer
from pipejax.vocabulary import with_rows


class TrainState(NamedTuple):
    """All that changes from step to step.

    Attributes:
      params: as the pipeline holds them.
      opt_state: the optimizer's; its moments are shaped and sharded as the parameters.
      step: int32 scalar, steps done.
    """

    params: Any
    opt_state: Any
    step: Any


class Trainer:
    """Initial state, step, and the layer-major form that checkpoints hold, for one pipeline and optimizer."""

    def __init__(self, pipe: Pipeline, optimizer: Optimizer, *, batch: Any, seed: int) -> None:
        """Works out shapes from a batch (arrays or `jax.ShapeDtypeStruct`s); compiles nothing.

        Args:
          pipe: the pipeline.
          optimizer: of its parameters.
          batch: a batch, for its shapes.
          seed: of initial parameters and dropout.
        """
        pipe.describe(batch)
        self.pipe, self.optimizer, self._batch = pipe, optimizer, batch
        self._init_key, self._dropout_key = jax.random.split(jax.random.key(seed))
        self.structs = jax.eval_shape(self._make)
        rest = NamedSharding(pipe.mesh, PartitionSpec())
        self.shardings = TrainState(
            params=pipe.shardings,
            opt_state=optax.tree.map_params(
                optimizer.transformation,
                lambda _, sharding: sharding,
                self.structs.opt_state,
                pipe.keep(pipe.shardings),
                transform_non_params=lambda _: rest,
            ),
            step=rest,
        )
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, rest))

    def init(self) -> TrainState:
        """The state before the first step."""
        return jax.jit(self._make, out_shardings=self.shardings)()

    def to_layers(self, state: TrainState) -> TrainState:
        """The state with parameters and moments whole and layer-major, the same whatever p and v."""
        whole = jax.eval_shape(self.pipe.to_layers, self.structs.params)
        return self._convert(state, self.pipe.layout.to_layers, whole)

    def from_layers(self, state: TrainState) -> TrainState:
        """The inverse of `to_layers`."""
        return self._convert(state, self.pipe.layout.from_layers, self.structs.params)

    def _make(self) -> TrainState:
        params = self.pipe.init(self._init_key, self._batch)
        return TrainState(params, self.optimizer.transformation.init(self.pipe.keep(params)), jnp.int32(0))

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(self._dropout_key, state.step)
        loss, grads = self.pipe.value_and_grad(state.params, batch, key)
        trained = self.pipe.keep(state.params)
        grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, trained)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its counts with floats, whatever the user forbids
            updates, opt_state = self.optimizer.transformation.update(grads, state.opt_state, trained)
            learning_rate = self.optimizer.learning_rate(state.step)
        params = self.pipe.fill(optax.apply_updates(trained, updates), state.params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": learning_rate}
        return TrainState(params, opt_state, state.step + 1), metrics

    def _convert(self, state: TrainState, function: Callable[[jax.Array], jax.Array], structs: Any) -> TrainState:
        """Leaves of moments are stacked and padded as the parameters are, whose new shapes are `structs`."""

        def convert(leaf: jax.Array, struct: Any, stacked: bool) -> jax.Array:
            if stacked:
                return function(leaf)
            return with_rows(leaf, struct.shape[0]) if leaf.ndim else leaf

        stacked = {part: jax.tree.map(lambda _, part=part: part == "layers", tree) for part, tree in structs.items()}
        trained = self.pipe.keep(structs), self.pipe.keep(stacked)
        return TrainState(
            params=jax.tree.map(convert, state.params, structs, stacked),
            opt_state=optax.tree.map_params(self.optimizer.transformation, convert, state.opt_state, *trained),
            step=state.step,
        )
