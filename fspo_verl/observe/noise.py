# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Numerical noise: S of responses that no update has moved.

The old log-probs and the first optimiser step of a rollout come from the same weights. They differ by rounding alone,
in other micro-batches and kernels, and S would be 0 without it. A band that such responses leave clips them at random,
before the policy has moved at all. docs/noise.md says how large the noise is and what helps.
"""

import math

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


def rounded_up(eps: float) -> float:
    """The next number of two digits: rounded down, an eps would be too narrow."""
    unit = 10.0 ** (math.floor(math.log10(eps)) - 1)
    return float(f"{math.ceil(eps / unit - 1e-9) * unit:.2g}")
