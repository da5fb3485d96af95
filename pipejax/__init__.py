"""pipejax: pipeline-parallel training for JAX in which activation memory stops being the limit.

Names are loaded when first used, so that schedules and the command line start without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipejax import aot, data, jaxprs, models, plain, schedules, train
    from pipejax.aot.flags import xla_flags
    from pipejax.mesh import make_mesh
    from pipejax.offload import Offload
    from pipejax.parts import Part, as_part
    from pipejax.pipeline import Pipeline

__all__ = [
    "Offload",
    "Part",
    "Pipeline",
    "aot",
    "as_part",
    "data",
    "jaxprs",
    "make_mesh",
    "models",
    "plain",
    "schedules",
    "train",
    "xla_flags",
]

_WHERE = {
    "Offload": "offload",
    "Part": "parts",
    "Pipeline": "pipeline",
    "as_part": "parts",
    "make_mesh": "mesh",
    "xla_flags": "aot.flags",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"pipejax.{_WHERE[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"pipejax.{name}")
    raise AttributeError(f"module 'pipejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
