# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of losses: statistics, records of trials, thresholds and the faults they have to notice."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic_run
from scipy import stats

from fspo_verl import cli
from fspo_verl.analysis.resampling import Estimate
from fspo_verl.band import Band
from fspo_verl.clips import CLIPS, LOSSES, BandClip
from fspo_verl.compare import measures, page, paired, thresholds
from fspo_verl.compare.trials import Clips, Trial, pool, read_trials
from fspo_verl.observe.settings import RunSettings

ROOT = Path(__file__).parents[2]
SEEDS = (1, 2, 3, 4, 5, 6)
STEPS = 8
# What synthetic_run records as the settings of each loss.
synthetic_run.RANGES |= {"grpo": {"band": None}, "fixed_band": {"band": CLIPS["fixed_band"].band.to_json()}}


def trial(validation=None, clips=None, **training) -> Trial:
    validation = {0: 0.3, 5: 0.6} if validation is None else validation
    return Trial("fspo", 1, None, {"reward": [0.5] * 8} | training, validation, {}, None, clips)


def write_run(
    folder: Path, loss: str, seed: int, method: BandClip | None = None, length_factor: int = 1, **metrics
) -> None:
    """A run of one loss, clipped by ``method`` (default: the loss's own), with answers to 64 questions."""
    # The prompts of a seed are the same for all losses, and what is clipped depends on the loss.
    records = synthetic_run.records(np.random.default_rng(seed), "fspo", STEPS, prompts=64)
    records["length"] *= length_factor
    records["clipped"] = (method or CLIPS[loss]).clipped(records).astype(np.float32)
    run = folder / f"{loss}-seed{seed}"
    with pytest.MonkeyPatch.context() as patch:
        if method:
            patch.setitem(synthetic_run.RANGES, loss, {"band": dataclasses.asdict(method.band)})
        synthetic_run.write_records(run / "records", records, loss)
    rng = np.random.default_rng([seed, LOSSES.index(loss)])
    lines = [{"step": 0, "data": {}}]
    for step in range(1, STEPS + 1):
        data = {"critic/score/mean": 0.5, "actor/grad_norm": 0.1, "actor/pg_loss": -0.01}
        lines.append({"step": step, "data": data | {name: values[step - 1] for name, values in metrics.items()}})
    (run / "validation").mkdir()
    for step, share in ((0, 0.3), (STEPS // 2, 0.5), (STEPS, 0.7)):
        right = rng.random(64) < share + 0.1 * (loss == "fspo") * (step > 0)
        rows = [{"input": f"question {i:02d}", "score": float(answer)} for i, answer in enumerate(right)]
        rng.shuffle(rows)
        (run / f"validation/{step}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        lines[step]["data"]["val-core/ledger/acc/mean@1"] = right.mean()
    (run / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in SEEDS:
        for loss in LOSSES:
            write_run(folder, loss, seed)
    return folder


@pytest.fixture(scope="module")
def trials(runs) -> list[Trial]:
    return read_trials(runs)


# --- numbers of one trial ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [-1.5, -0.3, 0.0, 0.8, 3.0])
def test_length_exponent_finds_the_power(k):
    x = np.log([5.0, 9, 20, 45, 80])
    n = np.array([100, 300, 50, 200, 70])
    clips = Clips([5, 6, 10, 30, 60, 90], x.tolist(), [n.tolist()], [(0.02 * n * np.exp(k * (x - 3))).tolist()], {})
    assert measures.length_exponent(trial(clips=clips)) == pytest.approx(k, abs=1e-9)


@pytest.mark.parametrize("clipped", [[0, 0, 0], [4, 0, 0], [0, 0, 4]])
def test_length_exponent_is_unknown_where_nothing_or_one_end_is_clipped(clipped):
    clips = Clips([1, 2, 3, 4], [0.0, 0.7, 1.1], [[10, 10, 10]], [clipped], {})
    assert math.isnan(measures.length_exponent(trial(clips=clips)))


def test_area_is_the_mean_height_of_the_curve():
    steps, values = [0, 4, 5, 11], [0.1, 0.3, 0.2, 0.9]
    fine = np.linspace(0, 11, 110_001)
    expected = np.interp(fine, steps, values).mean()
    assert measures.accuracy_area(trial(dict(zip(steps, values, strict=True)))) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("target", "expected"), [(0.1, 0), (0.3, 0), (0.45, 2.5), (0.6, 5), (0.7, 15), (0.9, math.nan)]
)
def test_steps_to_an_accuracy(target, expected):
    reached = measures.steps_to(trial({0: 0.3, 5: 0.6, 10: 0.5, 20: 0.9 - 1e-9}), target)
    assert reached == pytest.approx(expected, nan_ok=True)


def test_a_collapse_is_a_fall_below_half_of_the_best():
    assert not measures.collapsed(trial({0: 0.3, 5: 0.8, 10: 0.4, 15: 0.9}))
    assert measures.collapsed(trial({0: 0.3, 5: 0.8, 10: 0.39, 15: 0.9}))


def test_stability():
    spiky = trial({0: 0.3, 5: 0.8, 10: 0.5, 15: 0.9, 20: 0.7}, grad_norm=[1, 1, 1, None, 5.1, 5, 1, 1])
    assert measures.drawdown(spiky) == pytest.approx(0.3)
    assert measures.nonfinite_steps(spiky) == 1
    assert measures.gradient_spikes(spiky) == 1
    poisoned = trial(loss=[0.0] * 7 + [None], nonfinite_responses=[0.1, *[0.0] * 7])
    assert measures.nonfinite_steps(poisoned) == 2 and measures.nonfinite_steps(trial()) == 0


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [6, 7, 9])
def test_interval_holds_the_means_that_sign_flips_do_not_reject(seeds):
    values = np.random.default_rng(seeds).lognormal(size=seeds)
    interval = paired.sign_flip_interval(values)
    signs = np.array(list(itertools.product((-1, 1), repeat=seeds)))

    def p_value(mean: float) -> float:
        flipped = np.abs(signs @ (values - mean))
        return np.mean(flipped >= np.abs((values - mean).sum()) - 1e-9)

    assert interval.value == pytest.approx(values.mean())
    for end, outward in ((interval.lower, -1e-6), (interval.upper, 1e-6)):
        assert p_value(end - outward) > 0.05 >= p_value(end + outward)


def test_drawn_subsets_agree_with_all_subsets(monkeypatch):
    values = np.random.default_rng(0).normal(size=12)
    every = paired.sign_flip_interval(values)
    monkeypatch.setattr(paired, "_SUBSETS", 2**11)
    assert paired.sign_flip_interval(values)[1:] == pytest.approx(every[1:], abs=0.1 * (every.upper - every.lower))


def test_other_questions_widen_an_interval_by_what_they_differ():
    rng = np.random.default_rng(1)
    by_seed, by_question = rng.normal(0.1, 0.05, (6, 1)), rng.normal(0, 0.4, (1, 60))
    by_question -= by_question.mean()
    seeds = paired.sign_flip_interval(by_seed[:, 0])
    same = paired.over_questions(by_seed + np.zeros((6, 60)))
    assert same == pytest.approx(seeds)
    other = paired.over_questions(by_seed + by_question)
    more = stats.t.ppf(0.975, 59) * by_question.std(ddof=1) / math.sqrt(60)
    assert other.upper - other.value == pytest.approx(math.hypot(seeds.upper - seeds.value, more))
    assert other.value - other.lower == pytest.approx(math.hypot(seeds.value - seeds.lower, more))


def test_fewer_than_six_seeds_have_no_interval(trials):
    result = page.compare([t for t in trials if t.seed <= 5])
    assert result.differences[["lower", "upper", "lower_questions", "improvement_lower"]].isna().to_numpy().all()
    assert set(result.differences.verdict) - {paired.SAME} == {"no interval with fewer than 6 seeds"}
    assert "No interval: 5 seed(s), fewer than 6." in page.markdown(result)
    assert page.headline(result) == "Accuracy over the run: no verdict with fewer than 6 seeds."


def test_a_loss_with_fewer_seeds_gets_no_verdict(trials):
    def headline(gspo: set[int], fixed_band: set[int]) -> tuple[str, str]:
        seeds = {"gspo": gspo, "fixed_band": fixed_band}
        result = page.compare([t for t in trials if t.seed in seeds.get(t.loss, SEEDS) and t.loss != "grpo"])
        return page.headline(result), page.markdown(result)

    said, _ = headline({1, 2}, set(SEEDS))
    assert said.endswith("not compared, for want of 6 seeds, to gspo.") and "fixed_band;" in said
    said, text = headline({1, 2}, {3})
    assert said == "Accuracy over the run: no verdict with fewer than 6 seeds."
    assert "No interval: 2 seed(s), fewer than 6." in text
    apart = [t for t in trials if (t.loss, t.seed) in {("fspo", 1), ("fspo", 2), ("gspo", 3)}]
    assert page.headline(page.compare(apart)) == said
    assert "None: no loss has a seed of fspo's." in page.markdown(page.compare(apart))


def test_seeds_without_a_rate_are_told(trials):
    without = dataclasses.replace(next(t for t in trials if (t.loss, t.seed) == ("gspo", 2)), clips=None)
    result = page.compare([without if t.loss == "gspo" and t.seed == 2 else t for t in trials])
    rates = result.clip_rates.query("kind == 'clipped'").drop_duplicates("loss").set_index("loss").seeds
    assert rates["gspo"] == 5 and (rates.drop("gspo") == 6).all()
    assert page.markdown(result).count("mean over the seeds, of gspo 5 of 6.") == 2


def test_verdicts():
    certain, open_ = Estimate(-0.2, -0.3, -0.1), Estimate(-0.2, -0.5, 0.1)
    missing = Estimate(*[math.nan] * 3)
    different, equal = np.array([-0.1, -0.2, -0.3] * 2), np.zeros(6)
    assert paired.verdict(different, [certain, missing], "fspo") == "fspo lower"
    assert paired.verdict(different, [certain, open_], "fspo") == "no difference can be told"
    assert paired.verdict(equal, [Estimate(0, 0, 0), missing], "fspo") == "the same in every seed"


def test_the_headline_says_all_verdicts_on_accuracy(trials):
    result = page.compare(trials)
    rows = result.differences.metric == "accuracy_area"
    order = ["fspo higher", "no difference can be told", "no difference can be told"]
    result.differences.loc[rows, "verdict"] = order
    first, *others = result.differences.loss[rows]
    expected = f"fspo is higher than {first}; not to be told from {', '.join(others)}."
    assert page.headline(result) == f"Accuracy over the run: {expected}"
    assert f"**{page.headline(result)}**" in page.markdown(result)
    alone = page.compare([t for t in trials if t.loss == "fspo"])
    assert page.headline(alone) == "fspo alone: nothing to compare it with."


def test_curves_are_of_the_reward_where_accuracy_is_known_before_and_after_only(trials):
    def curves(given) -> tuple[str, np.ndarray]:
        axes = page.draw(page.compare(given)).axes[0]
        return axes.get_title(), np.array([line.get_ydata() for line in axes.lines if line.get_label() == "fspo"])

    title, (accuracy,) = curves(trials)
    assert title.startswith("validation accuracy") and len(accuracy) == 3
    reward = {"reward": [0.2, 0.4] * (STEPS // 2)}
    sparse = [dataclasses.replace(t, validation={0: 0.3, STEPS: 0.7}, training=t.training | reward) for t in trials]
    title, (reward,) = curves(sparse)
    assert title.startswith("mean training reward so far")
    assert reward == pytest.approx([0.2, 0.3, 0.8 / 3, 0.3, 1.4 / 5, 0.3, 2 / 7, 0.3])


def test_one_loss_alone_is_compared_to_nothing(trials):
    text = page.markdown(page.compare([trial for trial in trials if trial.loss == "fspo"]))
    assert "Paired differences" not in text and "nothing to compare it with" in text


def test_what_was_learned_is_the_best_of_some_steps_in_a_row(trials):
    rewards = [0.9, 0.9, 0.5, 1.0, 0.9, 1.0, 0.9, 0.99]
    assert measures.best(trial(reward=rewards), "reward") == pytest.approx(np.mean(rewards[3:]))
    assert measures.best(trial(reward=[0.2, 0.4]), "reward") == pytest.approx(0.3)
    learned = [dataclasses.replace(t, training=t.training | {"reward": rewards}) if t.seed < 3 else t for t in trials]
    shown = page.markdown(page.compare(learned, {"solvable problems": 64}))
    header, _, first = shown.partition("### In practice")[2].splitlines()[4:7]
    assert header.split(" | ")[4] == "reached 95% in training |" and first.split(" | ")[4] == "2 of 6 |"
    assert "reached 95%" not in page.markdown(page.compare(learned))


def test_pairs_are_matched_by_seed(trials):
    result = page.compare(trials)
    rows = result.differences.set_index(["metric", "loss"])
    values = result.values.pivot(index="seed", columns="loss", values="accuracy")
    row = rows.loc["accuracy", "fixed_band"]
    assert row.difference == pytest.approx((values.fspo - values.fixed_band).mean())
    assert row.seeds == 6 and row.improvement == (values.fspo > values.fixed_band).mean()
    # Answers and accuracies are the same thing, so only the width differs.
    assert row.lower_questions <= row.lower <= row.difference <= row.upper <= row.upper_questions


def test_what_a_user_gets_is_told_in_one_table(trials):
    tried = {"fspo": [0.5, 0.6, 0.595, 0.1], "gspo": [0.3, 0.3, 0.3, 0.3]}
    tuning = {
        "what": "4 multiples of its packaged clip range, chosen by mean training reward",
        **{"seeds": [100], "steps": 8, "factors": [1 / 3, 1, 3, 10]},
        "scores": {loss: [{"reward": r, "clip_rate": 0.1} for r in rewards] for loss, rewards in tried.items()},
        "chosen": {"fspo": 1, "gspo": 1 / 3},
    }
    setup = {"seconds": dict.fromkeys(LOSSES, 160.4), "tuning": tuning}
    text = page.markdown(page.compare(trials, setup))
    assert "so that a range beyond may be better: gspo." in text
    table = text.partition("### In practice")[2].partition("###")[0]
    cells = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ") for row in table.splitlines() if "|" in row}
    assert cells["fspo"][3:] == ["0 of 6", "160", "2 of 4"]
    assert cells["gspo"][3:] == ["0 of 6", "160", "4 of 4"] and cells["grpo"][3:] == ["0 of 6", "160", "–"]


def test_bands_on_the_same_responses(trials):
    values = measures.measure(trials, 0.6)
    # The order of their exponents is that of length_power.
    assert (values.k_gspo < values.k_fspo).all() and (values.k_fspo < values.k_fixed_band).all()
    # Same responses, same bands, whatever trained.
    same = values.pivot(index="seed", columns="loss", values="k_gspo")
    assert (same.nunique(axis=1) == 1).all()


# --- records of trials ------------------------------------------------------------------------------------------------


def test_a_comparison_is_regenerated_from_its_json(runs, tmp_path):
    def run(*arguments) -> int:
        return cli.main(["compare", *map(str, arguments)])

    assert run(runs, "--output", tmp_path / "first") == 0
    assert run(tmp_path / "first/comparison.json", "--output", tmp_path / "second") == 0
    for name in ("comparison.json", "comparison.png", "comparison.md"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    json.loads((tmp_path / "first/comparison.json").read_text(), parse_constant=pytest.fail)  # no NaN in it
    (tmp_path / "first/comparison.json").rename(tmp_path / "many_steps.json")
    assert run(tmp_path / "many_steps.json") == 0
    assert (tmp_path / "many_steps.png").read_bytes() == (tmp_path / "first/comparison.png").read_bytes()
    assert "(many_steps.png)" in (tmp_path / "many_steps.md").read_text()


def test_runs_are_added_to_what_is_kept_of_earlier_ones(runs, trials, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, seeds in ((first, SEEDS[:2]), (second, SEEDS[1:])):  # seed 2 is in both
        for loss, seed in itertools.product(LOSSES, seeds):
            shutil.copytree(runs / f"{loss}-seed{seed}", folder / f"{loss}-seed{seed}")
    (first / "setup.json").write_text(json.dumps({"command": "train"}))
    assert cli.main(["compare", str(first)]) == 0
    kept = tmp_path / "kept.json"
    shutil.copy(first / "comparison.json", kept)
    page_with_both = kept.with_suffix(".md")
    for _ in range(2):  # what is there already changes nothing
        assert cli.main(["compare", str(kept), str(second)]) == 0
        pooled = [Trial.from_json(trial) for trial in json.loads(kept.read_text())["trials"]]
        assert {(t.loss, t.seed) for t in pooled} == {(t.loss, t.seed) for t in trials} and len(pooled) == len(trials)
        by_key = {(trial.loss, trial.seed): trial for trial in trials}
        for trial in pooled:  # in other bins
            alone = by_key[trial.loss, trial.seed]
            assert np.sum(trial.clips.responses) == np.sum(alone.clips.responses)
            assert np.sum(trial.clips.clipped) == pytest.approx(np.sum(alone.clips.clipped))
            assert dataclasses.replace(trial, clips=None) == dataclasses.replace(alone, clips=None)
        assert len({tuple(trial.clips.edges) for trial in pooled}) == 1
        text = page_with_both.read_text()
        assert f"{len(SEEDS)} seeds each" in text
        added = ", ".join(f"{loss} {seed}" for loss in sorted(LOSSES) for seed in SEEDS[2:])
        assert f"- command: `train`\n- added to these, and made otherwise (loss and seed): {added}\n" in text
    part = tmp_path / "part"
    shutil.copytree(second / "fspo-seed3", part / "fspo-seed3")
    assert cli.main(["compare", str(first), str(part), "--output", str(tmp_path)]) == 0
    others = ", ".join(f"{loss} 2 of 3" for loss in sorted(LOSSES) if loss != "fspo")
    assert f"3 seeds (1, 2, 3), but {others}, " in (tmp_path / "comparison.md").read_text()


def test_pooled_bins_hold_lengths_that_the_first_runs_did_not_have(tmp_path):
    for folder, factor in (("long", 3), ("short", 1)):
        write_run(tmp_path / folder, "fspo", factor, length_factor=factor)
    for paths in itertools.permutations((tmp_path / "long", tmp_path / "short")):
        pooled, _ = page.load_all(paths)
        alone = [read_trials(path)[0] for path in (tmp_path / "short", tmp_path / "long")]
        for trial, of in zip(pooled, alone, strict=True):
            assert trial.clips.edges == pooled[0].clips.edges
            assert np.sum(trial.clips.responses, axis=1).tolist() == np.sum(of.clips.responses, axis=1).tolist()
        assert (pooled[0].clips.edges[0], pooled[0].clips.edges[-1]) == (
            alone[0].clips.edges[0],
            alone[1].clips.edges[-1],
        )


def test_seeds_that_clipped_otherwise_are_told(trials):
    settings = trials[0].settings
    wider = dataclasses.replace(settings, band=dataclasses.replace(settings.band, eps_low=0.5))
    text = page.markdown(page.compare([dataclasses.replace(trials[0], settings=wider), *trials[1:]]))
    seeds = ", ".join(map(str, SEEDS[1:]))
    assert f"differ in what they clipped: {trials[0].loss} (2)**" in text
    assert f"| {wider.clip} | {trials[0].seed} |" in text and f"| {settings.clip} | {seeds} |" in text
    assert "differ in what they clipped" not in page.markdown(page.compare(trials))


def test_what_contradicts_is_not_pooled(trials):
    longer = dataclasses.replace(trials[0], validation={0: 1.0})
    with pytest.raises(ValueError, match=f"two different runs of {longer.loss}, seed {longer.seed}"):
        pool(trials, [longer])
    edges = [trials[0].clips.edges[0], trials[0].clips.edges[-1]]
    binned = dataclasses.replace(trials[0], clips=dataclasses.replace(trials[0].clips, edges=edges))
    with pytest.raises(ValueError, match="length bins differ"):
        pool(trials[1:], [binned])


def test_text_around_the_marks_stays(tmp_path):
    file = tmp_path / "comparison.md"
    file.write_text(page.inserted("first", file))
    file.write_text(f"before\n{file.read_text()}after\n")
    file.write_text(page.inserted("second", file))
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "second" in text and "first" not in text


def test_the_first_steps_of_a_trial(trials):
    whole = trials[0]
    part = whole.first(STEPS // 2)
    assert part.steps == STEPS // 2 and list(part.validation) == [0, STEPS // 2]
    assert part.clips.clipped == whole.clips.clipped[: STEPS // 2]
    assert whole.first(STEPS) == whole
    with pytest.raises(ValueError, match="fewer than 9"):
        whole.first(9)


def test_the_first_steps_do_not_replace_what_is_kept(runs, tmp_path, capsys):
    assert cli.main(["compare", str(runs), "-o", str(tmp_path)]) == 0
    kept = tmp_path / "comparison.json"
    whole = kept.read_bytes()
    for steps in ("4", "0"):
        assert cli.main(["compare", str(kept), "--steps", steps]) != 0
    assert kept.read_bytes() == whole and "name an --output" in capsys.readouterr().err
    assert cli.main(["compare", str(kept), "--steps", "4", "--output", str(tmp_path / "first")]) == 0
    assert kept.read_bytes() == whole


def test_gspos_range_is_its_band_under_any_name(tmp_path, monkeypatch):
    monkeypatch.setitem(synthetic_run.RANGES, "gspo", {"clip_ratio_low": 0.04, "clip_ratio_high": 0.03})
    write_run(tmp_path, "gspo", 1)
    (tmp_path / "gspo-seed1").rename(tmp_path / "gspo_rate-seed1")
    (trial,) = read_trials(tmp_path)
    share = np.sum(trial.clips.matched["gspo_rate"]) / np.sum(trial.clips.responses)
    assert share == pytest.approx(0.1, abs=0.01)
    assert trial.clips.matched["gspo_rate"] != trial.clips.matched["gspo"]  # whose sides are 3 to 4


@pytest.mark.parametrize(
    ("settings", "clip"),
    [
        (RunSettings("vanilla", None, 0.2, 0.3, 3.0), "ratio from 1 − 0.2 to 1 + 0.3, dual clip 3"),
        (RunSettings("gspo", None, 3e-4, 4e-4, 3.0), "ratio from 1 − 0.0003 to 1 + 0.0004"),
        (RunSettings("fspo", Band(), 0.2, 0.2, 3.0), Band().describe()),
        (RunSettings("fspo", None, 0.2, 0.2, 3.0), None),  # a band of a later version
        (RunSettings("gpg", None, 0.2, 0.2, 3.0), None),
    ],
)
def test_a_clip_is_told_where_it_is_known(settings, clip):
    assert settings.clip == clip


def test_runs_that_do_not_start_alike_are_told(trials):
    other = dataclasses.replace(trials[0], validation=trials[0].validation | {0: 0.9})
    text = page.markdown(page.compare([other, *trials[1:]]))
    assert f"**Runs of one seed do not start alike: with seed {other.seed} " in text and "to 0.900.**" in text


def test_runs_that_cannot_be_compared(trials, tmp_path):
    with pytest.raises(ValueError, match="different numbers of steps"):
        page.compare([trials[0], trials[1].first(4)], baseline=trials[0].loss)
    with pytest.raises(ValueError, match="no run of the baseline 'dapo'"):
        page.compare(trials, baseline="dapo")
    later = {**trials[0].validation, STEPS + 1: 0.7}
    with pytest.raises(ValueError, match="validated at different steps"):
        page.compare([dataclasses.replace(trials[0], validation=later), *trials[1:]])
    with pytest.raises(ValueError, match=f"seed {trials[0].seed} were validated on different questions"):
        page.compare([dataclasses.replace(trials[0], questions="others"), *trials[1:]])
    with pytest.raises(ValueError, match="holds no runs: folders called LOSS-seedN"):
        read_trials(tmp_path)


# --- thresholds -------------------------------------------------------------------------------------------------------


@pytest.fixture
def limits(trials, tmp_path) -> Path:
    file = tmp_path / "thresholds.json"
    file.write_text(json.dumps({"setup": {"seeds": [1]}}))
    thresholds.update(file, measures.measure(trials, 0.6))
    return file


def test_what_has_not_changed_is_kept(limits, tmp_path):
    for loss in LOSSES:
        write_run(tmp_path, loss, seed=77)
    report, kept = thresholds.check(limits, measures.measure(read_trials(tmp_path), 0.6))
    assert kept, report


def sqrt_dropped(folder):
    write_run(folder, "fspo", 77, BandClip("fspo", "", Band(length_power=0.0)))


def eps_of_clip_ratio(folder):
    write_run(folder, "fspo", 77, BandClip("fspo", "", Band(0.2)))


def advantages_flipped(folder):
    write_run(folder, "fspo", 77, **{"val-core/ledger/acc/mean@1": [0.3, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]})
    log = folder / "fspo-seed77/metrics-1.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[-1]["data"]["val-core/ledger/acc/mean@1"] = 0.1
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def gradient_not_finite(folder):
    write_run(folder, "gspo", 77, **{"actor/grad_norm": [0.1] * 7 + [math.nan]})


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        (sqrt_dropped, "fspo clip rate"),
        (sqrt_dropped, "k, the fixed band - fspo's band"),
        (eps_of_clip_ratio, "fspo clip rate"),
        (advantages_flipped, "fspo accuracy gain"),
        (gradient_not_finite, "gspo non-finite steps"),
    ],
)
def test_planted_regressions_are_noticed(limits, tmp_path, fault, noticed):
    fault(tmp_path)
    for loss in LOSSES:
        if not (tmp_path / f"{loss}-seed77").exists():
            write_run(tmp_path, loss, 77)
    report, kept = thresholds.check(limits, measures.measure(read_trials(tmp_path), 0.6))
    assert not kept and f"FAIL {noticed}" in report, report


def test_unknown_values_are_not_kept(limits, trials):
    values = measures.measure(trials, 0.6)
    values.loc[values.loss == "fspo", "clip_rate"] = math.nan
    report, kept = thresholds.check(limits, values)
    assert not kept and "FAIL fspo clip rate: nan" in report


def test_update_shows_the_change(limits, trials):
    values = measures.measure(trials, 0.6)
    assert "was" not in thresholds.update(limits, values)
    values.loc[values.loss == "fspo", "clip_rate"] *= 2
    changed = [line for line in thresholds.update(limits, values).splitlines() if ", was " in line]
    assert len(changed) == 1 and changed[0].startswith("fspo clip rate: ")
    with pytest.raises(ValueError, match="thresholds come from 3 seeds or more"):
        thresholds.update(limits, values[values.seed < 3])


def test_every_entry_of_a_threshold_file_counts(limits, trials):
    data = json.loads(limits.read_text())
    del data["expected"]["fspo clip rate"]
    limits.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="fspo clip rate"):
        thresholds.check(limits, measures.measure(trials, 0.6))


def test_prediction_interval_holds_the_next_mean():
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(2000):
        low, high = thresholds.prediction(rng.normal(1, 0.1, 5), 2)
        inside.append(low <= rng.normal(1, 0.1, 2).mean() <= high)
    assert np.mean(inside) == pytest.approx(thresholds.CONFIDENCE, abs=0.01)


def test_committed_thresholds_fit_the_rules():
    data = json.loads((ROOT / "tests/comparison_thresholds.json").read_text())
    assert data["expected"].keys() == thresholds.RULES.keys() and len(data["measured"]["seeds"]) >= 3
    for name, rule in thresholds.RULES.items():
        limits = rule.interval(np.array(data["measured"][name]), len(data["setup"]["seeds"]))
        assert [data["expected"][name][end] for end in ("low", "high")] == [thresholds._round(end) for end in limits]
        assert (data["expected"][name]["why"], data["expected"][name]["direction"]) == (rule.why, rule.direction)


# --- the script -------------------------------------------------------------------------------------------------------


def script(output: Path, *options) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts/compare/comparison.py", "--output", output]
    command += ["--losses", ",".join(LOSSES), "--factors", ",".join(f"{loss}=1" for loss in LOSSES)]
    command += ["--seeds", "1,2", "--steps", STEPS, *options]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


@pytest.fixture
def finished(runs, tmp_path) -> Path:
    """An output folder in which all cells have finished."""
    sys.path.insert(0, str(ROOT / "scripts/compare"))
    import comparison

    args = comparison.parse_args(["--output", str(tmp_path), "--steps", str(STEPS)])
    for seed in (1, 2):
        (tmp_path / f"warm-start-seed{seed}/model").mkdir(parents=True)
        for loss in LOSSES:
            cell = comparison._cell(args, comparison.arms.Arm(loss, loss), seed, 1.0)
            cell.folder.parent.mkdir(exist_ok=True)
            settings = {"settings": cell.settings(), "seconds": 1.0}
            (runs / f"{loss}-seed{seed}/cell.json").write_text(json.dumps(settings))
            cell.folder.symlink_to(runs / f"{loss}-seed{seed}")
    return tmp_path


@pytest.mark.long
def test_finished_cells_are_not_run_again(finished):
    again = script(finished)
    assert again.returncode == 0 and "8 cells finished before" in again.stdout, again.stderr
    assert "no interval with fewer than 6 seeds" in (finished / "comparison.md").read_text()
    fewer = script(finished, "--seeds", "1")
    assert fewer.returncode != 0 and "holds other runs, fixed_band-seed2, fspo-seed2" in fewer.stderr
    other = script(finished, "--prompts", "16", "--mini-batch", "4")
    assert other.returncode != 0 and "choose another --output" in other.stderr


@pytest.mark.parametrize("failures", [1, 2])
def test_a_cell_that_fails_is_run_once_more(finished, tmp_path, monkeypatch, capsys, failures):
    import comparison
    import launch

    args = comparison.parse_args(["--output", str(finished), "--steps", str(STEPS)])
    cell = comparison._cell(args, comparison.arms.Arm("fspo", "fspo"), 1, 1.0)
    cell.folder.rename(finished / "aside")
    (tmp_path / "cells.py").write_text(f"""
import json, pathlib, sys
attempts = pathlib.Path({str(tmp_path / "attempts")!r})
attempts.mkdir(exist_ok=True)
(attempts / str(len(list(attempts.iterdir())))).touch()
if len(list(attempts.iterdir())) <= {failures}:
    sys.exit("Ray did not start")
pathlib.Path({str(finished / "aside")!r}).rename({str(cell.folder)!r})
""")
    monkeypatch.setattr(comparison, "HERE", tmp_path)
    progress = comparison.Progress(args, [cell])
    with pytest.raises(launch.Failure, match="Ray did not start") if failures == 2 else contextlib.nullcontext():
        progress.run("train", [cell])
    said = capsys.readouterr().out
    assert "fspo x 1, seed 1 failed, is run once more" in said
    assert ("[1/1] fspo x 1, seed 1: accuracy" in said) == (failures == 1)
    assert "Ray did not start" in next((finished / "logs").glob("*.failed.log")).read_text()


def test_an_arm_has_settings_of_its_own_and_its_bounds_are_scaled():
    sys.path.insert(0, str(ROOT / "scripts/compare"))
    import arms
    import cells

    changes = "policy_loss.eps_low=0.1,policy_loss.eps_dual=null,policy_loss.length_power=1"
    wide = arms.arm(f"wide=fspo,{changes}")
    assert (wide.name, wide.trains, wide.tuned) == ("wide", "fspo", True)
    key = "actor_rollout_ref.actor.policy_loss."
    expected = {f"{key}eps=0.09", f"{key}eps_low=0.3", f"{key}eps_dual=null", f"{key}length_power=1"}
    assert set(cells.overrides_of(wide, 3.0)) == expected
    for wrong in ("fspo=fspo", "warm=fspo", "wide=dapo", "Wide=fspo", "wide=fspo,policy_loss.eps_low"):
        with pytest.raises(argparse.ArgumentTypeError):
            arms.arm(wrong)


def test_a_finished_cell_of_before_an_option_existed_counts(finished):
    import comparison

    args = comparison.parse_args(["--output", str(finished), "--steps", str(STEPS)])
    cell = comparison._cell(args, comparison.arms.Arm("fspo", "fspo"), 1, 1.0)
    settings = cell.settings()
    del settings["sizes"]["solvable"]
    (cell.folder / "cell.json").write_text(json.dumps({"settings": settings, "seconds": 1.0}))
    assert comparison.Progress(args, [])._finished("train", cell)
    other = dataclasses.replace(cell, sizes=dataclasses.replace(cell.sizes, solvable=(64, 1.0)))
    with pytest.raises(comparison.Failure, match="choose another --output"):
        comparison.Progress(args, [])._finished("train", other)


@pytest.mark.parametrize("candidates", [3, 1])
def test_solvable_problems_are_those_that_the_start_solves_sometimes(tmp_path, monkeypatch, candidates):
    sys.path.insert(0, str(ROOT / "scripts/compare"))
    import cells
    import ledger
    import warm_start
    from transformers import AutoModelForCausalLM

    from fspo_verl.cpu import decode

    problems = ledger.data_set(64, seed=1)
    prompts = [ledger.encode_prompt(prompt[0]["content"]) for prompt in problems.prompt]
    answers = {tuple(p): r["ground_truth"] for p, r in zip(prompts, problems.reward_model, strict=True)}
    shares = {tuple(prompt): i % 5 / 4 for i, prompt in enumerate(prompts)}  # 0, 1/4, 1/2, 3/4, 1
    tries = itertools.cycle(range(cells.TRIES))

    def sample(policy, asked, sampling, eos, size):
        assert {s.temperature for s in sampling} == {0.7}
        done = next(tries) / cells.TRIES
        texts = [f"={answers[tuple(p)]}" if shares[tuple(p)] > done else "a" for p in asked]
        return [decode.Response(ledger.encode_response(text), []) for text in texts]

    monkeypatch.setattr(warm_start, "sample", sample)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda model: argparse.Namespace(eval=lambda: None))
    monkeypatch.setattr(cells, "CANDIDATES", candidates)
    found = cells.solvable_problems(problems, tmp_path, 20, 0.7)
    asked = [i for i in range(60) if i % 5 in (1, 2, 3)][:20]
    assert [info["index"] for info in found.extra_info] == asked
    with pytest.raises(cells.launch.Failure, match="of 15 of 24 problems, fewer than 21"):
        cells.solvable_problems(problems[:24], tmp_path, 21, 0.7)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("comparison", ["--factors", "fspo=1,gsop=1"]),
        ("comparison", ["--losses", "fspo", "--factors", "fspo=1,gspo=1"]),
        ("comparison", ["--losses", "fspo,gspo", "--factors", "fspo=1"]),
        ("comparison", ["--arm", "wide=fspo", "--arm", "wide=gspo"]),
        ("comparison", ["--solvable", "8"]),
        ("comparison", ["--", "actor_rollout_ref.actor.ppo_epochs=4"]),
        ("comparison", ["--", "data.train_batch_size=64"]),
        ("comparison", ["--", "actor_rollout_ref.actor.clip_ratio_low=0.1"]),
        ("comparison", ["--", "actor_rollout_ref.actor.policy_loss={eps_low:0.1}"]),
        ("comparison", ["--", "data.seed=5"]),
        ("comparison", ["--", "~data.seed"]),
        ("comparison", ["--", "algorithm.policy_loss=gspo"]),
        ("comparison", ["--", "trainer.total_training_steps=3"]),
        ("comparison", ["--seeds", "10,10"]),
        ("comparison", ["--seeds", "100,101,102"]),
        ("comparison", ["--check", str(ROOT / "tests/comparison_thresholds.json"), "--seeds", "77"]),
        ("comparison", ["--arm", "fast=fspo,optim.lr=1e-3"]),
        ("comparison", ["--arm", "fast=fspo,optim={lr:1e-3}"]),
        ("comparison", ["--arm", "calibrated=fspo,policy_loss.eps_low=0.1"]),
        ("comparison", ["--arm", "gspo=fspo,policy_loss.eps_low=0.1"]),
        ("regimes", ["--", "actor_rollout_ref.actor.ppo_epochs=4"]),
        ("regimes", ["--learning-rate", "1e-3"]),
        ("regimes", ["--target=0.7"]),
        ("regimes", ["--tuning-steps", "4"]),
        ("regimes", ["--losses", "fspo", "--factors", "fspo=3"]),
    ],
)
def test_what_would_be_passed_over_is_refused(script, options):
    command = [sys.executable, ROOT / f"scripts/compare/{script}.py", "--parse-only", *options]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and "error: " in refused.stderr


def test_the_calibrated_arm_has_the_band_that_calibrate_recommends(runs, tmp_path):
    sys.path.insert(0, str(ROOT / "scripts/compare"))
    import arms

    run, found = runs / "fspo-seed1", tmp_path / "found.json"
    assert cli.main(["calibrate", str(run), "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    chosen = result["fits"][result["recommended"]]["overrides"]
    values = dict(change.split("=") for change in arms.calibrated(run).changes)
    assert values == {key: "null" if value is None else str(value) for key, value in chosen.items()}


def test_help_needs_no_installed_package():
    command = [sys.executable, "-I", "-S", ROOT / "scripts/compare/comparison.py", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0 and "--losses" in shown.stdout


# --- the map of regimes -----------------------------------------------------------------------------------------------


def test_regimes_are_trained_apart_and_drawn_from_what_they_left(runs, tmp_path):
    sys.path.insert(0, str(ROOT / "scripts/compare"))
    import regimes

    grid = ["--epochs", "1,16", "--learning-rates", "1e-3", "--seeds", "1,2", "--losses", "fspo,gspo"]
    args = regimes.parse_args([*grid, "--output", str(tmp_path), "--", "a.b=1"])
    assert args.regimes == [(1, 1e-3), (16, 1e-3)]
    found = []
    for regime in args.regimes:
        cells = regimes.cells_of(args, regime)
        assert {cell.folder.parent.name for cell in cells} == {regime.name} and len(cells) == 4
        asked = (f"actor_rollout_ref.actor.ppo_epochs={regime.epochs}", "actor_rollout_ref.actor.optim.lr=0.001")
        assert all(set(cell.sizes.overrides) >= {*asked, "a.b=1"} for cell in cells)
        for cell in cells:
            cell.folder.parent.mkdir(exist_ok=True)
            cell.folder.symlink_to(runs / cell.folder.name)
        found += regimes.results(tmp_path / regime.name, regime, mini_batches=4)
    page = tmp_path / "regimes.md"
    regimes.write({"setup": {"machine": "made up"}, "cells": found}, tmp_path / "regimes.json")
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| 4 |", "| 64 |"))]
    assert [row.split(" | ")[2] for row in rows] == ["fspo", "gspo"] * 2
    again = tmp_path / "regimes.json"
    before = page.read_bytes(), (tmp_path / "regimes.png").read_bytes()
    regimes.write(json.loads(again.read_text()), again)
    assert (page.read_bytes(), (tmp_path / "regimes.png").read_bytes()) == before


def test_the_published_pages_are_those_of_their_records(tmp_path):
    sys.path.insert(0, str(ROOT / "scripts/compare"))
    import regimes

    comparisons = [file.stem for file in (ROOT / "docs").glob("comparison*.json")]
    for name in ("regimes", *comparisons):
        for kind in ("json", "md"):
            shutil.copy(ROOT / f"docs/{name}.{kind}", tmp_path)
    regimes.write(json.loads((tmp_path / "regimes.json").read_text()), tmp_path / "regimes.json")
    assert comparisons and not any(cli.main(["compare", str(tmp_path / f"{name}.json")]) for name in comparisons)
    for name in ("regimes", *comparisons):
        assert (tmp_path / f"{name}.md").read_text() == (ROOT / f"docs/{name}.md").read_text()


def test_help_of_the_regimes_needs_no_installed_package():
    command = [sys.executable, "-I", "-S", ROOT / "scripts/compare/regimes.py", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0 and "--learning-rates" in shown.stdout
