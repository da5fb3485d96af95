"""Parameters of the head that are parameters of the embedding."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Ties:
    """Pairs of a path in the head's tree and a path in the embedding's.

    At rest only the embedding holds a tied parameter. For a step it is put into the head as well, and its gradient is
    the sum of both uses.
    """

    pairs: tuple[tuple[Path, Path], ...]

    @classmethod
    def parse(cls, tied: dict[str, str]) -> Ties:
        """Reads {"head.path": "embed.path"}.

        Raises:
          ValueError: a path that does not start so.
        """
        pairs = []
        for head, embed in tied.items():
            (first, *of_head), (second, *of_embed) = head.split("."), embed.split(".")
            if first != "head" or second != "embed" or not of_head or not of_embed:
                raise ValueError(f"tied: {head!r}: {embed!r} must read 'head.<path>': 'embed.<path>'.")
            pairs.append((tuple(of_head), tuple(of_embed)))
        return cls(tuple(pairs))

    def check(self, params: Any) -> None:
        """Refuses paths that do not exist or do not match; `params` are shapes with the head still whole.

        Raises:
          ValueError: with what to change.
        """
        for head, embed in self.pairs:
            mine, theirs = _get(params["head"], head, "head"), _get(params["embed"], embed, "embed")
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise ValueError(
                    f"tied: head.{'.'.join(head)} is {mine.dtype}{list(mine.shape)} and embed.{'.'.join(embed)} is "
                    f"{theirs.dtype}{list(theirs.shape)}; give them one shape and dtype, or do not tie them."
                )

    def strip(self, params: Any) -> Any:
        """A tree shaped like the parameters without the head's copies."""
        head = params["head"]
        for path, _ in self.pairs:
            head = _replace(head, path, None)
        return {**params, "head": head}

    def join(self, params: Any) -> Any:
        """A tree shaped like the parameters with the head's copies put in."""
        head = params["head"]
        for path, source in self.pairs:
            head = _replace(head, path, _get(params["embed"], source, "embed"))
        return {**params, "head": head}

    def split_gradients(self, grads: Any) -> Any:
        """Gradients of `join`'s tree as those of the tree at rest: both uses summed into the embedding's."""
        embed = grads["embed"]
        for path, target in self.pairs:
            both = _get(embed, target, "embed"), _get(grads["head"], path, "head")
            # Where it is not trained neither use has a gradient.
            embed = embed if both[0] is None else _replace(embed, target, both[0] + both[1])
        return self.strip({**grads, "embed": embed})


def _get(tree: Any, path: Path, part: str) -> Any:
    node = tree
    for name in path:
        if not isinstance(node, dict) or name not in node:
            there = [".".join(str(key.key) for key in keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
            raise ValueError(
                f"tied: there is no parameter {part}.{'.'.join(path)}; the {part} has: {', '.join(there) or 'none'}."
            )
        node = node[name]
    return node


def _replace(tree: Any, path: Path, value: Any) -> Any:
    """A copy of a nested dict with one leaf set, or removed where `value` is None; emptied dicts stay."""
    name, rest = path[0], path[1:]
    if rest:
        return {**tree, name: _replace(tree.get(name, {}), rest, value)}
    kept = {key: item for key, item in tree.items() if key != name}
    return kept if value is None else {**kept, name: value}
