"""What the experiments settle before JAX looks for devices."""

import json
import os
import subprocess
import sys

import pytest

from pipejax import aot

PROGRAM = """
import json, os, pathlib, sys
glob = pathlib.Path.glob
there = json.loads(sys.argv[1])
pathlib.Path.glob = lambda self, pattern: iter(there) if pattern == "nvidia[0-9]*" else glob(self, pattern)
from experiments.devices import prepare
prepare(virtual=3)
assert "jax" not in sys.modules or there
import jax
print(json.dumps([jax.device_count(), os.environ["XLA_FLAGS"].split(), os.environ.get("JAX_PLATFORMS")]))
"""


def prepared(there, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    words = [sys.executable, "-c", PROGRAM, json.dumps(there)]
    done = subprocess.run(words, env={**kept, **environment}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_machine_without_gpus_gets_virtual_devices():
    assert prepared([]) == [3, ["--xla_force_host_platform_device_count=3"], "cpu"]


@pytest.mark.parametrize("own", ["", "--xla_disable_hlo_passes=mine"])
def test_a_machine_with_gpus_gets_the_flags_in_time(own):
    # No GPU is really there; that JAX comes up with three CPU devices shows that it had not read XLA_FLAGS before.
    count, flags, platforms = prepared(["nvidia0"], JAX_PLATFORMS="cpu", XLA_FLAGS=own)
    assert (count, platforms) == (3, "cpu")
    wanted = {str(flag) for flag in aot.xla_flags().flags if f"--{flag.name}=" not in own}
    assert set(flags) == {"--xla_force_host_platform_device_count=3", *own.split(), *wanted}
