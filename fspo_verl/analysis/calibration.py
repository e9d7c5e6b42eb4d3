# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Find the band that clips a target share of the responses and treats lengths alike, from what a run has recorded.

eps_high puts the target share of the responses with A > 0 above the band. eps_low puts the same
share of those with A < 0 below it. All recorded responses with an advantage count. Those of the
first mini-batch of each rollout have not moved and cannot be clipped, and they count, too. This is
the rate of the report and of fspo/clip_rate/all; actor/fspo/clip_fraction is of all responses.

The width is the one that the report advises. It is the run's own, unless one of the widths that
were tried is more even by more than noise. For a loss without a band it is FSPO's, sqrt(length).

The answer is that of the recorded updates. Trained with another band, learning rate or batch
size, the policy moves otherwise, and further where a rollout is trained on for several epochs:
calibrate again from the records of that run, until it clips what was asked for.

Without records the answer comes from metrics and a Gaussian law of S/sqrt(L), and is coarser.
"""

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fspo_verl.analysis import clip_rates, fit, numerical_noise
from fspo_verl.analysis.clip_rates import Estimate
from fspo_verl.analysis.conclusion import MEND, NOTHING_MOVED, RECORD, TAKE, percent
from fspo_verl.analysis.fit import FromMetrics, from_metrics
from fspo_verl.analysis.length_effect import MIN_STEPS
from fspo_verl.analysis.metric_facts import LEARN_MORE
from fspo_verl.analysis.overrides import band_overrides, loss_of, pasted, to_know
from fspo_verl.analysis.runs import Run, read_run
from fspo_verl.analysis.verdict import Verdict, verdict, verdict_of
from fspo_verl.band import DUAL, Band
from fspo_verl.keys import RECORDS_DIR
from fspo_verl.observe import noise
from fspo_verl.observe.metrics import PREFIX
from fspo_verl.observe.noise import Noise
from fspo_verl.observe.settings import RunSettings
from fspo_verl.output import say

_WIDTH = 100
_FEW_CLIPPED = 50


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` finds."""

    target: float
    verdict: Verdict  # on the clip that trained
    trained: Band | None  # the band that trained; None for a loss without one
    clusters: str  # of intervals: steps or prompts
    band: Band  # to take
    rate: Estimate  # its clip rate on these records, and the prediction interval for a re-run
    steps: int
    warnings: tuple[str, ...]
    noise: Noise | None  # against the band to take; None where no response is known not to have moved


def main(args: argparse.Namespace) -> int:
    """Print the calibration of ``args.run``; 0, or ValueError or FileNotFoundError with what to fix."""
    if not 0 < args.target_clip_rate < 1:
        raise ValueError(f"--target-clip-rate={args.target_clip_rate:g} must lie between 0 and 1")
    if args.max_rows < 1:
        raise ValueError(f"--max-rows={args.max_rows} must be at least 1")
    run = read_run(args.run, args.run.name, args.max_rows)
    if run.records.empty and not any(name.startswith(PREFIX) for name in run.metrics):
        raise ValueError(
            f"{args.run} holds no log-ratios of responses, and an eps needs them. What records them: {LEARN_MORE}"
        )
    result: FromMetrics | Calibration
    try:
        if run.records.empty:
            source, result = "metrics", from_metrics(run.metrics, args.target_clip_rate)
        else:
            source, result = "records", calibrate(run.records, args.target_clip_rate)
    except ValueError as error:
        if (said := verdict_of(run)).action != MEND:
            raise
        raise ValueError(f"{said.sentence} {said.advice} There is no eps to give: {error}") from error
    if args.json:
        answer = {"run": str(run.folder), "source": source} | _plain(result, run.settings)
        if isinstance(result, Calibration) and _within_noise(result):
            answer["overrides"] = answer["verdict"]["overrides"] = {}
        say(json.dumps(answer, indent=2, allow_nan=False))
        return 0
    say(text_from_metrics(result, run) if isinstance(result, FromMetrics) else text(result, run))
    return 0


def calibrate(records: pd.DataFrame, target: float) -> Calibration:
    """Fit the band that clips a target share of each side.

    Args:
        records: of a run, with on-policy responses.
        target: share between 0 and 1.

    Raises:
        ValueError: nothing has moved, a sign of the advantage is missing, or no band reaches the target.
    """
    if not (records["quadratic_variation"] > 0).any():
        raise ValueError(NOTHING_MOVED)
    if fit.resampled(records)[1].max() == 0:
        raise ValueError("all records are of one prompt in one step, and no other says what holds beyond it")
    settings, said = records.attrs["settings"], verdict(records, target)
    trained = settings and settings.trained_band
    width = trained or Band()
    if said.action == TAKE and said.comparison and said.comparison.best and said.comparison.best.band:
        width = said.comparison.best.band
    band = fit.with_eps(records, width, target)
    return Calibration(
        target,
        said,
        trained,
        fit.resampled(records)[0],
        band,
        fit.predicted_rate(records, band),
        int(records["step"].nunique()),
        tuple(_warnings(records, target, band)),
        numerical_noise.of_records(records, settings, band),
    )


def _warnings(records: pd.DataFrame, target: float, band: Band) -> Iterator[str]:
    """The more important ones first."""
    for name, side in (("eps_high", "upper"), ("eps_low", "lower")):
        clipped = target * clip_rates.sides(records)[side].sum()
        if clipped < _FEW_CLIPPED:
            yield f"{name} rests on {clipped:.0f} clipped responses: record more steps, or take a higher target"
    if fit.resampled(records)[0] == "prompts":
        yield "all records are of one step: eps and clip rate hold for its update, and another may move further or less"
    if band.dual > 1.01 * DUAL * band.high:
        yield (
            "responses with A < 0 move far upwards here, so that eps_dual is more than three times eps_high: the dual "
            "clip then takes at most a tenth of the target"
        )


# --- text ------------------------------------------------------------------------------------------------------------


def text(result: Calibration, run: Run) -> str:
    """The answer in at most 20 lines: the verdict, eps now and then, what to paste, and the next step."""
    trained, then, said = result.trained, result.band, result.verdict
    now = trained if trained and trained.form == then.form else None
    change = [
        f"{name} {f'{getattr(now, side):.4g} -> ' if now else ''}{getattr(then, side):.4g}"
        for name, side in (("eps_low", "low"), ("eps_high", "high"))
    ]
    lines = [
        _wrap(f"{run.name}: {said.sentence}"),
        _wrap(said.advice),
        _wrap(f"{_width(then)} clips {percent(result.rate.value)} of these responses. {_prediction(result)}"),
        "  " + "   ".join(change),
        _wrap(_within_noise(result)) or _paste_block(then, run.settings, said.advice),
        *(_wrap(f"{warning}.", "Note: ") for warning in result.warnings[:1]),
        _wrap(_next(result), "Next: "),
    ]
    return "\n".join(lines)


def _within_noise(result: Calibration) -> str:
    """What to say in place of overrides that would clip noise; empty for a band that is wider."""
    if result.noise is None or not noise.finding(result.noise, result.band):
        return ""
    return (
        f"There is nothing to paste: numerical noise alone puts {percent(result.noise.outside)} of the responses that "
        "no update had moved outside this band. Ask for a lower clip rate, or remove the noise first (docs/noise.md)."
    )


def _width(band: Band) -> str:
    name = fit.name_of(band)
    return "A fixed width" if name == fit.FIXED else f"A width that follows {name}"


def _prediction(result: Calibration) -> str:
    """The clip rate to expect of a re-run; empty where there are too few steps to tell."""
    rate, lower, upper = result.rate
    if result.clusters == "prompts" or result.steps < MIN_STEPS:
        steps = "One step is" if result.steps == 1 else f"{result.steps} steps are"
        return f"{steps} too few to say what a re-run would clip."
    if not upper - lower <= rate:
        return f"These {result.steps} steps differ too much to say what a re-run would clip."
    return f"A re-run at this eps would clip {percent(lower)} to {percent(upper)}, if it moved alike."


def _next(result: Calibration) -> str:
    if result.verdict.action == MEND:
        return "fix what the first line says, train, and calibrate from the records of that run."
    if _within_noise(result):
        return "remove the noise, train, and calibrate from the records of that run; or ask for a lower clip rate."
    if result.verdict.action == RECORD:
        steps = "more steps" if result.steps >= MIN_STEPS else f"{MIN_STEPS} steps or more"
        return f"record {steps}, and calibrate again."
    return (
        "train with this, and calibrate again from the records of that run, as another eps lets the policy move "
        "otherwise."
    )


def text_from_metrics(result: FromMetrics, run: Run) -> str:
    """What the metrics say, after what has to be mended first."""
    said = verdict_of(run)
    first = [_wrap(f"{run.name}: {said.sentence}"), _wrap(said.advice)] if said.action == MEND else []
    found = (
        f"{run.name}: rates only, no test, from the metrics of {result.steps} steps, as there are no records. It takes "
        f"S/sqrt(length) of the {result.moved:.0%} of the responses that move for Gaussian and independent of the "
        f"advantage; real tails are heavier. For intervals and a test set {RECORDS_DIR}=DIR and train."
    )
    blocks = [
        *first,
        _wrap(found),
        f"Width sqrt(length), for a clip rate of {result.target:g} on each side:",
        _paste_block(result.band, run.settings),
    ]
    floor = 0.0 if result.noise is None else noise.EPS_IN_SIGMA * result.noise.sigma
    if min(result.band.low, result.band.high) < floor:
        blocks.append(
            _wrap(
                f"Warning: this clip is narrower than the numerical noise, which asks for an eps of {floor:.2g} or "
                f"more. Ask for a lower clip rate, or remove the noise: {noise.HELP}."
            )
        )
    return "\n".join(blocks)


def _wrap(text: str, first: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=first, break_long_words=False, break_on_hyphens=False)


def _paste_block(band: Band, settings: RunSettings | None, said: str = "") -> str:
    """The arguments of `fspo-verl run` for a band, one a line, and what to know of them, unless that has been said."""
    loss, known = loss_of(band, settings), to_know(band, settings)
    words = [*([] if loss == "fspo" else [f"--loss {loss}"]), *pasted(band_overrides(band, settings))]
    block = " \\\n".join(f"  {word}" for word in words)
    return block if known in said else f"{block}\n{_wrap(known)}"


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value, settings: RunSettings | None):
    """Built-in types only; NaN and infinity as None, a NamedTuple by its fields, a band with its overrides."""
    if dataclasses.is_dataclass(value):
        fields = dict(vars(value))
        if isinstance(value, FromMetrics | Calibration):
            fields["overrides"] = band_overrides(value.band, settings)
        return _plain(fields, settings)
    if isinstance(value, dict):
        return {key: _plain(item, settings) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict(), settings)
    if isinstance(value, list | tuple):
        return [_plain(item, settings) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
