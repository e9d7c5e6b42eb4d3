# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Find the band that clips a target share of the responses and treats lengths alike, from what a run has recorded.

eps_high is set so that the target share of the responses with A > 0 lies above the band, and
eps_low so that the same share of those with A < 0 lies below it. All recorded responses with an
advantage count, also those of the first mini-batch of each rollout, which have not moved and
cannot be clipped: this is the rate that a report shows, and the metrics of a run as
fspo/clip_rate/all. (Their actor/fspo/clip_fraction is of all responses.)

The width is that of FSPO, sqrt(length), unless a test says that it would clip lengths unlike at
this rate. Then the width is taken whose clip depends least on length in the later half of the
steps, with its shape fitted on the earlier half.

The answer is that of the recorded updates. Trained with another band, learning rate or batch
size, the policy moves otherwise: calibrate again from the records of that run.

Without records the metrics give a coarser answer, from a Gaussian law of S/sqrt(L).
"""

import argparse
import dataclasses
import json
import math
import textwrap

import numpy as np

from fspo_verl.analysis.band_fit import Fit, overrides
from fspo_verl.analysis.calibrate import Calibration, calibrate
from fspo_verl.analysis.coarse import Coarse, coarse
from fspo_verl.analysis.length_effect import LengthEffect
from fspo_verl.analysis.resampling import Estimate
from fspo_verl.analysis.runs import RECORDS_DIR, Run, read_run
from fspo_verl.analysis.verdict import percent
from fspo_verl.observe import noise

_WIDTH = 100
_CAVEAT = "this holds for the recorded updates: with another band, learning rate or batch size, calibrate again"


def main(args: argparse.Namespace) -> int:
    """Print the calibration of ``args.run``; 0, or ValueError or FileNotFoundError with what to mend."""
    if not 0 < args.target_clip_rate < 1:
        raise ValueError(f"--target-clip-rate={args.target_clip_rate:g} must lie between 0 and 1")
    if args.max_rows < 1:
        raise ValueError(f"--max-rows={args.max_rows} must be at least 1")
    run = read_run(args.run, args.run.name, args.max_rows)
    result: Coarse | Calibration
    if run.records.empty:
        source, result = "metrics", coarse(run.metrics, args.target_clip_rate)
        print(coarse_text(result, run))
    else:
        source, result = "records", calibrate(run.records, args.target_clip_rate)
        print(text(result, run))
        if args.all:
            print(f"\n{details(result, run)}")
    if args.json:
        found = {"run": str(run.folder), "source": source} | _plain(result)
        args.json.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    return 0


# --- text ------------------------------------------------------------------------------------------------------------


def text(result: Calibration, run: Run) -> str:
    """The answer in at most 15 lines: the verdict, eps now and then, what to paste, and one caveat."""
    chosen, trained = result.chosen, result.trained
    band, rates = chosen.band, chosen.rates
    assert band is not None and rates is not None, "a calibration chooses a shape that has a band"
    rate, lower, upper = map(percent, rates["all"])
    title = f"A width of {chosen.width} clips {rate} of these responses, and {lower} to {upper} of those of a re-run."
    root = next((found.effect for found in result.fits[1:] if found.shape == "sqrt(length)"), None)
    if root:
        who = "shorter" if root.exponent < 0 else "longer"
        title += f" A width of sqrt(length) would clip {who} ones more."
    now = {}
    if trained and (trained.length_power, trained.normalization) == (band.length_power, band.normalization):
        now = {"eps_low": trained.low, "eps_high": trained.high}
    eps = (("eps_low", chosen.eps_low), ("eps_high", chosen.eps_high))
    change = [f"{name} {f'{now[name]:.4g} -> ' if now else ''}{estimate:.3g}" for name, estimate in eps]
    caveat = (*result.warnings, _CAVEAT)[0]
    lines = [
        _wrap(f"{run.name}: {result.verdict.sentence}"),
        _wrap(title),
        "  " + "   ".join(change),
        _lines(overrides(band, run.settings)),
        _wrap(f"{caveat}.", "Note: "),
    ]
    return "\n".join(lines)


def details(result: Calibration, run: Run) -> str:
    """What ``--all`` adds: every shape, every other clip of the catalogue, and all that a reader should know."""
    blocks = [_wrap(note) for note in (*result.verdict.notes, *(f"{text}." for text in result.warnings[1:]))]
    band = result.chosen.band
    if result.noise and band and (warned := noise.warning(result.noise, band)):
        blocks.append(_wrap(f"{warned}.", "Warning: "))
    blocks.append(
        _wrap(
            f"Each width at a clip rate of {percent(result.target)} on each side. k: clip rate ~ length^k, 0 where "
            "lengths are clipped alike; held out: the later half of the steps, by a shape fitted on the earlier half. "
            f"Intervals are 95% and resample {result.rerun_by}."
        )
    )
    blocks += [_of_fit(found, run) for found in result.fits]
    blocks.append("What other clips need to take as much of these records")
    for rule in result.rules:
        block = _wrap(f"{rule.name}: {rule.range}")
        blocks.append(f"{block}\n{_lines(rule.overrides)}" if rule.overrides else block)
    return "\n\n".join(blocks)


def _of_fit(found: Fit, run: Run) -> str:
    if found.band is None or found.rates is None:
        return _wrap(f"{found.shape}: {found.refused}")
    tests = f"k {_effect(found.effect)}, held out {_effect(found.held_out)}"
    eps = f"eps_low {found.eps_low:.3g}, eps_high {found.eps_high:.3g}, clip rate {found.rates['all']:.3f}"
    return f"{_wrap(f'{found.width}: {tests}; {eps}')}\n{_lines(overrides(found.band, run.settings))}"


def _effect(effect: LengthEffect | None) -> str:
    return "-" if effect is None else f"{Estimate(effect.exponent, effect.lower, effect.upper):.2f}"


def coarse_text(result: Coarse, run: Run) -> str:
    """What the metrics say."""
    moved = "all, as the metrics do not tell," if result.moved is None else f"{result.moved:.0%} of the responses"
    found = (
        f"{run.name}: rates only, no test, from the metrics of {result.steps} steps, as there are no records. It takes "
        f"S/sqrt(length) of {moved} that move for Gaussian and independent of the advantage; real tails are heavier. "
        f"For intervals and a test set {RECORDS_DIR}=DIR and train."
    )
    blocks = [
        _wrap(found),
        f"Width sqrt(length), for a clip rate of {result.target:g} on each side:",
        _lines(overrides(result.band, run.settings)),
    ]
    floor = 0.0 if result.noise is None else noise.EPS_IN_SIGMA * result.noise.sigma
    if min(result.eps_low, result.eps_high) < floor:
        blocks.append(
            _wrap(f"Warning: eps lies below the numerical noise, {floor:.2g}. What helps: a wider eps, {noise.HELP}")
        )
    return "\n".join(blocks)


def _wrap(text: str, first: str = "") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=first, break_long_words=False, break_on_hyphens=False)


def _lines(items: dict[str, float | str | None]) -> str:
    """Hydra overrides, one a line."""
    return " \\\n".join(f"  {key}={'null' if value is None else value}" for key, value in items.items())


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value):
    """Built-in types only; NaN and infinity as None, a NamedTuple by its fields, a band with its overrides."""
    if dataclasses.is_dataclass(value):
        fields = dict(vars(value))
        if isinstance(value, Coarse | Fit) and value.band:
            fields["overrides"] = overrides(value.band)
        return _plain(fields)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
