# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl selftest` on a CPU: every check passes on the sound loss, and a planted fault turns its line red."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import reference
import torch

import fspo_verl.loss
from fspo_verl import cli, versions
from fspo_verl.band import Band
from fspo_verl.findings import ERROR, FIX, NOTE, WARNING, Finding
from fspo_verl.loss import fspo_loss
from fspo_verl.selftest import command

ROOT = Path(__file__).parents[2]


def planted(sound: str, fault: str):
    """The loss with one replacement in its sources."""
    source = Path(fspo_verl.loss.__file__).read_text()
    assert source.count(sound) == 1
    module = types.ModuleType("planted")
    sys.modules["planted"] = module  # dataclasses look their module up
    exec(compile(source.replace(sound, fault), "planted", "exec"), vars(module))
    return module.fspo_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shipped_float64_is_that_of_the_tests(dtype):
    batch = new, old, advantages, mask = command.make_batch(36, 50, dtype)
    value, gradient = command.reference(*batch)
    band = vars(Band(command.EPS[dtype]))
    log_probs = [x.nan_to_num().double().tolist() for x in (new, old)]
    tables = [x.tolist() for x in (advantages.double(), mask, torch.ones(36, 50))]
    expected, expected_gradient, *_ = reference.fspo(*log_probs, *tables[:2], band, tables[2])
    assert value.sum().item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4096, 32768])
def test_the_batch_is_clear_of_every_edge_and_every_part_of_the_loss_acts(dtype, width):
    new, old, advantages, mask = command.make_batch(72, width, dtype)
    band = Band(command.EPS[dtype])
    found = fspo_loss(new.double(), old.double(), advantages.double(), mask, band)
    assert found.clipped_upper.any() and found.clipped_lower.any() and found.clipped_dual.any()
    assert (~found.clipped & (found.advantage > 0)).any() and (~found.clipped & (found.advantage < 0)).any()
    place = found.log_ratio / found.length.clamp(min=1).sqrt() / command.EPS[dtype]
    assert min((place.abs() - 1).abs().min(), (place - 3).abs().min()) > 0.05
    assert (found.length == 0).any() and found.finite.all()
    assert found.length.max() < width  # holes


LOSS = ("loss_float32", "loss_bfloat16")
PLANTED = {
    "sums in bfloat16": ("s, q = log_ratio.sum(-1)", "s, q = log_ratio.bfloat16().sum(-1).float()"),
    "a mask that is off by one token": ("torch.where(mask, log_prob", "torch.where(mask.roll(1, -1), log_prob"),
    "padding that gets a gradient": ("mask & finite[:, None], product", "finite[:, None], product"),
    "a clip that keeps the gradient": ("(clipped == log_ratio)", "torch.ones_like(clipped)"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_turns_the_lines_of_the_loss_red(fault, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: None)  # no verl: the loss alone
    checks = command.examine("cpu", loss=planted(*PLANTED[fault]))
    assert {one.id: one.severity for one in checks} == dict.fromkeys(LOSS, ERROR)
    assert all(one.sentence for one in checks)


@pytest.mark.parametrize(
    ("failed", "eps", "severity", "says", "advice"),
    [
        (["loss_float32"], {"bf16": 0.1}, ERROR, "loss_float32", "pip freeze"),
        ([], {}, WARNING, "fspo-verl-cpu", "pip install ./cpu"),
        ([], {"fp32": 1e-6, "bf16": 0.031}, WARNING, "1e-06 in fp32 and 0.031 in bf16", "float32"),
        ([], {"fp32": 1e-6, "bf16": 0.03}, NOTE, "1e-06 in fp32 and 0.03 in bf16", ""),
    ],
)
def test_the_conclusion_follows_from_the_checks(failed, eps, severity, says, advice):
    checks = [Finding(name, ERROR, "") for name in failed]
    checks += [Finding(f"noise_{dtype}", NOTE, "", value=value) for dtype, value in eps.items()]
    told = command.conclusion(checks)
    assert told.severity == severity and says in told.sentence and advice in told.advice
    assert told.action == (FIX if advice else "")
    assert [*told.overrides.values()] == ([eps["bf16"]] if eps.get("bf16") == 0.031 else [])


def run(*arguments: str) -> str:
    """What Python prints, on a CPU."""
    env = os.environ | {"VERL_PLATFORM": "cpu"}
    ended = subprocess.run([sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.long
def test_the_command_on_a_cpu():
    report = json.loads(run("-m", "fspo_verl.cli", "selftest", "--device", "cpu", "--json"))
    found = {one["id"]: one for one in report["findings"]}
    assert ERROR not in {one["severity"] for one in found.values()}
    assert 0 < found["noise_fp32"]["value"] < 1e-3 < found["noise_bf16"]["value"] == found["selftest"]["value"]


@pytest.mark.long
def test_without_verl_the_loss_is_checked_and_the_rest_skipped():
    absent = ("verl", "ray", "tensordict", "omegaconf", "hydra", "transformers")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"  # Python then finds none of them
        "from fspo_verl import cli, versions; versions.installed = lambda package: None\n"
        "sys.exit(cli.main(['selftest', '--device', 'cpu']))\n"
    )
    first, fix, *_ = run("-c", code).splitlines()
    assert first.startswith("warning  The loss of FSPO is exact") and fix.startswith("fix:     pip install verl")


@pytest.mark.parametrize(
    ("options", "message"), [(["--device", "cuda"], "torch sees no GPU"), (["--model", "/no/model"], "no config.json")]
)
def test_a_wrong_call_is_named(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["selftest", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_float32_and_one_layout_silence_the_noise():
    settings = ["bf16, 8 rows, then 1", "fp32, 8 rows, then 1", "bf16, 4 rows both times"]
    options = ["--responses", "16", "--longest", "48", "--settings", *settings]
    text = run("scripts/bench/noise.py", *options)
    rounded, full, same = (float(text.split(f"\n{name} ")[1].split()[0]) for name in settings)
    assert rounded > 1e-3 > 1e-5 > full and same < rounded / 10
