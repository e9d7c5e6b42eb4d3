# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the metrics of a run, and draws them."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fspo_verl import runs

# verl's metric names. Losses report what they clip under different names; the first that is there counts.
COLUMNS = {
    "reward": ["critic/score/mean"],
    "accuracy": ["val-core/ledger/acc/mean@1"],
    "clip_fraction": ["actor/fspo/clip_fraction", "actor/pg_clipfrac"],
    "shortest": ["response_length/min"],
    "longest": ["response_length/max"],
    "seconds": ["timing_s/step"],
}


def read_metrics(files: Iterable[Path]) -> pd.DataFrame:
    """One row per training step, in order, from verl's metric files; where attempts overlap the latest counts."""
    metrics = runs.read_metrics(file for file in files if file.exists())  # one that is awaited need not be there yet
    columns = {column: metrics.reindex(columns=names).bfill(axis=1).iloc[:, 0] for column, names in COLUMNS.items()}
    return pd.DataFrame(columns)


def summarize(run: Path) -> dict[str, float]:
    """What a run has achieved."""
    metrics = read_metrics(runs.metric_files(run))
    accuracy = metrics.accuracy.dropna()
    return {
        "accuracy_before": accuracy.iloc[0],
        "accuracy_after": accuracy.iloc[-1],
        "clip_fraction_median": metrics.clip_fraction.median(),
        "shortest": metrics.shortest.min(),
        "longest": metrics.longest.max(),
        "seconds_per_step": metrics.seconds.median(),
    }


def draw(run: Path, title: str) -> None:
    """Draw reward, validation accuracy and clip fraction over the steps into ``run/progress.png``."""
    metrics = read_metrics(runs.metric_files(run))
    figure = Figure(figsize=(7, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    upper.plot(metrics.reward.dropna(), color="tab:blue", label="training reward (sampled)")
    upper.plot(metrics.accuracy.dropna(), "o-", color="tab:orange", label="validation accuracy (greedy)")
    upper.set(title=title, ylabel="share of right answers", ylim=(0, 1))
    upper.legend(loc="lower right")
    lower.plot(metrics.clip_fraction.dropna(), color="tab:green")
    lower.set(xlabel="training step", ylabel="clip fraction", ylim=(0, None))
    lower.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(run / "progress.png", dpi=150)
