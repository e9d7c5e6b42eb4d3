# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report: what is computed from the records and the metrics of each run, with intervals."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import norm

from fspo_verl.analysis import clip_rates, resampling
from fspo_verl.analysis.counterfactuals import Counterfactuals, counterfactuals, weights_by_length
from fspo_verl.analysis.law import LawOfS, law_of_s
from fspo_verl.analysis.resampling import Estimate
from fspo_verl.analysis.runs import Run, config_differences, live_clip_rates
from fspo_verl.band import Band
from fspo_verl.clips import CLIPS, MATCHED_RATE, of_run
from fspo_verl.observe import noise
from fspo_verl.observe.metrics import NAMES
from fspo_verl.observe.noise import Noise
from fspo_verl.observe.settings import RunSettings

DRAWS, _WINDOW_DRAWS = 400, 100  # of resampling and of chance
_WINDOWS, _WINDOW_ROWS = 12, 1000  # windows of steps: at most so many, of so many rows or more
_OUTLIER = norm.ppf(0.975)


@dataclass
class Analysis:
    """All that is computed from the records of one run."""

    run: Run
    band: Band | None
    """The band that trained; None for a loss without one."""

    total: pd.Series
    """n, rate, lower, upper: clip rate over all lengths."""

    rates: pd.DataFrame
    """Clip rate by length."""

    lre: Estimate
    floor: Estimate
    """LRE by chance."""

    lre_excluded: int
    """Responses in bins that hold too few responses or prompts to take part in the LRE."""

    stock: Counterfactuals
    matched: Counterfactuals | None
    """None where no clip can take :data:`fspo_verl.clips.MATCHED_RATE` of these responses."""

    weights: pd.DataFrame
    """Mean of each smooth weight by length."""

    law: LawOfS
    quantiles: pd.DataFrame
    """Columns normal, z = (S + Q/2)/√Q, per_sqrt_length = S/(σ√L): quantiles of the normal law and of the sample."""

    outliers: pd.Series
    """n, rate, lower, upper: share of the moved responses with |S + Q/2| > 1.96 √Q."""

    windows: pd.DataFrame
    """σ, drift and LRE in windows of consecutive steps."""


def analyse(run: Run, edges: np.ndarray, rng: np.random.Generator) -> Analysis | None:
    """Everything about the records of a run; None where no response has an advantage.

    Args:
        run: the run.
        edges: of length bins that cover all its lengths, see :func:`fspo_verl.analysis.clip_rates.length_edges`.
        rng: source of all draws.
    """
    records = run.records
    counted = records[records.advantage != 0]
    if counted.empty:
        return None
    clusters = resampling.clusters(counted)
    rates = clip_rates.rate_by_length(counted.length, counted.clipped, edges, clusters=clusters)
    law = law_of_s(records, edges, rng, DRAWS)
    lre, floor = clip_rates.lre_against_chance(counted, counted.clipped, edges, rng, DRAWS)
    moved = records[records.quadratic_variation > 0]
    z = (moved.log_ratio + moved.quadratic_variation / 2) / np.sqrt(moved.quadratic_variation)
    return Analysis(
        run=run,
        band=run.settings and run.settings.trained_band,
        total=_overall(counted.length, counted.clipped, clusters, edges),
        rates=rates,
        lre=lre,
        floor=floor.worst,
        lre_excluded=clip_rates.length_reweighting_error(rates).excluded_responses,
        stock=counterfactuals(records, edges, rng, draws=DRAWS),
        matched=_matched(records, edges, rng),
        law=law,
        quantiles=_quantiles(z, moved.log_ratio / (law.sigma.value * np.sqrt(moved.length))),
        outliers=_overall(moved.length, np.abs(z) > _OUTLIER, resampling.clusters(moved), edges),
        windows=_windows(records, edges, rng),
        weights=weights_by_length(records, edges, rng, DRAWS),
    )


def noise_of(run: Run) -> Noise | None:
    """The numerical noise in a run's records, or else in its live metrics; None where neither shows any."""
    if len(run.records):
        return noise.of_records(run.records, run.settings, run.settings and run.settings.trained_band)
    return noise.of_metrics(run.metrics)


def clip_of(settings: RunSettings | None) -> str | None:
    """The name in :data:`fspo_verl.clips.CLIPS` of the clip with the shape of a run's, if there is one."""
    return None if settings is None else of_run(settings.loss, settings.trained_band)


def live_rates(run: Run, rng: np.random.Generator) -> pd.DataFrame:
    """Clip rate by length from a run's metrics: columns low, high, n, rate, lower, upper.

    n is the number of steps with a response in the bin, and the interval resamples steps: how many responses stand
    behind a step's rate is not logged.
    """
    rows = []
    longest = run.metrics.reindex(columns=NAMES["longest"]).max().item()
    for low, part in live_clip_rates(run.metrics).groupby("low"):
        part = part[part.responses > 0]
        if len(part):
            value, lower, upper = resampling.clustered_bootstrap(
                np.arange(len(part)), part[["clipped", "responses"]].to_numpy(), _quotient, rng
            )
            high = np.fmax(longest, low) if part.high.isna().any() else part.high.max()
            rows.append((low, high, len(part), value.item(), lower.item(), upper.item()))
    return pd.DataFrame(rows, columns=["low", "high", "n", "rate", "lower", "upper"])


def live_steps(run: Run) -> pd.DataFrame:
    """σ and drift of every step from a run's metrics, over all its rows: columns step, sigma, drift."""
    names = [*NAMES["sigma_squared"], *NAMES["drift"]]
    table = run.metrics.reindex(columns=names).set_axis(["sigma", "drift"], axis=1).dropna(how="all")
    return table.assign(sigma=np.sqrt(table.sigma)).reset_index()


def tables(runs: Sequence[Run], analyses: Sequence[Analysis], live: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Every number of a report, by the name of its file; ``live`` is :func:`live_rates` by name of run."""
    methods = [
        (a.run.name, constants, counterfactuals)
        for a in analyses
        for constants, counterfactuals in (("stock", a.stock), ("matched", a.matched))
        if counterfactuals is not None
    ]
    by_length = [
        ({"run": a.run.name, "quantity": field.name}, table)
        for a in analyses
        for field in dataclasses.fields(a.law)
        if isinstance(table := getattr(a.law, field.name), pd.DataFrame)
    ]
    recorded = {a.run.name: a for a in analyses}
    return {
        "summary": pd.DataFrame([_summary(run, recorded.get(run.name)) for run in runs]),
        "clip_rate_by_length": _stacked(({"run": a.run.name}, a.rates) for a in analyses),
        "live_clip_rate_by_length": _stacked(({"run": name}, table) for name, table in live.items()),
        "counterfactuals_by_length": _stacked(({"run": r, "constants": k}, c.by_length) for r, k, c in methods),
        "counterfactuals_summary": _stacked(({"run": r, "constants": k}, c.summary) for r, k, c in methods),
        "weights_by_length": _stacked(({"run": a.run.name}, a.weights) for a in analyses),
        "law_by_length": _stacked(by_length),
        "quantiles": _stacked(({"run": a.run.name}, a.quantiles) for a in analyses),
        "over_steps": _stacked(({"run": a.run.name}, a.windows) for a in analyses),
        "metrics": _stacked(({"run": run.name}, run.metrics.reset_index()) for run in runs),
        "config_differences": config_differences(runs).reset_index(),
    }


def steps(run: Run) -> int:
    """Number of training steps that left metrics or records."""
    return len(set(run.metrics.index[run.metrics.index > 0]) | set(run.records.step.unique()))


def _summary(run: Run, a: Analysis | None) -> dict:
    row = {"run": run.name, "loss": run.settings and run.settings.loss}
    row |= {"steps": steps(run), "records": len(run.records)}
    if (found := noise_of(run)) is not None:
        row |= {"noise_n": found.responses, "noise_sigma": found.sigma, "noise_outside": found.outside}
    if a is None:
        return row
    length = run.records.length
    row |= {"length_shortest": length.min(), "length_median": length.median(), "length_longest": length.max()}
    row |= {"n": a.total.n, "lre_excluded_responses": a.lre_excluded, "moved": a.law.responses}
    rate = Estimate(a.total.rate, a.total.lower, a.total.upper)
    outliers = Estimate(a.outliers.rate, a.outliers.lower, a.outliers.upper)
    estimates = {"clip_rate": rate, "lre": a.lre, "lre_floor": a.floor, "outliers": outliers}
    estimates |= {
        f.name: value for f in dataclasses.fields(a.law) if isinstance(value := getattr(a.law, f.name), Estimate)
    }
    estimates |= {f"variance_{name}": value for name, value in a.law.variance_law._asdict().items()}
    for name, (value, lower, upper) in estimates.items():
        row |= {name: value, f"{name}_lower": lower, f"{name}_upper": upper}
    return row


def _stacked(parts: Iterable[tuple[dict, pd.DataFrame]]) -> pd.DataFrame:
    """One table of all, with the keys of each as its first columns."""
    frames = [pd.concat([pd.DataFrame(keys, index=frame.index), frame], axis=1) for keys, frame in parts]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _overall(length, share, clusters, edges) -> pd.Series:
    return clip_rates.rate_by_length(length, share, edges[[0, -1]], clusters=clusters).iloc[0]


def _matched(records: pd.DataFrame, edges: np.ndarray, rng: np.random.Generator) -> Counterfactuals | None:
    def reaches(clip):
        try:
            return not clip.lacks(records) and clip.matched(records, MATCHED_RATE) is not None
        except ValueError:
            return False

    clips = {name: clip for name, clip in CLIPS.items() if reaches(clip)}
    return counterfactuals(records, edges, rng, MATCHED_RATE, clips, DRAWS) if clips else None


def _quantiles(z: pd.Series, per_sqrt_length: pd.Series) -> pd.DataFrame:
    """As far out as the sample reaches: half a response beyond the outermost."""
    normal = np.linspace(-3.5, 3.5, 57)
    normal = normal[norm.sf(np.abs(normal)) * len(z) >= 0.5]
    columns = {"z": z, "per_sqrt_length": per_sqrt_length}
    sample = {name: np.quantile(values, norm.cdf(normal)) if len(values) else [] for name, values in columns.items()}
    return pd.DataFrame({"normal": normal, **sample})


def _windows(records: pd.DataFrame, edges: np.ndarray, rng: np.random.Generator) -> pd.DataFrame:
    all_steps = np.unique(records.step)
    count = int(np.clip(len(records) // _WINDOW_ROWS, 1, min(_WINDOWS, len(all_steps))))
    rows = []
    for window in np.array_split(all_steps, count):
        part = records[records.step.between(window[0], window[-1])]
        counted, moved = part[part.advantage != 0], part[part.quadratic_variation > 0]
        columns = np.column_stack(
            [np.ones(len(moved)), moved.quadratic_variation / moved.length, moved.log_ratio / moved.length]
        )
        law = resampling.clustered_bootstrap(resampling.clusters(moved), columns, _sigma_and_drift, rng, _WINDOW_DRAWS)
        lre, (floor, _) = clip_rates.lre_against_chance(counted, counted.clipped, edges, rng, _WINDOW_DRAWS)
        row = {"first_step": window[0], "last_step": window[-1], "step": window.mean()}
        row |= {"n": len(counted), "moved": len(moved)}
        for name, numbers in (("sigma", [x[0] for x in law]), ("drift", [x[1] for x in law]), ("lre", lre)):
            row |= dict(zip((name, f"{name}_lower", f"{name}_upper"), numbers, strict=True))
        rows.append(row | {"drift_expected": -(row["sigma"] ** 2) / 2, "lre_expected": floor.value})
    return pd.DataFrame(rows)


def _sigma_and_drift(totals: np.ndarray) -> np.ndarray:
    count, variance, drift = np.moveaxis(totals, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.stack([np.sqrt(variance / count), drift / count], axis=-1)


def _quotient(totals: np.ndarray) -> np.ndarray:
    return totals[..., :1] / totals[..., 1:]
