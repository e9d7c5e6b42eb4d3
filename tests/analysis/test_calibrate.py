# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The calibrated band has the rate it promises, on the records and on a re-run; every way to fail says what to mend."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic_run
from scipy.optimize import linprog
from scipy.stats import norm
from simulated_records import assert_covered, frame, group_lengths, holds, simulate_run

from fspo_verl import cli
from fspo_verl.analysis import band_fit, clip_rates
from fspo_verl.analysis.calibrate import calibrate, recommend
from fspo_verl.analysis.coarse import coarse
from fspo_verl.band import NORMALIZATIONS, Band
from fspo_verl.clips import BandClip, ratio_band, standardized, upper_quantile
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.report import calibration

SEEDS = 200


def calibrated(records, target=0.1, seed=0, **kwargs):
    # A stream of its own: resampling with the very numbers that made the records would follow them.
    return calibrate(records, target, np.random.default_rng([seed, 1]), **kwargs)


def write_records(folder, records, loss="fspo"):
    synthetic_run.write_records(folder / "records", records, loss)
    return folder


def run_cli(capsys, *args):
    code = cli.main(["calibrate", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


# --- the band --------------------------------------------------------------------------------------------------------


def scores(records, band, side="upper"):
    """(S − c)/s of one side, and what is resampled."""
    return band_fit.beyond(records, band, side), band_fit.resampled(records)[1][clip_rates.sides(records)[side]]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("steps, step_spread", [(5, 0.43), (19, 0.3)])
def test_intervals_of_eps_cover_the_true_quantile_where_steps_differ(normalization, steps, step_spread):
    band = Band(normalization=normalization)
    endless = simulate_run(np.random.default_rng(1000), steps=3000, step_spread=step_spread)
    truth = upper_quantile(scores(endless, band, "lower")[0], 0.1)
    hits = []
    for seed in range(SEEDS):
        records = simulate_run(np.random.default_rng(seed), steps, step_spread=step_spread)
        score, cluster = scores(records, band, "lower")
        eps = upper_quantile(score, 0.1)
        low, high = band_fit.eps_interval(score, eps, cluster, 0.95)
        assert low <= eps <= high
        hits.append(low <= truth <= high)
    # More often than stated only where steps hardly differ, as for a width of sqrt(Q).
    assert_covered(hits, at_least=normalization == "studentized")


@pytest.mark.parametrize("steps, step_spread, prompts", [(1, 0.0, 64), (5, 0.43, 8), (19, 0.3, 8), (20, 0.3, 8)])
def test_the_rate_of_a_re_run_lands_in_its_interval(steps, step_spread, prompts):
    hits = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        run, again = (simulate_run(rng, steps, prompts, 4, step_spread=step_spread) for _ in range(2))
        score, cluster = scores(run, Band())
        eps = upper_quantile(score, 0.1)
        rate = band_fit.rerun_rate(score > eps, cluster, 0.95)
        hits.append(holds(rate, np.mean(scores(again, Band())[0] > eps)))
    assert_covered(hits)


@pytest.mark.parametrize("name", ["sqrt(L)", "L^p, -Q/2", "sqrt(Q) limited, -Q/2"])
def test_the_suggested_band_has_the_stated_clip_rate_on_a_re_run(name):
    (shape,) = [shape for shape in band_fit.SHAPES if shape.name == name]
    hits = []
    for seed in range(SEEDS // 2):
        run, again = (simulate_run(np.random.default_rng([seed, i]), 12, 8, step_spread=0.43) for i in range(2))
        found = band_fit.fit(run, shape, 0.1)
        clipped = BandClip("", "", found.band).clipped(again)
        hits.append(holds(found.rates["all"], clipped[again.advantage != 0].mean()))
    assert_covered(hits, at_least=shape.limit)


def test_the_suggested_bands_clip_the_target_on_both_sides():
    run = simulate_run(np.random.default_rng(0), step_spread=0.2)
    result = calibrated(run, draws=50)
    assert result.rerun_by == "steps" and [found.shape for found in result.fits] == list(band_fit.SHAPES)
    side = clip_rates.sides(run)
    for found in result.fits:
        assert found.eps_low.lower < found.eps_low.value < found.eps_low.upper
        assert found.eps_high.lower < found.eps_high.value < found.eps_high.upper
        overrides = calibration.overrides(found.band)
        assert overrides["eps"] is None and overrides["eps_dual"] is None
        method = BandClip("band", "", FSPOPolicyLossConfig(**overrides))
        assert Band(**Band.fields_in(vars(method.band))) == found.band
        clipped = method.clipped(run)
        count = side["upper"].sum()
        assert clipped[side["upper"]].mean() == pytest.approx(0.1, abs=3 / count)  # eps has 4 digits
        assert found.rates["upper"].value == clipped[side["upper"]].mean()


def test_the_dual_clip_takes_at_most_a_tenth_of_the_target():
    run = simulate_run(np.random.default_rng(0), step_spread=0.2)
    lower = np.flatnonzero(clip_rates.sides(run)["lower"])
    far = np.random.default_rng(1).choice(lower, len(lower) // 5, replace=False)
    moved = run.log_ratio.to_numpy().copy()
    moved[far] = 10 * Band().high * np.sqrt(run.length.to_numpy()[far]) * np.linspace(1, 2, len(far))
    run["log_ratio"] = moved
    found = band_fit.fit(run, band_fit.SHAPES[0], 0.1)
    assert found.dual_widened and found.band.dual > 3 * found.band.high
    assert 0 < found.rates["dual"].value <= 0.01
    clipped = BandClip("", "", found.band).clipped(run)
    assert clipped[clip_rates.sides(run)["lower"]].mean() == pytest.approx(0.11, abs=0.002)
    assert any("eps_dual is more than three times eps_high" in text for text in calibrated(run, draws=20).warnings)


def test_on_policy_responses_count_in_the_target():
    records = simulate_run(np.random.default_rng(0))
    moved = records[records.mini_batch > 0]
    all_of_them, only_moved = (calibrated(part, draws=20).fits[0].eps_high.value for part in (records, moved))
    score = standardized(moved[moved.advantage > 0], Band())
    assert only_moved == upper_quantile(score, 0.1)
    assert all_of_them == pytest.approx(upper_quantile(score, 0.1 * 4 / 3), rel=0.02)


# --- power and limit -------------------------------------------------------------------------------------------------


def pinball(y, length, share):
    """Slope of the linear quantile regression of log y on log L, as the linear programme that defines it."""
    n = len(y)
    cost = np.r_[0.0, 0.0, np.full(n, 1 - share), np.full(n, share)]
    line = np.c_[np.ones(n), np.log(length), np.eye(n), -np.eye(n)]
    solved = linprog(cost, A_eq=line, b_eq=np.log(y), bounds=[(None, None)] * 2 + [(0, None)] * (2 * n))
    return solved.x[1]


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_the_power_is_that_of_a_quantile_regression(share):
    rng = np.random.default_rng(0)
    length = rng.integers(5, 500, 300)
    y = length**0.4 * rng.lognormal(0, 0.5, 300)
    power = band_fit.power_of_length([(y, length, np.arange(300))], share)
    assert power.value == pytest.approx(pinball(y, length, share), abs=0.01)
    scaled = band_fit.power_of_length([(7 * y, 3 * length, np.arange(300))], share)
    assert scaled == pytest.approx(power)


@pytest.mark.parametrize("steps, prompts, truth", [(5, 32, 0.3), (20, 16, 0.5), (60, 8, 0.7)])
def test_the_interval_of_the_power_covers_it(steps, prompts, truth):
    hits = []
    for seed in range(SEEDS):
        records = simulate_run(
            np.random.default_rng(seed), steps, prompts, kappa=0.0, step_spread=0.43, power=truth, prompt_spread=0.3
        )
        hits.append(holds(band_fit.power_of_log_ratio(records, "plain", 0.1), truth))
    assert_covered(hits)


@pytest.mark.parametrize("truth", [0.5, 0.25])
def test_a_trend_with_length_is_found_where_there_is_one_and_as_often_as_stated_where_not(truth):
    p = []
    for seed in range(SEEDS // 2):
        records = simulate_run(np.random.default_rng(seed), 25, kappa=0.0, step_spread=0.43, power=truth)
        p.append(band_fit.fit(records, band_fit.SHAPES[0], 0.1).trend)
    if truth == 0.5:
        assert_covered([value >= 0.05 for value in p], at_least=True)  # two sides, each tested at half the level
    else:
        assert np.mean([value < 0.05 for value in p]) > 0.9


def test_a_power_that_the_data_do_not_hold_is_not_a_number():
    y, length = np.array([1.0, 2, 3, 4]), np.array([5, 6, 7, 8])
    for part in (
        (y, np.full(4, 5), np.arange(4)),  # one length
        (y, length, np.zeros(4, int)),  # one cluster
        (np.array([1.0, 0, 0, 0]), length, np.arange(4)),  # one of four above 0, where two are wanted
        (y[:0], length[:0], np.arange(0)),
    ):
        assert all(map(math.isnan, band_fit.power_of_length([part], 0.5)))


def test_the_limit_acts_on_the_largest_moves_at_every_length():
    records = simulate_run(np.random.default_rng(0), prompts=64, power=0.3)
    shape = next(shape for shape in band_fit.SHAPES if shape.limit)
    band = band_fit.shaped(records, shape, 0.1)
    assert band.length_power == pytest.approx(0.3, abs=0.05)
    moved = records[records.quadratic_variation > 0]
    beyond = np.sqrt(moved.quadratic_variation) > band.realized_limit * moved.length**band.length_power
    assert beyond.mean() == pytest.approx(0.05, abs=0.002)
    assert beyond[moved.length > 60].mean() == pytest.approx(0.05, abs=0.01)


# --- which band ------------------------------------------------------------------------------------------------------


def sudden(rng, kappa=0.0):
    """Responses beyond 100 tokens have three times the spread of shorter ones, which no power of L follows."""
    length, prompt = group_lengths(rng, 4000, 4)
    q = 0.01**2 * length * np.where(length > 100, 9.0, 1.0)
    s = np.sqrt(q) * rng.standard_normal(len(q)) - kappa * q / 2
    return frame(length, s, q, rng.choice([-1, 1], len(q)), prompt, prompt // 80)


@pytest.mark.parametrize(
    "records, name, reason",
    [
        (lambda rng: simulate_run(rng, prompts=32, kappa=0.0), "sqrt(L)", "treats lengths alike"),
        (lambda rng: simulate_run(rng, 50, 64, sigma=0.08, kappa=1.0), "sqrt(L), -Q/2", "simpler, but not fair"),
        (lambda rng: simulate_run(rng, 50, 64, power=0.15, kappa=0.0), "L^0.15", "simpler, but not fair"),
        (sudden, "sqrt(Q) limited, -Q/2", "comes nearest"),
    ],
    ids=["sqrt(L)", "drift", "another power", "no power"],
)
def test_the_simplest_band_that_is_flat_on_later_steps_is_recommended(records, name, reason):
    records = records(np.random.default_rng(0))
    result = calibrated(records, draws=100)
    chosen = result.fits[result.recommended]
    assert chosen.name == name or abs(chosen.band.length_power - 0.15) < 0.05 and name == "L^0.15"
    text = " ".join(result.reasons)
    assert reason in text and "what it costs" in text
    simpler = list(zip(result.fits, result.judged, strict=True))[: result.recommended]
    assert all(judged.excess > 1 or found.trend < 0.05 for found, judged in simpler) and chosen.shape.bounded


def test_what_is_judged_has_not_been_fitted():
    records = simulate_run(np.random.default_rng(0), 11, 32, step_spread=0.3)
    result = calibrated(records, draws=50)
    assert result.halves == ("steps 0 to 5", "steps 6 to 10")
    earlier, later = records[records.step <= 5], records[records.step > 5]
    alone = calibrated(earlier, draws=50)
    counted = later.advantage != 0
    for fitted, found, judgement in zip(alone.fits, result.earlier, result.judged, strict=True):
        assert fitted.band == found.band and fitted.rates == found.rates
        clipped = BandClip("", "", found.band).clipped(later)[counted]
        assert judgement.rates["all"] == clipped.mean()
        by_length = judgement.by_length[judgement.by_length.n > 0]
        assert (by_length.n * by_length.rate).sum() == pytest.approx(clipped.sum())
    changed = records.assign(log_ratio=records.log_ratio.where(records.step <= 5, 0))
    assert [found.band for found in calibrated(changed, draws=50).earlier] == [f.band for f in result.earlier]


def test_one_step_is_judged_on_other_prompts():
    records = simulate_run(np.random.default_rng(0), steps=1, prompts=200)
    result = calibrated(records, draws=50)
    assert result.rerun_by == "prompts" and result.halves == ("100 prompts", "100 prompts")
    assert not math.isnan(result.judged[0].excess)


def test_the_clip_rate_of_each_mini_batch_is_shown():
    records = simulate_run(np.random.default_rng(0), mini_batches=16)
    found = band_fit.fit(records, band_fit.SHAPES[0], 0.1)
    clipped = BandClip("", "", found.band).clipped(records)[records.advantage != 0]
    table = found.by_mini_batch
    assert table["first"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14] and table["last"].tolist()[-1] == 15
    assert table.rate[0] < table.rate[4] < table.rate[7]
    assert (table.n * table.rate).sum() == pytest.approx(clipped.sum()) and table.n.sum() == len(clipped)


def test_a_shape_that_cannot_reach_the_target_is_refused_with_its_reason_and_another_recommended():
    records = simulate_run(np.random.default_rng(0), prompts=32, sigma=0.25, kappa=1.0, low=200, high=400)
    result = calibrated(records, 0.25, draws=50)
    zero, centered = result.fits[:2]
    assert "of the responses with A > 0 lie above the centre, and eps must be positive" in zero.refused
    assert centered.band and result.judged[0] is None and result.fits[result.recommended].band


# --- warnings --------------------------------------------------------------------------------------------------------


def test_nothing_to_warn_about():
    records = simulate_run(np.random.default_rng(1), kappa=0.0)
    assert calibrated(records[records.length <= 300], draws=100).warnings == ()


def test_sides_that_ask_for_different_powers_are_named():
    rng = np.random.default_rng(0)
    records = simulate_run(rng, 50, 32, kappa=0.0)
    shrunk = records.log_ratio.where(records.log_ratio < 0, records.log_ratio * (records.length / 50) ** -0.4)
    (warning,) = calibrated(records.assign(log_ratio=shrunk), draws=50).warnings
    assert "the two sides ask for different powers of L, 0.1" in warning


def test_little_data_is_said():
    rng = np.random.default_rng(0)
    records = simulate_run(rng, steps=1, prompts=24, group=8)
    long = frame([5000] * 3, [0.1, -0.1, 0.2], 1.0, [1, -1, 1], ["a", "b", "c"], mini_batch=np.ones(3, np.int32))
    records = pd.concat([records, long], ignore_index=True)
    records.attrs["rows"] = 10_000
    warnings = calibrated(records, 0.05, draws=50).warnings
    expected = [
        f"{len(records)} of 10,000 records are used",
        "eps_high rests on 4 clipped responses",
        "eps_low rests on 4 clipped responses",
        "all records are of one step",
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
        dict(item.removeprefix(calibration.KEY).split("=") for item in line.split())
        for line in blocks
        if line.startswith(("  " + calibration.KEY, "  +"))
    ]


def numbers(overrides):
    texts = {name: None if value == "null" else value for name, value in overrides.items()}
    return {name: float(value) if value and value[0].isdigit() else value for name, value in texts.items()}


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
    assert out.startswith(
        f"run: recommended is {recommended['name']}, which clips 0.05 on each side\n\n  {calibration.KEY}"
    )
    *blocks, gspo = pasted(out)
    assert len(blocks) == len(band_fit.SHAPES)
    assert numbers(blocks[0]) == {
        name.removeprefix(calibration.KEY): value for name, value in recommended["overrides"].items()
    }
    for overrides in blocks:
        clipped = BandClip("", "", FSPOPolicyLossConfig(**numbers(overrides))).clipped(records)
        assert clipped[records.advantage > 0].mean() == pytest.approx(0.05, abs=0.003)
    assert gspo.pop("+algorithm.policy_loss") == "gspo"
    low, high = (float(gspo.pop(f"{calibration.ACTOR}clip_ratio_{side}")) for side in ("low", "high"))
    clipped = BandClip("", "", ratio_band(1 - low, 1 + high, 1.0)).clipped(records)
    for side in ("upper", "lower"):
        assert clipped[clip_rates.sides(records)[side]].mean() == pytest.approx(0.05, abs=0.003)
    again = run_cli(capsys, run, "--target-clip-rate", 0.05)[1]
    assert again == out


@pytest.mark.parametrize("loss", ["gspo", "vanilla"])
def test_records_of_another_loss_calibrate_too(tmp_path, capsys, loss):
    run = write_records(tmp_path, simulate_run(np.random.default_rng(0)), loss)
    code, out, _ = run_cli(capsys, run)
    assert code == 0 and f"in this run ({loss})" in out
    *blocks, gspo = pasted(out)
    assert all(block["+algorithm.policy_loss"] == "fspo" for block in blocks)
    assert gspo["+algorithm.policy_loss"] == "gspo"


def test_overrides_undo_what_contradicts_them(tmp_path, capsys, monkeypatch):
    band = {"eps_low": 0.1, "eps_high": 0.1, "eps_dual": 0.3, "length_power": 0.0, "normalization": "drift_corrected"}
    monkeypatch.setitem(synthetic_run.RANGES["fspo"], "band", band)
    run = write_records(tmp_path, simulate_run(np.random.default_rng(0)))
    _, out, _ = run_cli(capsys, run)
    *blocks, _gspo = pasted(out)
    for overrides in blocks:
        # The widths that these overrides name, whatever the run had.
        both = FSPOPolicyLossConfig(**({"eps": 0.1} | band | numbers(overrides)))
        assert both.length_power == numbers(overrides)["length_power"] and both.dual >= both.high
        assert both.normalization == overrides["normalization"]
    assert {overrides["length_power"] for overrides in blocks} >= {"0.5"}


def test_a_power_that_all_records_rule_out_is_not_recommended_even_if_its_lre_is_within_chance():
    records = simulate_run(np.random.default_rng(1), 30, 12, kappa=0.0, power=0.3)
    result = calibrated(records, draws=100)
    root = result.fits[0]
    assert root.trend < 0.05 and result.judged[0].excess <= 1
    assert result.fits[result.recommended].shape.power
    assert any("sqrt(L) is simpler, but not fair" in x and "depend on log length" in x for x in result.reasons)


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
    "one prompt": (
        records_without().query("prompt == prompt.iloc[-1]"),
        (),
        "all records are of one prompt in one step",
    ),
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


def earlier_half_without(sign):
    """Records whose earlier half of the steps has no advantage of this sign."""
    records = simulate_run(np.random.default_rng(0), steps=4)
    return records[(records.step > records.step.min() + 1) | (np.sign(records.advantage) != sign)]


@pytest.mark.parametrize("sign", [1, -1])
def test_half_of_the_records_may_lack_a_side(tmp_path, capsys, sign):
    folder = write_records(tmp_path, earlier_half_without(sign).astype({"prompt": str}))
    code, out, _ = run_cli(capsys, folder)
    assert code == 0 and "no such band has the target rate in both halves" in " ".join(out.split())


def test_a_shape_that_cannot_be_judged_is_not_taken_for_fair_where_others_are():
    tests = {"upper": 0.4, "lower": 0.6}
    fits = tuple(band_fit.Fit(shape, band=Band(), trends=tests) for shape in band_fit.SHAPES[:2])
    side = {"lre": 0.1, "floor_upper": 0.2}
    fair = band_fit.Judgement({}, {"upper": side, "lower": side}, pd.DataFrame())
    choice, reasons = recommend(fits, (None, fair))
    assert choice == 1 and "sqrt(L) is simpler, but not judged: no such band has the target rate in both" in reasons[1]
    assert recommend(fits, (fair, None))[0] == recommend(fits, (fair, fair))[0] == recommend(fits, (None, None))[0] == 0
    assert "no dependence of clips on log length can be told (p = 0.8)" in reasons[0]
    untested = dataclasses.replace(fits[0], trends=dict.fromkeys(tests, math.nan))
    assert "too few lengths, steps or prompts for a test" in recommend((untested,), (fair,))[1][0]


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


def metrics_of(records, bypass=False):
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
            "actor/fspo/on_policy_fraction": 0.0 if bypass else (part.mini_batch == 0).mean(),
            "response_length/mean": part.length.mean(),
            "response_length/max": part.length.max(),
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


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("target", [0.1, 0.02])
def test_metrics_alone_give_nearly_the_band_of_the_records(bypass, target):
    records = gaussian_run(np.random.default_rng(0))
    if bypass:  # another engine's log-probs: the first mini-batch has moved, too
        records = records[records.mini_batch > 0].assign(mini_batch=lambda rows: rows.mini_batch - 1)
    result = coarse(metrics_of(records, bypass), target)
    score = standardized(records, Band())
    assert result.moved == pytest.approx(1.0 if bypass else 0.75)
    assert result.eps_high == pytest.approx(upper_quantile(score, target), rel=0.05)
    assert result.eps_low == pytest.approx(upper_quantile(-score, target), rel=0.05)
    assert result.kappa == pytest.approx(0.7, abs=0.25)  # four standard errors of a mean of S/L
    moved = records[records.quadratic_variation > 0]
    sigma = math.sqrt((moved.quadratic_variation / moved.length).mean())
    assert result.spread == pytest.approx(sigma * math.sqrt(399), rel=0.05)
    assert FSPOPolicyLossConfig(**calibration.overrides(result.band)).normalization == "plain"


def test_metrics_that_do_not_tell_who_moved():
    metrics = metrics_of(gaussian_run(np.random.default_rng(0), mini_batches=1000))  # all but two have moved
    result = coarse(metrics.drop(columns="actor/fspo/on_policy_fraction").iloc[[20]], 0.1)
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
    assert numbers(overrides) == {name.removeprefix(calibration.KEY): v for name, v in result["overrides"].items()}
    code, _, err = run_cli(capsys, tmp_path, "--target-clip-rate", 0.5)
    assert code == 2 and "no band with centre 0 clips 0.5 of the responses" in err


def test_metrics_of_a_run_that_never_moved():
    metrics = metrics_of(gaussian_run(np.random.default_rng(0), sigma=0.0))
    with pytest.raises(ValueError, match="no recorded response has moved"):
        coarse(metrics, 0.1)
