# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The clip rate to expect at each length, without a run: from noise alone, and from noise and movement.

  fspo-verl forecast --lengths 200,2000,8000 --sigma 0.01
  fspo-verl forecast --lengths 200,2000,8000 --k3 0.0004 --loss gspo --clip 0.0003 0.0004
  fspo-verl forecast RUN          sigma, movement and lengths from the metrics of any run of verl

The log-ratio S of a response of L tokens is taken as normal, with variance sigma^2 L and mean -sigma^2 L / 2, as of
independent tokens that all spread alike. The advantage is above 0 for one response in two. Rejections, which act on the
rollout engine's log-probs, know noise alone. The forecast is off where tokens move together, or where those of short
responses spread more: in one record of chat it says 2%, and FSPO's band takes 10%. Only records tell.
"""

import argparse
import dataclasses
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd

from fspo_verl.analysis.mismatch import RULES
from fspo_verl.analysis.runs import read_run
from fspo_verl.clips import CLIPS, BandClip, ratio_band
from fspo_verl.output import show

_POINTS = 4000  # of the normal law, equally likely
_RULES = {rule.name: rule for rule in (*CLIPS.values(), *RULES) if isinstance(rule, BandClip) and rule.name != "opsm"}
# What a forecast reads of metrics: k3 of trainer and rollout engine, ours or else verl's, and k1 of the policy's move.
# The mean of either is half of a token's squared log-ratio.
K3, KL = ("fspo/mismatch_kl", "rollout_corr/k3_kl"), "actor/ppo_kl"
LENGTHS = tuple(f"response_length/{name}" for name in ("min", "mean", "max"))


class Spread(NamedTuple):
    """How far a token's log-ratio spreads, nats."""

    noise: float  # of two computations of the same weights
    moved: float = 0.0  # of the policy since the rollout

    @property
    def both(self) -> float:
        """Of noise and movement, which are independent."""
        return math.hypot(self.noise, self.moved)


def main(args: argparse.Namespace) -> int:
    spread, lengths = given(args)
    if args.loss not in (None, *_RULES):
        raise ValueError(f"--loss={args.loss} is none of {', '.join(_RULES)}")
    rules = [rule for rule in _RULES.values() if args.loss in (None, rule.name)]
    if args.clip:
        if args.loss is None:
            raise ValueError("--clip LOW HIGH is the range of one loss: name it by --loss")
        rules = [with_range(rules[0], *args.clip)]
    first = rules[0] if args.loss else _RULES["gspo"]
    shares = [f"{expected_rate(first, length, spread.noise):.1%} at {length:,} tokens" for length in lengths]
    print(f"Noise of {spread.noise:.2g} nats per token alone makes {first.label} clip {', '.join(shares)}.")
    rows = [("rule", "from", *(f"{length:,}" for length in lengths))]
    for rule in rules:
        causes = {"noise": spread.noise}
        if spread.moved and not rule.rejects:
            causes["noise and movement"] = spread.both
        for cause, sigma in causes.items():
            rates = (f"{expected_rate(rule, length, sigma):.1%}" for length in lengths)
            rows.append((", ".join(filter(None, (rule.label, rule.range))), cause, *rates))
    show(rows, widths=(46, 19, *(8 for _ in lengths[1:])))
    print("next: record steps with +algorithm.policy_loss=observed; `fspo-verl report RUN` measures what this assumes")
    return 0


def expected_rate(rule: BandClip, length: int, sigma: float) -> float:
    """Share of responses of so many tokens that a rule clips, for a normal log-ratio (derived here).

    Args:
        sigma: root mean square of a token's log-ratio, nats.
    """
    law = NormalDist(-(sigma**2) * length / 2, sigma * math.sqrt(length) or 1e-300)
    points = np.array([law.inv_cdf((n + 0.5) / _POINTS) for n in range(_POINTS)])
    responses = pd.DataFrame({"log_ratio": points, "length": length, "quadratic_variation": sigma**2 * length})
    return float(np.mean([rule.clipped(responses.assign(advantage=sign)).mean() for sign in (1.0, -1.0)]))


def with_range(rule: BandClip, low: float, high: float) -> BandClip:
    """The rule with another range: ``clip_ratio_low`` and ``_high`` of GSPO and the fixed band, eps of the others.

    Raises:
        ValueError: the rule cannot have this range.
    """
    if rule.name in ("gspo", "fixed_band"):
        return dataclasses.replace(rule, band=ratio_band(1 - low, 1 + high, rule.band.length_power), range="")
    band = dataclasses.replace(rule.band, eps=None, eps_low=low, eps_high=high, eps_dual=math.inf)
    return dataclasses.replace(rule, band=band, range="")


def given(args: argparse.Namespace) -> tuple[Spread, list[int]]:
    """Spread and lengths, by option or else from the metrics of a run."""
    metrics = read_run(args.run, args.run.name).metrics.median() if args.run else pd.Series(dtype=float)
    logged = (metrics[name] for name in K3 if name in metrics)
    k3 = next(logged, math.nan) if args.k3 is None else args.k3
    noise = args.sigma
    if noise is None and k3 >= 0:
        noise = math.sqrt(2 * k3)
    if noise is None or not noise >= 0:
        raise ValueError(f"give --sigma (nats per token) or --k3, or a run with the metric {' or '.join(K3)}")
    moved = math.sqrt(2 * max(metrics.get(KL, 0.0), 0.0))
    lengths = args.lengths or [round(metrics[name]) for name in LENGTHS if name in metrics]
    if not lengths:
        raise ValueError("give --lengths, such as --lengths 200,2000,8000")
    return Spread(noise, moved), sorted({max(length, 1) for length in lengths})
