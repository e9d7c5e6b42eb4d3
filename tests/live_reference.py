# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The live series of a step by the code that reports run on records."""

import numpy as np
import pandas as pd

from fspo_verl.analysis import clip_rates
from fspo_verl.clips import BandClip
from fspo_verl.observe.settings import RunSettings


def series(
    records: pd.DataFrame, settings: RunSettings | None, length_bins: list[int], min_count: int = 1
) -> dict[str, float]:
    """The series of the records of one step, of a loss that clips whole responses.

    Args:
        records: all responses with a token of the step.
        settings: of the run; None where they are not known.
        length_bins: inner edges of the bins, as the config has them.
        min_count: of :func:`fspo_verl.analysis.live.series`.
    """
    edges = np.array([1, *length_bins, 2**31])
    counted = records[records.advantage != 0]
    table = clip_rates.rate_by_length(counted.length, counted.clipped, edges, np.arange(len(counted)))
    better = counted.advantage > 0
    variance = (records.quadratic_variation / records.length).astype(np.float64)
    still = (records.mini_batch == 0) & (settings is None or not settings.old_log_probs_from_rollout)
    ratio = np.exp(np.minimum(counted.log_ratio[counted.clipped == 0].to_numpy(np.float64), 20))
    values = {
        "clip_rate/all": counted.clipped.mean(),
        **{f"clip_rate/{name}": rate for name, rate in zip(names(length_bins), table.rate, strict=True)},
        "lre": clip_rates.length_reweighting_error(table.drop(columns="clusters"), min_count),
        "ess": ratio.sum() ** 2 / np.square(ratio).sum() / len(ratio),
        "clip_rate/better": counted.clipped[better].mean(),
        "clip_rate/worse": counted.clipped[~better].mean(),
        "not_finite": (records.decision == "nonfinite").mean(),
        "moved_sigma": np.sqrt(variance[~still].mean()),
        "noise_sigma": np.sqrt(variance[still].mean()),
    }
    if settings is not None and settings.trained_band is not None:
        values["noise_outside"] = BandClip("", "", settings.trained_band).outside(records)[still].mean()
    if "rollout_length" in records:
        values["rejected"] = (records.decision == "rejected").mean()
        tokens = records.rollout_length.sum()
        squares = records.rollout_quadratic_variation.astype(np.float64).sum()
        values["mismatch_sigma"] = np.sqrt(squares / tokens)
    if "truncated" in records:
        values["truncated"] = records.truncated.mean()
    counts = dict(zip(names(length_bins), table.n, strict=True)) | {"better": better.sum(), "unmoved": still.sum()}
    of_bin = [name for name in counts if name.startswith("len_") and not counts[name]]
    values |= {f"step_responses/{name}": count for name, count in counts.items() if name not in of_bin}
    return {f"fspo/{name}": value for name, value in values.items() if not np.isnan(value)}


def names(length_bins: list[int]) -> list[str]:
    inner = [f"len_{low:05d}_{high - 1:05d}" for low, high in zip([1, *length_bins], length_bins, strict=False)]
    return [*inner, f"len_{length_bins[-1]:05d}_up"]
