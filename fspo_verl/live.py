# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Live series of a run: what TensorBoard, W&B and the metrics file show of the clip, without a division by the reader.

verl averages metrics, and a rate is no average (:mod:`fspo_verl.observe.metrics`): numerators and denominators reach
the driver apart, as ``actor/fspo/*``. They are divided where a trainer hands the metrics of a step to its loggers, so
that a rate is that of the step's responses, however these were cut into ranks and micro-batches, with the code that
reports use. All trainers of verl log through ``Tracking.log``, around which :mod:`fspo_verl.verl_patches` adds them:
the v1 trainers, ``RayPPOTrainer``, one-step-off and the fully asynchronous one.
"""

import logging
import math
from collections.abc import Mapping

from fspo_verl.observe.metrics import PREFIX as RAW
from fspo_verl.output import cause

logger = logging.getLogger("fspo_verl")

PREFIX = "fspo/"


def series(metrics: Mapping[str, float], min_count: int | None = None) -> dict[str, float]:
    """The live series of one step, ``fspo/*``; a number that the step does not give is left out.

    Args:
        metrics: what verl has made of the metrics of :mod:`fspo_verl.observe.metrics`, among any others; without them
            there are no series.
        min_count: responses that a length bin needs to take part in the LRE of the step; None for
            :data:`fspo_verl.analysis.clip_rates.MIN_COUNT`.

    Returns:
        ``clip_rate/all``, ``clip_rate/len_LOW_HIGH``: Σ clipped over the responses with a token and an advantage other
        than 0, of the step and of a length bin; ``lre``: length reweighting error of these bins
        (:func:`fspo_verl.analysis.clip_rates.length_reweighting_error`); ``ess``: (Σw)² / (n Σw²) of the
        importance-sampling ratios w of the n responses with a token; ``noise_sigma``: numerical noise of a token's
        log-ratio, in nats (:mod:`fspo_verl.observe.noise`); ``mismatch_sigma``: root mean square, over the tokens, of
        d = log π_trainer − log π_engine in nats, both before the update; ``mismatch_kl``: mean of exp(d) − 1 − d, the
        k3 estimate of KL(engine ‖ trainer) as verl has it in ``rollout_corr/k3_kl``; ``truncated``: share of the
        responses that fills what it was allowed; ``eps_low``, ``eps_high``: the eps in force of a band that follows a
        clip rate (:mod:`fspo_verl.adaptive`).
    """
    raw = {name: value for name, value in metrics.items() if name.startswith(RAW)}
    if not raw:
        return {}
    # Imported for the first metrics of this package: processes that never log any do without pandas.
    import pandas as pd

    from fspo_verl.analysis import numerical_noise
    from fspo_verl.analysis.clip_rates import MIN_COUNT, length_reweighting_error
    from fspo_verl.analysis.runs import live_clip_rates

    step = pd.DataFrame([raw], dtype=float)
    bins = live_clip_rates(step)
    values = {"clip_rate/all": _quotient(bins["clipped"].sum(), bins["responses"].sum())}
    values |= {f"clip_rate/{_bin_name(bin.low, bin.high)}": bin.rate for bin in bins.itertuples()}
    if f"{RAW}step_rows" in raw:
        count = (bins["responses"] * raw[f"{RAW}step_rows"]).round().astype(int)
        values["lre"] = length_reweighting_error(bins.assign(n=count), MIN_COUNT if min_count is None else min_count)
    ratio, squared, rows = (raw.get(RAW + name, math.nan) for name in ("ratio", "ratio_squared", "sequence_fraction"))
    values["ess"] = _quotient(ratio**2, squared * rows)
    if (measured := numerical_noise.of_metrics(step)) is not None:
        values["noise_sigma"] = measured.sigma
    tokens, squares, k3 = (
        raw.get(f"{RAW}rollout_{name}", math.nan) for name in ("length", "quadratic_variation", "k3")
    )
    values |= {"mismatch_sigma": math.sqrt(_quotient(squares, tokens)), "mismatch_kl": _quotient(k3, tokens)}
    values["truncated"] = _quotient(raw.get(f"{RAW}truncated_fraction", math.nan), rows)
    values |= {name: raw[RAW + name] for name in ("eps_low", "eps_high") if RAW + name in raw}
    return {PREFIX + name: float(value) for name, value in values.items() if not math.isnan(value)}


def _quotient(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan


def _bin_name(low: int, high: float) -> str:
    """The bin's name with leading zeros, so that loggers sort bins by length."""
    return f"len_{low:05d}_up" if math.isnan(high) else f"len_{low:05d}_{high:05.0f}"


def series_or_warning(data: Mapping) -> dict[str, float]:
    """:func:`series`; none, with a warning, where that fails: logging must not stop training."""
    try:
        return series(data)
    except Exception as error:
        _warn(error)
        return {}


_said: set[tuple] = set()  # causes


def _warn(error: Exception) -> None:
    """Once per cause."""
    if (found := cause(error)) not in _said:
        _said.add(found)
        text = "no live series %s* for a step, only their raw sums %s*: %s: %s. Said once."
        logger.warning(text, PREFIX, RAW, type(error).__name__, error)
