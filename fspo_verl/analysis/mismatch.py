# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Mismatch of trainer and rollout engine: its size, and whom rules drop by it.

d is a token's log π_trainer − log π_engine before the update, in nats; S_r and Q_r are the sums of d and d² over a
response (:func:`fspo_verl.observe.columns.mismatch_columns`). It holds numerical noise, and where the engine's weights
were behind (``staleness``) the updates in between.
"""

import contextlib
import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import third_of
from fspo_verl.band import Band
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip
from fspo_verl.observe.columns import ICEPOP
from fspo_verl.observe.settings import RunSettings

TRUNCATION = 2.0  # of importance weights: verl's rollout_is_threshold

RULES = (
    BandClip("sqrt_length", "width √L", Band(), rejects=True, range="|S_r| up to 0.03·√L"),  # derived here
    dataclasses.replace(CLIPS["seq_is"], label="verl, sum of tokens"),
    dataclasses.replace(CLIPS["geo_rs"], label="verl, mean of tokens"),
)
"""Rules that drop responses, as bands on S_r, each at a usual range."""


class Mismatch(NamedTuple):
    """The result of :func:`mismatch`."""

    responses: int
    sigma: float  # root mean square of d, nats
    mean: float  # of d: its systematic part; independent noise alone has −sigma²/2
    kl: float  # mean of exp(d) − 1 − d over the tokens, KL(engine ‖ trainer)
    staleness: float  # mean, training steps; NaN where it is not known
    rejected: float  # share that a rollout correction took out of the loss
    dropped: pd.DataFrame  # by rule and range: share of all responses that it drops, and of each third by length


def mismatch(records: pd.DataFrame, settings: RunSettings | None = None) -> Mismatch | None:
    """Return what the records say of trainer and rollout engine; None where they do not hold it.

    Args:
        records: of :func:`fspo_verl.observe.records.read_records`, rejected responses included.
    """
    records = with_engines(records, settings)
    if settings is not None and settings.old_log_probs_from_rollout:
        # The update has not moved the first mini-batch: its S is the mismatch.
        records = records[records["mini_batch"] == 0].assign(log_ratio=0.0)
    if "rollout_length" not in records or not (records["rollout_length"] > 0).any():
        return None
    records = records[records["rollout_length"] > 0]
    length, s, q, k3 = (
        records[f"rollout_{name}"].to_numpy(np.float64) for name in ("length", "log_ratio", "quadratic_variation", "k3")
    )
    tokens = length.sum()
    staleness = float(records["staleness"].mean()) if "staleness" in records else math.nan
    rejected = float((records["length"] == 0).mean())
    sigma, mean, kl = math.sqrt(q.sum() / tokens), s.sum() / tokens, k3.sum() / tokens
    return Mismatch(len(records), sigma, mean, kl, staleness, rejected, dropped(records))


def dropped(records: pd.DataFrame) -> pd.DataFrame:
    """Share that each rule takes, at its usual range and scaled to 10% overall where it can be.

    Returns:
        Index ``rule`` and ``range``, columns ``all``, ``shortest``, ``middle`` and ``longest`` (thirds by length). For
        IcePop it is the share of a response's tokens, for a truncated importance weight that of its weight.
    """
    length, s, q = (records[f"rollout_{name}"] for name in ("length", "log_ratio", "quadratic_variation"))
    every = pd.DataFrame({"length": length, "log_ratio": s, "quadratic_variation": q, "advantage": 1.0})
    shares = {}
    for rule in RULES:
        shares[rule.label, rule.range] = rule.clipped(every)
        with contextlib.suppress(ValueError):  # too few responses on the side that it drops
            shares[rule.label, f"scaled to {MATCHED_RATE:.0%}"] = rule.matched(every, MATCHED_RATE).clipped(every)
    shares["IcePop", "token ratio {:g} to {:g}".format(*ICEPOP)] = records["tokens_masked_icepop"] / length
    cut = -np.expm1(np.minimum(math.log(TRUNCATION) - s, 0))
    shares["truncated weight", f"ratio up to {TRUNCATION:g}"] = cut
    table = pd.DataFrame({name: np.asarray(share, np.float64) for name, share in shares.items()})
    thirds = table.groupby(third_of(length.to_numpy())).mean().reindex(range(3))
    thirds = thirds.set_axis(["shortest", "middle", "longest"])
    return pd.concat([table.mean().rename("all"), thirds.T], axis=1).rename_axis(["rule", "range"])


def with_engines(records: pd.DataFrame, settings: RunSettings | None) -> pd.DataFrame:
    """The records with what trainer and rollout engine make of the same tokens, as far as that is known.

    In bypass mode the old log-probs are the engine's. The first mini-batch of a step has not moved yet, so that its S
    is the mismatch (and what staleness adds); later ones are not measured, and their length is 0.
    """
    if "rollout_length" in records or settings is None or not settings.old_log_probs_from_rollout:
        return records
    first = (records["mini_batch"] == 0) & (records["length"] > 0)
    names = ("length", "log_ratio", "quadratic_variation")
    measured = {f"rollout_{name}": records[name].where(first, 0.0) for name in names}
    return records.assign(**measured, rollout_k3=math.nan, tokens_masked_icepop=math.nan)
