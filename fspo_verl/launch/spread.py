# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether eps suits the spread of log-ratios that was measured, for ``fspo-verl doctor``."""

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

from fspo_verl.launch.plan import typical_lengths
from fspo_verl.launch.view import POLICY_LOSS, Finding, Launch


def findings(launch: Launch, sigma: float | None, noise: float | None, folder: Path | None) -> Iterator[Finding]:
    """Whether the band clips nothing or nearly everything, and whether it tells a move from numerical noise.

    Args:
        launch: of the loss fspo.
        sigma: standard deviation of a token's log-ratio, nats. S of L tokens is then taken as normal with variance
            Q = L·sigma² and mean −Q/2 (derived here from E_old[e^S] = 1).
        noise: the same of a policy that has not moved: the mean of S is then 0.
        folder: of records. Their S and L count in place of ``sigma``, and of ``noise`` where that is not given.

    Raises:
        ValueError: no response that moved is recorded in the folder.
    """
    records = None if folder is None else _recorded(folder)
    if records is not None:
        yield from judge_eps(launch, *_outside_recorded(launch.band, records))
    elif sigma is not None:
        yield from judge_eps(
            launch, {f"L={n}": _outside(launch.band, n, sigma) for n in typical_lengths(launch)}, sigma
        )
    yield from judge_noise(launch, noise, records)


def judge_eps(launch: Launch, outside: dict[str, float], sigma: float) -> Iterator[Finding]:
    """Whether the band lets (nearly) everything through, or (nearly) nothing, at the spread that was measured.

    Args:
        outside: share of the responses outside the band, by where.
    """
    band = launch.band
    rates = ", ".join(f"{rate:.2g} at {where}" for where, rate in outside.items())
    yield Finding("note", "outside_band", f"share of responses outside the band at sigma={sigma:.3g}: {rates}")
    # The unit of eps is such that the longest response's S has standard deviation 1.
    longest = launch.max_response_length or 1
    unit = 1 if band.is_studentized else sigma * math.sqrt(longest) / band.scale_at(longest)
    wanted = launch.with_eps(2 * unit, 2 * unit)  # leaves about 5% of undrifted responses outside
    responses = (launch.prompts_per_rollout or 1) * launch.config.actor_rollout_ref.rollout.n
    eps = f"eps_low={band.low:g}, eps_high={band.high:g}"
    if max(outside.values()) < 1 / responses:
        what = f"{eps} clip less than one response a step"
        yield Finding("warning", "eps_never_binds", what, f"share outside the band: {rates}", wanted)
    if crowded := [where for where, rate in outside.items() if rate > 0.5]:
        drifts = min(outside.values()) < 0.5 and band.normalization == "plain"
        corrected = f"{POLICY_LOSS}.normalization=drift_corrected (long responses drift), or fewer stale steps"
        fix = corrected if drifts else wanted
        why = f"at {', '.join(crowded)}; {rates}"
        yield Finding("warning", "eps_always_binds", f"{eps} leave most responses outside", why, fix)


def judge_noise(launch: Launch, sigma: float | None, records) -> Iterator[Finding]:
    """Whether the band tells a move from numerical noise (:mod:`fspo_verl.observe.noise`)."""
    from fspo_verl.observe import noise

    band = launch.band
    if sigma is not None:
        outside = max(_outside(band, length, sigma, drift=0.0) for length in typical_lengths(launch))
        spread = sigma * max(math.sqrt(length) / band.scale_at(length) for length in typical_lengths(launch))
        widen = noise.EPS_IN_SIGMA * spread / min(band.low, band.high)
        below = outside > noise.SHARE and not band.is_studentized
    elif records is not None and (on_policy := noise.of_records(records, records.attrs["settings"], band)):
        sigma, outside, widen = on_policy.sigma, on_policy.outside, on_policy.widen
        below = noise.warning(on_policy, band) is not None
    else:
        return
    what = f"with nothing moved, {outside:.2g} of the responses lie outside the band (noise of {sigma:.2g} per token)"
    if below:
        low, high = (noise.rounded_up(widen * eps) for eps in (band.low, band.high))
        fix = f"{launch.with_eps(low, high)}, or {noise.HELP}"
        yield Finding("warning", "eps_below_noise", what, "it clips rounding, not moves", fix)
    else:
        yield Finding("note", "noise", what)


def _outside(band, length: int, sigma: float, drift: float = 1.0) -> float:
    """Probability that S, normal with variance Q = L·sigma² and mean −drift·Q/2, lies outside the band."""
    import torch

    variation = length * sigma**2
    low, high, _ = (edge.item() for edge in band.edges(*torch.tensor([[length], [variation]], dtype=torch.float64)))
    law = NormalDist(-drift * variation / 2, variation**0.5)
    return law.cdf(low) + 1 - law.cdf(high)


def _recorded(folder: Path):
    """A table of the records by which a band is judged."""
    from fspo_verl.observe.records import read_records

    records = read_records(folder, ["mini_batch", "length", "log_ratio", "quadratic_variation"], max_rows=1_000_000)
    if not (records.quadratic_variation > 0).any():
        raise ValueError(f"{folder} holds no records of responses that moved (records_dir, several steps per rollout)")
    return records


def _outside_recorded(band, records) -> tuple[dict[str, float], float]:
    """Share of the responses that moved outside the band, all and by thirds of length, and their sigma."""
    import pandas as pd
    import torch

    records = records[records.quadratic_variation > 0]
    length, variation = (torch.tensor(records[c].to_numpy("float64")) for c in ("length", "quadratic_variation"))
    low, high, _ = band.edges(length, variation)
    outside = ~records.log_ratio.between(low.numpy(), high.numpy())
    thirds = outside.groupby(pd.qcut(records.length, 3, duplicates="drop"), observed=True).mean()
    by_length = {f"L={third.left:.0f}-{third.right:.0f}": share for third, share in thirds.items()}
    sigma = (records.quadratic_variation.sum() / records.length.sum()) ** 0.5
    return {"all": outside.mean(), **by_length}, sigma
