# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Numerical noise: S of responses that no update has moved, and what it does where it fills the band.

The old log-probs and the first optimiser step of a rollout come from the same weights. They differ by rounding alone,
in other micro-batches and kernels, and S would be 0 without it. A band that such responses leave clips them at random,
before the policy has moved at all. docs/noise.md says how large the noise is and what helps.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from fspo_verl.band import Band
from fspo_verl.observe.metrics import PREFIX
from fspo_verl.observe.settings import RunSettings

MEANS = [f"{PREFIX}on_policy_{name}" for name in ("fraction", "sigma_squared", "outside_fraction")]
ROWS = f"{PREFIX}rows"

SHARE = 0.01
"""Of the on-policy responses, the share outside the band up to which their noise counts as harmless.

It is that of a half-width of 2.6 standard deviations of the noise. A band that clips 10% in all is 1.6 standard
deviations of S wide, so that at this share two fifths of the variance of S are noise, and nearly all of it at 5%.
(Derived here, with normal laws.)
"""
EPS_IN_SIGMA = 2.576
"""The smallest eps of a width of sqrt(L) that means anything, in units of a token's noise, for tokens whose noises are
independent: the normal quantile of 1 - SHARE / 2."""
HELP = (
    "float32 log-probs (++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32}), or the same "
    "micro-batches for old and new log-probs; see docs/noise.md"
)


class Noise(NamedTuple):
    """Numerical noise of the on-policy responses."""

    responses: int
    sigma: float
    """Spread of a token's log-ratio, nats: the root of the mean of Q/L."""

    outside: float = math.nan
    """Share outside the band; NaN without a band."""

    widen: float = math.nan
    """What eps_low and eps_high have to be multiplied with, so that :data:`SHARE` of these responses lie outside."""


def on_policy(mini_batch, settings: RunSettings | None):
    """bool ``[rows]``: responses of the first mini-batch after their old log-probs were computed.

    Args:
        mini_batch: ``[rows]`` optimiser step between two weight syncs, from 0; verl refreshes the old policy at each.
        settings: of the records. In bypass mode the old log-probs are those of another engine.
    """
    return (mini_batch == 0) & (settings is None or not settings.old_log_probs_from_rollout)


def of_means(means: Mapping[str, float], steps: int) -> Noise | None:
    """The noise that live metrics show, from their means over so many steps; None if they show none."""
    share, variance, outside = (means.get(name, math.nan) for name in MEANS)
    if not (share > 0 and variance >= 0):
        return None
    # A step logs the rows of one mini-batch, and one of its mini-batches is on-policy.
    return Noise(round(means.get(ROWS, 0.0) * steps), math.sqrt(variance / share), outside / share)


def finding(noise: Noise, band: Band) -> str | None:
    """What a band narrower than the noise does; None for any other band.

    That is, where more than :data:`SHARE` of the on-policy responses lie outside, by two standard deviations of a
    Poisson count, which assumes independent responses.
    """
    count = noise.outside * noise.responses
    # The comparison is False for NaN, where there is no band to leave.
    if not count - 2 * math.sqrt(count) > SHARE * noise.responses:
        return None
    return (
        f"the clip is narrower than the numerical noise: rounding alone puts {noise.outside:.0%} of the responses "
        f"outside it. This was counted on {noise.responses:,} responses that no update had moved, of which {SHARE:.0%} "
        "at most should lie outside"
    )


def remedy(noise: Noise) -> str:
    """The remedy for what :func:`finding` has found."""
    wide = f"{rounded_up(noise.widen):g} times as wide, so that {SHARE:.0%} lie outside" if noise.widen > 0 else "wider"
    return f"Make the clip {wide}, or remove the noise: {HELP}"


def rounded_up(eps: float) -> float:
    """The next number of two digits: rounded down, an eps would be too narrow."""
    unit = 10.0 ** (math.floor(math.log10(eps)) - 1)
    return float(f"{math.ceil(eps / unit - 1e-9) * unit:.2g}")
