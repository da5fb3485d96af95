"""Embedding and head within a tick.

A part whose parameters are whole runs on the one device that holds the model's first or last stage, while the others
wait. A part whose parameters are cut over the devices (vocabulary parallelism, arXiv 2411.05288) runs on all of them,
in the ticks in which one of them needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pipejax import frozen
from pipejax.runtime import rings

Row = dict[str, jax.Array]
AXIS = "pipe"

# Embedding and head draw their dropout as if they were the layers num_layers + these.
EMBED_KEY, HEAD_KEY = 0, 1


@dataclasses.dataclass(frozen=True)
class Functions:
    """Embedding and head as the runtime sees them. Keys are None in evaluation.

    Attributes:
      embed: (params, batch, key) -> x, the first block's input.
      head: (params, x, batch, key) -> (loss sum, weight), float32 scalars.
      cut: {"embed", "head"}, trees like the parameters': whether a leaf is cut by rows over the devices.
      trained: {"embed", "layers", "head"}, the same: whether a leaf has a gradient.
    """

    embed: Callable[[Any, Any, Any], jax.Array]
    head: Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, jax.Array]]
    cut: Any
    trained: Any

    def spread(self, part: str) -> bool:
        """Whether all devices take part in "embed" or "head"."""
        return any(jax.tree.leaves(self.cut[part]))


@dataclasses.dataclass(frozen=True)
class Ends:
    """Embedding and head of one device.

    Attributes:
      functions: what they compute.
      params: {"embed", "head"}; leaves that are cut hold this device's rows, the others are whole.
      microbatch: index -> one microbatch's arrays.
      key: (EMBED_KEY or HEAD_KEY, microbatch) -> a key, or None.
    """

    functions: Functions
    params: Any
    microbatch: Callable[[jax.Array], Any]
    key: Callable[[int, jax.Array], Any]

    def embed(self, x: jax.Array, row: Row) -> jax.Array:
        """F's input: what has arrived, or the embedding where F is of the first stage."""

        def embed(_: Any, x: jax.Array) -> jax.Array:
            index = row["embed_microbatch"]
            embedded = self.functions.embed(self.params["embed"], self.microbatch(index), self.key(EMBED_KEY, index))
            return jnp.where(row["f_embed"] > 0, embedded, x)

        return when(row["embed_due"] if self.functions.spread("embed") else row["f_embed"], embed, x)

    def unembed(self, dx: jax.Array, row: Row, grads: Any) -> Any:
        """Adds the embedding's gradients where B was of the first stage."""
        if not jax.tree.leaves(grads):
            return grads  # nothing in it is trained
        own = row["b_embed"] > 0
        spread = self.functions.spread("embed")

        def unembed(_: Any, grads: Any) -> Any:
            index = row["unembed_microbatch"]
            batch, key = self.microbatch(index), self.key(EMBED_KEY, index)
            _, vjp = jax.vjp(
                lambda p: self.functions.embed(self._whole("embed", p), batch, key), self._trained("embed")
            )
            return self._add("embed", grads, vjp(_share(dx, own) if spread else dx)[0], own)

        return when(row["unembed_due"] if spread else row["b_embed"], unembed, grads)

    def head(
        self, y: jax.Array, row: Row, state: tuple[Any, jax.Array, jax.Array, jax.Array]
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
        """Head forward and backward in one go, where F was of the last stage.

        Args:
          y: F's output.
          row: this tick's.
          state: the head's gradients, the ring of cotangents, loss sum and weight.

        Returns:
          The state with this microbatch's added.
        """
        own = row["f_head"] > 0
        spread = self.functions.spread("head")

        def head(_: Any, state: Any) -> Any:
            grads, dy, loss, weight = state
            index = row["head_microbatch"]
            batch, key = self.microbatch(index), self.key(HEAD_KEY, index)
            (added, weighs), vjp = jax.vjp(
                lambda p, h: self.functions.head(self._whole("head", p), h, batch, key),
                self._trained("head"),
                _share(y, own) if spread else y,
            )
            dparams, cotangent = vjp((jnp.ones_like(added), jnp.zeros_like(weighs)))

            def store(_: Any, ring: jax.Array) -> jax.Array:
                return rings.store(ring, cotangent, row["head_store"])

            return (
                self._add("head", grads, dparams, own),
                when(row["f_head"], store, dy),
                loss + jnp.where(own, added, 0),
                weight + jnp.where(own, weighs, 0),
            )

        return when(row["head_due"] if spread else row["f_head"], head, state)

    def loss(self, y: jax.Array, row: Row, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Adds loss and weight where F was of the last stage, without a backward."""
        own = row["f_head"] > 0
        spread = self.functions.spread("head")

        def head(_: Any, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index = row["head_microbatch"]
            x = _share(y, own) if spread else y
            loss, weight = self.functions.head(
                self.params["head"], x, self.microbatch(index), self.key(HEAD_KEY, index)
            )
            return totals[0] + jnp.where(own, loss, 0), totals[1] + jnp.where(own, weight, 0)

        return when(row["head_due"] if spread else row["f_head"], head, totals)

    def _trained(self, part: str) -> Any:
        return frozen.keep(self.functions.trained[part], self.params[part])

    def _whole(self, part: str, trained: Any) -> Any:
        return frozen.fill(self.functions.trained[part], trained, self.params[part])

    def _add(self, part: str, totals: Any, grads: Any, own: jax.Array) -> Any:
        """Adds gradients: of a cut leaf every device's, of a whole one that of the device whose stage it is."""
        return jax.tree.map(
            lambda total, grad, cut: total + jnp.where(jnp.logical_or(own, cut), grad.astype(total.dtype), 0),
            totals,
            grads,
            frozen.keep(self.functions.trained[part], self.functions.cut[part]),
        )


def when(flag: jax.Array, body: Callable[[Any, Any], Any], operand: Any) -> Any:
    """`body` where flag is 1, else the operand: a loop of one trip or none, which updates its operands in place.

    A `lax.cond` would copy them (DESIGN trap 2). The scope tells a compiled program's readers how often it runs.
    """
    with jax.named_scope(f"{body.__name__}_if_due"):
        return lax.fori_loop(0, flag, body, operand)


def _share(value: jax.Array, own: jax.Array) -> jax.Array:
    """One device's value on all of them."""
    return lax.psum(jnp.where(own, value, jnp.zeros((), value.dtype)), AXIS)
