# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a report concludes and advises of simulated runs whose truth is known, and in which order causes are named."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic_run
import truth_table
from scipy.stats import binom
from simulated_records import frame
from test_live import logged_by_verl

from fspo_verl import cli
from fspo_verl.analysis import conclusion as c
from fspo_verl.analysis import fit, runs, widths
from fspo_verl.analysis.conclusion import CAUSES, Evidence, conclude
from fspo_verl.analysis.length_effect import ENDS, LONGER, MIDDLE, SHORTER, length_effect
from fspo_verl.analysis.overrides import pasted
from fspo_verl.analysis.verdict import of_records, percent, verdict, verdict_of
from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.keys import POLICY_LOSS
from fspo_verl.observe.settings import RunSettings

KEY = f"{POLICY_LOSS}."
COMMITTED = sorted((Path(__file__).parents[1] / "recorded").glob("*/"))


def simulated(seed=0, **settings):
    return truth_table.simulate(np.random.default_rng(seed), **settings)


def outcome(said):
    return said.cause, said.effect and said.effect.who, said.action


def rate_of(overrides, records):
    """What the band that is advised clips of each side."""
    values = {key.removeprefix(KEY): value for key, value in overrides.items() if key.startswith(KEY)}
    clipped = fit.clipped_by(FSPOPolicyLossConfig(**values), records)
    return [clipped[(sign * records.advantage > 0).to_numpy()].mean() for sign in (1, -1)]


# --- what was said wrongly -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_a_shape_is_kept_only_where_others_were_tried_and_are_no_better(rate):
    """Of a run with k = -0.34 at 47% it was said that nothing is more even than sqrt(length), and nothing was tried."""
    records = simulated(rate=rate, power=0.2, pull=1.0, mini_batches=8)
    said = verdict(records)
    assert outcome(said) == (c.LENGTH, SHORTER, c.TAKE)
    assert said.comparison.rate == 0.1 and len(said.comparison.others) >= 2 and not said.comparison.untried
    assert said.comparison.best.spread < said.comparison.own.spread / 2
    assert rate_of(said.overrides, records) == pytest.approx([0.1, 0.1], abs=0.012)


@pytest.mark.parametrize("rate", [0.57, 0.77])
def test_where_most_responses_are_clipped_the_clip_is_not_kept_and_a_band_in_reach_is_named(rate):
    """It was said to keep the clip after 77% clipped, and that no band clips 0.571682 as a next step."""
    records = simulated(rate=rate, mini_batches=8, pull=3.0)
    said = verdict(records)
    assert (said.cause, said.action) == (c.LEVEL, c.TAKE)
    assert rate_of(said.overrides, records) == pytest.approx([0.1, 0.1], abs=0.012)


def test_what_is_kept_decides_where_most_is_clipped():
    """2% against 21% kept is no dependence like length^-0.10 of what is clipped."""
    records = simulated(rate=0.77, mini_batches=8, pull=3.0, own=0.9)
    said = verdict(records)
    assert said.cause == c.LEVEL and said.effect.of_kept and said.effect.who == SHORTER and said.effect.exponent > 0.3
    assert any("shorter" in note.lower() for note in said.notes)


@pytest.mark.parametrize(("bend", "who"), [(0.4, ENDS), (-0.4, MIDDLE)])
def test_a_clip_of_both_ends_or_the_middle_is_seen_and_no_width_is_said_to_mend_it(bend, who):
    said = verdict(simulated(bend=bend, steps=30))
    assert outcome(said) == (c.LENGTH, who, c.KEEP) and not said.overrides
    assert "no width on offer is even" in said.advice and len(said.comparison.others) >= 1


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_a_few_steps_whose_slopes_differ_give_no_verdict_on_the_run(steps):
    """In 15 to 43% of such runs a dependence was called."""
    for seed in range(8):
        said = verdict(simulated(seed, steps=steps, prompts=64, by_step=0.4))
        assert said.action == c.RECORD and not said.overrides and not said.effect.is_of_run


def test_what_could_not_be_tried_says_why():
    said = verdict(simulated(own=1.0, steps=12, prompts=4, mini_batches=2, group=32))
    assert set(said.comparison.untried) == {fit.POWER} and said.comparison.others
    assert all("too few lengths" in why for why in said.comparison.untried.values())


# --- candidates ------------------------------------------------------------------------------------------------------


def test_a_width_is_judged_where_it_was_not_fitted():
    records = simulated(steps=11)
    halves = records[records.step <= 5], records[records.step > 5]
    shapes = widths._shapes(widths._Halves(records), Band(), 0.1, {})[fit.POWER]
    judged_on = records, *halves
    fitted_to = records, *reversed(halves)
    powers = [fit.fitted_power(part, 0.1) for part in fitted_to]
    assert [band.length_power for band in shapes] == powers and len(set(powers)) == len(judged_on)


def test_another_width_is_rarely_called_more_even_where_none_is():
    assert not any(widths.compare(simulated(n, steps=10, prompts=16), depends=False).best for n in range(12))


def test_the_own_power_is_kept_where_it_is_even():
    records = simulated(power=0.3, steps=40)
    band = fit.with_eps(records, Band(length_power=0.3), 0.1)
    records["clipped"] = fit.clipped_by(band, records)
    records.attrs["settings"] = RunSettings("fspo", band)
    said = verdict(records)
    assert (said.cause, said.action) == (c.EVEN, c.KEEP) and len(said.comparison.others) >= 2


def test_a_loss_that_clips_tokens_is_compared_as_it_was_recorded():
    records = simulated(own=1.0, steps=30)
    records["clipped"] = records.clipped * np.random.default_rng(0).uniform(0.2, 1.0, len(records))
    records.attrs["settings"] = RunSettings("vanilla", None)
    said = verdict(records)
    assert outcome(said) == (c.LENGTH, SHORTER, c.TAKE) and said.comparison.own.band is None
    assert "fspo-verl run OVERRIDES" in said.advice and "algorithm.policy_loss" not in said.overrides
    assert said.comparison.rate == 0.1


# --- the order of causes ---------------------------------------------------------------------------------------------

HOLDS = {
    c.NOT_FINITE: {"not_finite": 0.02},
    c.CUT_OFF: {"cut_off": 0.4},
    c.NOISE: {"noise_share": 0.8, "noise_sigma": 0.01},
    c.MISMATCH: {"mismatch_share": 0.8, "mismatch_sigma": 0.01},
    c.LEVEL: {"clip_rate": 0.7},
    c.LENGTH: {"length": length_effect(simulated(own=1.0))},
    c.SIDE: {"sides": (0.3, 0.1), "sides_differ": True, "band": Band(eps=1.0)},
}
SOUND = Evidence(responses=1000, clip_rate=0.1, length=length_effect(simulated()))


@pytest.mark.parametrize("causes", [part for n in range(1, 4) for part in itertools.combinations(CAUSES, n)])
def test_the_first_cause_that_holds_is_the_conclusion_and_the_others_come_below(causes):
    evidence = SOUND
    for cause in reversed(causes):
        evidence = dataclasses.replace(evidence, **HOLDS[cause])
    assert tuple(one.cause for one in conclude(evidence)) == causes == tuple(sorted(causes, key=CAUSES.index))


def test_of_what_is_not_known_nothing_is_said():
    (sound,) = conclude(SOUND)
    assert (sound.cause, sound.action) == (c.EVEN, c.KEEP) and not c.lines(SOUND)
    (nothing,) = conclude(Evidence())
    assert nothing.cause == c.UNKNOWN and not c.lines(Evidence())
    plain = verdict(simulated())
    assert "cut off" not in " ".join([plain.sentence, *plain.notes])


def test_live_series_and_records_have_the_same_words():
    records = simulated(truncated=0.4).drop(columns="prompt_text_hash")
    series = {"fspo/clip_rate/all": records.clipped.mean(), "fspo/truncated": records.truncated.mean()}
    (live, *_), said = conclude(Evidence.of_live(series | {"fspo/lre": np.nan})), verdict(records)
    assert live.cause == said.cause == c.CUT_OFF and live.advice == said.advice
    assert said.sentence.startswith(live.sentence.rstrip("."))
    (rate,) = conclude(Evidence.of_live({"fspo/clip_rate/all": 0.2}))
    assert rate.cause == c.UNKNOWN and percent(0.2) in rate.sentence


def test_a_process_that_trains_can_use_the_rules_without_pandas_and_scipy():
    code = "import sys, fspo_verl.analysis.conclusion; print({'pandas', 'scipy', 'pyarrow'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# --- cut off, sides, bypass ------------------------------------------------------------------------------------------


def test_the_longest_third_is_told_with_and_without_the_responses_that_are_cut_off():
    records = simulated(truncated=0.3)
    cut = records.truncated > 0
    records["clipped"] = np.where(cut, 1.0, records.clipped * 0.5)
    counted = records[records.advantage != 0]
    longest = counted[counted.length >= counted.length.quantile(2 / 3)]
    shares = [percent(part.clipped.mean()) for part in (longest, longest[longest.truncated == 0])]
    said = verdict(records)
    assert said.cause == c.CUT_OFF and said.action == c.MEND and all(share in said.sentence for share in shares)
    few = verdict(records.assign(truncated=(np.arange(len(records)) % 10 == 0).astype(float)))
    assert few.cause != c.CUT_OFF and any("cut off" in note for note in few.notes)


def test_what_leaves_no_advantage_is_named():
    """Where all are cut off, no response has an advantage."""
    said = verdict(simulated().assign(advantage=0.0, truncated=1.0))
    assert (said.cause, said.action, said.responses) == (c.CUT_OFF, c.MEND, 0)


@pytest.mark.parametrize(("bypass", "noise", "cause"), [(True, 0.03, c.MISMATCH), (False, 0.03, c.NOISE)])
def test_what_the_first_mini_batch_shows_is_mismatch_in_bypass_mode_and_else_noise(bypass, noise, cause):
    said = verdict(simulated(bypass=bypass, noise=noise))
    assert (said.cause, said.action) == (cause, c.MEND)
    quiet = verdict(simulated(bypass=bypass, noise=1e-4))
    assert quiet.cause == c.EVEN and not quiet.notes


def test_sides_that_are_clipped_alike_are_told_apart_in_one_run_of_a_hundred():
    called = sum(of_records(simulated(seed, rate=0.01)).sides_differ for seed in range(300))
    assert called <= 8  # more by chance in 1 of 250 tries at 1%, and fewer in 1 of 25 at 5%


def test_a_wider_clip_is_advised_against_noise_only_where_it_would_still_clip():
    few, wide = "ppo_mini_batch_size", re.compile(r"([\d.]+) times as wide")
    moved, still = (verdict(simulated(noise=0.03, mini_batches=count)) for count in (4, 1))
    assert moved.cause == still.cause == c.NOISE
    assert float(wide.search(moved.advice)[1]) > 1 and few not in moved.advice
    assert few in still.advice and not wide.search(still.advice) and percent(still.rate) in still.sentence


# --- too little ------------------------------------------------------------------------------------------------------

LITTLE = {
    "nothing recorded": (frame([]), c.UNKNOWN, c.RECORD),
    "no advantage": (frame([5, 9], advantage=0), c.UNKNOWN, c.RECORD),
    "nothing moved": (frame([50, 90] * 100), c.LEVEL, c.MEND),
    "everything clipped": (frame([50, 90] * 100, 1.0, 1.0, clipped=np.ones(200), mini_batch=1), c.LEVEL, c.TAKE),
    "one length": (frame([50] * 200, 1.0, 1.0, clipped=np.arange(200) % 4 == 0, mini_batch=1), c.EVEN, c.KEEP),
    "few prompts": (frame([50, 90] * 10, 1.0, 1.0, clipped=np.arange(20) % 2, mini_batch=1), c.UNKNOWN, c.RECORD),
    "one prompt a stratum": (
        frame([50, 90] * 100, 1.0, 1.0, step=np.arange(200), clipped=np.arange(200) % 3 == 0, mini_batch=1),
        c.UNKNOWN,
        c.RECORD,
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", LITTLE)
def test_too_few_to_say_is_an_answer(case):
    records, cause, action = LITTLE[case]
    said = verdict(records)
    assert (said.cause, said.action) == (cause, action) and said.sentence and said.advice and said.effect is None


@pytest.mark.parametrize(("recorded", "with_clips"), [(40, 8), (12, 6), (9, 9), (9, 4)])
def test_ten_steps_are_asked_for_only_where_fewer_are_recorded(recorded, with_clips, tmp_path, capsys):
    table = synthetic_run.records(np.random.default_rng(0), "fspo", recorded)
    table.loc[table.step <= recorded - with_clips, "clipped"] = np.float32(0)
    synthetic_run.write_records(tmp_path / "records", table, "fspo")
    said = verdict_of(runs.read_run(tmp_path, "run"))
    assert (said.action, said.effect.steps) == (c.RECORD, with_clips)
    assert cli.main(["calibrate", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (said.advice, out):
        assert ("ecord 10 steps or more" in words) == (recorded < 10)
    assert f"{recorded} are too few" in out if recorded < 10 else f"{recorded} steps are too few" not in out
    assert (f"{with_clips} of {recorded} steps" in said.sentence) == (with_clips < recorded)


@pytest.mark.parametrize("column", ["quadratic_variation", "log_ratio"])
def test_a_broken_value_says_nothing_of_the_noise(column):
    records = simulated(noise=0.004)
    broken = records.copy()
    first = broken.index[broken.mini_batch == 0][:3]
    broken.loc[first, column] = np.inf
    broken.attrs = records.attrs
    sound, found = of_records(records.drop(first)).noise_found, of_records(broken).noise_found
    assert found == sound and verdict(broken).sentence


# --- report and calibrate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [*COMMITTED, "fspo", "gspo", "vanilla"], ids=lambda folder: Path(folder).name)
def test_report_and_calibrate_say_the_same_of_one_run(folder, tmp_path, capsys):
    if isinstance(folder, str):
        folder = synthetic_run.write_run(tmp_path / folder, folder, steps=12)
    said = verdict_of(run := runs.read_run(folder, folder.name))
    if not (run.records.mini_batch > 0).any():  # nothing has moved on purpose: there is no eps to find
        assert said.cause == c.NOISE
    assert cli.main(["calibrate", str(folder)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{folder.name}: {said.sentence} {said.advice} " in out
    if said.overrides and said.comparison and said.comparison.rate == 0.1:
        assert " \\ ".join(pasted(said.overrides)) in out


def still(mini_batches, loss="fspo", steps=12):
    """A run that updates do not move."""
    table = synthetic_run.records(np.random.default_rng(0), loss, steps, mini_batches=mini_batches)
    return table.assign(log_ratio=np.float32(0), quadratic_variation=np.float32(0), clipped=np.float32(0))


@pytest.mark.parametrize("kind", ["records", "metrics"])
@pytest.mark.parametrize("mini_batches", [1, 4])
def test_where_nothing_moved_the_remedy_is_one_that_the_run_does_not_have(mini_batches, kind, tmp_path, capsys):
    table = still(mini_batches)
    if kind == "records":
        synthetic_run.write_records(tmp_path / "records", table, "fspo")
    else:
        steps = [logged_by_verl(part, [1, 2], mini_batches) for _, part in table.groupby("step")]
        lines = [json.dumps({"step": step, "data": metrics}) for step, metrics in enumerate(steps, start=1)]
        (tmp_path / "metrics-1.jsonl").write_text("\n".join(lines) + "\n")
    said = verdict_of(runs.read_run(tmp_path, "run"))
    assert (said.cause, said.action) == (c.LEVEL, c.MEND)
    assert ("ppo_mini_batch_size" in said.advice) == (mini_batches == 1) != ("learning rate" in said.advice)
    assert ("one optimiser step" in said.sentence) == (mini_batches == 1)
    assert cli.main(["calibrate", str(tmp_path)]) == 2
    assert f"fspo-verl calibrate: {said.sentence} {said.advice}" in capsys.readouterr().err


BROKEN = {
    "not finite": still(4).assign(decision="nonfinite"),
    "not finite, and some moved": synthetic_run.records(np.random.default_rng(0)).assign(decision="nonfinite"),
    "noise alone, out of reach": synthetic_run.records(np.random.default_rng(0), mini_batches=1).assign(
        log_ratio=1.0, quadratic_variation=1.0, clipped=1.0
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_calibrate_begins_with_what_to_mend_though_there_is_no_eps(name, tmp_path, capsys):
    synthetic_run.write_records(tmp_path / "records", BROKEN[name], "fspo")
    said = verdict_of(runs.read_run(tmp_path, "run"))
    assert said.action == c.MEND
    code = cli.main(["calibrate", str(tmp_path)])
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    assert f"{said.sentence} {said.advice}" in (out if code == 0 else err)


def steep(first=0.0):
    """Records whose clip follows the length; and noise of this sigma in first mini-batches."""
    table = synthetic_run.records(np.random.default_rng(0), "fspo", 24, lengths=(5, 800))
    s = np.where(table.mini_batch > 0, table.log_ratio, first * np.sqrt(table.length) * np.sign(table.index % 2 - 0.5))
    table = table.assign(log_ratio=s.astype(np.float32))
    table["quadratic_variation"] = table.quadratic_variation.where(table.mini_batch > 0, first**2 * table.length)
    return table


@pytest.mark.parametrize("target", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("kind", ["idle", "longer"])
def test_the_words_of_calibrate_and_its_overrides_are_of_one_band(kind, target, tmp_path, capsys, monkeypatch):
    table = steep()
    table["clipped"] = np.float32(0)
    if kind == "longer":
        monkeypatch.setitem(synthetic_run.RANGES["fspo"], "band", {"eps": 0.4, "length_power": 0.0})
        table["clipped"] = ((table.log_ratio.abs() > 0.4) & (table.advantage != 0)).astype(np.float32)
    synthetic_run.write_records(tmp_path / "records", table, "fspo")
    command = ["calibrate", str(tmp_path), "--target-clip-rate", str(target)]
    assert cli.main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    said = result["verdict"]
    assert said["action"] == c.TAKE and said["overrides"] == result["overrides"]
    assert f"clips {percent(target)} of these responses, of either" in said["advice"] and said["advice"] in out
    assert " \\ ".join(pasted(result["overrides"])) in out


@pytest.mark.parametrize("first", [0.0, 0.04])
def test_a_band_within_the_noise_is_not_to_be_pasted(first, tmp_path, capsys):
    synthetic_run.write_records(tmp_path / "records", steep(first), "fspo")
    assert cli.main(["calibrate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert cli.main(["calibrate", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (f"{KEY}eps_low=" in out) == (first == 0) != ("nothing to paste" in out)
    assert bool(result["overrides"]) == (first == 0)
    assert first == 0 or not result["verdict"]["overrides"]


# --- the truth table -------------------------------------------------------------------------------------------------

_MANY = ("even", "even, heavy tails", "even, slopes that differ by step, sd 0.3")
_SURE = [name for name, cell in truth_table.CELLS.items() if cell.cause not in (c.EVEN, c.LENGTH)]


@pytest.mark.parametrize("name", ["shorter", "longer", "both ends", "even, 5 steps", *_SURE])
def test_what_is_plain_to_see_is_said_and_advised(name):
    found = truth_table.outcomes(truth_table.CELLS[name], range(5))
    assert sum(count for pair, count in found.items() if pair == (truth_table.RIGHT, truth_table.RIGHT)) >= 4


@pytest.mark.parametrize("name", _MANY)
def test_false_alarms_are_as_rare_as_they_should_be(name):
    found = truth_table.outcomes(truth_table.CELLS[name], range(runs := 40))
    for place in (0, 1):
        wrong = sum(count for pair, count in found.items() if pair[place] == truth_table.WRONG)
        assert wrong <= binom.ppf(0.999, runs, 0.05)


def test_the_table_goes_on_where_it_was_stopped(tmp_path, capsys):
    cell, file, parts = truth_table.CELLS["even, 5 steps"], tmp_path / "truth.csv", {}
    for count in (2, 5, 3):
        truth_table.main(["--runs", f"{count}", "--only", cell.name, "--output", str(file)])
        parts[count] = capsys.readouterr().out
    assert f"| {cell.name} | even, record | yes |" in parts[5] == parts[3] != parts[2]
    found = truth_table.outcomes(cell, range(5))
    rows = truth_table.pd.read_csv(file).query("cell == @cell.name")
    assert {(row.conclusion, row.advice): row.runs for row in rows.itertuples()} == found


def test_cells_name_every_truth():
    assert {cell.cause for cell in truth_table.CELLS.values()} == {*CAUSES, c.EVEN}
    assert {cell.who for cell in truth_table.CELLS.values()} == {None, SHORTER, LONGER, ENDS, MIDDLE}
