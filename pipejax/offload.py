"""What happens to each named activation between F and B: saved, offloaded or recomputed.

Blocks name their activations with `jax.ad_checkpoint.checkpoint_name`; the pipeline itself names each block's input
`block_input`. An `Offload` says which names stay in device memory, which travel to pinned host memory and back, and
which are recomputed by B. Everything without a name is recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax import jaxprs
from pipejax.schedules.schedule import Kind, Schedule

BLOCK_INPUT = "block_input"

Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Fates:
    """The names of one block's activations, sorted by fate; the three sets are disjoint and cover every name."""

    saved: tuple[str, ...]
    offloaded: tuple[str, ...]
    recomputed: tuple[str, ...]

    def forward_policy(self) -> Policy:
        """The `jax.checkpoint` policy that F runs under: it types the offloaded residuals as pinned host memory."""
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.saved),
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )

    def backward_policy(self) -> Policy:
        """The save-only twin of `forward_policy`, under which B takes residuals that are already back on the device."""
        return jax.checkpoint_policies.save_only_these_names(*self.saved, *self.offloaded)


class Placed(NamedTuple):
    """Where the activations of one name really are between F and B.

    Attributes:
      fate: what was asked for: "saved", "offloaded" or "recomputed".
      device: bytes of one layer and microbatch that stay in device memory. The block's input does where it is
        recomputed and nothing else takes its place, and so do offloaded arrays too small to be worth a transfer.
      host: bytes that go through pinned host memory.
    """

    fate: str
    device: int
    host: int


@dataclasses.dataclass(frozen=True)
class Offload:
    """Names by fate; None stands for every name that no other field claims.

    At most one of the three fields may be None. Use `Offload.none()` to keep all named activations on the device,
    `Offload.full()` to send all of them through pinned host memory (PipeOffload's PO-F, arXiv 2503.01328 section 4),
    or name activations one by one.

    Attributes:
      saved: names kept in device memory.
      offloaded: names that go to pinned host memory after F and come back before B.
      recomputed: names that B computes again.
      first_chunks: how many chunks of each device move, those whose activations live longest; None for as many as the
        schedule says, or all.
      share: of those chunks' activations, how many move, the longest-lived first; above 0 and at most 1.
      k: the time of a round trip of a chunk's activations over that of its passes, which paces the transfers where
        not all activations of a lockstep schedule move; None paces them by what has to move.
    """

    saved: tuple[str, ...] | None = ()
    offloaded: tuple[str, ...] | None = ()
    recomputed: tuple[str, ...] | None = None
    first_chunks: int | None = None
    share: float = 1.0
    k: float | None = None

    def __post_init__(self) -> None:
        fields = (self.saved, self.offloaded, self.recomputed)
        if sum(field is None for field in fields) > 1:
            raise ValueError("Offload: only one of saved, offloaded, recomputed may be None (None takes what is left).")
        for field in fields:
            if isinstance(field, str):
                raise ValueError(f"Offload: write the names as a tuple, ({field!r},), not as one string.")
        names = [name for field in fields if field is not None for name in field]
        if self.first_chunks is not None and self.first_chunks < 1:
            raise ValueError(f"Offload: first_chunks is {self.first_chunks}; pass 1 or more, or use Offload.none().")
        if not 0 < self.share <= 1:
            raise ValueError(f"Offload: share is {self.share}; pass a number above 0 and at most 1.")
        if self.k is not None and not self.k > 0:
            raise ValueError(f"Offload: k is {self.k}; a transfer takes a time above 0.")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"Offload: {', '.join(twice)} is listed twice; give each name one fate.")

    @classmethod
    def none(cls, *, recomputed: Iterable[str] = ()) -> Offload:
        """All named activations stay in device memory, but for those in `recomputed`."""
        return cls(saved=None, offloaded=(), recomputed=tuple(recomputed))

    @classmethod
    def full(cls, *, saved: Iterable[str] = (), recomputed: Iterable[str] = ()) -> Offload:
        """All named activations go through pinned host memory, but for those in `saved` and `recomputed`.

        Of a schedule that says itself how many chunks move (PO-H), those of its chunks.
        """
        return cls(saved=tuple(saved), offloaded=None, recomputed=tuple(recomputed))

    @classmethod
    def chunks(cls, count: int, *, k: float | None = None) -> Offload:
        """As `full`, for the `count` chunks of each device that live longest (the paper's selective offload)."""
        return cls(offloaded=None, recomputed=(), first_chunks=count, k=k)

    @classmethod
    def fraction(cls, share: float, *, k: float | None = None) -> Offload:
        """As `full`, for a share of all activations, the longest-lived first."""
        return cls(offloaded=None, recomputed=(), share=share, k=k)

    @classmethod
    def auto(cls, *, k: float) -> Offload:
        """As much as a link hides whose round trip for a chunk takes k times the chunk's compute: all up to k = 1."""
        return cls.fraction(min(1.0, 1 / k) if k > 0 else 1.0, k=k)  # a k that is no k is refused by name

    @classmethod
    def parse(cls, text: str) -> Offload:
        """Reads what command lines take: "none", "full", "chunks=N", "fraction=A" or "auto=K".

        Raises:
          ValueError: it reads otherwise.
        """
        makers: dict[str, Callable[[str], Offload]] = {
            "chunks": lambda value: cls.chunks(int(value)),
            "fraction": lambda value: cls.fraction(float(value)),
            "auto": lambda value: cls.auto(k=float(value)),
        }
        name, given, value = text.partition("=")
        try:
            if not given and name in ("none", "full"):
                return cls.none() if name == "none" else cls.full()
            return makers[name](value)
        except (KeyError, ValueError) as error:
            reason = f" ({error})" if str(error).startswith("Offload") else ""
            raise ValueError(
                f"offload is {text!r}{reason}; pass none, full, chunks=N, fraction=A with A up to 1, or auto=K."
            ) from error

    @property
    def partial(self) -> bool:
        """Whether only some of the activations are meant to move."""
        return self.first_chunks is not None or self.share < 1

    @property
    def moves(self) -> bool:
        """Whether anything is meant to leave the device."""
        return self.offloaded is None or len(self.offloaded) > 0

    def fates(self, names: Iterable[str]) -> Fates:
        """Gives each of a block's names its fate.

        Args:
          names: the names that the block's program holds, `block_input` among them.

        Raises:
          ValueError: a name listed here is none of the block's.
        """
        there = sorted(set(names))
        given = {name: fate for fate in ("saved", "offloaded", "recomputed") for name in getattr(self, fate) or ()}
        unknown = sorted(set(given) - set(there))
        if unknown:
            raise ValueError(
                f"Offload: no activation of the block is named {', '.join(map(repr, unknown))}; "
                f"the names there are: {', '.join(there)}."
            )
        rest = next(
            (fate for fate in ("saved", "offloaded", "recomputed") if getattr(self, fate) is None), "recomputed"
        )
        sorted_by_fate: dict[str, list[str]] = {"saved": [], "offloaded": [], "recomputed": []}
        for name in there:
            sorted_by_fate[given.get(name, rest)].append(name)
        return Fates(**{fate: tuple(found) for fate, found in sorted_by_fate.items()})


def wanted(offload: Offload, schedule: Schedule) -> np.ndarray:
    """Bool [stages, microbatches], the activations that an `Offload` means to move in a schedule.

    Raises:
      ValueError: it names more chunks than there are.
    """
    slots = {kind: np.zeros((schedule.placement.stages, schedule.microbatches), np.int64) for kind in (Kind.F, Kind.B)}
    for kind, at in slots.items():
        passes = schedule.passes[schedule.passes["kind"] == kind]
        at[schedule.placement.stage[passes["device"], passes["chunk"]], passes["microbatch"]] = passes["slot"]
    lifespan = slots[Kind.B] - slots[Kind.F]
    count = offload.first_chunks or schedule.offload_chunks or schedule.chunks
    if count > schedule.chunks:
        raise ValueError(f"Offload: first_chunks is {count}; the schedule has {schedule.chunks} chunks on each device.")
    chosen = np.zeros(lifespan.shape, bool)
    for device in range(schedule.devices):
        stages = schedule.placement.stage[device]
        longest = stages[np.argsort(-lifespan[stages].mean(axis=1), kind="stable")[:count]]
        order = np.argsort(-lifespan[longest].reshape(-1), kind="stable")
        take = np.zeros(order.size, bool)
        take[order[: round(offload.share * order.size)]] = True
        chosen[longest] = take.reshape(len(longest), -1)
    return chosen


def activation_names(block: Callable[..., Any], *args: Any) -> tuple[str, ...]:
    """The `checkpoint_name`s in a block's program, sorted; `args` may be arrays or `jax.ShapeDtypeStruct`s."""
    closed = jax.make_jaxpr(block)(*args)
    found = {eqn.params["name"] for eqn in jaxprs.all_equations(closed.jaxpr) if eqn.primitive.name == "name"}
    return tuple(sorted(found))
