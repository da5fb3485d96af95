"""What a step changes, and the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from pipejax.pipeline import Pipeline
from pipejax.train.optimizer import Optimizer


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
                pipe.shardings,
                transform_non_params=lambda _: rest,
            ),
            step=rest,
        )
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, rest))

    def init(self) -> TrainState:
        """The state before the first step."""
        return jax.jit(self._make, out_shardings=self.shardings)()

    def to_layers(self, state: TrainState) -> TrainState:
        """The state with parameters and moments layer-major, the same whatever p and v."""
        return self._convert(state, self.pipe.layout.to_layers)

    def from_layers(self, state: TrainState) -> TrainState:
        """The inverse of `to_layers`."""
        return self._convert(state, self.pipe.layout.from_layers)

    def _make(self) -> TrainState:
        params = self.pipe.init(self._init_key, self._batch)
        return TrainState(params, self.optimizer.transformation.init(params), jnp.int32(0))

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(self._dropout_key, state.step)
        loss, grads = self.pipe.value_and_grad(state.params, batch, key)
        grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its counts with floats, whatever the user forbids
            updates, opt_state = self.optimizer.transformation.update(grads, state.opt_state, state.params)
            learning_rate = self.optimizer.learning_rate(state.step)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": learning_rate}
        return TrainState(params, opt_state, state.step + 1), metrics

    def _convert(self, state: TrainState, function: Any) -> TrainState:
        # Every leaf of a moment's "layers" is stacked as the parameters' are.
        stacked = {
            part: jax.tree.map(lambda _, part=part: part == "layers", tree)
            for part, tree in self.structs.params.items()
        }
        convert = lambda leaf, layers: function(leaf) if layers else leaf
        return TrainState(
            params=jax.tree.map(convert, state.params, stacked),
            opt_state=optax.tree.map_params(self.optimizer.transformation, convert, state.opt_state, stacked),
            step=state.step,
        )
