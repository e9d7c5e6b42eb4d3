# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Numerical noise: S of responses that no update has moved, and the one recipe against it.

The old log-probs and the first optimiser step of a rollout come from the same weights. They differ by rounding alone,
in other micro-batches and kernels, and S would be 0 without it. A range that such responses leave clips them at random,
before the policy has moved at all. docs/noise.md says how large the noise is. Every command, check and alert takes its
remedy from :meth:`Noise.remedy`.
"""

import math
from dataclasses import dataclass

from fspo_verl.output import percent, see

SHARE = 0.01
"""The share of the on-policy responses outside the range up to which their noise counts as harmless.

It is that of a half-width of 2.6 standard deviations of the noise. A range that clips 10% in all is 1.6 standard
deviations of S wide, so that at this share two fifths of the variance of S are noise, and nearly all of it at 5%.
(Derived here, with normal laws.)
"""
EPS_IN_SIGMA = 2.576
"""The smallest eps of a width of sqrt(L) that means anything, in units of a token's noise, for tokens whose noises are
independent: the normal quantile of 1 - SHARE / 2."""
LARGEST_EDGE = 1.0
"""Log-ratio at the edge of such a range, at the longest response, up to which a wider range is a remedy.

Within it no response weighs more than e times what it should, and with this noise alone the effective sample size is
86%. Beyond it a wider range only lets the noise into the weights. (Derived here.)
"""
BF16_SIGMA = (0.0035, 0.14)
"""The least and the largest spread of a token's log-ratio by bfloat16 alone, nats, in micro-batches that differ:
scripts/bench/noise.py on a CPU, and scripts/bench/noise_8b.py on an H100."""

SAME = "cut old log-probs and updates into the same micro-batches"
FLOAT32 = "compute log-probs in float32 (++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32})"
PRICE = "What either costs in time is not measured."
UNKNOWN = "A wider range is no remedy before fspo/noise_sigma is measured: it lets noise into the weights."


@dataclass(frozen=True)
class Noise:
    """The noise of a launch or a run, and what to do about it."""

    sigma: float | None
    """Spread of a token's noise, nats; None where it is not measured."""

    longest: float | None
    """Tokens of the longest response; None where it is not known."""

    weighs: bool = True
    """The loss weighs a response by e^S."""

    @property
    def can_be_outside(self) -> bool | None:
        """Tell whether a wider range is a remedy; None where that is not known."""
        if not self.weighs:
            return True
        if self.sigma is None or self.longest is None:
            return None
        return EPS_IN_SIGMA * self.sigma * math.sqrt(self.longest) < LARGEST_EDGE

    def remedy(self, wider: str = "") -> str:
        """The remedy, in sentences.

        Args:
            wider: a range that is wide enough, where that of the run is not, as the subject of a sentence.
        """
        if self.can_be_outside:
            width = f" {wider} would do as well." if wider else ""
        elif self.sigma is None or self.longest is None:
            width = f" {UNKNOWN}"
        else:
            width = (
                " No eps helps: the weight e^S carries the noise, which alone leaves an effective sample size of "
                f"{effective(self.sigma, self.longest)} at {self.longest:,.0f} tokens."
            )
        return f"First {SAME}, or {FLOAT32}. {PRICE}{width}{see('noise.md')}"


def effective(sigma: float, length: float) -> str:
    """The effective sample size of responses of ``length`` tokens that independent differences of ``sigma`` nats weigh.

    E[w]² / E[w²] = exp(−σ²L) of w = e^S with a normal S of variance σ²L, as a share of their number.
    """
    share = math.exp(-(sigma**2) * length)
    return percent(share) if share >= 0.001 else "less than 0.1%"


def rounded_up(eps: float) -> float:
    """The next number of two digits: rounded down, an eps would be too narrow."""
    return float(f"{math.ceil(eps / _unit(eps) - 1e-9) * _unit(eps):.2g}")


def rounded_down(eps: float) -> float:
    """The number of two digits before it."""
    return float(f"{math.floor(eps / _unit(eps)) * _unit(eps):.2g}")


def _unit(eps: float) -> float:
    return 10.0 ** (math.floor(math.log10(eps)) - 1)
