"""Targets are data: those that come with pipejax, and a user's own."""

import importlib.resources

import pytest

from pipejax import aot
from pipejax.aot import topology

NAMES = ("a100-40g", "a100-80g", "b200", "h100-80g", "h200-141g")


def test_names():
    assert aot.target_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_plausible(name):
    target = aot.load_target(name)
    assert target.name == name
    assert 40e9 <= target.hbm_bytes <= 200e9
    assert 1e12 < target.hbm_rate < 8e12
    assert 1e14 < target.matmul_flops["bf16"] < target.peak_bf16_flops < 3e15
    assert 1e10 < target.pcie_rate < target.nvlink_rate
    assert f"memory_bandwidth: {int(target.hbm_rate / 0.85 / 1e9)}" in target.target_config or name == "h100-80g"


@pytest.mark.parametrize(
    ("name", "bf16", "hbm", "pcie", "shared_by", "host"),
    [
        ("a100-40g", 312, 1555, 4, 2, 1),
        ("a100-80g", 312, 2039, 4, 2, 2),
        ("h100-80g", 989.4, 3350, 5, 2, 2),
        ("h200-141g", 989.4, 4800, 5, 1, 2),
        ("b200", 2250, 8000, 5, 2, 2),
    ],
)
def test_figures_are_the_data_sheets(name, bf16, hbm, pcie, shared_by, host):
    target = aot.load_target(name)
    assert target.peak_bf16_flops == pytest.approx(bf16 * 1e12)
    assert target.hbm_rate == pytest.approx(0.85 * hbm * 1e9)
    assert (target.pcie_generation, target.pcie_shared_by) == (pcie, shared_by)
    assert (target.node_gpus, target.node_host_bytes) == (8, host * 10**12)


def test_what_the_paper_sustained():
    rates = {name: aot.load_target(name) for name in ("a100-80g", "h100-80g")}
    assert rates["a100-80g"].matmul_flops["bf16"] == pytest.approx(220e12, rel=0.01)
    assert rates["h100-80g"].matmul_flops["bf16"] == pytest.approx(440e12, rel=0.01)
    assert rates["a100-80g"].pcie_rate == pytest.approx(15e9, rel=0.02)
    assert rates["h100-80g"].pcie_rate == pytest.approx(21e9, rel=0.02)


def test_rates_of_ones_own():
    target = aot.load_target("h100-80g").with_rates(tflops=100, link_gbps=7)
    assert target.matmul_flops["bf16"] == pytest.approx(100e12)
    assert target.pcie_rate == 7e9
    assert target.peak_bf16_flops == aot.load_target("h100-80g").peak_bf16_flops


def test_an_own_file(tmp_path):
    text = importlib.resources.files("pipejax.aot.targets").joinpath("h100-80g.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('name = "h100-80g"', 'name = "mine"').replace("gpus = 8", "gpus = 4"))
    assert (aot.load_target(path).name, aot.load_target(str(path)).node_gpus) == ("mine", 4)


def test_bad_targets_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no target 'h900'; give one of a100-40g, .*, h200-141g, or a TOML file"):
        aot.load_target("h900")
    path = tmp_path / "bad.toml"
    path.write_text("[tflops]\nbf16 = 1\n")
    with pytest.raises(ValueError, match=r"lacks tflops\.tf32, .*node\.gpus.*h100-80g\.toml shows all there is"):
        aot.load_target(path)
    path.write_text("not toml")
    with pytest.raises(ValueError, match="is not a TOML file"):
        aot.load_target(path)


@pytest.mark.aot
@pytest.mark.parametrize("name", NAMES)
def test_xla_takes_the_target(name):
    assert aot.gpu_mesh(pipe=8, target=name).shape == {"pipe": 8}


@pytest.mark.aot
def test_nodes_must_be_full():
    assert len(aot.gpu_devices(16)) == 16
    with pytest.raises(ValueError, match="12 devices do not fill nodes of 8 GPUs"):
        aot.gpu_devices(12)


def test_a_missing_plugin_is_named(monkeypatch):
    def absent(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", absent)
    with pytest.raises(aot.PluginMissingError, match=r"pip install jax-cuda13-plugin==\S+ jax-cuda13-pjrt==\S+$"):
        aot.gpu_mesh(pipe=2)
