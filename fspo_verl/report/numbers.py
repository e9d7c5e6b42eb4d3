# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a report: what is computed from the records and the metrics of each run, with intervals."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import norm

from fspo_verl.analysis import clip_rates, resampling
from fspo_verl.analysis.counterfactuals import Counterfactuals, counterfactuals
from fspo_verl.analysis.law import LawOfS, law_of_s
from fspo_verl.analysis.resampling import Estimate
from fspo_verl.analysis.runs import Run, config_differences, live_clip_rates
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
    """All that is computed from the records of one run. ``total`` and ``outliers`` hold n, rate, lower, upper."""

    run: Run
    total: pd.Series  # clip rate over all lengths
    rates: pd.DataFrame  # by length
    lre: Estimate
    floor: Estimate  # LRE by chance
    lre_excluded: int  # responses in bins that hold too few responses or prompts to take part in the LRE
    stock: Counterfactuals
    matched: Counterfactuals | None  # None where no clip can take MATCHED_RATE of these responses
    law: LawOfS
    quantiles: pd.DataFrame  # of the normal law (normal) and of the sample: z = (S + Q/2)/√Q, per_sqrt_length = S/(σ√L)
    outliers: pd.Series  # share of the moved responses with |S + Q/2| > 1.96 √Q
    windows: pd.DataFrame  # σ, drift and LRE in windows of consecutive steps


def analyse(run: Run, edges: np.ndarray, rng: np.random.Generator) -> Analysis | None:
    """Everything about the records of a run; None where no response has an advantage.

    Args:
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
        total=_overall(counted.length, counted.clipped, clusters, edges),
        rates=rates,
        lre=lre,
        floor=floor,
        lre_excluded=int(rates.n[~clip_rates.takes_part(rates)].sum()),
        stock=counterfactuals(records, edges, rng, draws=DRAWS),
        matched=_matched(records, edges, rng),
        law=law,
        quantiles=_quantiles(z, moved.log_ratio / (law.sigma.value * np.sqrt(moved.length))),
        outliers=_overall(moved.length, np.abs(z) > _OUTLIER, resampling.clusters(moved), edges),
        windows=_windows(records, edges, rng),
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
    """Clip rate by length from a run's metrics: columns low, high, steps, rate, lower, upper.

    ``steps`` have a response in the bin, and the interval resamples them: how many responses stand behind a step's rate
    is not logged.
    """
    rows = []
    longest = run.metrics.reindex(columns=NAMES["longest"]).max().item()
    for low, part in live_clip_rates(run.metrics).query("responses > 0").groupby("low"):
        rate = resampling.clustered_bootstrap(
            np.arange(len(part)), part[["clipped", "responses"]], lambda totals: totals[..., :1] / totals[..., 1:], rng
        )
        high = np.fmax(longest, low) if part.high.isna().any() else part.high.max()
        rows.append((low, high, len(part), *(number.item() for number in rate)))
    return pd.DataFrame(rows, columns=["low", "high", "steps", "rate", "lower", "upper"])


def live_steps(run: Run) -> pd.DataFrame:
    """σ and drift of every step from a run's metrics, over all its rows: columns step, sigma, drift."""
    names = [*NAMES["sigma_squared"], *NAMES["drift"]]
    table = run.metrics.reindex(columns=names).set_axis(["sigma", "drift"], axis=1).dropna(how="all")
    return table.assign(sigma=np.sqrt(table.sigma)).reset_index()


def tables(runs: Sequence[Run], analyses: Sequence[Analysis], live: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Every number of a report, by the name of its file; ``live`` is :func:`live_rates` by name of run."""
    recorded = {a.run.name: a for a in analyses}
    methods = {
        (name, constants): found
        for name, a in recorded.items()
        for constants, found in (("stock", a.stock), ("matched", a.matched))
        if found is not None
    }
    of_law = {
        (name, quantity): table
        for name, a in recorded.items()
        for quantity, table in vars(a.law).items()
        if isinstance(table, pd.DataFrame)
    }
    return {
        "summary": pd.DataFrame([_summary(run, recorded.get(run.name)) for run in runs]),
        "clip_rate_by_length": _stacked({name: a.rates for name, a in recorded.items()}),
        "live_clip_rate_by_length": _stacked(live),
        "counterfactuals_by_length": _stacked(
            {k: found.by_length for k, found in methods.items()}, ("run", "constants")
        ),
        "counterfactuals_summary": _stacked({k: found.summary for k, found in methods.items()}, ("run", "constants")),
        "law_by_length": _stacked(of_law, ("run", "quantity")),
        "quantiles": _stacked({name: a.quantiles for name, a in recorded.items()}),
        "over_steps": _stacked({name: a.windows for name, a in recorded.items()}),
        "metrics": _stacked({run.name: run.metrics.reset_index() for run in runs}),
        "config_differences": config_differences(runs).reset_index(),
    }


def _stacked(frames: dict, keys: Sequence[str] = ("run",)) -> pd.DataFrame:
    """One table of all; its first columns, ``keys``, say which."""
    # Copied into one block: pandas warns of new columns in a table of a hundred blocks, as those of metrics are.
    return pd.concat(frames, names=keys).copy().reset_index(keys) if frames else pd.DataFrame()


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
    rate, outliers = (overall[["rate", "lower", "upper"]] for overall in (a.total, a.outliers))
    estimates = {"clip_rate": rate, "lre": a.lre, "lre_floor": a.floor, "outliers": outliers}
    estimates |= {name: value for name, value in vars(a.law).items() if isinstance(value, Estimate)}
    estimates |= {f"variance_{name}": value for name, value in a.law.variance_law._asdict().items()}
    for name, (value, lower, upper) in estimates.items():
        row |= {name: value, f"{name}_lower": lower, f"{name}_upper": upper}
    return row


def _overall(length, share, clusters, edges) -> pd.Series:
    return clip_rates.rate_by_length(length, share, edges[[0, -1]], clusters=clusters).iloc[0]


def _matched(records: pd.DataFrame, edges: np.ndarray, rng: np.random.Generator) -> Counterfactuals | None:
    clips = {}
    for name, clip in CLIPS.items():
        with contextlib.suppress(ValueError):  # one that cannot take so many of these responses
            if not clip.lacks(records):
                clip.matched(records, MATCHED_RATE)
                clips[name] = clip
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
        lre, floor = clip_rates.lre_against_chance(counted, counted.clipped, edges, rng, _WINDOW_DRAWS)
        row = {"first_step": window[0], "last_step": window[-1], "step": window.mean()}
        row |= {"n": len(counted), "moved": len(moved)}
        for name, numbers in zip(("sigma", "drift", "lre"), (*np.transpose(law), lre), strict=True):
            row |= dict(zip((name, f"{name}_lower", f"{name}_upper"), numbers, strict=True))
        rows.append(row | {"drift_expected": -(row["sigma"] ** 2) / 2, "lre_expected": floor.value})
    return pd.DataFrame(rows)


def _sigma_and_drift(totals: np.ndarray) -> np.ndarray:
    count, variance, drift = np.moveaxis(totals, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.stack([np.sqrt(variance / count), drift / count], axis=-1)
