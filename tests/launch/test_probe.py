# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is tried on a verl that was never tested: planted changes of verl are told, and who is told."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl
from hydra import compose, initialize_config_module
from verl.trainer.ppo import core_algos
from verl.workers.utils import losses

import fspo_verl.register
from fspo_verl import versions
from fspo_verl.launch import checks, doctor, hook, probe


def without_totals(agg_loss):
    """``agg_loss`` that divides by what the micro-batch holds."""
    return lambda loss_mat, loss_mask, loss_agg_mode, **totals: agg_loss(loss_mat, loss_mask, loss_agg_mode)


def one_argument_less(get_policy_loss_fn):
    return lambda name: (
        lambda rollout_is_weights, **others: get_policy_loss_fn(name)(
            **{key: value for key, value in others.items() if key != "advantages"}
        )
    )


def one_position_late(no_padding_2_padding):
    def other(values, data):
        late = torch.nested.nested_tensor_from_jagged(values.values().roll(1), values.offsets())
        return no_padding_2_padding(late, data)

    return other


PLANTED = [  # what is replaced, by what, words of the warning
    (losses, "get_policy_loss_fn", lambda _: lambda name: core_algos.POLICY_LOSS_REGISTRY["vanilla"], "gives"),
    (losses, "get_policy_loss_fn", one_argument_less, "TypeError"),
    (losses, "no_padding_2_padding", one_position_late, "gives"),
    (losses, "no_padding_2_padding", lambda pad: lambda *args: pad(*args).detach(), "RuntimeError"),
    (core_algos, "agg_loss", lambda agg: lambda **arguments: 2 * agg(**arguments), "loss_mode=fspo gives"),
    (core_algos, "agg_loss", without_totals, "loss_mode=fspo gives"),
    (core_algos, "POLICY_LOSS_REGISTRY", lambda _: {}, "loss cannot be called"),
]


@pytest.mark.parametrize(("module", "name", "change", "words"), PLANTED)
def test_a_verl_that_would_train_something_else_is_told(module, name, change, words, monkeypatch):
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    assert words in probe.problems()[0]


def test_another_loss_under_our_name_is_told(monkeypatch):
    gspo = core_algos.POLICY_LOSS_REGISTRY["gspo"]
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "fspo", gspo)
    assert probe.problems() != []
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "fspo", fspo_verl.register.compute_policy_loss_fspo)
    assert probe.problems() == []


# --- who is told -----------------------------------------------------------------------------------------------------


def launch(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*overrides, "actor_rollout_ref.rollout.name=vllm"])


@pytest.mark.parametrize(("untested", "selected"), [(True, True), (True, False), (False, True)])
def test_a_launch_of_ours_on_an_untested_verl_is_probed(untested, selected, monkeypatch, caplog):
    if untested:
        monkeypatch.setitem(versions.TESTED, "verl", ("0.9.0",))
        monkeypatch.setattr(versions, "installed", lambda package: "0.99")
    monkeypatch.setattr(probe, "_loss", lambda: iter(["planted"]))
    mode = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"
    hook.check(launch("+algorithm.policy_loss=fspo" if selected else mode))
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert bool(said) == (untested and selected)
    if said:
        assert said[0] == "verl 0.99 was not tested with fspo_verl: tested are 0.9.0"
        assert "verl 0.99 does not do what fspo_verl needs of it: planted" in said[1] and len(said) == 2
    found = [finding.check for finding in doctor.installation()]
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
    command = [str(Path(sys.executable).with_name("fspo-verl")), "doctor", "--no-worker"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "verl 0.99.dev0 was not tested with fspo_verl" in run.stdout
    assert "Found checkpoint" not in run.stdout + run.stderr


# --- bypass mode -----------------------------------------------------------------------------------------------------

BYPASS = "algorithm.rollout_correction.bypass_mode=True"


@pytest.mark.parametrize("loss", ["fspo", "gspo"])
@pytest.mark.parametrize("untested", [True, False])
def test_bypass_mode_on_an_untested_verl_is_warned_about(untested, loss, monkeypatch):
    monkeypatch.setattr(versions, "untested_verl", lambda: "0.99" if untested else None)
    found = {finding.check: finding for finding in checks.findings(launch(f"+algorithm.policy_loss={loss}", BYPASS))}
    assert ("bypassed_loss" in found) == untested
    if untested:
        assert found["bypassed_loss"].fix == "algorithm.rollout_correction.bypass_mode=False"
