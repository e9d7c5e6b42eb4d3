# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Records with a known law of S, for tests of estimates, and what a confidence interval has to fulfil."""

import math

import numpy as np
import pandas as pd
from scipy import stats

from fspo_verl import clips
from fspo_verl.analysis.judgement import judge_records


def frame(length, log_ratio=0.0, quadratic_variation=0.0, advantage=1.0, prompt=None, step=0, **columns):
    """Records with the given columns, the others as if nothing were clipped."""
    n = len(length)
    log_ratio = np.broadcast_to(log_ratio, n).astype(np.float32)
    prompt = pd.Categorical(range(n) if prompt is None else prompt)
    records = pd.DataFrame(
        {
            "step": np.broadcast_to(step, n).astype(np.int32),
            "mini_batch": np.zeros(n, np.int32),
            "prompt": prompt.rename_categories(str),
            "prompt_text_hash": prompt.codes.astype(np.int64),
            "length": np.asarray(length, np.int32),
            "log_ratio": log_ratio,
            "quadratic_variation": np.broadcast_to(quadratic_variation, n).astype(np.float32),
            "advantage": np.broadcast_to(advantage, n).astype(np.float32),
            "clipped": np.zeros(n, np.float32),
            "decision": pd.Categorical(["kept"] * n),
            **{name: np.zeros(n, np.int32) for name in clips.COLUMNS},
        }
        | columns
    )
    records.attrs = {"settings": None, "rows": n, "lost": 0}
    return records


def group_lengths(rng, prompts, group, low=10, high=400):
    """Lengths of the responses, alike within a prompt; and the prompt of each."""
    prompt = np.repeat(np.arange(prompts), group)
    center = rng.uniform(math.log(low), math.log(high), prompts)
    return np.exp(center[prompt] + 0.3 * rng.standard_normal(len(prompt))).astype(int).clip(1), prompt


def simulate_run(
    rng,
    steps=25,
    prompts=16,
    group=8,
    sigma=0.02,
    kappa=0.9,
    step_spread=0.0,
    mini_batches=4,
    low=10,
    high=400,
    *,
    power=0.5,
):
    """Records of a run with rollouts of ``prompts`` groups, whose responses share a fifth of the variance of S.

    The first mini-batch of a step has not moved, the k-th has k times the variance. Q grows like L^(2·power).
    ``step_spread`` is the standard deviation of log sigma between steps.
    """
    length, prompt = group_lengths(rng, steps * prompts, group, low, high)
    step = prompt // prompts
    mini_batch = prompt % prompts * mini_batches // prompts
    update = np.exp(step_spread * rng.standard_normal(steps))[step]
    q = (sigma * update) ** 2 * mini_batch * length ** (2 * power) * rng.gamma(10, 0.1, len(length))
    own, shared = rng.standard_normal(len(length)), rng.standard_normal(steps * prompts)[prompt]
    s = np.sqrt(q) * (math.sqrt(0.8) * own + math.sqrt(0.2) * shared)
    advantage = rng.choice([-1.0, 0.0, 1.0], len(length), p=[0.45, 0.1, 0.45])
    return frame(length, s - kappa * q / 2, q, advantage, prompt, step, mini_batch=mini_batch.astype(np.int32))


def assert_covered(hits, confidence=0.95):
    """The share of intervals that hold the truth is what a binomial with the nominal level gives, 999 times in 1000."""
    low, high = stats.binom.interval(0.999, len(hits), confidence)
    assert low <= sum(hits) <= high, f"{sum(hits)} of {len(hits)}"


def holds(estimate, truth):
    return estimate.lower <= truth <= estimate.upper


def judged(records, rate=0.1):
    """The judgement of records whose settings are among their attrs."""
    return judge_records(records, records.attrs["settings"], rate)
