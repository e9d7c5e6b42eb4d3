# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl forecast`: its rates are those of simulated tokens, and its figures come from where it says."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fspo_verl import cli
from fspo_verl.analysis import forecast
from fspo_verl.band import Band
from fspo_verl.clips import CLIPS, MATCHED_RATE, ratio_band

RULES = sorted(forecast._RULES)
LAW = Path(__file__).parents[2] / "scripts/studies/law/records/log_ratios.parquet"


@pytest.mark.parametrize(("length", "carriers"), [(400, 1.0), (400, 0.05), (5, 0.05)])
@pytest.mark.parametrize("sigma", [0.003, 0.03, 0.1])
@pytest.mark.parametrize("name", RULES)
def test_a_rate_is_that_of_independent_tokens(name, sigma, length, carriers):
    """Whether all of them spread alike, or a few that are drawn at random carry it all."""
    rng, rule = np.random.default_rng(0), forecast._RULES[name]
    variance = sigma**2 / carriers
    carries = rng.random((4000, length), dtype=np.float32) < carriers
    tokens = carries * (-variance / 2 + math.sqrt(variance) * rng.standard_normal((4000, length), dtype=np.float32))
    advantage = rng.choice([-1.0, 1.0], 4000)
    columns = {"log_ratio": tokens.sum(1), "quadratic_variation": (tokens**2).sum(1), "advantage": advantage}
    simulated = rule.clipped(pd.DataFrame(columns).assign(length=length)).mean()
    error = math.sqrt(max(simulated * (1 - simulated), 1e-3) / 4000)
    assert forecast.expected_rate(rule, length, sigma, carriers) == pytest.approx(simulated, abs=4 * error)


@pytest.mark.parametrize("name", ["fspo", "gspo", "fixed_band"])
def test_a_forecast_meets_recorded_responses_where_tokens_are_alike_and_misses_others(name):
    """Plain text of a real model, where tokens spread alike, and chat, where those of short responses spread more."""
    found = {}
    for kind in ("text", "chat"):
        cell = f"temperature == 1 and direction == 'grpo' and mini_batch == 4 and kind == '{kind}'"
        rows = pd.read_parquet(LAW).query(f"{cell} and advantage != 0")
        rows = rows.assign(log_ratio=rows.s.map(np.sum), quadratic_variation=rows.q.map(np.sum))
        sigma = math.sqrt(rows.quadratic_variation.sum() / rows.length.sum())
        rule = CLIPS[name].matched(rows, MATCHED_RATE)
        lengths = rows.length.sort_values()[::8]
        found[kind] = np.mean([forecast.expected_rate(rule, length, sigma) for length in lengths])
    assert found["text"] == pytest.approx(MATCHED_RATE, abs=0.05)
    assert name != "fspo" or found["chat"] == pytest.approx(0.02, abs=0.005)  # what the help says


def shown(capsys, command: str) -> str:
    assert cli.main(["forecast", *command.split()]) == 0
    return capsys.readouterr().out


def rates(text: str) -> dict[str, list[float]]:
    """The table of an answer: per cent by rule, a rate per length."""
    rows = [line.split() for line in text.splitlines() if line.endswith("%")]
    return {
        " ".join(row): [float(cell[:-1]) for cell in row if cell.endswith("%") and cell[0].isdigit()] for row in rows
    }


def rate_of(name: str, text: str) -> list[float]:
    found = [found for row, found in rates(text).items() if row.startswith(name)]
    assert len(found) == 1, text
    return found[0]


def forecast_rates(rule, sigma, lengths):
    return [pytest.approx(100 * forecast.expected_rate(rule, length, sigma), abs=0.06) for length in lengths]


def write_run(folder, config=None, **metrics):
    lines = [{"step": step, "data": metrics} for step in (1, 2)]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (folder / ".hydra").mkdir(exist_ok=True)
        (folder / ".hydra/config.yaml").write_text(json.dumps(config))
    return folder


def test_the_answer_names_the_loss_first_and_what_to_do_last(capsys):
    first, *_, last = shown(capsys, "--lengths 100,8000 --sigma 0.01 --loss gspo --clip 0.0003 0.0004").splitlines()
    assert first.startswith("Noise of 0.01 nats per token alone makes GSPO clip 36.4% at 100 tokens, 0.63% at 8,000")
    assert last.startswith("next: ")


def test_few_tokens_that_carry_the_noise_change_short_responses(capsys):
    alike, carried = shown(capsys, "--lengths 5,2000 --sigma 0.01 --loss fspo").splitlines()[:2]
    assert "FSPO clip 0.14% at 5 tokens, 0.17% at 2,000" in alike
    assert "5% of the tokens carried all of it: 1.7% at 5 tokens, 0.18% at 2,000" in carried


LOGGED = dict(zip(forecast.LENGTHS, (20, 50, 400), strict=True))


def test_clips_see_the_noise_of_a_run_and_rejections_its_mismatch(tmp_path, capsys):
    """Trained on recomputed old log-probs. Its mismatch is forty times its noise, and no clip sees it."""
    metrics = LOGGED | {"fspo/noise_sigma": 5e-4, "fspo/mismatch_kl": 2e-4, "fspo/clip_rate/all": 0.004}
    found = shown(capsys, str(write_run(tmp_path, actor_ppo_kl=1e-7, **metrics)))
    assert rate_of("GSPO noise", found) == forecast_rates(forecast._RULES["gspo"], 5e-4, (20, 50, 400))
    assert rate_of("verl, mean", found) == forecast_rates(forecast._RULES["geo_rs"], 0.02, (20, 50, 400))
    assert "this run clips 0.40%" in found.splitlines()[0]


@pytest.mark.parametrize("name", forecast.K3)
def test_a_mismatch_is_the_noise_of_clips_in_bypass_mode_alone(name, tmp_path, capsys):
    config = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
    config["actor_rollout_ref"] = {"actor": {"policy_loss": {"loss_mode": "vanilla"}}}
    found = shown(capsys, str(write_run(tmp_path / "bypass", config, **LOGGED | {name: 5e-5})))
    assert rate_of("GSPO mismatch", found) == forecast_rates(forecast._RULES["gspo"], 0.01, (20, 50, 400))
    run = write_run(tmp_path / "recomputed", **LOGGED | {name: 5e-5})
    assert {row.split()[-4] for row in rates(shown(capsys, str(run)))} == {"mismatch"}
    assert cli.main(["forecast", str(run), "--loss", "gspo"]) == 2
    assert "fspo/noise_sigma" in capsys.readouterr().err


def test_k3_that_is_given_is_the_mismatch_as_in_a_log(tmp_path, capsys):
    given = shown(capsys, "--lengths 20,50,400 --k3 0.0002")
    assert given == shown(capsys, str(write_run(tmp_path / "log", **LOGGED | {"rollout_corr/k3_kl": 2e-4})))
    assert {row.split()[-4] for row in rates(given)} == {"mismatch"} and "clip" not in given.splitlines()[0]
    bypass = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
    bypass["actor_rollout_ref"] = {"actor": {"policy_loss": {"loss_mode": "vanilla"}}}
    found = shown(capsys, f"{write_run(tmp_path / 'bypass', bypass, **LOGGED)} --k3 0.0002")
    assert rate_of("GSPO mismatch", found) == forecast_rates(forecast._RULES["gspo"], 0.02, (20, 50, 400))


@pytest.mark.parametrize("loss", ["fspo", "gspo"])
def test_the_first_row_is_the_clip_of_the_run(loss, tmp_path, capsys):
    wide = {"fspo": {"eps": 0.006}, "gspo": {}}[loss]
    actor = {"policy_loss": {"loss_mode": loss, **wide}, "clip_ratio_low": 0.001, "clip_ratio_high": 0.002}
    found = shown(
        capsys,
        str(write_run(tmp_path, {"actor_rollout_ref": {"actor": actor}}, **LOGGED, **{"fspo/noise_sigma": 0.005})),
    )
    band = Band(eps=0.006) if loss == "fspo" else ratio_band(0.999, 1.002, 1.0)
    own = forecast_rates(dataclasses.replace(CLIPS[loss], band=band), 0.005, (20, 50, 400))
    first, row = found.splitlines()[0], next(iter(rates(found).values()))
    assert row == own and f"this run's {CLIPS[loss].label} clip" in first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--sigma 0.01", "--lengths"),
        ("--lengths 10", "--sigma"),
        ("--lengths 10 --k3 -1", "--k3=-1"),
        ("--lengths 10 --k3 2e-4 --loss gspo", "bypass mode only: give --sigma (there 0.02)"),
        ("--lengths 10 --k3 1e300", "--k3=1e+300"),
        ("--lengths 10 --k3 0.1 --sigma 0.1", "--k3"),
        ("--lengths 10 --sigma -1", "--sigma=-1"),
        ("--lengths 10 --sigma 1e200", "--sigma=1e+200"),
        ("--lengths 10 --sigma inf", "--sigma=inf"),
        ("--lengths 10 --sigma nan", "--sigma=nan"),
        ("--lengths 1k --sigma 0.1", "--lengths=1k"),
        ("--lengths nan --sigma 0.1", "--lengths=nan"),
        ("--lengths 0 --sigma 0.1", "--lengths=0"),
        ("--lengths 10, --sigma 0.1", "--lengths=10,"),
        ("--lengths 99999999999 --sigma 0.1", "--lengths=99999999999"),
        ("--lengths 10 --sigma 0.01 --clip 1 2", "--loss"),
        ("--lengths 10 --sigma 0.01 --loss gspo --clip 1 1", "0 < LOW < 1"),
        ("--lengths 10 --sigma 0.01 --loss gspo --clip 0.1 nan", "HIGH > 0"),
        ("--lengths 10 --sigma 0.01 --loss fspo --clip 0 1", "LOW > 0"),
        ("--lengths 10 --sigma 0.01 --loss vanilla", "gspo"),
    ],
)
def test_what_is_missing_or_wrong_is_named_in_one_line(options, words, capsys):
    code = None
    with contextlib.suppress(SystemExit):
        code = cli.main(["forecast", *options.split()])
    said = capsys.readouterr().err
    assert (code, len(said.splitlines())) == (2, 1) and words in said


@pytest.mark.parametrize("broken", [math.nan, math.inf, -1.0])
def test_what_a_run_logs_and_is_no_number_counts_as_not_logged(broken, tmp_path, capsys):
    whole = LOGGED | {"fspo/noise_sigma": 0.01}
    for name, words in ((forecast.LENGTHS[1], None), ("fspo/noise_sigma", "--sigma"), (forecast.LENGTHS, "--lengths")):
        names = [name] if isinstance(name, str) else name
        run = write_run(tmp_path, **whole | dict.fromkeys(names, broken))
        assert cli.main(["forecast", str(run)]) == (2 if words else 0)
        captured = capsys.readouterr()
        assert len(captured.err.splitlines()) == bool(words) and (words or "") in captured.err
