# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Find the band that clips a target share of the responses and treats lengths alike, from what a run has recorded.

eps_high is set so that the target share of the responses with A > 0 lies above the band, and
eps_low so that the same share of those with A < 0 lies below it. All recorded responses with an
advantage count, also those of the first mini-batch of each rollout, which have not moved and
cannot be clipped: this is the rate that a report shows, and the metrics of a run as
fspo/clip_rate/all. (Their actor/fspo/clip_fraction is of all responses.)

Several kinds of band are fitted on the earlier half of the steps and judged on the later half.
Recommended is the simplest that treats lengths alike there, as far as the records tell, and that
limits how far a response may move; where none does, the one that comes nearest.

The answer is that of the recorded updates. Trained with another band, learning rate or batch
size, the policy moves otherwise: calibrate again from the records of that run.

Without records the metrics give a coarser answer, from a Gaussian law of S/sqrt(L).
"""

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Iterable

import numpy as np
import pandas as pd

from fspo_verl.analysis.band_fit import SIDES, Fit
from fspo_verl.analysis.calibrate import Calibration, calibrate
from fspo_verl.analysis.coarse import Coarse, coarse
from fspo_verl.analysis.resampling import Estimate, number
from fspo_verl.analysis.runs import RECORDS_DIR, Run, read_run
from fspo_verl.band import Band
from fspo_verl.observe import noise
from fspo_verl.observe.noise import Noise

ACTOR = "actor_rollout_ref.actor."
KEY = f"{ACTOR}policy_loss."
_WIDTH = 100


def main(args: argparse.Namespace) -> int:
    """Print the calibration of ``args.run``; 0, or ValueError or FileNotFoundError with what to mend."""
    if not 0 < args.target_clip_rate < 1:
        raise ValueError(f"--target-clip-rate={args.target_clip_rate:g} must lie between 0 and 1")
    for option in ("bins", "min_count", "max_rows"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')}={getattr(args, option)} must be at least 1")
    run = read_run(args.run, args.run.name, args.max_rows)
    if run.records.empty:
        source, result = "metrics", coarse(run.metrics, args.target_clip_rate)
        print(coarse_text(result, run))
    else:
        rng = np.random.default_rng(args.seed)
        source, result = "records", calibrate(run.records, args.target_clip_rate, rng, args.bins, args.min_count)
        print(text(result, run))
    if args.json:
        found = {"run": str(run.folder), "source": source} | _plain(result)
        args.json.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    return 0


# --- text ------------------------------------------------------------------------------------------------------------


def text(result: Calibration, run: Run) -> str:
    """What the records say: the recommended band and why, what it rests on, and the other bands."""
    chosen = result.chosen
    blocks = [
        _wrap(f"{run.name}: recommended is {chosen.name}, which clips {result.target:g} on each side"),
        _paste(chosen.band, run),
        _list("Why", result.reasons),
        *([_list("Warnings", result.warnings)] if result.warnings else []),
        f"Judged on {result.halves[1]}, fitted on {result.halves[0]}\n{_judged(result)}",
        _wrap(
            f"Bands fitted on all records (target {result.target:g} of all responses with A > 0, and of all with "
            "A < 0, on-policy ones included)"
        )
        + f"\n{_bands(result.fits)}",
        f"Clip rate from the first to the last mini-batch of a rollout\n{_mini_batches(result.fits)}",
        f"Responses\n{_responses(result, run)}",
        f"Log-ratio S of a response with L tokens; Q is the sum of its squared token log-ratios\n{_law(result)}",
        _wrap(
            "A band is named by its width and, unless that is 0, its centre. Clip rate: over both sides and the dual "
            f"clip, with the interval in which a re-run of the same size lands, given other {result.rerun_by} and the "
            "same course of training. LRE: largest relative departure of a length bin's acceptance from the overall "
            "one, with eps scaled to the target there, beside what chance gives in 97.5% of draws at most. Edge: the "
            "quantile of S that a band of this clip rate has to follow. Intervals are 95%; those of eps, clip rate and "
            f"edge resample {result.rerun_by}, the others prompts."
        ),
    ]
    others = [found for found in result.fits if found.band and found is not chosen]
    blocks += [f"{found.name}:\n{_paste(found.band, run)}" for found in others]
    if result.gspo:
        lines = _lines({"+algorithm.policy_loss": "gspo"} | {ACTOR + name: end for name, end in result.gspo.items()})
        blocks.append(f"For comparison, GSPO with a range that clips as much of these records:\n{lines}")
    return "\n\n".join(blocks)


def coarse_text(result: Coarse, run: Run) -> str:
    """What the metrics say."""
    moved = "not known, so all are taken to have moved" if result.moved is None else f"{result.moved:.0%}"
    rows = [
        ("responses that move", moved),
        ("kappa", f"about {result.kappa:.2f} (0: S does not drift, 1: it drifts by -Q/2)"),
        ("sigma*sqrt(L)", f"about {result.spread:.2f} at the longest response (the drift matters from 1)"),
        ("numerical noise", _noise(result.noise)),
    ]
    blocks = [
        _wrap(
            f"{run.name}: no records, so a coarse answer without intervals, from the metrics of {result.steps} steps"
        ),
        _wrap(
            "It takes S/sqrt(L) of the responses that move in a step for Gaussian, with the mean and spread that "
            "the metrics show, and for independent of the advantage. Real tails are heavier, the first "
            "mini-batches move less than the last, and updates push responses with A < 0 down, so that more of "
            "these may be clipped. For an answer with intervals, for the other modes and for a recommendation, "
            f"record the run: {RECORDS_DIR}=DIR."
        ),
        _rows(rows),
        f"Centre 0, width sqrt(L), for a clip rate of {result.target:g} on each side:\n{_paste(result.band, run)}",
    ]
    floor = 0.0 if result.noise is None else noise.EPS_IN_SIGMA * result.noise.sigma
    if min(result.eps_low, result.eps_high) < floor:
        help_ = f"eps lies below the numerical noise, {floor:.2g}. What helps: a wider eps, {noise.HELP}"
        blocks.append(_wrap(help_, "Warning: "))
    return "\n\n".join(blocks)


def _responses(result: Calibration, run: Run) -> str:
    loss = run.settings.loss if run.settings else "loss not known"
    counts = f"{result.responses:,} with an advantage, of {result.prompts:,} prompts in {result.steps:,} steps"
    return _rows(
        [
            ("responses", counts),
            ("length", f"{result.shortest:,} to {result.longest:,} tokens"),
            ("moved", f"{result.moved:.1%} of them; the others are on the policy and cannot be clipped"),
            ("clip rate", f"{result.clip_rate:.3f} in this run ({loss})"),
        ]
    )


def _law(result: Calibration) -> str:
    law, power = result.law, result.power
    powers = ", ".join(f"{name} {number(power[name].value, '.2f')}" for name in ("upper", "lower", "earlier", "later"))
    spread = "no length bin has enough responses"
    if bin_ := result.spread:
        tokens = f"{bin_['low']:,.0f} to {bin_['high']:,.0f} tokens"
        spread = f"{Estimate(bin_['value'], bin_['lower'], bin_['upper']):.2f} at {tokens}   the drift matters from 1"
    return _rows(
        [
            ("sigma", f"{law.sigma:.3g} per token"),
            ("numerical noise", _noise(result.noise)),
            ("sigma*sqrt(L)", spread),
            ("kappa", f"{law.kappa:.2f}   0: S does not drift, 1: it drifts by -Q/2"),
            ("edge ~ L^p", f"p = {power['both']:.2f}   {powers}"),
            ("std(S) ~ L^p", f"p = {law.std_slope:.2f}   a width of sqrt(L) assumes 0.5"),
            ("Var(S)", "a + b L + c L^2:"),
            *((f"  {name}", f"{term:.2g}") for name, term in zip("abc", law.variance_law, strict=True)),
            ("last 4 tokens", f"{law.last_share:.2f} of Q"),
            ("top 1% of tokens", f"{law.top_share:.2f} of Q: where most, S has heavy tails"),
        ]
    )


def _noise(on_policy: Noise | None) -> str:
    if on_policy is None:
        return "not known: no response is known not to have moved"
    return f"{on_policy.sigma:.2g} per token, of {on_policy.responses:,} responses that have not moved"


def _judged(result: Calibration) -> str:
    rates = [("", "clip rate predicted", "found", "LRE, A > 0", "chance", "LRE, A < 0", "chance")]
    lengths = []
    for found, earlier, judgement in zip(result.fits, result.earlier, result.judged, strict=True):
        if judgement is None:
            continue
        lre = [number(judgement.lre[side][key], ".2f") for side in SIDES for key in ("lre", "floor_upper")]
        name = earlier.name if found.shape.power else found.name
        table = judgement.by_length
        rates.append((name, f"{earlier.rates['all']:.3f}", f"{judgement.rates['all']:.3f}", *lre))
        lengths = lengths or [("found, from length", *(f"{low:,}" for low in table["low"]))]
        lengths.append((name, *(number(rate, ".2f") for rate in table["rate"])))
    return f"{_aligned(rates)}\n\n{_aligned(lengths)}" if lengths else "  no band reaches the target in both halves"


def _bands(fits: tuple[Fit, ...]) -> str:
    rows = [
        (found.name, f"{found.eps_low:.3g}", f"{found.eps_high:.3g}", f"{found.rates['all']:.3f}")
        for found in fits
        if found.band
    ]
    refusals = [_wrap(f"{found.name}: {found.refused}", "  ") for found in fits if found.refused]
    return "\n".join([_aligned([("", "eps_low", "eps_high", "clip rate"), *rows]), *refusals])


def _mini_batches(fits: tuple[Fit, ...]) -> str:
    fitted = [found for found in fits if found.band]
    groups = fitted[0].by_mini_batch[["first", "last"]].itertuples(index=False)
    names = [str(first) if first == last else f"{first}-{last}" for first, last in groups]
    rows = [(found.name, *(number(rate, ".3f") for rate in found.by_mini_batch["rate"])) for found in fitted]
    return _aligned([("", *names), *rows])


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _rows(pairs: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<20}{text}" for name, text in pairs)


def _list(title: str, items: Iterable[str]) -> str:
    return "\n".join([title, *(_wrap(item, "  - ") for item in items)])


def _wrap(text: str, first: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=False)


def _paste(band: Band, run: Run) -> str:
    """Hydra overrides, one a line; with what else must change in a run that trained with another band or loss."""
    default, settings = Band(), run.settings
    before = settings and settings.band or default
    fitted = ("length_power", "realized_limit")
    reset = {name: getattr(default, name) for name in fitted if getattr(before, name) != getattr(default, name)}
    selected = {"+algorithm.policy_loss": "fspo"} if settings and settings.loss != "fspo" else {}
    return _lines(selected | {KEY + name: value for name, value in (reset | overrides(band)).items()})


def _lines(items: dict[str, float | str | None]) -> str:
    return " \\\n".join(f"  {key}={'null' if value is None else value}" for key, value in items.items())


def overrides(band: Band) -> dict[str, float | str | None]:
    """Fields of the policy loss that give this band, whatever eps a launch has; the others where not the default."""
    values = {"eps": None, "eps_low": band.low, "eps_high": band.high, "eps_dual": band.eps_dual}
    values["normalization"] = band.normalization
    fitted = {name: getattr(band, name) for name in ("length_power", "realized_limit")}
    return values | {name: value for name, value in fitted.items() if value != getattr(Band, name)}


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value):
    """Built-in types only; NaN as None, a NamedTuple by its fields, a table by its rows, a fit with its overrides."""
    if dataclasses.is_dataclass(value):
        fields = dict(vars(value))
        if isinstance(value, Coarse | Fit) and value.band:
            fields["overrides"] = {KEY + name: setting for name, setting in overrides(value.band).items()}
        if isinstance(value, Fit):
            fields["name"] = value.name
        return _plain(fields)
    if isinstance(value, pd.DataFrame):
        return _plain(value.to_dict("records"))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
