# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The clip rate to expect at each length from noise alone, without a run or before its next one.

  fspo-verl forecast --lengths 200,2000,8000 --sigma 0.01 --loss gspo --clip 0.0003 0.0004
  fspo-verl forecast --lengths 200,2000,8000 --k3 0.0004 --loss seq_is
  fspo-verl forecast RUN          sigma, lengths and the clip range of a run, or what of these its log holds

The log-ratio S of a response of L tokens is taken as normal, with variance sigma^2 L and mean -sigma^2 L / 2, as if
tokens were independent and spread alike. Half of the responses have an advantage above 0. A run gives two sigmas: its
noise (fspo/noise_sigma), which clips see, and the mismatch of trainer and rollout engine, which rejections see. In
bypass mode clips see the mismatch as well. --sigma stands for either, --k3 for the mismatch. Movement of the policy
itself is not included.

The forecast is wrong where tokens move together, and for short responses where few tokens carry the noise. The second
line gives the rates if 5% of the tokens carry all of it. In one record of chat FSPO's band clips 10% where the forecast
says 2%: measure with records before you rely on it.
"""

import argparse
import dataclasses
import math
from typing import NamedTuple

import pandas as pd
import torch

from fspo_verl.analysis import numerical_noise
from fspo_verl.analysis.mismatch import OPSM, RULES
from fspo_verl.analysis.runs import Run, read_run
from fspo_verl.clips import CLIPS, BandClip, of_run, ratio_band
from fspo_verl.observe.metrics import NAMES
from fspo_verl.output import show

_RULES = {rule.name: rule for rule in (*CLIPS.values(), *RULES) if isinstance(rule, BandClip) and rule is not OPSM}
CLIP_RATE, NOISE, K3 = NAMES["clip_rate"], "fspo/noise_sigma", ("fspo/mismatch_kl", "rollout_corr/k3_kl")
LENGTHS = tuple(f"response_length/{name}" for name in ("min", "mean", "max"))
CARRIERS = 0.05  # share of the tokens, for what unequal tokens would do
_LARGEST_SIGMA, _LONGEST = 10.0, 10_000_000  # nats, tokens


class Spread(NamedTuple):
    """Root mean square of a token's log-ratio where the policy has not moved, nats; NaN where it is not known."""

    noise: float  # of the trainer against itself
    mismatch: float  # of the trainer against the rollout engine
    bypass: bool = False  # the old log-probs are those of the rollout engine

    def seen_by(self, rule: BandClip) -> tuple[str, float]:
        """The name and the size of the spread that a rule acts on."""
        return ("mismatch", self.mismatch) if rule.rejects or self.bypass else ("noise", self.noise)


def main(args: argparse.Namespace) -> int:
    run = read_run(args.run, args.run.name) if args.run else None
    typical = run.metrics.median() if run else pd.Series(dtype=float)
    spread, lengths = spread_of(args, run, typical), lengths_of(args.lengths, typical)
    rules = [rule for rule in rules_of(args, run) if not math.isnan(spread.seen_by(rule)[1])]
    if not rules:
        what, train = "no noise is given", ""
        if args.run:
            what, train = f"{args.run} logs no {NOISE}", ", or train with algorithm.policy_loss=observed"
        raise ValueError(
            f"{what}, and clips see {K3[1]} in bypass mode only: give --sigma (there {spread.mismatch:.2g}){train}"
        )
    first = next((rule for rule in rules if rule.name in (args.loss, "run", "gspo")), rules[0])
    (cause, sigma), does = spread.seen_by(first), "drop" if first.rejects else "clip"
    measured = f"; this run clips {_percent(typical[CLIP_RATE])} in all" if CLIP_RATE in typical else ""
    print(
        f"{cause.capitalize()} of {sigma:.2g} nats per token alone makes {first.label} {does} "
        f"{_rates(first, lengths, sigma)}{measured}."
    )
    print(f"If {CARRIERS:.0%} of the tokens carried all of it: {_rates(first, lengths, sigma, CARRIERS)}.")
    rows = [("rule", "from", *(f"{length:,}" for length in lengths))]
    for rule in rules:
        cause, sigma = spread.seen_by(rule)
        rates = (_percent(expected_rate(rule, length, sigma)) for length in lengths)
        rows.append((", ".join(filter(None, (rule.label, rule.range))), cause, *rates))
    show(rows, widths=(46, 9, *(8 for _ in lengths[1:])))
    print("next: record steps with algorithm.policy_loss=observed; `fspo-verl report RUN` measures what this assumes")
    return 0


def expected_rate(rule: BandClip, length: int, sigma: float, carriers: float = 1.0) -> float:
    """Share of responses of so many tokens that a rule clips, for a normal log-ratio (derived here).

    Args:
        sigma: root mean square of a token's log-ratio, nats.
        carriers: share of the tokens that carry it; which ones is random. The other tokens have log-ratio 0.
    """
    count = torch.tensor([float(length)], dtype=torch.float64)  # of those that carry, and how likely it is
    weight = torch.ones_like(count)
    if carriers < 1:
        count = torch.arange(length + 1, dtype=torch.float64)
        weight = torch.distributions.Binomial(length, torch.tensor(carriers, dtype=torch.float64)).log_prob(count).exp()
    variation = count * sigma**2 / carriers
    low, high, dual = rule.band.edges(torch.full_like(count, length), variation)

    def below(edge):
        # Without variance S is 0, and so is the centre: the quotient is an infinity of the edge's sign.
        return torch.special.ndtr((edge + variation / 2) / variation.sqrt())

    beyond = below(low) + 1 - below(high)
    clipped = beyond if rule.rejects else (beyond + 1 - below(dual)) / 2
    return float((weight * clipped).sum())


def with_range(rule: BandClip, low: float, high: float) -> BandClip:
    """The rule with another range: ``clip_ratio_low`` and ``_high`` where it is one of ratios, eps of the others.

    Raises:
        ValueError: the rule cannot have this range.
    """
    if rule.ratios:
        if not (0 < low < 1 and 0 < high < math.inf):
            raise ValueError(f"--clip {low:g} {high:g}: {rule.name} needs 0 < LOW < 1 and HIGH > 0")
        return dataclasses.replace(rule, band=ratio_band(1 - low, 1 + high, rule.band.length_power), range="")
    if not (low > 0 and high > 0):
        raise ValueError(f"--clip {low:g} {high:g}: {rule.name} needs LOW > 0 and HIGH > 0, the eps of each side")
    band = dataclasses.replace(rule.band, eps=None, eps_low=low, eps_high=high, eps_dual=math.inf)
    return dataclasses.replace(rule, band=band, range="")


def rules_of(args: argparse.Namespace, run: Run | None) -> list[BandClip]:
    """The rules to forecast; the run's own clip is the first.

    Raises:
        ValueError: there is no such loss, or it cannot have the range of ``--clip``.
    """
    if args.loss not in (None, *_RULES):
        raise ValueError(f"--loss={args.loss} is none of {', '.join(_RULES)}")
    if args.loss is None and args.clip:
        raise ValueError("--clip LOW HIGH is the range of one loss: name it by --loss")
    if args.loss:
        return [with_range(_RULES[args.loss], *args.clip) if args.clip else _RULES[args.loss]]
    settings = run and run.settings
    own = []
    if settings and (band := settings.trained_band):
        known = _RULES.get(of_run(settings.loss, band) or "")
        own = [BandClip("run", f"this run's {known.label if known else 'band'}", band, range=settings.clip or "")]
    return [*own, *_RULES.values()]


def spread_of(args: argparse.Namespace, run: Run | None, typical: pd.Series) -> Spread:
    """Noise and mismatch, by option or else as the run logs them.

    Raises:
        ValueError: neither is given, or it is no spread of a token's log-ratio.
    """
    if args.sigma is not None and args.k3 is not None:
        raise ValueError("--sigma and --k3 give the same number: leave one out")
    for name, value, largest in (("sigma", args.sigma, _LARGEST_SIGMA), ("k3", args.k3, _LARGEST_SIGMA**2 / 2)):
        if value is not None and not 0 <= value <= largest:
            raise ValueError(f"--{name}={value:g} has to be a number from 0 to {largest:g}")
    if args.sigma is not None:
        return Spread(args.sigma, args.sigma)
    logged = typical[typical.between(0, _LARGEST_SIGMA)]
    k3 = next((logged[name] for name in K3 if name in logged), math.nan) if args.k3 is None else args.k3
    measured = numerical_noise.of_metrics(run.metrics) if run else None
    own = logged.get(NOISE, measured.sigma if measured else math.nan)
    bypass = bool(run and run.settings and run.settings.old_log_probs_from_rollout)
    if math.isnan(k3) and (bypass or math.isnan(own)):
        raise ValueError(f"give --sigma (nats per token) or --k3, or a run with the metric {NOISE} or {K3[1]}")
    return Spread(own, math.sqrt(2 * k3), bypass)


def lengths_of(option: str | None, typical: pd.Series) -> list[int]:
    """The lengths of ``--lengths``, or else the shortest, the mean and the longest of a run; rising.

    Raises:
        ValueError: there are none, or one is no number of tokens.
    """
    if option is not None:
        if not all(text.strip().isdecimal() and 1 <= int(text) <= _LONGEST for text in option.split(",")):
            raise ValueError(f"--lengths={option} has to be numbers of tokens such as 200,2000,8000")
        return sorted({int(text) for text in option.split(",")})
    logged = [typical[name] for name in LENGTHS if 0 <= typical.get(name, math.nan) <= _LONGEST]
    if not logged:
        raise ValueError("give --lengths, such as --lengths 200,2000,8000")
    return sorted({max(round(length), 1) for length in logged})


def _rates(rule: BandClip, lengths: list[int], sigma: float, carriers: float = 1.0) -> str:
    rates = (_percent(expected_rate(rule, length, sigma, carriers)) for length in lengths)
    return ", ".join(f"{rate} at {length:,} tokens" for rate, length in zip(rates, lengths, strict=True))


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}"
