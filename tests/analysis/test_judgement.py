# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Conclusions and advice are those of the truth of simulated runs, and causes are named in their order."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import synthetic_run
import truth_table
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from simulated_records import frame, judged
from test_live import logged_by_verl

from fspo_verl import cli
from fspo_verl.analysis import causes as c
from fspo_verl.analysis import fit, live, runs, widths
from fspo_verl.analysis.breaks import find_break
from fspo_verl.analysis.causes import CAUSES, conclude
from fspo_verl.analysis.evidence import Break, Evidence
from fspo_verl.analysis.judgement import Verdict, decide, evidence_of_records, judge, judge_records
from fspo_verl.analysis.length_effect import SHORTER, WHO, LengthEffect, length_effect
from fspo_verl.band import Band
from fspo_verl.findings import FIX, KEEP, RECORD, TAKE
from fspo_verl.observe.noise import SAME
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import percent


def simulated(seed=0, **settings):
    return truth_table.simulate(np.random.default_rng(seed), **settings)


def evidence_in(records, **options):
    return evidence_of_records(records, records.attrs["settings"], **options)


def outcome(said):
    effect = said.evidence.lengths.effect
    return said.findings[0].id, effect and effect.who, said.findings[0].action


# --- widths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_a_width_is_kept_only_where_others_were_tried_and_are_no_better(rate):
    said = judged(simulated(rate=rate, power=0.2, pull=1.0, mini_batches=8))
    assert outcome(said) == (c.LENGTH, SHORTER, TAKE)
    assert said.compared.rate == 0.1 and len(said.compared.others) >= 2 and not said.compared.untried
    assert said.width.uneven < said.compared.own.uneven / 2


def test_what_could_not_be_tried_says_why():
    said = judged(simulated(own=1.0, steps=12, prompts=4, mini_batches=2, group=32))
    assert set(said.compared.untried) == {fit.POWER} and said.compared.others
    assert all("too few lengths" in why for why in said.compared.untried.values())


def test_a_width_is_judged_where_it_was_not_fitted(monkeypatch):
    records, judged_on = simulated(steps=11), []
    powers = {len(records): 0.1, (records.step <= 5).sum(): 0.2, (records.step > 5).sum(): 0.3}
    clipped_by = fit.clipped_by
    monkeypatch.setattr(fit, "fitted_power", lambda part, rate: powers[len(part)])
    monkeypatch.setattr(fit, "clipped_by", lambda *at: judged_on.append(at) or clipped_by(*at))
    found = {one.name for one in compared(records).others}
    fitted = {band.length_power: part.step.max() for band, part in judged_on if band.length_power not in (0.0, 0.5)}
    assert "length^0.1" in found and fitted == {0.3: 5, 0.2: 10}


def compared(records, rate=0.1):
    return widths.compare(records, records.attrs["settings"], False, rate)


def test_another_width_is_rarely_called_more_even_where_none_is():
    assert not any(compared(simulated(n, steps=10, prompts=16)).best for n in range(12))


@pytest.mark.parametrize("rate", [0.03, 0.25])
def test_widths_are_compared_at_the_rate_that_is_asked_for(rate):
    records = simulated(own=1.0)
    for one in (compared(records, rate).own, *compared(records, rate).others):
        assert fit.clipped_by(one.band, records)[records.advantage != 0].mean() == pytest.approx(rate, abs=0.003)


def test_what_cannot_be_seen_of_an_even_width_is_no_unevenness():
    """A spread above what sampling makes is seen in 5 of 100 even runs, and of an uneven width nearly always."""
    even = [compared(simulated(seed)).own for seed in range(60)]
    assert sum(one.shows for one in even) <= binom.ppf(0.999, 60, 0.05)
    uneven = [compared(simulated(seed, own=1.0)).own for seed in range(5)]
    assert all(one.shows for one in uneven)


def test_the_own_power_is_kept_where_it_is_even():
    records = simulated(power=0.3, steps=40)
    band = fit.with_eps(records, Band(length_power=0.3), 0.1)
    records["clipped"] = fit.clipped_by(band, records)
    records.attrs["settings"] = RunSettings("fspo", band)
    said = judged(records)
    assert outcome(said) == (c.EVEN, None, KEEP) and len(said.compared.others) >= 2


@pytest.mark.parametrize("share", [0.1, 0.002])
def test_a_clip_of_tokens_is_compared_only_where_it_has_the_rate_of_the_others(share):
    records = simulated(tokens=share * 4 / 3)  # the first of four mini-batches is not clipped
    compared_with = judged(records).compared
    assert (compared_with.own is not None) == (share == 0.1) and compared_with.best is None
    assert (widths.OWN in compared_with.untried) == (share != 0.1) and len(compared_with.others) >= 2


def test_ranges_that_are_uneven_alike_are_rarely_told_apart():
    records, rng, rare = simulated(steps=15), np.random.default_rng(0), 0.01
    measure, share = widths._Measure(records), 0.2 * records.length.rank(pct=True)

    def clips_longer_ones():
        return measure.of("", None, (rng.random(len(records)) < share).to_numpy(np.float64))

    drawn = [widths._best(clips_longer_ones(), {"": clips_longer_ones()}, measure, rare)[0] for _ in range(150)]
    assert sum(one is not None for one in drawn) <= binom.ppf(0.999, len(drawn), rare)


def test_a_range_is_taken_only_if_it_is_more_even_all_over_the_run():
    records = simulated(own=1.0, steps=20)
    assert judged(records).verdict is Verdict.BETTER
    own = (records.step < 10).to_numpy()
    turned = simulated(own=0.0, steps=20, seed=1)
    records = pd.concat([records[own], turned[turned.step >= 10]], ignore_index=True)
    records.attrs = turned.attrs
    assert judged(records).verdict is not Verdict.BETTER


@pytest.mark.parametrize(
    ("effect", "own", "best", "others", "verdict"),
    [
        ({"p_of_change": 0.001, "p": 0.5}, 0.3, None, 2, Verdict.CHANGED),
        ({"p_of_change": 0.001, "early": -1.0, "late": -0.5}, 0.3, 0.1, 2, Verdict.BETTER),
        ({"p": 0.2, "p_if_independent": 0.01}, 0.3, 0.1, 2, Verdict.UNSETTLED),
        ({}, None, None, 2, Verdict.APART),
        ({}, 0.3, None, 0, Verdict.ALONE),
        ({"who": "by side"}, 0.3, 0.2, 2, Verdict.NO_EVEN),
        ({"who": "both ends"}, 0.3, 0.05, 2, Verdict.BETTER),
        ({}, 0.3, None, 2, Verdict.NO_BETTER),
        ({"p": 0.4}, 0.3, None, 2, Verdict.EVEN),
        ({"p": 0.4}, 0.3, 0.05, 2, Verdict.LOOKS_BETTER),
    ],
)
def test_a_verdict_follows_from_the_test_and_the_comparison(effect, own, best, others, verdict):
    found = LengthEffect(-0.5, -0.8, -0.2, 0.001, SHORTER)._replace(**{"p_if_independent": 1.0} | effect)
    own, best = (one and widths.Width("", None, one, 0.1, (one,) * 3, np.zeros(0)) for one in (own, best))
    assert decide(found, widths.Comparison(0.1, own, (best or own,) * others, best, False, {})) is verdict


# --- the order of causes ---------------------------------------------------------------------------------------------

HOLDS = {  # fields of the evidence, and of its records
    c.NOT_FINITE: {"not_finite": 0.02},
    c.BROKEN: {"policy": Break(7, (("reward", 0.6, 0.01), ("length", 400.0, 30.0)))},
    c.CUT_OFF: {"cut_off": 0.4},
    c.NOISE: {"noise": {"share": 0.8, "sigma": 0.01}},
    c.MISMATCH: {"engines": {"share": 0.8, "sigma": 0.01, "bypass": True}},
    c.LEVEL: {"clip_rate": 0.7},
    c.LENGTH: {"lengths": {"effect": length_effect(simulated(own=1.0))}},
    c.SIDE: {"sides": (0.3, 0.1), "band": Band(eps=1.0), "lengths": {"sides_differ": True}},
    c.WEIGHTS: {"effective": 0.1},
}


def with_(evidence, **fields):
    """The evidence with other fields, those of its records by a dict."""
    records = {
        name: dataclasses.replace(getattr(evidence, name), **of) for name, of in fields.items() if isinstance(of, dict)
    }
    return dataclasses.replace(evidence, **fields | records)


SOUND = with_(evidence_in(simulated()), noise={"outside": None})


@given(st.sets(st.sampled_from(CAUSES)))
def test_the_first_cause_that_holds_is_the_conclusion_and_the_others_come_below(held):
    evidence = SOUND
    for cause in held:
        evidence = with_(evidence, **HOLDS[cause])
    said = conclude(evidence)
    lengths = c.LENGTH if c.LENGTH in held else c.EVEN
    order = [lengths if cause == c.LENGTH else cause for cause in CAUSES]
    assert [one.id for one in said] == [one for one in order if one in (*held, lengths)]
    healthy = not {*held} & {*c.HEALTH}
    assert all(one.advice or not healthy for one in said) and said[0].advice
    assert healthy or not [one for one in said if one.id not in c.HEALTH and one.advice]


@pytest.mark.parametrize(
    ("spread", "clips", "told"), [(1.0, False, False), (1.1, False, False), (1.3, False, True), (1.3, True, False)]
)
def test_that_few_responses_carry_the_gradient_is_told_of_a_typical_step_and_of_what_the_clip_leaves(
    spread, clips, told
):
    """Weights e^S of a normal S have an effective sample size of exp(-spread²): 37%, 30% and 18%; a quarter is told."""
    rng = np.random.default_rng(0)
    s = spread * rng.standard_normal(20_000)
    s[0] = 30.0  # one of them, of one step, outweighs all
    length, step = rng.integers(100, 200, len(s)), np.arange(len(s)) // 1000
    clipped = (clips & (s > 0.5)).astype(np.float32)
    records = frame(length, s, 1e-4 * length, rng.choice([-1.0, 1.0], len(s)), step=step, clipped=clipped)
    records.attrs["settings"] = RunSettings("fspo", Band(10.0))
    assert (c.WEIGHTS in {one.id for one in judged(records).findings}) == told
    records.attrs["settings"] = RunSettings("gspo", None, 0.2, 0.2)  # its weight is e^(S/L)
    assert c.WEIGHTS not in {one.id for one in judged(records).findings}


def test_of_what_is_not_known_nothing_is_said():
    (sound,) = conclude(SOUND)
    assert (sound.id, sound.action) == (c.EVEN, KEEP)
    untested = with_(
        SOUND, **HOLDS[c.SIDE] | {"lengths": {"effect": None, "too_few": "too few to say", "sides_differ": True}}
    )
    assert [one.id for one in conclude(untested)] == [c.UNKNOWN, c.SIDE]
    (nothing,) = conclude(Evidence())
    assert nothing.id == c.UNKNOWN
    assert "cut off" not in " ".join(map(str, judged(simulated()).findings))


# --- numbers in sentences --------------------------------------------------------------------------------------------


def test_rates_in_a_sentence_are_counts_over_the_lengths_that_it_names():
    records = simulated(own=1.0, trend=1.0)
    counted = records[records.advantage != 0]
    (said, *_), thirds = judged(records).findings, evidence_in(records).thirds
    assert sum(part.responses for part in thirds) == len(counted)
    for part in thirds:
        rows = counted[counted.length.between(part.shortest, part.longest)]
        assert (part.responses, part.rate) == (len(rows), pytest.approx(rows.clipped.mean()))
        assert f"{percent(rows.clipped.mean())} of" in said.sentence


def test_counts_that_differ_where_the_test_finds_nothing_are_explained():
    """Steps that clip more and have longer responses: the counts differ, and lengths are clipped alike."""
    parts = [simulated(seed, steps=10, rate=rate) for seed, rate in ((0, 0.02), (1, 0.2))]
    parts[1] = parts[1].assign(length=4 * parts[1].length, step=parts[1].step + 10, prompt=parts[1].prompt + 10_000)
    records = pd.concat(parts, ignore_index=True).assign(prompt_text_hash=lambda rows: rows.prompt)
    found = evidence_of_records(records, None)
    (said, *_) = conclude(with_(found, noise={"sigma": None, "share": None}))
    assert said.id == c.EVEN and found.thirds[-1].rate > 2 * found.thirds[0].rate
    explained = "hold other lengths"
    assert explained in said.sentence and explained not in judged(simulated()).findings[0].sentence


def test_no_p_value_is_0():
    sure = HOLDS[c.LENGTH]["lengths"]["effect"]._replace(p=0.0)
    (said, *_) = conclude(with_(SOUND, lengths={"effect": sure}))
    assert "p = 0 " not in said.sentence and "p < 0.0001" in said.sentence


def test_sides_that_hold_other_lengths_are_named_and_not_mini_batches():
    found = [judged(simulated(seed, worse=1.5, sides=1 / 3)) for seed in range(6)]
    sentences = [one.findings[0].sentence for one in found]
    assert all(one.evidence.lengths.between == "side" for one in found) and "ini-batches" not in " ".join(sentences)
    # Where counts differ by no more than the test allows for, nothing has to be explained.
    assert sum("Worse responses are clipped more" in sentence for sentence in sentences) >= 4


def test_slopes_that_persist_are_no_dependence_and_what_changes_is_said_with_both_rates():
    found = [judged(simulated(seed, persists=0.3, steps=15)) for seed in range(12)]
    assert sum(one.evidence.lengths.effect.depends for one in found) <= binom.ppf(0.999, 12, 0.15)
    few = [one for one in found if one.verdict is Verdict.UNSETTLED]
    assert few and all(one.findings[0].action == RECORD and one.width is None for one in few)
    drift = judged(simulated(drift=0.6, steps=20))
    assert outcome(drift)[0] == c.CHANGE and drift.verdict is Verdict.CHANGED
    for thirds in drift.evidence.lengths.of_halves:
        assert all(f"{percent(part.rate)} of" in drift.findings[0].sentence for part in thirds)


@pytest.mark.parametrize("kind", [*truth_table.HEALTHY, *truth_table.BREAKS])
def test_a_policy_that_breaks_is_called_and_a_healthy_one_is_not(kind):
    called = truth_table.called_broken(kind, 100)
    assert called >= 0.9 if kind in truth_table.BREAKS else called <= 0.01


def test_a_break_comes_before_any_talk_of_the_clip_and_names_its_step():
    metrics = truth_table.metrics_of(np.random.default_rng(0), "repetition to the limit")
    broken = find_break(metrics)
    assert {sign for sign, *_ in broken.signs} == {"reward", "length", "entropy"}
    reward = metrics["critic/score/mean"]
    assert reward[broken.step - 8 : broken.step - 4].mean() > 4 * reward[broken.step :].mean()
    first, *others = judge_records(simulated(own=1.0), None, policy=broken).findings
    assert (first.id, first.action) == (c.BROKEN, FIX) and not any(one.advice for one in others)


# --- sides, noise ----------------------------------------------------------------------------------------------------


def test_sides_that_are_clipped_alike_are_told_apart_in_one_run_of_a_hundred():
    called = sum(evidence_in(simulated(seed, rate=0.01), tested=False).lengths.sides_differ for seed in range(300))
    assert called <= 8  # more by chance in 1 of 250 tries at 1%, and fewer in 1 of 25 at 5%


def test_a_wider_clip_is_advised_against_noise_only_where_it_would_still_clip_and_lets_none_into_the_weights():
    few, wide = "ppo_mini_batch_size", "would do as well"
    moved, still = (simulated(noise=0.03, mini_batches=count) for count in (4, 1))
    gspo = moved.copy()
    gspo.attrs = moved.attrs | {"settings": RunSettings("gspo", None, 3e-4, 4e-4)}  # its weight is e^(S/L)
    moved, still, gspo = (judged(records).findings[0] for records in (moved, still, gspo))
    assert moved.id == still.id == gspo.id == c.NOISE
    assert all(SAME in found.advice for found in (moved, still, gspo))
    assert wide in gspo.advice and wide not in moved.advice and few not in moved.advice
    assert few in still.advice and wide not in still.advice and percent(still.value) in still.sentence


# --- too little ------------------------------------------------------------------------------------------------------

LITTLE = {
    "nothing recorded": (frame([]), c.UNKNOWN, RECORD),
    "no advantage": (frame([5, 9], 0.1, 0.1, advantage=0), c.UNKNOWN, RECORD),
    "all cut off, no advantage": (simulated().assign(advantage=0.0, truncated=1.0), c.CUT_OFF, FIX),
    "nothing moved": (frame([50, 90] * 100), c.LEVEL, FIX),
    "everything clipped": (frame([50, 90] * 100, 1.0, 1.0, clipped=np.ones(200), mini_batch=1), c.LEVEL, TAKE),
    "one length": (frame([50] * 200, 1.0, 1.0, clipped=np.arange(200) % 4 == 0, mini_batch=1), c.EVEN, KEEP),
    "few prompts": (frame([50, 90] * 10, 1.0, 1.0, clipped=np.arange(20) % 3 == 0, mini_batch=1), c.UNKNOWN, RECORD),
    "one prompt a stratum": (
        frame([50, 90] * 100, 1.0, 1.0, step=np.arange(200), clipped=np.arange(200) % 3 == 0, mini_batch=1),
        c.UNKNOWN,
        RECORD,
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", LITTLE)
def test_too_few_to_say_is_an_answer(case):
    records, cause, action = LITTLE[case]
    said = judged(records)
    assert outcome(said) == (cause, None, action) and said.findings[0].advice and said.evidence.lengths.effect is None


@pytest.mark.parametrize(("recorded", "with_clips"), [(40, 8), (12, 6), (9, 9), (9, 4)])
def test_ten_steps_are_asked_for_only_where_fewer_are_recorded(recorded, with_clips, tmp_path):
    table = synthetic_run.records(np.random.default_rng(0), "fspo", recorded)
    table.loc[table.step <= recorded - with_clips, "clipped"] = np.float32(0)
    synthetic_run.write_records(tmp_path / "records", table, "fspo")
    said = judge(runs.read_run(tmp_path, "run"))
    first = said.findings[0]
    assert (first.action, said.evidence.lengths.effect.steps) == (RECORD, with_clips)
    assert ("10 steps or more" in first.advice) == (recorded < 10)
    assert (f"{with_clips} of {recorded} steps" in first.sentence) == (with_clips < recorded)


@pytest.mark.parametrize("column", ["quadratic_variation", "log_ratio"])
def test_a_broken_value_is_named_and_says_nothing_of_the_noise(column):
    records = simulated(noise=0.004)
    broken = records.copy()
    first = broken.index[broken.mini_batch == 0][:30]
    broken.loc[first, column] = np.nan
    sound, found = (evidence_of_records(one, records.attrs["settings"]) for one in (records.drop(first), broken))
    assert found.noise.outside == pytest.approx(sound.noise.outside, abs=1e-3)
    assert found.not_finite == pytest.approx(30 / len(records))
    every = evidence_of_records(records.assign(**{column: np.nan}), records.attrs["settings"])
    assert conclude(every)[0].id == c.NOT_FINITE


# --- where nothing can be calibrated ---------------------------------------------------------------------------------


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
        steps = [live.logged(logged_by_verl(part, [2, 2], mini_batches)) for _, part in table.groupby("step")]
        lines = [json.dumps({"step": step, "data": metrics}) for step, metrics in enumerate(steps, start=1)]
        (tmp_path / "metrics-1.jsonl").write_text("\n".join(lines) + "\n")
    said = judge(runs.read_run(tmp_path, "run")).findings[0]
    assert (said.id, said.action) == (c.LEVEL, FIX)
    assert ("ppo_mini_batch_size" in said.advice) == (mini_batches == 1) != ("learning rate" in said.advice)
    assert ("one optimiser step" in said.sentence) == (mini_batches == 1)
    assert cli.main(["calibrate", str(tmp_path)]) == 2
    assert f"fspo-verl calibrate: {said}" in capsys.readouterr().err


BROKEN = {
    "not finite": still(4).assign(decision="nonfinite"),
    "not finite, and some moved": synthetic_run.records(np.random.default_rng(0)).assign(decision="nonfinite"),
    "noise alone, out of reach": synthetic_run.records(np.random.default_rng(0), mini_batches=1).assign(
        log_ratio=1.0, quadratic_variation=1.0, clipped=1.0
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_calibrate_begins_with_what_to_fix_though_there_is_no_eps(name, tmp_path, capsys):
    synthetic_run.write_records(tmp_path / "records", BROKEN[name], "fspo")
    said = judge(runs.read_run(tmp_path, "run")).findings[0]
    assert said.action == FIX
    code = cli.main(["calibrate", str(tmp_path)])
    out, err = capsys.readouterr()
    assert (said.sentence in out and said.advice in out) if code == 0 else str(said) in err


# --- the truth table -------------------------------------------------------------------------------------------------

_MANY = ("even", "even, heavy tails", "even, slopes that differ by step, sd 0.3")
_SURE = ["shorter", "longer", "bypass, hardly any mismatch", "even, 5 steps, slopes that differ by step, sd 0.3"]
_SURE += [f"{name}, 30 steps" for name in ("both ends", "the middle", "opposite slopes of the sides")]
_SURE += [name for name, cell in truth_table.CELLS.items() if cell.cause not in (c.EVEN, c.LENGTH)]


@pytest.mark.parametrize("name", _SURE)
def test_what_is_plain_to_see_is_said_and_advised(name):
    found = truth_table.outcomes(truth_table.CELLS[name], range(5))
    assert found[truth_table.RIGHT, truth_table.RIGHT] >= 4


@pytest.mark.parametrize("name", _MANY)
def test_false_alarms_are_as_rare_as_they_should_be(name):
    found = truth_table.outcomes(truth_table.CELLS[name], range(runs := 40))
    for place in (0, 1):
        wrong = sum(count for pair, count in found.items() if pair[place] == truth_table.WRONG)
        assert wrong <= binom.ppf(0.999, runs, 0.05)


def test_cells_name_every_truth():
    assert {cell.cause for cell in truth_table.CELLS.values()} == {*CAUSES, c.EVEN, c.CHANGE} - {c.BROKEN}
    assert {cell.who for cell in truth_table.CELLS.values()} == {None, *WHO}
