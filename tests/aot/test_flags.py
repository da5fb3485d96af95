"""XLA flags: only those that this XLA knows, each with its reason."""

import json
import os

import pytest

from pipejax import aot
from pipejax.aot import flags


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags._accepted.cache_clear()
    yield tmp_path
    flags._accepted.cache_clear()


def test_all_that_is_wanted_is_known_to_both_versions(cache):
    assert {flag.name for flag in aot.xla_flags().flags} == {flag.name for flag in flags._WANTED}
    assert all(flag.why for flag in flags._WANTED)


def test_a_target_gets_what_xla_does_not_set_for_it(cache):
    scheduler = "xla_gpu_enable_latency_hiding_scheduler"
    names = {target: {flag.name for flag in aot.xla_flags(target).flags} for target in aot.target_names()}
    assert {target for target, found in names.items() if scheduler in found} == {"a100-40g", "a100-80g"}
    assert all(found - {scheduler} == names["h100-80g"] for found in names.values())
    assert aot.xla_flags(aot.load_target("b200")) == aot.xla_flags("b200")
    with pytest.raises(ValueError, match="no target 'h900'"):
        aot.xla_flags("h900")


def test_what_was_found_is_remembered_for_this_version(cache, monkeypatch):
    aot.xla_flags()
    (file,) = (cache / "pipejax").iterdir()
    found = json.loads(file.read_text())
    monkeypatch.setattr(flags, "probe", lambda *_: pytest.fail("tried again"))
    flags._accepted.cache_clear()
    assert len(aot.xla_flags().flags) == len(found["accepted"])


def test_a_damaged_memory_is_made_again(cache):
    aot.xla_flags()
    (file,) = (cache / "pipejax").iterdir()
    file.write_text("{")
    flags._accepted.cache_clear()
    assert len(aot.xla_flags().flags) == len(flags._WANTED)


def test_unknown_flags_are_left_out():
    asked = {name: f"--{name}=1" for name in ("xla_no_such_flag", "xla_gpu_autotune_level", "xla_nor_this_one")}
    assert flags.probe(asked) == {"xla_gpu_autotune_level"}


def test_what_is_set_already_wins(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1 --xla_disable_hlo_passes=mine")
    found = aot.xla_flags()
    found.set()
    words = os.environ["XLA_FLAGS"].split()
    assert words[:2] == ["--xla_other=1", "--xla_disable_hlo_passes=mine"]
    assert len(words) == len(found.flags) + 1


def test_each_flag_is_explained():
    found = aot.xla_flags()
    assert [line.split("  # ")[0] for line in found.explain().splitlines()] == str(found).split()
    assert found.compiler_options["xla_disable_hlo_passes"] == "rematerialization"
