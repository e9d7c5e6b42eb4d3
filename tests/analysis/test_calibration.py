# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The calibrated band has the rate it promises; every way to fail says what to fix."""

import contextlib
import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic_run
import truth_table
from composed import composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from simulated_records import frame, simulate_run
from verl.utils.config import omega_conf_to_dataclass

from fspo_verl import cli
from fspo_verl.analysis import causes, fit, logs, runs
from fspo_verl.analysis.calibration import EPS, calibrate
from fspo_verl.analysis.fit import fitted_power
from fspo_verl.analysis.length_effect import SHORTER, length_effect
from fspo_verl.analysis.metric_facts import LEARN_MORE
from fspo_verl.analysis.overrides import band_overrides, loss_of
from fspo_verl.band import Band
from fspo_verl.clips import standardized
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.findings import KEEP, TAKE
from fspo_verl.findings import pasted as pasted_by_us
from fspo_verl.keys import ACTOR, OVERRIDES, POLICY_LOSS
from fspo_verl.launch import doctor
from fspo_verl.observe.records import Records
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import percent

KEY = f"{POLICY_LOSS}."


def write_records(folder, records, loss="fspo"):
    synthetic_run.write_records(folder / "records", records, loss)
    return folder


def trained(records, eps=None):
    """The records of a run with FSPO's width, whose eps clips a tenth of each side by default."""
    band = Band(eps) if eps else fit.with_eps(records, Band(), 0.1)
    records["clipped"] = fit.clipped_by(band, records).astype(np.float32)
    records.attrs["settings"] = RunSettings("fspo", band)
    return records


def run_of(records):
    return runs.Run("run", Path("run"), logs.Log.of([]), Records(records, records.attrs["settings"], len(records)))


def band_of(overrides):
    """The band of overrides, with what Hydra makes of their texts, as a launch of the loss fspo has it."""
    texts = [f"{key}={'null' if value is None else value}" for key, value in overrides.items() if key.startswith(KEY)]
    items = OverridesParser.create().parse_overrides(texts)
    return FSPOPolicyLossConfig(**{item.key_or_group.removeprefix(KEY): item.value() for item in items})


def run_cli(capsys, *args):
    code = cli.main(["calibrate", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", [0.0, 0.3, 0.5, 0.8])
def test_a_fitted_power_follows_the_spread_and_clips_lengths_alike(truth):
    records = simulate_run(np.random.default_rng(0), 40, 16, kappa=0.0, power=truth, step_spread=0.3)
    power = fitted_power(records, 0.1)
    assert power == pytest.approx(truth, abs=0.08)
    band = fit.with_eps(records, Band(length_power=power), 0.1)
    assert abs(length_effect(records, fit.clipped_by(band, records)).exponent) < 0.15


def test_a_fitted_power_does_not_take_a_course_of_training_for_a_length():
    rng, parts = np.random.default_rng(0), []
    for k in range(4):  # responses get longer, and the policy moves further
        part = simulate_run(rng, 8, 16, sigma=0.01 * 1.6**k, kappa=0.0, low=10 * 2**k, high=60 * 2**k)
        name = part.prompt.astype(str) + f" of part {k}"
        parts.append(
            part.assign(step=part.step + 8 * k, prompt=name, prompt_text_hash=part.prompt_text_hash + 1000 * k)
        )
    records = pd.concat(parts, ignore_index=True)
    assert fitted_power(records.astype({"prompt": "category"}), 0.1) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    "records, reason",
    [
        (simulate_run(np.random.default_rng(0)).assign(length=50), "too few lengths"),
        (simulate_run(np.random.default_rng(0), 2, 8), "too few lengths and prompts"),
        (simulate_run(np.random.default_rng(0)).query("advantage > 0"), "no response has an advantage < 0"),
        (
            simulate_run(np.random.default_rng(0), prompts=32, sigma=0.25, kappa=1.0, low=200, high=400),
            "no range clips 0.25 .*of the responses with A > 0 lie above the centre, and eps must be positive",
        ),
    ],
)
def test_a_width_that_cannot_be_fitted_says_why(records, reason):
    with pytest.raises(fit.Unreachable, match=reason):
        fitted_power(records, 0.25)


@given(seed=st.integers(0, 10_000), responses=st.integers(2, 40))
def test_of_few_responses_the_dual_clip_takes_no_more_than_its_share(seed, responses):
    """The share holds also where it is less than one response."""
    rng, target = np.random.default_rng(seed), 0.5 / responses
    advantage = np.repeat([1.0, -1.0], responses)
    records = frame(rng.integers(5, 50, 2 * responses), rng.normal(0.1, 0.2, 2 * responses), 0.01, advantage)
    with contextlib.suppress(fit.Unreachable):
        band = fit.with_eps(records, Band(), target)
        assert (standardized(records, band)[advantage < 0] > band.dual).mean() <= target / 10


def test_one_step_is_judged_by_prompts():
    records = simulate_run(np.random.default_rng(0), steps=1, prompts=200)
    later = fit.is_later_half(records)
    one, other = (set(records.prompt[half]) for half in (later, ~later))
    assert len(one) == len(other) == 100 and not one & other


# --- the command -----------------------------------------------------------------------------------------------------


def pasted(out):
    """The overrides that are printed, as a shell would pass them on."""
    lines = [line for line in out.splitlines() if re.match(rf" +{ACTOR}\.", line)]
    assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith("\\")
    return dict(item.split("=", 1) for item in shlex.split("\n".join(lines)) if item.strip())


@pytest.mark.parametrize("power", [0.5, 0.15])
def test_prints_the_findings_and_overrides_that_give_the_rate(tmp_path, capsys, power):
    """Another width is proposed only where that of the run is less even."""
    records = trained(simulate_run(np.random.default_rng(0), 40, 32, sigma=0.05, kappa=0.0, power=power))
    run = write_records(tmp_path / "run", records)
    code, out, err = run_cli(capsys, run, "--target-clip-rate", 0.05)
    assert (code, err) == (0, "") and len(out.splitlines()) <= 20
    result = json.loads(run_cli(capsys, run, "--target-clip-rate", 0.05, "--json")[1])
    first, band = result["findings"][0], result["findings"][-1]
    assert first["sentence"] in out and first["advice"] in out and band["sentence"] in out
    assert (band["id"], first["action"]) == (EPS, KEEP if power == 0.5 else TAKE)
    assert pasted(out) == dict(item.split("=", 1) for item in shlex.split(" ".join(band["overrides"])))
    trains = band_of(pasted(out))
    clipped = fit.clipped_by(trains, records)
    assert band["value"] == pytest.approx(clipped[records.advantage != 0].mean())
    for side in (1, -1):
        assert clipped[np.sign(records.advantage) == side].mean() == pytest.approx(0.05, abs=0.003)
    assert (trains.length_power == 0.5) == (power == 0.5)
    root, taken = (length_effect(records, one) for one in (records.clipped, clipped))
    assert power == 0.5 or (root.who == SHORTER and abs(taken.exponent) < abs(root.exponent) / 3)


def test_what_is_said_of_the_band_is_printed_and_advice_to_calibrate_is_not(tmp_path, capsys):
    """Worse responses are clipped thrice as often, for which the report advises this command. Few are to be clipped."""
    records = simulate_run(np.random.default_rng(0), 20, 32, kappa=0.0)
    records["log_ratio"] *= np.where(records.advantage > 0, 0.5, 1.0)
    run = write_records(tmp_path / "run", trained(records, eps=0.03))
    findings = json.loads(run_cli(capsys, run, "--target-clip-rate", 0.02, "--json")[1])["findings"]
    (side,) = [one for one in findings if one["id"] == causes.SIDE]
    few = [one["sentence"] for one in findings if one["id"] == "few clipped"]
    out = run_cli(capsys, run, "--target-clip-rate", 0.02)[1]
    assert few and all(sentence in out for sentence in few)
    assert side["sentence"] in out and "fspo-verl calibrate" in side["advice"] and "fspo-verl calibrate" not in out


@pytest.mark.parametrize("factor", [1 / 3, 1.0, 3.0])
def test_a_range_that_clips_another_share_at_the_end_of_the_run_says_which(factor):
    """The spread falls or rises threefold over the run."""
    records = truth_table.simulate(np.random.default_rng(0), steps=20, widen=math.log(factor))
    found = {one.id: one for one in calibrate(run_of(records), 0.1)}
    assert ("last steps" in found) == (factor != 1)
    if factor != 1:
        clipped = fit.clipped_by(band_of(found[EPS].overrides), records)
        last = clipped[(records.step >= 16) & (records.advantage != 0)].mean()
        assert found["last steps"].value == pytest.approx(last, abs=1e-3)
        assert (last < 0.08) == (factor < 1) and percent(found["last steps"].value) in found["last steps"].sentence


# --- the rate that is said is the one that is trained ----------------------------------------------------------------


@pytest.mark.parametrize("target", [0.1, 0.3])
def test_the_rate_of_a_gspo_run_is_that_of_verls_gspo_which_has_no_dual_clip(target):
    records = synthetic_run.records(np.random.default_rng(5), "gspo", 20)
    settings = RunSettings("gspo", None, 3e-4, 4e-4)
    band = fit.with_eps(records, settings.trained_band, target)
    low, high = band_overrides(band, settings).values()
    ratio, better, worse = np.exp(records.log_ratio / records.length), records.advantage > 0, records.advantage < 0
    clipped = (better & (ratio > 1 + high)) | (worse & (ratio < 1 - low))
    counted = better | worse
    assert fit.clipped_by(band, records)[counted].mean() == pytest.approx(clipped[counted].mean(), abs=5e-4)
    for side in (better, worse):
        assert clipped[side].mean() == pytest.approx(target, abs=2e-3)


@pytest.mark.parametrize("dual", [None, math.inf])
@pytest.mark.parametrize("target", [0.02, 0.1, 0.3])
def test_the_band_to_take_clips_what_is_said_with_its_dual_clip_and_turns_none_on(target, dual):
    records = synthetic_run.records(np.random.default_rng(1), "fspo", 20, sigma=0.04)
    wild = records.index[(records.advantage < 0) & (records.mini_batch > 0)][::9]
    records.loc[wild, "log_ratio"] = records.log_ratio[wild].abs() * 3  # worse responses that move far upwards
    records.attrs["settings"] = RunSettings("fspo", Band(0.2, eps_dual=dual))
    *_, wide, found = calibrate(run_of(records), target)
    trains = band_of(found.overrides)
    assert math.isinf(trains.dual) == (dual is not None)
    score, better, worse = records.log_ratio / np.sqrt(records.length), records.advantage > 0, records.advantage < 0
    sides = (score > trains.high)[better].mean(), ((score < -trains.low) | (score > trains.dual))[worse].mean()
    assert sides == pytest.approx((target, target), abs=2e-3)
    assert (wide.id == "dual clip") == (1.01 * trains.high < trains.dual < math.inf)
    # An eps has four digits, which may take one response more.
    assert (score > trains.dual)[worse].sum() <= 0.1 * target * worse.sum() + 1
    assert "clip {} of the better and {} of the worse".format(*map(percent, sides)) in found.sentence
    assert "option" in found.sentence and "the run's own clip" in found.sentence
    every = sides[0] * better.sum() + sides[1] * worse.sum()
    assert found.value == pytest.approx(every / (better | worse).sum(), abs=1e-4)


@pytest.mark.parametrize("loss", ["gspo", "vanilla"])
def test_records_of_another_loss_calibrate_too(tmp_path, capsys, loss):
    run = write_records(tmp_path, simulate_run(np.random.default_rng(0)), loss)
    code, out, _ = run_cli(capsys, run)
    assert code == 0 and pasted(out)
    assert ("fspo-verl run --loss gspo OVERRIDES" in out) == (loss == "gspo") != ("fspo-verl run OVERRIDES" in out)


RANGE = [f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"]
SIZES = f"{ACTOR}.use_dynamic_bsz=True algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
FSPO = "algorithm.policy_loss=fspo"
COMMANDS = {  # what a run was launched with
    "verl's own": [],
    "verl's gspo": [f"{KEY}loss_mode=gspo", *RANGE],
    "observed": ["algorithm.policy_loss=observed"],
    "observed gspo": ["algorithm.policy_loss=observed", f"{KEY}loss_mode=gspo", *RANGE],
    "gspo": ["algorithm.policy_loss=gspo"],
    "grpo": ["algorithm.policy_loss=grpo"],
    "no clip": ["algorithm.policy_loss=no_clip"],
    "fixed band": ["algorithm.policy_loss=fixed_band"],
    "fspo": [FSPO],
    "both sides": [FSPO, f"{KEY}eps_low=0.05", f"{KEY}eps_high=0.07", f"{KEY}eps_dual=0.5"],
    "a power": [FSPO, f"{KEY}length_power=0.3"],
    "the mean": [FSPO, f"{KEY}length_power=1", f"{KEY}eps=1e-3"],
    "drift": [FSPO, f"{KEY}normalization=drift_corrected"],
    "a clip rate": [FSPO, f"{KEY}target_clip_rate=0.1"],
    "a clip rate with a bound": [FSPO, f"{KEY}target_clip_rate=0.1", f"{KEY}eps_max=0.2", f"{KEY}length_power=0.4"],
}


def launched(arguments):
    """The config of a launch that the doctor finds no error in, as far as the loss goes."""
    config, findings = composed([*SIZES.split(), *arguments], lambda config: (config, doctor.examine(config)))
    assert not [one for one in findings if one.severity == "error"], findings
    return config


@pytest.fixture(scope="module")
def moved():
    return simulate_run(np.random.default_rng(0), 12, 32, kappa=0.0)


@pytest.mark.parametrize("kind", COMMANDS)
def test_what_is_advised_starts_where_it_is_put_and_trains_the_advised_band(kind, moved, tmp_path, monkeypatch):
    """Behind ``fspo-verl run`` on the run's own command, and behind a command that trains the loss already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(OVERRIDES, raising=False)
    settings = runs.settings_of(OmegaConf.to_container(launched(COMMANDS[kind])))
    keeps_its_width = settings.loss == "gspo" and kind != "observed gspo"
    width = settings.trained_band if keeps_its_width else Band(length_power=0.0 if settings.band else 0.41)
    band = fit.with_eps(moved, width, 0.1)
    words, loss = pasted_by_us(band_overrides(band, settings)), loss_of(band, settings)
    configs = []
    if settings.loss == loss:
        configs.append(launched([*COMMANDS[kind], *(shlex.split(word)[0] for word in words)]))
    monkeypatch.setenv(OVERRIDES, " ".join([f"algorithm.policy_loss={loss}", *words]))
    configs.append(launched(COMMANDS[kind]))
    for actor in (config.actor_rollout_ref.actor for config in configs):
        trains = omega_conf_to_dataclass(actor.policy_loss)
        if isinstance(trains, FSPOPolicyLossConfig):
            assert not keeps_its_width and trains.target_clip_rate is None
            assert (trains.low, trains.high, trains.dual) == (band.low, band.high, band.dual)
            assert Band.from_json(Band.to_json(trains)).form == band.form
        else:  # a run of GSPO keeps its loss where it keeps its width
            assert keeps_its_width and getattr(trains, "inner", trains.loss_mode) == "gspo" and band.length_power == 1
            ends = RunSettings("gspo", None, actor.clip_ratio_low, actor.clip_ratio_high).trained_band
            assert (ends.low, ends.high) == pytest.approx((band.low, band.high), rel=1e-3)


def records_without(**columns):
    return simulate_run(np.random.default_rng(0), steps=2).assign(**columns)


ERRORS = {
    "nothing moved": (
        records_without(log_ratio=0.0, quadratic_variation=0.0),
        (),
        "Nothing moved, so nothing can be clipped",
    ),
    "no A > 0": (records_without(advantage=-1.0), (), "no response has an advantage > 0"),
    "no A < 0": (records_without(advantage=1.0), (), "no response has an advantage < 0"),
    "one prompt": (records_without().query("prompt == prompt.iloc[-1]"), (), "of one prompt in one step"),
    "target out of reach": (records_without(), ("--target-clip-rate", 0.8), "which no range can clip"),
    "target 0": (records_without(), ("--target-clip-rate", 0), "--target-clip-rate=0 must lie between 0 and 1"),
    "target 1": (records_without(), ("--target-clip-rate", 1), "--target-clip-rate=1 must lie between 0 and 1"),
    "no rows": (records_without(), ("--max-rows", 0), "--max-rows=0 must be at least 1"),
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
    assert code == 2 and LEARN_MORE in err and len(err.splitlines()) == 1
