# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of losses: statistics, records of trials, and the script."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import baselines
import measures
import numpy as np
import pytest
import synthetic_run
import training_run
from compare import compare, main
from trials import Clips, Trial, read_trials

from fspo_verl.clips import CLIPS, LOSSES

SEEDS = (1, 2, 3, 4, 5, 6)
STEPS = 8
# What synthetic_run records as the settings of each loss.
synthetic_run.RANGES |= {"grpo": {"band": None}, "fixed_band": {"band": CLIPS["fixed_band"].band.to_json()}}


def trial(validation=None, clips=None, **training) -> Trial:
    validation = {0: 0.3, 5: 0.6} if validation is None else validation
    return Trial("fspo", 1, None, {"reward": [0.5] * 8} | training, validation, clips)


def write_run(folder: Path, loss: str, seed: int) -> None:
    """A run of one loss, clipped by its own range, validated on 64 questions."""
    # The prompts of a seed are the same for all losses, and what is clipped depends on the loss.
    records = synthetic_run.records(np.random.default_rng(seed), "fspo", STEPS, prompts=64)
    records["clipped"] = CLIPS[loss].clipped(records).astype(np.float32)
    run = folder / f"{loss}-seed{seed}"
    synthetic_run.write_records(run / "records", records, loss)
    rng = np.random.default_rng([seed, LOSSES.index(loss)])
    lines = [{"step": 0, "data": {}}]
    for step in range(1, STEPS + 1):
        data = {"critic/score/mean": 0.5, "actor/grad_norm": 0.1, "actor/pg_loss": -0.01}
        lines.append({"step": step, "data": data | {"fspo/not_finite": 0.0}})
    for step, share in ((0, 0.3), (STEPS // 2, 0.5), (STEPS, 0.7)):
        right = rng.binomial(64, share + 0.1 * (loss == "fspo")) if step else 19  # runs of a seed start alike
        lines[step]["data"]["val-core/ledger/acc/mean@1"] = right / 64
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


@pytest.mark.parametrize("k", [-1.5, 0.0, 3.0])
def test_length_exponent_finds_the_power(k):
    x = np.log([5.0, 9, 20, 45, 80])
    n = np.array([100, 300, 50, 200, 70])
    clips = Clips([5, 6, 10, 30, 60, 90], x.tolist(), [n.tolist()], [(0.02 * n * np.exp(k * (x - 3))).tolist()], {})
    assert measures.length_exponent(trial(clips=clips)) == pytest.approx(k, abs=1e-9)


@pytest.mark.parametrize("name", ["loss", "nonfinite_responses"])
def test_steps_of_which_something_is_not_logged_are_not_taken_for_finite(trials, name):
    one = trials[0]
    assert measures.nonfinite_steps(one) == 0
    without = {key: of for key, of in one.training.items() if key != name}
    assert math.isnan(measures.nonfinite_steps(dataclasses.replace(one, training=without)))


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [6, 9])
def test_interval_holds_the_means_that_sign_flips_do_not_reject(seeds):
    values = np.random.default_rng(seeds).lognormal(size=seeds)
    interval = measures.sign_flip_interval(values)
    signs = np.array(list(itertools.product((-1, 1), repeat=seeds)))

    def p_value(mean: float) -> float:
        flipped = np.abs(signs @ (values - mean))
        return np.mean(flipped >= np.abs((values - mean).sum()) - 1e-9)

    for end, outward in zip(interval, (-1e-6, 1e-6), strict=True):
        assert p_value(end - outward) > 0.05 >= p_value(end + outward)


def test_an_adjusted_p_is_that_of_all_joint_flips():
    differences = np.random.default_rng(3).normal(0.3, 1, (6, 3))
    signs = np.array(list(itertools.product((-1, 1), repeat=6)))
    alone = np.abs(signs @ differences) / np.sqrt((differences**2).sum(0))
    observed = np.abs(differences.sum(0)) / np.sqrt((differences**2).sum(0))
    first, second, third = np.argsort(-observed)
    expected = np.zeros(3)
    expected[first] = np.mean(alone.max(1) >= observed[first] - 1e-9)
    expected[second] = np.mean(alone[:, [second, third]].max(1) >= observed[second] - 1e-9)
    expected[third] = np.mean(alone[:, third] >= observed[third] - 1e-9)
    expected[[second, third]] = np.maximum.accumulate([*expected[[first, second, third]]])[1:]
    np.testing.assert_allclose(measures.adjusted_p(np.c_[differences, np.zeros(6)]), [*expected, 1])


def compared(**accuracy: Sequence[float]):
    """A comparison of trials that end at these accuracies, one per seed."""
    pairs = [(loss, seed, end) for loss, ends in accuracy.items() for seed, end in enumerate(ends)]
    return compare([dataclasses.replace(trial({0: 0.3, 8: end}), loss=loss, seed=seed) for loss, seed, end in pairs])


def test_a_verdict_names_the_loss_that_ends_higher_and_what_to_do():
    base = np.array([0.50, 0.52, 0.54, 0.56, 0.58, 0.60, 0.62, 0.64])
    noise = np.array([0.1, -0.1, 0.09, -0.09, 0.08, -0.08, 0.07, -0.07])
    result = compared(fspo=base, above=base + 0.2, below=base - 0.2, near=base + noise, twin=base)
    verdicts = result.differences.query("metric == 'accuracy'").set_index("loss").verdict
    expected = {"above": "fspo lower", "below": "fspo higher", "near": measures.NOT_SHOWN, "twin": measures.SAME}
    assert verdicts.to_dict() == expected
    for said in ("fspo ends with 57% ", "ends higher than below (37%)", "ends lower than above (77%)", "3 losses"):
        assert said in result.headline
    assert result.advice.startswith("Take above.") and "points" in result.advice
    assert compared(fspo=base, below=base - 0.2).advice == "Keep fspo."


def test_the_page_leads_with_what_was_compared_what_differs_and_what_is_not_shown():
    base = np.array([0.50, 0.52, 0.54, 0.56, 0.58, 0.60])
    result = compared(fspo=base, gspo=base - 0.2, grpo=base + [0.1, -0.1, 0.09, -0.09, 0.08, -0.08])
    page = dataclasses.replace(result, on="a model").to_markdown("picture.png").split("\n\n")
    assert page[1] == "Compared: fspo with gspo, grpo, on a model: 6 seeds, 8 training steps."
    assert page[2].startswith("Differs by more than noise: accuracy at the end (fspo higher than gspo); accuracy, mean")
    assert page[3].startswith("No difference shown: accuracy at the end (grpo); ")
    assert [part for part in page if part.startswith("![")] == [page[4]]


def test_fewer_than_six_seeds_give_no_verdict():
    result = compared(fspo=[0.9] * 6, gspo=[0.1, 0.2, 0.1, 0.2, 0.1], grpo=[0.1, 0.2, 0.1, 0.2, 0.1, 0.2])
    rows = result.differences.query("metric == 'accuracy'").set_index("loss")
    assert rows.loc["gspo", ["lower", "upper", "p"]].isna().all() and rows.verdict["gspo"] == measures.TOO_FEW
    assert rows.verdict["grpo"] == "fspo higher"
    assert "verdict on gspo (" in result.headline
    assert "Keep" not in result.advice and "seeds of each loss" in result.advice
    apart = compare([dataclasses.replace(trial(), loss=loss, seed=seed) for loss, seed in (("fspo", 1), ("gspo", 2))])
    assert apart.differences.empty and "verdict on gspo" in apart.headline
    alone = compared(fspo=[0.9])
    assert "Train another loss" in alone.advice and alone.to_markdown("p.png").startswith(f"**{alone.headline}**")


def test_a_seed_without_records_has_no_rate(trials):
    without = [dataclasses.replace(t, clips=None) if (t.loss, t.seed) == ("gspo", 2) else t for t in trials]
    result = compare(without)
    rates = result.clip_rates.query("kind == 'clipped'").drop_duplicates("loss").set_index("loss").seeds
    assert rates["gspo"] == 5 and (rates.drop("gspo") == 6).all()
    assert set(result.reached.query("loss == 'gspo' and measure == 'clip rate'").seeds) == {"5"}


def test_pairs_are_matched_by_seed(trials):
    result = compare(trials[::-1])
    values = result.values.pivot(index="seed", columns="loss", values="accuracy")
    row = result.differences.set_index(["metric", "loss"]).loc["accuracy", "fixed_band"]
    assert row.difference == pytest.approx((values.fspo - values.fixed_band).mean())
    assert row.seeds == 6 and row.improvement == (values.fspo > values.fixed_band).mean()
    assert {t.clipped_more for t in trials} >= {"longer", "not shown"}


# --- records of trials ------------------------------------------------------------------------------------------------


def test_a_comparison_is_regenerated_from_its_json(runs, trials, tmp_path, capsys):
    written = tmp_path / "written"
    assert main([str(runs), "--output", str(written), "--on", "a model"]) == 0
    capsys.readouterr()
    kept, file = Path(shutil.copy(written / "comparison.json", tmp_path / "kept.json")), tmp_path / "kept.md"
    assert main([str(kept)]) == 0
    assert kept.read_bytes() == (written / "comparison.json").read_bytes()
    assert (tmp_path / "kept.png").read_bytes() == (written / "comparison.png").read_bytes()
    assert file.read_text() == (written / "comparison.md").read_text().replace("comparison.png", "kept.png")
    json.loads(kept.read_text(), parse_constant=pytest.fail)  # no NaN in it
    shown, result = capsys.readouterr().out, compare(trials)
    assert shown.startswith(result.headline) and shown.endswith(f"{result.advice}\n")
    assert not set("|*#") & set(shown)  # no Markdown on a terminal


def test_runs_that_are_not_alike_are_told(trials):
    assert compare(trials).warnings == []
    start = dataclasses.replace(trials[0], validation=trials[0].validation | {0: 0.9})
    (warning,) = compare([start, *trials[1:]]).warnings
    assert f"with seed {start.seed} " in warning and "to 0.900." in warning
    settings = trials[0].settings
    wider = dataclasses.replace(settings, band=dataclasses.replace(settings.band, eps_low=0.5))
    result = compare([dataclasses.replace(trials[0], settings=wider), *trials[1:]])
    assert f"differ in what they clipped: {trials[0].loss};" in result.warnings[0]
    seeds = dict(result.trained[["clip", "seeds"]].itertuples(index=False))
    assert seeds[wider.clip] == str(trials[0].seed) and seeds[settings.clip] == ", ".join(map(str, SEEDS[1:]))


def test_runs_that_cannot_be_compared(trials, tmp_path):
    one, *others = trials
    name = f"{one.loss} seed {one.seed}"
    half = dataclasses.replace(one, training={name: values[:4] for name, values in one.training.items()})
    later = dataclasses.replace(one, validation={**one.validation, STEPS + 1: 0.7})
    for changed, words in (
        (half, f"different numbers of steps: most have 8, {name} has 4"),
        (later, f"validated at different steps: most have .*, {name} has "),
    ):
        with pytest.raises(ValueError, match=words):
            compare([changed, *others])
    with pytest.raises(ValueError, match="no run of the baseline 'dapo'"):
        compare(trials, baseline="dapo")
    with pytest.raises(ValueError, match="holds no runs: folders called LOSS-seedN"):
        read_trials(tmp_path)


def test_a_file_that_is_no_comparison_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"compare: {tmp_path / 'nothing'}: no such folder or file\n"
    file = tmp_path / "other.json"
    for text in ("{", "[]", '{"trials": [{}]}'):
        file.write_text(text)
        assert main([str(file)]) == 2
        assert f"{file} is neither a folder of runs nor a comparison.json" in capsys.readouterr().err


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(runs, tmp_path) -> Path:
    """An output folder in which all training runs have finished."""
    args = baselines.parse_args(["--output", str(tmp_path), "--steps", str(STEPS)])
    (tmp_path / "runs").mkdir()
    for seed, loss in itertools.product((1, 2), LOSSES):
        run = baselines.training_run(args, baselines.Arm(loss, loss), seed, 1.0)
        shutil.copytree(runs / run.folder.name, run.folder)
        (run.folder / "run.json").write_text(json.dumps({"settings": run.settings}))
    return tmp_path


def test_finished_runs_are_not_run_again(finished, capsys):
    def args(*options: str) -> argparse.Namespace:
        factors = ["--factors", ",".join(f"{loss}=1" for loss in LOSSES)]
        return baselines.parse_args(["--output", str(finished), "--steps", str(STEPS), *factors, *options])

    assert baselines.run(args("--seeds", "1,2")) == 0
    assert "8 runs finished before" in capsys.readouterr().out
    assert json.loads((finished / "setup.json").read_text())["all runs"].startswith("actor_rollout_ref.")
    with pytest.raises(baselines.Failure, match="holds other runs, fixed_band-seed2, fspo-seed2"):
        baselines.run(args("--seeds", "1"))
    with pytest.raises(baselines.Failure, match="choose another --output"):
        baselines.run(args("--seeds", "1,2", "--epochs", "4"))


@pytest.mark.parametrize("failures", [1, 2])
def test_a_run_that_fails_is_run_once_more(finished, tmp_path, monkeypatch, capsys, failures):
    args = baselines.parse_args(["--output", str(finished), "--steps", str(STEPS)])
    run = baselines.training_run(args, baselines.Arm("fspo", "fspo"), 1, 1.0)
    (finished / "warm-start-seed1/model").mkdir(parents=True)
    run.folder.rename(finished / "aside")
    (tmp_path / "training_run.py").write_text(f"""
import json, pathlib, sys
attempts = pathlib.Path({str(tmp_path / "attempts")!r})
attempts.mkdir(exist_ok=True)
(attempts / str(len(list(attempts.iterdir())))).touch()
if len(list(attempts.iterdir())) <= {failures}:
    sys.exit("Ray did not start")
pathlib.Path({str(finished / "aside")!r}).rename({str(run.folder)!r})
""")
    monkeypatch.setattr(baselines, "HERE", tmp_path)
    failure = pytest.raises(baselines.Failure, match="Ray did not start")
    with failure if failures == 2 else contextlib.nullcontext():
        baselines.run_all(args, [run])
    said = capsys.readouterr().out
    assert "fspo x 1, seed 1 failed, is run once more" in said
    assert ("[train] fspo x 1, seed 1: accuracy" in said) == (failures == 1)
    assert "Ray did not start" in next((finished / "logs").glob("*.failed.log")).read_text()


def test_an_arm_has_settings_of_its_own_and_its_bounds_are_scaled():
    arm, changes = baselines.own_arm, "policy_loss.eps_low=0.1,policy_loss.eps_dual=null,policy_loss.length_power=1"
    wide = arm(f"wide=fspo,{changes}")
    assert (wide.name, wide.trains, wide.tuned) == ("wide", "fspo", True)
    key = "actor_rollout_ref.actor.policy_loss."
    expected = {f"{key}eps=0.09", f"{key}eps_low=0.3", f"{key}eps_dual=null", f"{key}length_power=1"}
    assert set(training_run.overrides_of(wide, 3.0)) == expected
    for wrong in ("fspo=fspo", "warm=fspo", "wide=dapo", "Wide=fspo", "wide=fspo,policy_loss.eps_low"):
        with pytest.raises(argparse.ArgumentTypeError):
            arm(wrong)


def test_each_loss_gets_the_multiple_that_earned_most(runs, tmp_path):
    args = baselines.parse_args(["--losses", "fspo,no_clip", "--tuning-seeds", "1,2", "--output", str(tmp_path)])
    for factor, reward in zip(baselines.FACTORS, (0.2, 0.3, 0.9, 0.4), strict=True):
        for seed in (1, 2):
            folder = baselines.training_run(args, args.arms[0], seed, factor, tuning=True).folder
            shutil.copytree(runs / f"fspo-seed{seed}", folder)
            log = folder / "metrics-1.jsonl"
            log.write_text(log.read_text().replace('"critic/score/mean": 0.5', f'"critic/score/mean": {reward}'))
    factors, scores = baselines.choose_factors(args)
    assert factors == {"fspo": 3.0, "no_clip": 1.0} and scores.keys() == {"fspo"}
    assert [score["reward"] for score in scores["fspo"]] == [0.2, 0.3, 0.9, 0.4]


PASSED_OVER = (  # options of which something would not count
    *("--factors fspo=1,gsop=1", "--losses fspo --factors fspo=1,gspo=1", "--losses fspo,gspo --factors fspo=1"),
    *("--losses fspo,gsop", "--arm wide=fspo --arm wide=gspo", "--arm fast=fspo,optim={lr:1e-3}"),
    *("--arm gspo=fspo,policy_loss.eps_low=0.1", "--seeds 10,10", "--seeds 100,101,102"),
    *(
        "--check --arm wide=fspo",
        "--check --factors fspo=1",
        "-- actor_rollout_ref.actor.ppo_epochs=4",
        "-- ~data.seed",
    ),
    *("-- actor_rollout_ref.actor.clip_ratio_low=0.1", "-- actor_rollout_ref.actor.policy_loss={eps_low:0.1}"),
    "-- algorithm.policy_loss=gspo",
)


@pytest.mark.parametrize("options", PASSED_OVER)
def test_what_would_be_passed_over_is_refused(options, capsys):
    with pytest.raises(SystemExit) as refused:
        baselines.parse_args(options.split())
    assert refused.value.code == 2 and "error: " in capsys.readouterr().err


def test_the_check_has_a_range_of_fspo_that_responses_pass_on_every_side():
    args = baselines.parse_args(["--check", "--seeds", "20"])
    assert [arm.name for arm in args.arms] == ["fspo", "no_clip", "gspo", "grpo"] and args.steps == 3
    run = baselines.training_run(args, args.arms[0], 20, 1.0)
    assert run.probed and "actor_rollout_ref.actor.policy_loss.eps_dual=0.015" in training_run.overrides_of(
        run.arm, 1.0
    )
    (alone,) = baselines.parse_args(["--check", "--losses", "fspo"]).arms
    assert alone == args.arms[0]
