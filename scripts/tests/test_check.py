# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The exact check of a comparison: every planted fault is seen and named, and a sound loss passes."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check
import faults
import loss_probe
import method
import numpy as np
import pandas as pd
import pytest
import torch
from method import Method
from small_training import overrides, write_task

from fspo_verl.band import Band

ASKED = {"fspo": Method(0.015, 0.02, 0.03)}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A small training with each fault, and some with none, each in the folder of its name."""
    folder = tmp_path_factory.mktemp("small")
    command = [sys.executable, Path(faults.__file__), "--small", folder]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return folder


@pytest.mark.parametrize("name", faults.SOUND)
def test_a_sound_loss_passes_whatever_says_what_was_asked(small, name):
    for asked in (ASKED, None):
        text, kept = check.report(check.judge({"fspo": small / name}, asked), complete=True)
        assert kept and text.startswith("6 checks, and all hold."), text


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_planted_fault_is_named_first(small, name):
    text, kept = check.report(check.judge({"fspo": small / name}, ASKED))
    assert not kept and re.search(faults.FAULTS[name][1], faults.first_failure(text)), text


@pytest.mark.parametrize(
    ("fspo", "no_clip", "kept", "said"),
    [
        ("seed-0", "no-clip", True, r"are equal until update 2 clips \d+ responses of fspo, and differ after it"),
        ("gradient-kept", "no-clip", False, "the next one is that of no_clip: the clip has stopped no gradient"),
        ("seed-0", "token-mean", None, "differ from update 2 on, before anything was clipped"),
    ],
)
def test_two_runs_from_one_rollout_part_where_the_clip_first_acts(small, fspo, no_clip, kept, said):
    pair = [check.read_arm(*arm) for arm in (("fspo", small / fspo), ("no_clip", small / no_clip))]
    verdict = check.judge_fork(*pair)
    assert verdict.kept is kept and re.search(said, verdict.text), verdict


def test_what_a_run_does_not_show_fails_only_where_it_was_made_to_show_it(small):
    arm = check.read_arm("fspo", small / "seed-0")
    arm = arm._replace(rows=arm.rows[arm.rows.call < 2], calls=arm.calls[:2])  # before the first update
    verdicts = check._loss(arm, ASKED["fspo"])
    assert [verdict.kept for verdict in verdicts] == [True, None, None, None]
    assert check.report(verdicts)[1] and not check.report(verdicts, complete=True)[1]


def test_a_run_without_a_call_or_with_another_loss_fails(small, tmp_path):
    (verdict,) = check.judge({"fspo": tmp_path})
    assert verdict.kept is False and "no call of a loss is written down" in verdict.text
    (verdict,) = check.judge({"gspo": small / "seed-0"})
    assert verdict.kept is False and "verl has trained loss_mode=fspo, not gspo" in verdict.text


def test_the_logged_loss_of_every_step_counts(small):
    arm = check.read_arm("fspo", small / "seed-0")
    arm.run.metrics.loc[2, "actor/pg_loss"] *= 1.01
    verdict = check._logged_loss(arm, ASKED["fspo"])
    assert verdict.kept is False and "in step 2 " in verdict.text


def test_value_and_gradient_are_those_of_autograd_in_every_mode():
    # One token a response: the loss of a response is then the integral of its gradient.
    generator = torch.Generator().manual_seed(0)
    s = (0.2 * torch.randn(1000, generator=generator, dtype=torch.float64)).requires_grad_()
    a = torch.randn(1000, generator=generator, dtype=torch.float64)
    loss = -torch.minimum(s.exp() * a, s.clamp(-0.1, 0.15).exp() * a)
    loss = torch.where(a < 0, torch.minimum(loss, -a * math.exp(0.3)), loss)
    columns = {
        "length": 1.0,
        "log_ratio": s.detach(),
        "variation": 0.0,
        "better": a.clamp(min=0),
        "worse": a.clamp(max=0),
    }
    rows = pd.DataFrame(columns | {"ranks": 1, "tokens": 1000, "responses": 1000, "divisor": 1})
    (gradient,) = torch.autograd.grad(loss.sum(), s)
    for mode in method.MODES:
        found = Method(0.1, 0.15, 0.3, mode=mode).applied(rows)
        scale = 1 if mode == "token-sum" else 1000
        np.testing.assert_allclose(found.value * scale, loss.detach())
        np.testing.assert_allclose((found.gradient_better + found.gradient_worse) * scale, gradient)
    assert found.decision.value_counts().min() > 5 and found.decision.nunique() == 4


def test_what_a_config_leaves_out_is_as_the_package_has_it():
    mode = "seq-mean-token-sum-norm"
    for band in (Band(), Band(eps_low=0.02), Band(eps_high=0.05, eps_dual=0.5), Band(normalization="drift_corrected")):
        expected = Method(band.low, band.high, band.dual, drifts=band.normalization != "plain")
        config = dict.fromkeys(loss_probe.FIELDS) | vars(band)
        assert method.asked("fspo", mode, config) == expected
    assert method.asked("fspo", mode, config | {"target_clip_rate": 0.1}) is None
    assert method.asked("gspo", mode, config) is None


def test_an_observed_loss_that_loses_a_gradient_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSS_PROBE", str(tmp_path / "probe"))
    ones = torch.ones(2, 3)

    def vanilla(log_prob, old_log_prob, advantages, **_):
        return -(log_prob - old_log_prob).exp().mul(advantages).sum(), {}

    def observed(log_prob, **others):
        keeps = ones if others["old_log_prob"].sum() < 0 else torch.eye(2, 3)
        return vanilla(log_prob * keeps + (log_prob * (1 - keeps)).detach(), **others)

    losses = {"vanilla": vanilla, "observed": observed}
    config = SimpleNamespace(policy_loss=SimpleNamespace(inner="vanilla"), global_batch_info={})
    call = loss_probe.probed("observed", losses.__getitem__)
    for old in (-1.0, 1.0):
        value, _ = call(old * ones, ones.clone().requires_grad_(), ones, ones, "token-sum", config)
        assert value.requires_grad
    (file,) = (tmp_path / "probe").iterdir()
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    (verdict,) = check._as_verls_own(check.Arm("grpo", None, calls, pd.DataFrame()), "vanilla")
    assert verdict.kept is False and verdict.text.endswith("those of verl's own vanilla in 1 of 2 calls")


def test_variants_of_a_method_are_others():
    for asked in (*ASKED.values(), *check.PACKAGED.values()):
        assert asked not in asked.variants.values()
    assert dataclasses.replace(ASKED["fspo"], weight="S/L") in ASKED["fspo"].variants.values()


def test_a_wrong_call_and_a_training_that_fails_are_told(tmp_path, capsys):
    with pytest.raises(SystemExit):
        check.main(["--arms", "dapo"])
    assert check.main([str(tmp_path), "--arms", "fspo", "--", "bash", "-c", "echo it ends here; exit 3"]) == 2
    said = capsys.readouterr().err
    assert "it ends here" in said and said.endswith("check: the training of fspo ended with 3\n")


@pytest.mark.trains
@pytest.mark.long
def test_a_launch_of_ones_own_gets_the_same_verdict(untrained_model, tmp_path):
    task = write_task(tmp_path, problems=16)
    launch = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "fspo_cpu"]
    launch += [text for text in overrides(task, untrained_model) if "policy_loss" not in text]
    launch += ["trainer.total_training_steps=2", "actor_rollout_ref.actor.loss_scale_factor=20"]
    command = [sys.executable, Path(check.__file__), tmp_path / "check", "--arms", "fspo,gspo", "--", *launch]
    ended = subprocess.run(command, env=os.environ | {"VERL_PLATFORM": "cpu"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"ok   fspo: value and gradient of 64 responses in \d+ calls are right", ended.stdout)
    assert "ok   gspo: value and gradient are those of verl's own gspo" in ended.stdout
