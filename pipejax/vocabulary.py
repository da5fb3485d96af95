"""Parameters of embedding and head that are cut by rows over the pipeline's devices (arXiv 2411.05288).

At rest as in a step each device holds an equal share of the rows, the vocabulary; where the devices do not divide
them, rows of zeros fill up the last shares. They have no gradient and are in no checkpoint.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pipejax.parts import Part
from pipejax.tied import Ties

_PARTS = ("embed", "head")


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Which parameters are cut, over how many devices.

    Attributes:
      paths: {"embed", "head"}, dot paths within the part.
      devices: p.
    """

    paths: dict[str, tuple[str, ...]]
    devices: int

    @classmethod
    def of(cls, embed: Part, head: Part, *, devices: int) -> Cuts:
        """What the parts declare."""
        return cls({"embed": embed.split, "head": head.split}, devices)

    def check(self, params: Any, ties: Ties) -> None:
        """Refuses paths that do not exist, and ties of a parameter that is cut with one that is not.

        Args:
          params: whole parameters or their shapes, the head's copies of tied ones put in.
          ties: which are tied.

        Raises:
          ValueError: with what to change.
        """
        for part in _PARTS:
            there = {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params[part])}
            for path in self.paths[part]:
                if path not in there or not there[path].ndim:
                    raise ValueError(
                        f"{part}: split names the parameter {path!r}, which is none of its arrays: {', '.join(there)}."
                    )
        for head, embed in ties.pairs:
            cut = [".".join(head) in self.paths["head"], ".".join(embed) in self.paths["embed"]]
            if cut[0] != cut[1]:
                raise ValueError(
                    f"tied: of head.{'.'.join(head)} and embed.{'.'.join(embed)} one is split over the devices and the "
                    "other is not; declare both in `split`, or neither."
                )

    def mask(self, params: Any) -> Any:
        """{"embed", "head"}, trees like the parameters': whether each leaf is cut."""
        return {part: self._map(lambda _, cut: cut, params[part], part) for part in _PARTS}

    def pad(self, params: Any) -> Any:
        """Whole parameters (or any tree like them) with rows added until the devices divide them."""

        def pad(leaf: jax.Array, cut: bool) -> jax.Array:
            return with_rows(leaf, leaf.shape[0] + -leaf.shape[0] % self.devices) if cut else leaf

        return {**params, **{part: self._map(pad, params[part], part) for part in _PARTS}}

    def strip(self, params: Any, whole: Any) -> Any:
        """The inverse of `pad`; `whole` has the shapes. A place that holds None keeps it."""

        def strip(like: Any, leaf: jax.Array | None) -> jax.Array | None:
            return leaf if leaf is None or not leaf.ndim else with_rows(leaf, like.shape[0])

        return {**params, **{part: jax.tree.map(strip, whole[part], params[part]) for part in _PARTS}}

    def _map(self, function: Any, tree: Any, part: str) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: function(leaf, _dotted(path) in self.paths[part]), tree
        )


def with_rows(leaf: jax.Array, count: int) -> jax.Array:
    """An array [rows, ...] with so many rows: the last ones dropped, or rows of zeros added."""
    missing = count - leaf.shape[0]
    if missing > 0:
        return jnp.concatenate([leaf, jnp.zeros((missing, *leaf.shape[1:]), leaf.dtype)])
    return leaf[:count] if missing else leaf


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
