"""The XLA flags that pipelines want on GPUs, those of them that this XLA knows.

An unknown flag in XLA_FLAGS aborts the process and the set differs between versions, so each is tried in a process of
its own; what was found is remembered per version of jaxlib.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from pipejax.aot.targets import Target, load_target


@dataclasses.dataclass(frozen=True)
class Flag:
    """One XLA flag.

    Attributes:
      name: without dashes.
      value: as XLA's compiler options take it.
      why: it is set.
      below: the CUDA compute capability from which on XLA sets it by itself; None where it never does.
    """

    name: str
    value: str | int | bool
    why: str
    below: int | None = None

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"--{self.name}={value}"


_WANTED = (
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "spreads transfers over compute; on by default from H100 on, not for A100",
        below=9,
    ),
    Flag(
        "xla_gpu_experimental_parallel_async_compute_limit",
        16,
        "lets all host transfers of a tick be under way at once; by default one ends right after its start",
    ),
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        2,
        "lets the sends of F and of B both run beside the weight gradients",
    ),
    Flag(
        "xla_disable_hlo_passes",
        "rematerialization",
        "that pass counts pinned host buffers as device memory, and would compute again what fits",
    ),
)

_PROBE = "import jaxlib.xla_client as c; c.make_cpu_client()"


@dataclasses.dataclass(frozen=True)
class XlaFlags:
    """A set of flags that this XLA accepts; `str()` gives what XLA_FLAGS is to hold."""

    flags: tuple[Flag, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.flags))

    @property
    def compiler_options(self) -> dict[str, str | int | bool]:
        """The same for `jax.jit(..., compiler_options=...)`, which needs no environment variable."""
        return {flag.name: flag.value for flag in self.flags}

    def explain(self) -> str:
        """One line per flag, with the reason for it."""
        return "\n".join(f"{flag}  # {flag.why}" for flag in self.flags)

    def set(self) -> None:
        """Adds the flags to XLA_FLAGS; call it before JAX first looks for devices. What is set there already wins."""
        there = os.environ.get("XLA_FLAGS", "")
        added = [str(flag) for flag in self.flags if f"--{flag.name}=" not in there]
        os.environ["XLA_FLAGS"] = " ".join([*there.split(), *added])


def xla_flags(target: str | os.PathLike[str] | Target | None = None) -> XlaFlags:
    """The flags that pipelines want on GPUs, without those that the installed XLA doesn't know.

    Args:
      target: which GPU, by its name, a TOML file or a `Target`; None for the set that serves any.

    Raises:
      ValueError: no such target.
    """
    if target is None:
        capability = 0
    else:
        capability = (target if isinstance(target, Target) else load_target(target)).compute_capability
    known = _accepted(importlib.metadata.version("jaxlib"))
    return XlaFlags(
        tuple(flag for flag in _WANTED if flag.name in known and (flag.below is None or capability < flag.below))
    )


@functools.cache
def _accepted(version: str) -> frozenset[str]:
    wanted = tuple(map(str, _WANTED))
    path = _cache_folder() / f"xla_flags_{version}.json"
    try:
        known = json.loads(path.read_text())
        if known["wanted"] == list(wanted):
            return frozenset(known["accepted"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    accepted = probe({flag.name: str(flag) for flag in _WANTED})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"wanted": wanted, "accepted": sorted(accepted)}, file)
        os.replace(file.name, path)
    except OSError:
        pass  # a folder that cannot be written costs a second a process
    return accepted


def probe(flags: dict[str, str]) -> frozenset[str]:
    """The names of those flags, given by name as XLA_FLAGS has them, that XLA accepts; tried in other processes."""
    left = list(flags)
    while left:
        run = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "XLA_FLAGS": " ".join(flags[name] for name in left)},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode == 0:
            break
        refused = [name for name in left if re.search(rf"\b{name}\b", run.stderr)]
        if not refused:
            raise RuntimeError(f"XLA did not start while its flags were tried: {run.stderr.strip()[-500:]}")
        left = [name for name in left if name not in refused]
    return frozenset(left)


def _cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "pipejax"
