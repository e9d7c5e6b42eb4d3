# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""From the live metrics of a run, where there are no records, to a band that clips about a target share."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import optimize, stats

from fspo_verl.analysis.fit import NOTHING_MOVED, digits
from fspo_verl.analysis.runs import RECORDS_DIR
from fspo_verl.band import Band
from fspo_verl.observe import noise
from fspo_verl.observe.metrics import PREFIX
from fspo_verl.observe.noise import Noise

_MEAN, _SQUARE = (f"{PREFIX}log_ratio_per_sqrt_length{which}" for which in ("", "_squared"))
_SEQUENCES, _ON_POLICY = (f"{PREFIX}{which}_fraction" for which in ("sequence", "on_policy"))


@dataclass(frozen=True)
class FromMetrics:
    """What :func:`from_metrics` finds."""

    target: float
    steps: int
    moved: float | None  # share of the responses that move at all, mean over steps; None if the metrics do not tell
    eps_low: float
    eps_high: float
    noise: Noise | None

    @property
    def band(self) -> Band:
        """With eps in two digits."""
        return Band(eps=None, eps_low=digits(self.eps_low, 2), eps_high=digits(self.eps_high, 2))


def from_metrics(metrics: pd.DataFrame, target: float) -> FromMetrics:
    """Band with centre 0 and width sqrt(L) from live metrics alone.

    Each step contributes the Gaussian that has the mean and the mean square of S/sqrt(L) of its responses; the band is
    the one beyond which the steps have the target share on average. The first mini-batch of a rollout has not moved:
    its rows are taken out of the means, where the metrics tell their share. In bypass mode all have moved.

    Raises:
        ValueError: the metrics are not there, nothing moved, or too little moved for the target.
    """
    missing = [name for name in (_MEAN, _SQUARE) if name not in metrics]
    if missing:
        raise ValueError(
            f"there are no records, and the metrics lack {', '.join(missing)}: train with "
            f"+algorithm.policy_loss=fspo, and with {RECORDS_DIR}=DIR for the full answer"
        )
    metrics = metrics.dropna(subset=[_MEAN, _SQUARE])
    if not (metrics[_SQUARE] > 0).any():
        raise ValueError(NOTHING_MOVED)
    known = _moving_share(metrics)
    moving = 1.0 if known is None else known
    share = metrics.get(_SEQUENCES, 1.0) * moving
    mean = (metrics[_MEAN] / share).to_numpy()
    spread = np.sqrt(np.maximum(metrics[_SQUARE] / share - mean**2, 0)).to_numpy()
    moved = np.where(spread > 0, moving, 0.0)
    return FromMetrics(
        target=target,
        steps=len(metrics),
        moved=None if known is None else float(np.mean(moved)),
        eps_low=_eps(-mean, spread, moved, target, "below"),
        eps_high=_eps(mean, spread, moved, target, "above"),
        noise=noise.of_metrics(metrics),
    )


def _eps(mean: np.ndarray, spread: np.ndarray, moved: np.ndarray, target: float, where: str) -> float:
    """The number beyond which the target share lies, of Gaussians ``[steps]`` that hold the share ``moved`` each."""

    def excess(eps: float) -> float:
        return np.mean(moved * stats.norm.sf(eps, mean, np.where(spread > 0, spread, 1.0))) - target

    if excess(0.0) <= 0:
        raise ValueError(
            f"no band with centre 0 clips {target:g} of the responses {where} it: only {excess(0.0) + target:.1%} lie "
            "there; lower the target, or actor_rollout_ref.actor.ppo_mini_batch_size"
        )
    return optimize.brentq(excess, 0.0, np.max(np.abs(mean) + 40 * spread))


def _moving_share(metrics: pd.DataFrame) -> pd.Series | None:
    """Share of each step's responses that are not in the first mini-batch of the rollout; None if it is not logged.

    1 where a step has one mini-batch only: what moved there did not move by updates.
    """
    if not {_SEQUENCES, _ON_POLICY} <= set(metrics):
        return None
    on_policy = metrics[_ON_POLICY] / metrics[_SEQUENCES]
    return 1 - on_policy.where(on_policy < 0.999, 0.0)
