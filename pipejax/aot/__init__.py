"""Compiling for GPUs on a machine without one: will it fit, how much pinned memory, what is copied."""

from pipejax.aot.flags import FLAGS as FLAGS
from pipejax.aot.flags import xla_flags as xla_flags
from pipejax.aot.report import Report as Report
from pipejax.aot.report import read as read
from pipejax.aot.topology import abstract as abstract
from pipejax.aot.topology import environment as environment
from pipejax.aot.topology import gpu_mesh as gpu_mesh
