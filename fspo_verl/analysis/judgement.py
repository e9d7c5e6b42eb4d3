# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The judgement of a run, the same for every command: its evidence, from records or metrics, and its findings.

Records become the series that a run logs, and their evidence is made as that of metrics is. Tests on responses add to
it. Causes and words are those of :mod:`fspo_verl.analysis.causes`; advice on a range is about those that were tried
(:mod:`fspo_verl.analysis.widths`).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr

from fspo_verl.analysis import fit, live, mismatch, widths
from fspo_verl.analysis.breaks import find_break
from fspo_verl.analysis.causes import CHANGE, EVEN, HEALTH, LENGTH, SHARE_CUT_OFF, UNKNOWN, conclude
from fspo_verl.analysis.clip_rates import prompts_of, third_of
from fspo_verl.analysis.evidence import TYPICAL, Break, Evidence, Lengths, evidence_of
from fspo_verl.analysis.length_effect import (
    BY_SIDE,
    ENDS,
    MIDDLE,
    MIN_PROMPTS,
    MIN_STEPS,
    LengthEffect,
    length_effect,
)
from fspo_verl.analysis.metric_facts import LEARN_MORE, course, cut_off, facts
from fspo_verl.analysis.runs import Run
from fspo_verl.analysis.widths import Comparison, Width
from fspo_verl.clips import MATCHED_RATE, BandClip
from fspo_verl.findings import FIX, KEEP, NOTE, RECORD, TAKE, Finding
from fspo_verl.keys import RECORDS_DIR
from fspo_verl.loss import MAX_LOG_RATIO
from fspo_verl.observe.columns import OPTIONAL
from fspo_verl.observe.metrics import NAMES, SERIES, metrics
from fspo_verl.observe.quotients import Counted, parts
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import percent, show

_RARE_SIDE = 0.01  # p-value of two sides; with RARE of the lengths a weighted Bonferroni split of 6%


class Verdict(Enum):
    """The advice on the range of a run whose lengths were tested."""

    ALONE = "there is no other range to compare it with"
    APART = "the clip cannot be brought to the rate of the others"
    CHANGED = "the dependence changes over the run"
    UNSETTLED = "there are too few steps to tell a dependence from slopes that persist"
    NO_EVEN = "none on offer is even"
    NO_BETTER = "none is more even by more than noise"
    EVEN = "no dependence is shown, and none is more even"
    LOOKS_BETTER = "another is more even, though no dependence is shown"
    BETTER = "another is more even"


class Judgement(NamedTuple):
    """The result of :func:`judge`.

    Attributes:
        findings: the conclusion first.
        compared: the ranges that were tried; None if the advice is not about them.
        verdict: what is advised on the range; None where that is not asked.
    """

    findings: list[Finding]
    evidence: Evidence
    compared: Comparison | None = None
    verdict: Verdict | None = None

    @property
    def width(self) -> Width | None:
        """The range to take in place of the run's own; None where that stays."""
        return self.compared.best if self.verdict is Verdict.BETTER and self.compared else None


def judge(run: Run, rate: float = MATCHED_RATE) -> Judgement:
    """Judge a run; too little data is an answer, and only none at all is an error.

    Args:
        rate: clip rate of a range to take, at which ranges are compared.

    Raises:
        ValueError: there are neither records nor metrics to judge it by; says where they come from.
    """
    if len(run.records):
        found = judge_records(run.rollouts, run.settings, rate, find_break(run.metrics))
        return found._replace(findings=[*found.findings, *_incomplete(run)])
    evidence = evidence_of_metrics(run)
    if evidence.clip_rate is None and ((facts_of_log := facts(run)) or evidence.broken):
        return Judgement(_of_log(facts_of_log, evidence), evidence)
    first, *others = conclude(evidence)
    if first.id == UNKNOWN and evidence.clip_rate is None and not others:
        raise ValueError(
            f"{run.folder} holds nothing to judge: no records of responses ({RECORDS_DIR}=DIR), and no metrics of the "
            f"training (trainer.logger=[console,file]). Both come from: {LEARN_MORE}"
        )
    how = f"Train with {RECORDS_DIR}=DIR"
    if run.settings is None or run.settings.loss != "fspo":
        how += " and algorithm.policy_loss=observed (algorithm.policy_loss=gspo and grpo include it)"
    first = replace(first, advice=f"{first.advice} {how}.", action=first.action or RECORD)
    if first.id != UNKNOWN:
        others.append(Finding("no records", NOTE, "These are rates only, no test: there are no records."))
    return Judgement([first, *others], evidence)


def judge_records(
    records: pd.DataFrame, settings: RunSettings | None, rate: float = MATCHED_RATE, policy: Break | None = None
) -> Judgement:
    """:func:`judge` of records alone, those of rejected responses included; ``policy``: where metrics say it broke."""
    evidence = replace(evidence_of_records(records, settings), policy=policy)
    findings, effect = conclude(evidence), evidence.lengths.effect
    if effect is None or not effect.is_of_run or findings[0].action == FIX:
        return Judgement(findings, evidence)
    compared = widths.compare(records[records["length"] > 0], settings, effect.depends, rate)
    verdict = decide(effect, compared)
    for place, one in enumerate(findings):
        if one.action and one.id in (LENGTH, CHANGE, UNKNOWN, EVEN):
            findings[place] = _with_advice(one, verdict, compared)
    return Judgement(findings, evidence, compared, verdict)


# --- evidence --------------------------------------------------------------------------------------------------------


def evidence_of_metrics(run: Run) -> Evidence:
    """The evidence that the metrics of a run give, over all steps."""
    logged = run.metrics
    steps = logged[logged.filter(regex=f"^{SERIES}").notna().any(axis=1)]
    found = live.over_steps(steps.to_dict("records"))
    typical = logged.filter(regex=f"^({'|'.join(TYPICAL)})").median().dropna()
    found |= {str(name): float(value) for name, value in typical.items()}
    if NAMES["longest"] in logged:
        found[NAMES["longest"]] = float(logged[NAMES["longest"]].max())
    evidence = evidence_of(found, run.settings, len(steps))
    evidence = replace(evidence, broken=run.broken, policy=find_break(logged))
    shares = logged["fspo/truncated"].dropna() if "fspo/truncated" in logged else cut_off(run)
    return _with_course(evidence, shares)


def _with_course(evidence: Evidence, cut_off: pd.Series) -> Evidence:
    """The evidence with the course over the steps of the share that is cut off."""
    if (found := course(cut_off)) is None:
        return evidence
    many = cut_off.index[cut_off >= SHARE_CUT_OFF]
    since = int(many[0]) if len(many) else None
    share = found.last if evidence.cut_off is None else evidence.cut_off
    return replace(evidence, cut_off=share, cut_off_before=found.first, cut_off_since=since)


def evidence_of_records(records: pd.DataFrame, settings: RunSettings | None, tested: bool = True) -> Evidence:
    """The evidence that records give; without a test of lengths where not ``tested``."""
    counted = records[(records["advantage"] != 0) & (records["length"] > 0)]
    if records.empty:
        return Evidence(responses=0, steps=0)
    steps = int(records["step"].nunique())
    longest = float(records["length"].max())
    found = replace(evidence_of(series(records, settings), settings, steps), responses=len(counted), longest=longest)
    if "truncated" in records:
        found = _with_course(found, records[records["length"] > 0].groupby("step")["truncated"].mean().dropna())
    if counted.empty:
        return found
    clipped, better = counted["clipped"].to_numpy(np.float64), (counted["advantage"] > 0).to_numpy()
    effect, later = length_effect(records) if tested else None, fit.is_later_half(counted)
    kept = counted[counted["clipped"] == 0]
    lengths = Lengths(
        effect=effect,
        too_few=_too_few(counted) if tested and not effect else None,
        one_length=counted["length"].nunique() == 1,
        tails=parts(_by_length(counted), 0.1),
        of_sides=tuple(parts(_by_length(counted[side])) for side in (better, ~better)),
        of_halves=tuple(parts(_by_length(counted[half])) for half in (~later, later)),
        between=_between(counted),
        sides_differ=_sides_differ(counted, clipped, better),
        by_token=bool(((clipped > 0) & (clipped < 1)).any()),
    )
    effective = float(kept.groupby("step")["log_ratio"].apply(_effective).median()) if found.weighs else None
    return replace(found, effective=effective, thirds=parts(_by_length(counted)), lengths=lengths)


def series(records: pd.DataFrame, settings: RunSettings | None) -> dict[str, float]:
    """The live series of these responses as if they were of one step, all lengths in one bin."""
    records = mismatch.with_engines(records, settings)
    names = ["length", "log_ratio", "quadratic_variation", "advantage", *OPTIONAL]
    columns = {name: records[name].to_numpy(np.float64) for name in names if name in records}
    finite = np.isfinite(columns["log_ratio"]) & np.isfinite(columns["quadratic_variation"])
    columns["finite"] = (finite & (records["decision"] != "nonfinite")).to_numpy(np.float64)
    for name in ("log_ratio", "quadratic_variation"):
        columns[name] = np.where(columns["finite"], columns[name], 0.0)
    clipped = records["clipped"].to_numpy(np.float64)
    below, beyond = ((records["decision"] == side).to_numpy() for side in ("lower", "dual"))
    sides = {"upper": ~(below | beyond), "lower": below, "dual": beyond}
    columns |= {f"clipped_{side}": clipped * is_there for side, is_there in sides.items()}
    if settings and settings.trained_band is not None:
        columns["outside"] = BandClip("", "", settings.trained_band).outside(records) & (columns["finite"] > 0)
    bypass = settings is not None and settings.old_log_probs_from_rollout
    on_policy = (records["mini_batch"] == 0).to_numpy() & (not bypass)
    return live.series(metrics(columns, (), on_policy, len(records)))


def _effective(log_ratio: pd.Series) -> float:
    """Kish's effective sample size of responses that are weighed by e^S, as a share of their number."""
    weight = np.exp(np.minimum(log_ratio.to_numpy(np.float64), MAX_LOG_RATIO))
    return float(weight.mean() ** 2 / np.square(weight).mean())


def _by_length(counted: pd.DataFrame) -> list[Counted]:
    length, place = np.unique(counted["length"].to_numpy(), return_inverse=True)
    responses, clips = np.bincount(place), np.bincount(place, counted["clipped"].to_numpy(np.float64))
    return [*map(Counted, length.tolist(), length.tolist(), responses.tolist(), clips.tolist())]


def _between(counted: pd.DataFrame) -> str | None:
    """Find what would make counted rates differ over thirds of the length, were each side or mini-batch clipped alike.

    The larger part of the log ratio of the longest and the shortest third; "both" where neither makes half of it.
    """
    third = third_of(counted["length"].to_numpy())
    if len(np.unique(third)) < 2:
        return None

    def ratio(clipped: pd.Series) -> float:
        by_third = clipped.groupby(third).mean()
        return math.log(max(by_third.iloc[-1], 1e-9) / max(by_third.iloc[0], 1e-9))

    clipped, side = counted["clipped"], counted["advantage"] > 0
    whole = ratio(clipped)
    by_side = ratio(clipped.groupby(side).transform("mean")) / whole if whole else 0.0
    by_mini_batch = (
        ratio(clipped.groupby([counted["step"], counted["mini_batch"]]).transform("mean")) / whole if whole else 0.0
    )
    if max(by_side, by_mini_batch) < 0.5:
        return "both"
    return "side" if by_side >= by_mini_batch else "mini-batch"


def _too_few(counted: pd.DataFrame) -> str:
    """Why there is no test."""
    if counted["length"].nunique() == 1:
        return "all have one length, so there is nothing to compare"
    prompts = np.unique(prompts_of(counted)[(counted["clipped"] > 0).to_numpy()]).size
    why = "too few mini-batches hold several prompts and lengths of one sign of the advantage"
    if prompts < MIN_PROMPTS:
        why = f"clips fell on {prompts} prompts, and a test needs {MIN_PROMPTS}"
    return f"too few to say whether length matters ({why})"


def _sides_differ(counted: pd.DataFrame, clipped: np.ndarray, better: np.ndarray) -> bool | None:
    """Whether the clip rates of both signs of the advantage differ: Student's t over the clusters, linearised."""
    if better.all() or not better.any():
        return None
    by_step = counted["step"].nunique() >= MIN_STEPS
    cluster = pd.factorize(counted["step"])[0] if by_step else prompts_of(counted)
    rates = [clipped[side].mean() for side in (better, ~better)]
    part = np.where(better, (clipped - rates[0]) / better.sum(), (rates[1] - clipped) / (~better).sum())
    by_cluster, count = np.bincount(cluster, part), int(cluster.max()) + 1
    if count < 3 or not by_cluster.any():
        return False
    ratio = (rates[0] - rates[1]) / math.sqrt(np.square(by_cluster).sum() * count / (count - 1))
    return bool(2 * stdtr(count - 1, -abs(ratio)) < _RARE_SIDE)


# --- advice on ranges ------------------------------------------------------------------------------------------------


_ADVICE = {
    Verdict.ALONE: (KEEP, "Keep the range: there is no other to compare it with."),
    Verdict.APART: (KEEP, "Keep the clip: it cannot be brought to the clip rate at which ranges are compared."),
    Verdict.CHANGED: (KEEP, "Keep the range: what is even in one half of the run is not in the other."),
    Verdict.UNSETTLED: (RECORD, "Record more steps."),
    Verdict.NO_EVEN: (KEEP, "Keep the range: none on offer is even here."),
    Verdict.NO_BETTER: (KEEP, "Keep the range: none that was tried is more even by more than noise all over the run."),
    Verdict.EVEN: (KEEP, "{before}"),
    Verdict.LOOKS_BETTER: (RECORD, "Record more steps: {best} looks more even, though no dependence is shown."),
    Verdict.BETTER: (TAKE, "Take {best}."),
}


def decide(effect: LengthEffect, compared: Comparison) -> Verdict:
    """Decide what is advised on a range, by the test and the comparison."""
    best = compared.best
    if effect.turns:
        return Verdict.CHANGED
    if effect.is_unsettled:
        return Verdict.UNSETTLED
    if compared.own is None:
        return Verdict.APART
    if not compared.others:
        return Verdict.ALONE
    if effect.who in (ENDS, MIDDLE, BY_SIDE) and (best is None or best.shows):
        return Verdict.NO_EVEN
    if effect.depends:
        return Verdict.NO_BETTER if best is None else Verdict.BETTER
    return Verdict.EVEN if best is None else Verdict.LOOKS_BETTER


def _with_advice(finding: Finding, verdict: Verdict, compared: Comparison) -> Finding:
    """The finding on lengths with the advice of a verdict."""
    action, advice = _ADVICE[verdict]
    best = "" if compared.best is None else _a_range(compared.best)
    return replace(finding, action=action, advice=advice.format(best=best, before=finding.advice), command="")


def _a_range(width: Width) -> str:
    return "a range of fixed width" if width.name == fit.FIXED else f"a range whose width follows {width.name}"


def comparison_rows(compared: Comparison | None) -> list[dict]:
    """The ranges that were tried, the run's own first: range, uneven, and the smallest unevenness that would show."""
    if compared is None:
        return []
    own = [] if compared.own is None else [compared.own]
    return [
        {"range": f"{one.name}{' (the run)' * (one in own)}"}
        | {"uneven": one.uneven, "smallest": None if math.isnan(one.smallest) else one.smallest}
        for one in (*own, *compared.others)
    ]


def share(value: float | None) -> str:
    """A share of that table in per cent, or a dash."""
    return "–" if value is None else percent(value)


def show_comparison(compared: Comparison | None) -> None:
    """Print that table, and what is to be known of it; nothing where nothing was compared."""
    if rows := comparison_rows(compared):
        texts = [(row["range"], *(share(row[name]) for name in ("uneven", "smallest"))) for row in rows]
        show([("range", "uneven", "smallest that would show"), *texts], widths=(34, 8))
        show([(note,) for note in comparison_notes(compared)], widths=())


def comparison_notes(compared: Comparison | None) -> list[str]:
    """Return the notes below that table, in sentences."""
    if compared is None or not (compared.own or compared.others):
        return []
    notes = [
        f"Each range is scaled to clip {percent(compared.rate)} and judged on steps that it was not fitted to. Uneven: "
        "by how much its clip rate varies over fifths of the length of the better and of the worse responses, as a "
        "share of the rate. Below the smallest that would show it may be chance."
    ]
    if compared.is_tie:
        notes.append("Another range is as even within noise: then sqrt(length) is taken, which has nothing to fit.")
    return notes + [f"Not compared: {name} ({why})." for name, why in compared.untried.items()]


# --- what else -------------------------------------------------------------------------------------------------------


def _of_log(facts_of_log: list[Finding], evidence: Evidence) -> list[Finding]:
    """Judge a run that was not observed: never why responses are clipped. The launch that would tell comes last."""
    more = f"To see why responses are clipped, and of which lengths: {LEARN_MORE}."
    health = [one for one in conclude(evidence) if one.id in HEALTH]
    if health and health[0].action == FIX:
        return [replace(health[0], advice=f"{health[0].advice} {more}"), *health[1:], *facts_of_log]
    by_id = {one.id: one for one in facts_of_log}
    nothing = by_id.get("no advantage")
    first = nothing if nothing and nothing.value == 1 else by_id.get("clipped", facts_of_log[0])
    others = [*health, *(one for one in facts_of_log if one is not first)]
    return [replace(first, id=UNKNOWN, advice=more, action=RECORD), *others]


def _incomplete(run: Run) -> Iterator[Finding]:
    if steps := run.recorded.incomplete_steps:
        said = f"Steps with missing records: {steps:,}. Their files are damaged, gone or were not written."
        yield Finding("incomplete", NOTE, said, "", steps)
    if (rows := run.recorded.rows) > len(run.records):
        said = f"A random {len(run.records):,} of its {rows:,} records are used (--max-rows)."
        yield Finding("sample", NOTE, said, "", len(run.records) / rows)
