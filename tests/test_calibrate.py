# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The calibrated band has the rate it promises, on the records and on a re-run; every way to fail says what to mend."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic_run
from scipy.stats import norm
from simulated_records import assert_covered, frame, group_lengths, holds, simulate_law, simulate_run

from fspo_verl import calibrate, cli, fairness
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.fairness import Method
from fspo_verl.loss import Band

SEEDS = 200


def calibrated(records, target=0.1, seed=0, **kwargs):
    # A stream of its own: resampling with the very numbers that made the records would follow them.
    return calibrate.calibrate(records, target, np.random.default_rng([seed, 1]), **kwargs)


def write_records(folder, records, loss="fspo"):
    synthetic_run.write_records(folder / "records", records, loss)
    return folder


def run_cli(capsys, *args):
    code = cli.main(["calibrate", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


# --- the band --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("center, width", calibrate.MODES)
def test_intervals_of_eps_cover_the_true_quantile(center, width):
    band = Band(band_center=center, band_width=width)
    endless = simulate_run(np.random.default_rng(1000), steps=3000)
    truth = fairness.upper_quantile(fairness.standardized(endless, band)[fairness.sides(endless)["upper"]], 0.1)
    hits = []
    for seed in range(SEEDS):
        records = simulate_run(np.random.default_rng(seed), steps=10)
        upper = fairness.sides(records)["upper"]
        score = fairness.standardized(records, band)[upper]
        eps = fairness.upper_quantile(score, 0.1)
        low, high = calibrate._eps_interval(score, eps, fairness.clusters(records)[upper], 0.95)
        assert low <= eps <= high
        hits.append(low <= truth <= high)
    assert_covered(hits)


@pytest.mark.parametrize("steps, step_spread", [(10, 0.0), (25, 0.3)], ids=["by prompt", "by step"])
def test_the_rate_of_a_re_run_lands_in_its_interval(steps, step_spread):
    hits = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        run, again = (simulate_run(rng, steps, 8, 4, step_spread=step_spread) for _ in range(2))
        upper, upper_again = (fairness.sides(records)["upper"] for records in (run, again))
        score, score_again = (fairness.standardized(records, Band()) for records in (run, again))
        eps = fairness.upper_quantile(score[upper], 0.1)
        options = calibrate._Options(0.1, rng, None, 50, 100, 0.95)
        rate = calibrate._rerun_rate(run[upper], score[upper] > eps, options)
        hits.append(holds(rate, np.mean(score_again[upper_again] > eps)))
    assert_covered(hits)


def test_the_suggested_bands_clip_the_target_here_and_the_stated_rate_on_a_re_run():
    hits = []
    for seed in range(8):
        run, again = (simulate_run(np.random.default_rng([seed, i]), step_spread=0.2) for i in range(2))
        result = calibrated(run, 0.1, seed, draws=100)
        assert result.rerun_by == "steps" and [(fit.band_center, fit.band_width) for fit in result.fits] == list(
            calibrate.MODES
        )
        for fit in result.fits:
            assert fit.eps_low.lower < fit.eps_low.value < fit.eps_low.upper
            assert fit.eps_high.lower < fit.eps_high.value < fit.eps_high.upper
            assert fit.overrides["eps_dual"] == pytest.approx(3 * fit.overrides["eps_high"])
            method = Method("band", "", FSPOPolicyLossConfig(**fit.overrides))
            side = fairness.sides(run)
            count = side["upper"].sum()
            assert method.clipped(run)[side["upper"]].mean() == pytest.approx(0.1, abs=3 / count)  # eps has 4 digits
            clipped, side = method.clipped(again), fairness.sides(again)
            hits += [holds(fit.rates[name], clipped[mask].mean()) for name, mask in side.items()]
    assert_covered(hits)


def test_unmoved_responses_count_in_the_target():
    records = simulate_run(np.random.default_rng(0))
    moved = records[records.mini_batch > 0]
    all_of_them, only_moved = (calibrated(part, draws=20).fits[0].eps_high.value for part in (records, moved))
    score = fairness.standardized(moved[moved.advantage > 0], Band())
    assert only_moved == fairness.upper_quantile(score, 0.1)
    assert all_of_them == pytest.approx(fairness.upper_quantile(score, 0.1 * 4 / 3), rel=0.02)


# --- which band ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sigma, kappa, mode, reason",
    [
        (0.01, 1.0, 0, "below about 1 the drift is small beside the spread"),
        (0.08, 1.0, 1, "S drifts by about -Q/2, nearer to it than to 0"),
        (0.08, 0.0, 0, "S drifts by less than half of -Q/2, and that centre would overcorrect"),
        (0.08, 0.5, 0, "does not tell whether S drifts by -Q/2 or not"),
    ],
)
def test_the_recommended_centre_follows_drift_and_kappa(sigma, kappa, mode, reason):
    records = simulate_run(np.random.default_rng(0), prompts=32, sigma=sigma, kappa=kappa)
    result = calibrated(records, draws=100)
    assert result.recommended == mode
    assert reason in result.reasons[0]
    assert result.spread["value"] == pytest.approx(sigma * math.sqrt(1.5 * 4 / 3 * 400), rel=0.3)


def test_a_mode_that_cannot_reach_the_target_is_refused_with_its_reason_and_another_recommended():
    records = simulate_run(np.random.default_rng(0), prompts=32, sigma=0.25, kappa=1.0, low=200, high=400)
    result = calibrated(records, 0.25, draws=50)
    zero, *others = result.fits
    assert "of the responses with A > 0 lie above the centre, and eps must be positive" in zero.refused[0]
    assert not any(fit.refused for fit in others) and result.recommended == 1


def test_the_fairer_width_is_pointed_at_but_not_chosen():
    """Long responses have three times the sigma of short ones: only sqrt(Q) treats them alike."""
    rng = np.random.default_rng(0)
    length, prompt = group_lengths(rng, 4000, 4)
    q = 0.03**2 * length * np.where(length > 100, 9.0, 1.0)
    s = np.sqrt(q) * rng.standard_normal(len(q)) - q / 2
    records = frame(length, s, q, rng.choice([-1, 1], len(q)), prompt, prompt // 80)
    result = calibrated(records, draws=50)
    assert result.recommended == 1
    text = " ".join(result.reasons)
    assert "lengths are not clipped alike on the upper side even so" in text
    assert "width sqrt(Q) with centre -Q/2 is fairer on the upper and lower side" in text and "no trust region" in text


# --- warnings --------------------------------------------------------------------------------------------------------


def test_nothing_to_warn_about():
    records = simulate_run(np.random.default_rng(1), kappa=0.0)
    assert calibrated(records[records.length <= 300], draws=100).warnings == ()


@pytest.mark.parametrize("power, variance, why", [(0.3, None, ""), (None, (0.02, 4e-4, 0), "does not grow with L")])
def test_a_law_that_is_not_sqrt_l_is_said(power, variance, why):
    rng = np.random.default_rng(0)
    records = simulate_law(rng, power=power, variance=variance, prompts=300)
    records["advantage"] = rng.choice([-1.0, 1.0], len(records))
    (warning,) = (text for text in calibrated(records, draws=100).warnings if text.startswith("std(S) grows like L^0."))
    assert "not like sqrt(L)" in warning and why in warning


def test_little_data_is_said():
    rng = np.random.default_rng(0)
    records = simulate_run(rng, steps=3, prompts=8, group=8)
    long = frame([5000] * 3, [0.1, -0.1, 0.2], 1.0, [1, -1, 1], ["a", "b", "c"], mini_batch=np.ones(3, np.int32))
    records = pd.concat([records, long], ignore_index=True)
    records.attrs["rows"] = 10_000
    warnings = calibrated(records, 0.05, draws=50).warnings
    expected = [
        f"{len(records)} of 10,000 records are used",
        "eps_high rests on 4 clipped responses",
        "eps_low rests on 4 clipped responses",
        "the intervals rest on 27 prompts",
    ]
    counts = [int(0.05 * mask.sum() + 0.5) for mask in (records.advantage > 0, records.advantage < 0)]
    expected[1:3] = [f"{eps} rests on {n} clipped" for eps, n in zip(("eps_high", "eps_low"), counts, strict=True)]
    for text in expected:
        assert sum(warning.startswith(text) for warning in warnings) == 1, text
    assert sum("tokens or more: too few for a bin" in warning for warning in warnings) == 1


# --- the command -----------------------------------------------------------------------------------------------------


def pasted(out):
    """The overrides of each printed block, as a shell would pass them on."""
    blocks = out.replace(" \\\n", " ").splitlines()
    return [
        dict(item.removeprefix(calibrate.KEY).split("=") for item in line.split())
        for line in blocks
        if line.startswith(("  " + calibrate.KEY, "  +"))
    ]


def numbers(overrides):
    return {name: float(value) if value[0].isdigit() else value for name, value in overrides.items()}


def test_prints_overrides_that_give_the_rate_and_writes_them_as_json(tmp_path, capsys):
    records = simulate_run(np.random.default_rng(0), sigma=0.05)
    run = write_records(tmp_path / "run", records)
    file = tmp_path / "out.json"
    code, out, err = run_cli(capsys, run, "--target-clip-rate", 0.05, "--json", file)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    result = json.loads(file.read_text())
    recommended = result["fits"][result["recommended"]]
    assert result["source"] == "records" and result["responses"] == (records.advantage != 0).sum()
    blocks = pasted(out)
    assert len(blocks) == 3 and blocks[0]["band_center"] == recommended["band_center"] == "realized"
    assert numbers(blocks[0]) == {
        name.removeprefix(calibrate.KEY): value for name, value in recommended["overrides"].items()
    }
    for overrides in blocks:
        clipped = Method("", "", FSPOPolicyLossConfig(**numbers(overrides))).clipped(records)
        assert clipped[records.advantage > 0].mean() == pytest.approx(0.05, abs=0.003)
    again = run_cli(capsys, run, "--target-clip-rate", 0.05)[1]
    assert again == out


@pytest.mark.parametrize("loss", ["gspo", "vanilla"])
def test_records_of_another_loss_calibrate_too(tmp_path, capsys, loss):
    run = write_records(tmp_path, simulate_run(np.random.default_rng(0)), loss)
    code, out, _ = run_cli(capsys, run)
    assert code == 0 and f"in this run ({loss})" in out
    assert all(block["+algorithm.policy_loss"] == "fspo" for block in pasted(out))


def test_overrides_undo_what_contradicts_them(tmp_path, capsys, monkeypatch):
    band = {"eps_low": 0.1, "eps_high": 0.1, "length_power": 0.0, "band_center": "constant", "drift_per_token": 0.01}
    monkeypatch.setitem(synthetic_run.RANGES["fspo"], "band", band)
    run = write_records(tmp_path, simulate_run(np.random.default_rng(0)))
    _, out, _ = run_cli(capsys, run)
    for overrides in pasted(out):
        assert FSPOPolicyLossConfig(**(band | numbers(overrides))).length_power == 0.5


def records_without(**columns):
    return simulate_run(np.random.default_rng(0), steps=2).assign(**columns)


ERRORS = {
    "nothing moved": (
        records_without(log_ratio=0.0, quadratic_variation=0.0),
        (),
        "no recorded response has moved (Q = 0 in all of them): with one optimiser step per rollout the ratio stays 1 "
        "and no clip can act; lower actor_rollout_ref.actor.ppo_mini_batch_size",
    ),
    "no A > 0": (records_without(advantage=-1.0), (), "no recorded response has an advantage > 0"),
    "no A < 0": (records_without(advantage=1.0), (), "no recorded response has an advantage < 0"),
    "target out of reach": (
        records_without(),
        ("--target-clip-rate", 0.8),
        "have not moved, as those of the first of 4 mini-batches of each rollout, which no clip can reach: lower the "
        "target, or actor_rollout_ref.actor.ppo_mini_batch_size",
    ),
    "target beyond the centre": (
        records_without(),
        ("--target-clip-rate", 0.6),
        "of the responses with A < 0 lie below the centre, and eps must be positive",
    ),
    "target 0": (records_without(), ("--target-clip-rate", 0), "--target-clip-rate=0 must lie between 0 and 1"),
    "target 1": (records_without(), ("--target-clip-rate", 1), "--target-clip-rate=1 must lie between 0 and 1"),
    "no bins": (records_without(), ("--bins", 0), "--bins=0 must be at least 1"),
    "min_count 0": (records_without(), ("--min-count", 0), "--min-count=0 must be at least 1"),
    "no rows": (records_without(), ("--max-rows", 0), "--max-rows=0 must be at least 1"),
    "no folder for the JSON": (records_without(), ("--json", "/no/such/folder/x.json"), "/no/such/folder/x.json"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_records(tmp_path, capsys, case):
    records, options, message = ERRORS[case]
    code, _, err = run_cli(capsys, write_records(tmp_path, records.astype({"prompt": str})), *options)
    assert code == 2 and err.startswith("fspo-verl calibrate: ") and message in err and "Traceback" not in err


def test_errors_of_folders(tmp_path, capsys):
    assert run_cli(capsys, tmp_path / "missing")[0] == 2
    code, _, err = run_cli(capsys, tmp_path)
    assert code == 2 and "holds no run" in err
    synthetic_run.write_metrics(tmp_path / "metrics-1.jsonl", np.random.default_rng(0), "fspo", 3)
    code, _, err = run_cli(capsys, tmp_path)
    assert code == 2 and "no records, and the metrics lack actor/fspo/log_ratio_per_sqrt_length" in err
    assert "records_dir=DIR" in err


# --- without records -------------------------------------------------------------------------------------------------


def metrics_of(records, epochs=1):
    """The live metrics of a run, one row a step."""
    rows = {}
    for step, part in records.groupby("step"):
        per_sqrt = part.log_ratio.astype(float) / np.sqrt(part.length)
        rows[step] = {
            "actor/fspo/log_ratio_per_sqrt_length": per_sqrt.mean(),
            "actor/fspo/log_ratio_per_sqrt_length_squared": (per_sqrt**2).mean(),
            "actor/fspo/log_ratio_per_token": (part.log_ratio / part.length).mean(),
            "actor/fspo/sigma_squared": (part.quadratic_variation / part.length).mean(),
            "actor/fspo/sequence_fraction": 1.0,
            "actor/fspo/rows": len(part) / part.mini_batch.nunique(),
            "response_length/mean": part.length.mean(),
            "response_length/max": part.length.max(),
            "prompt_length/mean": 20.0,
            "perf/total_num_tokens": (part.length + 20).sum() / epochs,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")


def gaussian_run(rng, steps=40, rows=800, mini_batches=4, sigma=0.02):
    """Half of the responses of each moved mini-batch on either side; S/sqrt(L) ~ N(0, sigma²), sigma by step."""
    step = np.repeat(np.arange(steps), rows)
    mini_batch = np.tile(np.arange(rows) * mini_batches // rows, steps)
    length = rng.integers(10, 400, len(step))
    spread = sigma * np.linspace(0.5, 1.5, steps)[step] * (mini_batch > 0)
    s = spread * np.sqrt(length) * rng.standard_normal(len(step)) - 0.7 * spread**2 * length / 2
    return frame(
        length, s, spread**2 * length, rng.choice([-1, 1], len(step)), step=step, mini_batch=mini_batch.astype(np.int32)
    )


@pytest.mark.parametrize("epochs", [1, 2])
def test_metrics_alone_give_nearly_the_band_of_the_records(epochs):
    records = gaussian_run(np.random.default_rng(0))
    config = {"actor_rollout_ref": {"actor": {"ppo_epochs": epochs}}}
    result = calibrate.coarse(metrics_of(records, epochs), config, 0.1)
    score = fairness.standardized(records, Band())
    assert result.moved == pytest.approx(0.75)
    assert result.eps_high == pytest.approx(fairness.upper_quantile(score, 0.1), rel=0.05)
    assert result.eps_low == pytest.approx(fairness.upper_quantile(-score, 0.1), rel=0.05)
    assert result.kappa == pytest.approx(0.7, abs=0.25)  # four standard errors of a mean of S/L
    moved = records[records.quadratic_variation > 0]
    sigma = math.sqrt((moved.quadratic_variation / moved.length).mean())
    assert result.spread == pytest.approx(sigma * math.sqrt(399), rel=0.05)
    assert FSPOPolicyLossConfig(**result.overrides).band_center == "zero"


def test_metrics_that_do_not_tell_who_moved():
    metrics = metrics_of(gaussian_run(np.random.default_rng(0), mini_batches=1000))  # all but two have moved
    result = calibrate.coarse(metrics.drop(columns="actor/fspo/rows").iloc[[20]], None, 0.1)
    assert result.moved is None
    mean, square = (metrics.iloc[20][f"actor/fspo/log_ratio_per_sqrt_length{x}"] for x in ("", "_squared"))
    assert result.eps_high == pytest.approx(norm.isf(0.1, mean, math.sqrt(square - mean**2)))


def test_the_command_falls_back_on_metrics(tmp_path, capsys):
    metrics = metrics_of(gaussian_run(np.random.default_rng(0), steps=10))
    lines = [json.dumps({"step": step, "data": row}) for step, row in metrics.to_dict("index").items()]
    (tmp_path / "metrics-1.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = run_cli(capsys, tmp_path, "--json", tmp_path / "out.json")
    assert (code, err) == (0, "") and "a coarse answer without intervals, from the metrics" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100
    (overrides,) = pasted(out)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["source"] == "metrics"
    assert numbers(overrides) == {name.removeprefix(calibrate.KEY): v for name, v in result["overrides"].items()}
    code, _, err = run_cli(capsys, tmp_path, "--target-clip-rate", 0.5)
    assert code == 2 and "no band with centre 0 clips 0.5 of the responses" in err


def test_metrics_of_a_run_that_never_moved():
    metrics = metrics_of(gaussian_run(np.random.default_rng(0), sigma=0.0))
    with pytest.raises(ValueError, match="no recorded response has moved"):
        calibrate.coarse(metrics, None, 0.1)
