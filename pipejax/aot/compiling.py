"""Compiles a lowered program for GPUs that are not there, and keeps all that XLA says about it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from pipejax.aot import hlo
from pipejax.aot.buffers import Buffers
from pipejax.aot.buffers import decode as decode_buffers
from pipejax.aot.flags import xla_flags
from pipejax.aot.hlo import Module
from pipejax.aot.wire import Message


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A program compiled for a GPU.

    Attributes:
      module: the scheduled program.
      buffers: XLA's buffer assignment: what lies where, and when.
      memory: XLA's own totals, a `CompiledMemoryStats`.
      seconds: what compiling took.
    """

    module: Module
    buffers: Buffers
    memory: Any
    seconds: float


def compile_for_gpu(lowered: jax.stages.Lowered, *, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compiles a program that was lowered against `gpu_mesh`'s devices.

    Needs no XLA_FLAGS: those of `xla_flags` are passed along, and JAX's settings that would spoil the result (fewer
    optimisations, the compilation cache) are put aside meanwhile.

    Args:
      lowered: from `jax.jit(...).lower(...)`.
      options: more XLA options, or other values for those of `xla_flags`.
    """
    with tempfile.TemporaryDirectory(prefix="pipejax-aot-") as folder:
        settings = {
            **xla_flags().compiler_options,
            "xla_gpu_autotune_level": 0,  # there is no GPU to tune on
            **(options or {}),
            # The buffer assignment is in no Python object; XLA writes it beside the program.
            "xla_dump_to": folder,
            "xla_dump_hlo_as_proto": True,
        }
        start = time.perf_counter()
        with _as_on_gpu():
            compiled = lowered.compile(compiler_options=settings)
        seconds = time.perf_counter() - start
        (file,) = pathlib.Path(folder).glob("*gpu_after_optimizations.hlo.pb")
        message = Message(file.read_bytes())  # an HloProto
    module = hlo.from_message(message.message(1))
    return Compiled(
        module=module,
        buffers=decode_buffers(message.message(3), module),
        memory=compiled.memory_analysis(),
        seconds=seconds,
    )


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    wanted = {"jax_disable_most_optimizations": False, "jax_enable_compilation_cache": False}
    before = {name: jax.config.values[name] for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
