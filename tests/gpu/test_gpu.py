# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl gpu` on a CPU: every check passes on the sound loss, and a planted fault turns its line red."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import reference
import torch

import fspo_verl.loss
import fspo_verl.token_sums
from fspo_verl import cli, gpu, versions
from fspo_verl.gpu import cost, exact, floor, responses, step
from fspo_verl.loss import fspo_loss
from fspo_verl.observe import noise

ROOT = Path(__file__).parents[2]
SMALL = ["--device", "cpu", "--longest", "512", "--rounds", "2", "--responses", "6", "--response-length", "40"]


def examined(*options, loss=None) -> dict[str, exact.Line]:
    """The lines by the names of their checks."""
    args = cli.parser("gpu").parse_args([*SMALL, *options])
    return {line.check: line for line in gpu.examine(args, "cpu", loss)}


def planted(sound: str, fault: str):
    """The loss with one replacement in its sources."""
    source = "".join(Path(module.__file__).read_text() for module in (fspo_verl.token_sums, fspo_verl.loss))
    source = source.replace("from fspo_verl.token_sums import TokenSums\n", "")
    assert source.count(sound) == 1
    module = types.ModuleType("planted")
    sys.modules["planted"] = module  # dataclasses look their module up
    exec(compile(source.replace(sound, fault), "planted", "exec"), vars(module))
    return module.fspo_loss


def twice(loss):
    """A compiler that is wrong."""

    def other(*args):
        found = loss(*args)
        return found._replace(loss=2 * found.loss)

    return other


# --- the loss against float64 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shipped_float64_is_that_of_the_tests(dtype):
    batch = exact.batch_of_all_places(36, 50, dtype)
    value, gradient = exact.reference(batch)
    band = dataclasses.asdict(batch.band)
    ones = np.ones(batch.mask.shape).tolist()
    advantages = np.repeat(batch.advantage[:, None], 50, -1).tolist()
    log_probs = [np.nan_to_num(x).astype(float).tolist() for x in (batch.log_prob, batch.old_log_prob)]
    expected, expected_gradient, *_ = reference.fspo(*log_probs, advantages, batch.mask.tolist(), band, ones)
    assert value.sum() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [50, 5000])
def test_the_batch_is_clear_of_every_edge_and_every_part_of_the_loss_acts(dtype, width):
    batch = exact.batch_of_all_places(36, width, dtype)
    tensors = (torch.tensor(x).double() for x in (batch.log_prob, batch.old_log_prob))
    advantages = torch.tensor(batch.advantage)[:, None].expand(batch.mask.shape)
    found = fspo_loss(*tensors, advantages, torch.tensor(batch.mask), batch.band)
    for side in (found.clipped_upper, found.clipped_lower, found.clipped_dual):
        assert side.any()
    assert (~found.clipped & (found.advantage > 0)).any() and (~found.clipped & (found.advantage < 0)).any()
    place = found.log_ratio / found.length.clamp(min=1).sqrt() / batch.band.high
    assert min((place.abs() - 1).abs().min(), (place - 3).abs().min()) > 0.05
    assert (found.length == 0).sum() == 1 and found.finite.all()
    assert found.length.max() < width  # holes


PLANTED = {
    "sums in bfloat16": (
        "dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)",
        "dtype = torch.bfloat16",
        {"loss_float32", "loss_bfloat16", "meter"},  # whose columns NumPy cannot take
    ),
    "a mask that is off by one token": (
        "padding = ~mask[rows]",
        "padding = ~mask[rows].roll(1, -1)",
        {"loss_float32", "loss_bfloat16"},
    ),
    "padding that gets a gradient": (
        "idle = ~ctx.mask[rows] | (",
        "idle = (~ctx.mask[rows] & False) | (",
        {"loss_float32", "loss_bfloat16"},
    ),
    "a clip that keeps the gradient": (
        "torch.where(above, positive.detach(), positive)",
        "positive",
        {"loss_float32", "loss_bfloat16"},
    ),
    "an extra .item()": (
        "    return SequenceLoss(\n",
        "    loss_mean = length.sum().item()\n    return SequenceLoss(\n",
        {"sync"},
    ),
    "a host copy in the backward pass": (
        "        grad = torch.empty(",
        "        ctx.mask.sum().cpu()\n        grad = torch.empty(",
        {"sync"},
    ),
    "a branch on a tensor": (
        "    return SequenceLoss(\n",
        "    assert length.sum() >= 0\n    return SequenceLoss(\n",
        {"sync"},
    ),
    "a matrix kept for the backward pass": (
        "        ctx.mark_non_differentiable(",
        "        ctx.kept = log_prob.float() - old_log_prob.float()\n        ctx.mark_non_differentiable(",
        {"memory"},
    ),
    "temporaries as large as the batch": (
        "for rows in row_blocks(log_prob):",
        "for rows in [slice(0, len(log_prob))]:",
        {"memory"},
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_turns_its_line_red_and_no_other(fault):
    sound, wrong, red = PLANTED[fault]
    lines = examined("--checks", "loss", "meter", loss=planted(sound, wrong))
    assert {check for check, line in lines.items() if line.status == "error"} == red
    assert {line.status for check, line in lines.items() if check not in red} <= {"ok", "skipped"}
    assert all(lines[check].what and lines[check].why and lines[check].fix for check in red)


def test_ranks_sum_to_the_whole_and_a_failing_one_is_named():
    line = exact.ranks_line(fspo_loss, "cpu", 64)
    assert line.status == "ok" and "2 ranks over gloo" in line.what and line.figures["error"] < 1e-5
    line = exact.ranks_line(torch.add, "cpu", 64)
    assert line.status == "error" and "TypeError" in line.what


# --- the stand-in for a GPU's counters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "count"),
    [
        (lambda x: x.sum(), 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x[0]) + int(x[1]), 2),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x.cpu().numpy(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: [x.sum().item() for _ in range(3)], 3),
    ],
)
def test_the_stand_in_counts_what_would_wait_for_a_gpu(reads, count):
    x = torch.randn(10)
    with cost.Meter("cpu") as meter:
        reads(x)
    assert meter.synchronizations == count
    assert torch.randn(2).tolist() and torch.Tensor.cpu.__name__ == "cpu"  # left as it was


def test_the_stand_in_measures_what_is_kept_and_what_is_there_at_a_time():
    x = torch.randn(1000)
    with cost.Meter("cpu") as meter:
        kept = x + 1
        view = kept[:500]
        x.mul_(2)
        temporary = torch.cat([x, x])
        del temporary
        more = x.sum()
    assert meter.kept == 4000 + 4 and meter.peak == 4000 + 8000
    del view, more


@pytest.mark.parametrize(("compiled", "status"), [(lambda loss: loss, "ok"), (twice, "error")])
def test_torch_compile_has_to_leave_the_loss_as_it_is(compiled, status, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda loss, backend: asked.append(backend) or compiled(loss))
    line = cost.compile_line(fspo_loss, "cpu", (8, 64), rounds=2)
    assert (line.status, asked) == (status, ["inductor"])
    assert {row["loss"] for row in line.figures["rows"]} == {"eager", "compiled"}


def test_the_loss_that_torch_captures_is_the_loss():
    line = cost.compile_line(fspo_loss, "cpu", (8, 64), rounds=1, backend="eager")  # needs no compiler of C++
    assert line.status == "ok", line


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "power", "factor"), [(0.0, 0.5, 1.0), (1.0, 1.0, np.sqrt(256))])
def test_the_floor_of_noise_with_a_known_law(shared, power, factor):
    rng = np.random.default_rng(0)
    differences = [
        0.05 * (rng.standard_normal(256) if shared == 0 else np.full(256, rng.standard_normal())) for _ in range(3000)
    ]
    found = floor.floor(differences)
    assert found.sigma == pytest.approx(0.05, rel=0.05) and found.longest == 256
    assert found.power == pytest.approx(power, abs=0.02)
    assert found.eps == pytest.approx(noise.EPS_IN_SIGMA * 0.05 * factor, rel=0.06)


def test_without_noise_every_eps_means_something():
    found = floor.floor([np.zeros(64)] * 8)
    assert (found.sigma, found.eps) == (0.0, 0.0) and np.isnan(found.power)
    assert floor.floor([np.ones(3)]).longest == 0  # nothing so long


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return responses.small_model(tmp_path_factory.mktemp("small") / "model", num_hidden_layers=2)


def test_log_probs_are_the_same_in_every_layout_and_head(model):
    import transformers

    loaded = {
        attention: transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention).eval()
        for attention in ("eager", "sdpa")
    }
    sampled = responses.sample(loaded["sdpa"], [1, 5, 9, 30, 17])
    assert [len(x) for x in sampled.responses] == [1, 5, 9, 30, 17]
    expected = []
    for prompt, response in zip(sampled.prompts, sampled.responses, strict=True):
        logits = loaded["eager"](torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0].detach())
    for attention, layout in ((a, x) for a in loaded for x in (floor.REFERENCE, *floor.OTHERS)):
        found = floor.log_probs(loaded[attention], sampled, layout, floor.heads("cpu"))
        for name, values in found.items():
            for value, true in zip(values, expected, strict=True):
                torch.testing.assert_close(value, true, rtol=1e-4, atol=1e-4, msg=f"{attention} {layout} {name}")


def test_a_noisy_machine_is_warned_of(monkeypatch):
    measured = {
        "softmax": {"the same again": floor.Floor(0.0, np.nan, 0.0, 64), "any": floor.Floor(0.05, 0.5, 0.13, 64)}
    }
    line = floor._line("noise_bf16_sdpa", "bf16", measured, "softmax")
    assert line.status == "warning" and "0.13" in line.what and "--noise 0.05" in line.fix
    measured["softmax"]["any"] = floor.Floor(1e-6, 0.5, 2.6e-6, 64)
    assert floor._line("noise_fp32_sdpa", "fp32", measured, "softmax").status == "ok"


# --- verl's engine ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_real_step_of_verls_engine(model):
    line = step.line("cpu", model)
    assert line.status == "ok", line
    assert line.figures["cpu"]["grad_norm"] > 1 and "no GPU to compare with" in line.why


@pytest.mark.parametrize(
    ("metric", "value", "status"),
    [
        (None, 0.0, "ok"),
        ("actor/fspo/log_ratio", 1.01, "error"),
        ("grad_norm", float("nan"), "error"),
        ("perf/max_memory_allocated_gb", 7.0, "ok"),
    ],
)
def test_a_step_with_other_metrics_than_on_the_cpu_is_an_error(metric, value, status, monkeypatch):
    sound = {"grad_norm": 1.0, "actor/fspo/clip_fraction": 0.5, "actor/fspo/log_ratio": 1.0}
    sound["perf/max_memory_allocated_gb"] = 0.0
    monkeypatch.setattr(step, "step", lambda _, device: sound | ({metric: value} if device == "cuda" else {}))
    line = step.line("cuda", Path("model"))
    assert line.status == status and (status == "ok" or metric in line.what)


@pytest.mark.long
def test_a_step_that_fails_is_named(tmp_path):
    line = step.line("cpu", tmp_path / "no-model")
    assert line.status == "error" and "no-model" in line.what and line.fix


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_on_a_cpu(capsys):
    checks = ["loss", "meter", "time", "noise"]
    assert cli.main(["gpu", *SMALL, "--json", "--checks", *checks]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {line["check"]: line for line in report["lines"]}
    assert found["device"]["status"] == found["noise_bf16_flash_attention_2"]["status"] == "skipped"
    for check in ("loss_float32", "loss_bfloat16", "sync", "memory", "time", "noise_fp32_sdpa", "noise_fp32_eager"):
        assert check in found and found[check]["status"] != "error", check
    assert found["noise_fp32_sdpa"]["status"] == "ok" and report["error"] == 0
    assert {row["loss"] for row in found["time"]["figures"]["rows"]} == {"fspo", "gspo", "vanilla"}
    assert report["machine"]["torch"] == versions.installed("torch")
    assert cli.main(["gpu", *SMALL, "--checks", "loss"]) == 0
    text = capsys.readouterr().out
    assert "ok       loss_float32" in text and "0 errors, 0 warnings, 1 skipped" in text


def test_without_verl_its_parts_are_skipped_by_name(monkeypatch):
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda package: None if package == "verl" else installed(package))
    lines = examined("--checks", "time", "step")
    assert lines["time"].status == "ok"
    for check in ("time_verl", "step"):
        assert lines[check].status == "skipped" and "verl is not installed" in lines[check].what


@pytest.mark.long
def test_a_bare_machine_needs_neither_verl_nor_ray():
    """torch and transformers are all that the checks of loss, cost and noise import."""
    code = (
        "import sys\n"
        "absent = ('verl', 'ray', 'tensordict', 'omegaconf', 'hydra', 'scipy')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"  # Python then finds none of them
        "from fspo_verl import versions\n"
        "found = versions.installed\n"
        "versions.installed = lambda package: None if package == 'verl' else found(package)\n"
        "from fspo_verl.cli import main\n"
        "sys.exit(main(['gpu', *sys.argv[1:]]))\n"
    )
    options = [*SMALL, "--checks", "loss", "ranks", "meter", "noise", "step"]
    run = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert "noise_fp32_sdpa" in run.stdout and "0 errors" in run.stdout


def test_the_help_needs_no_torch():
    code = (
        "import sys\n"
        "from fspo_verl.cli import main\n"
        "try:\n    main(['gpu', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "--model" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("options", "message"), [(["--device", "cuda"], "torch sees no GPU"), (["--model", "/no/model"], "no config.json")]
)
def test_a_wrong_call_is_named(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["gpu", *options]) == 2
    assert message in capsys.readouterr().err


# --- the remedies, through verl's engine -----------------------------------------------------------------------------


@pytest.mark.long
def test_float32_and_one_layout_silence_the_noise():
    settings = ["bf16, 8 rows, then 1", "fp32, 8 rows, then 1", "bf16, 4 rows both times"]
    options = ["--responses", "16", "--longest", "48", "--settings", *settings]
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "noise_floor.py", *options],
        env=os.environ | {"VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    sigma = {
        name: float(line.removeprefix(name).split()[0])
        for name in settings
        for line in run.stdout.splitlines()
        if line.startswith(name)
    }
    assert sigma["bf16, 8 rows, then 1"] > 1e-3 > 1e-5 > sigma["fp32, 8 rows, then 1"]
    assert sigma["bf16, 4 rows both times"] < sigma["bf16, 8 rows, then 1"] / 10
