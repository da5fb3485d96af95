"""Compiling for GPUs on a machine without one: will it fit, how much pinned memory, what is copied, what is exposed.

mesh = pj.aot.gpu_mesh(pipe=8, target="h100-80g")
...  # build the pipeline on it, and lower a step with pj.aot.abstract(...)
report = pj.aot.report(pj.aot.compile_for_gpu(lowered), devices=8)
"""

from pipejax.aot.compiling import Compiled as Compiled
from pipejax.aot.compiling import compile_for_gpu as compile_for_gpu
from pipejax.aot.flags import Flag as Flag
from pipejax.aot.flags import XlaFlags as XlaFlags
from pipejax.aot.flags import xla_flags as xla_flags
from pipejax.aot.reporting import Report as Report
from pipejax.aot.reporting import assert_device_bytes as assert_device_bytes
from pipejax.aot.reporting import assert_hidden as assert_hidden
from pipejax.aot.reporting import assert_no_ring_copies as assert_no_ring_copies
from pipejax.aot.reporting import report as report
from pipejax.aot.targets import Target as Target
from pipejax.aot.targets import load_target as load_target
from pipejax.aot.targets import target_names as target_names
from pipejax.aot.topology import PluginMissingError as PluginMissingError
from pipejax.aot.topology import abstract as abstract
from pipejax.aot.topology import gpu_devices as gpu_devices
from pipejax.aot.topology import gpu_mesh as gpu_mesh
