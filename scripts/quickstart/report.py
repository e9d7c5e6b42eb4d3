# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the metrics of a run, and draws them."""

import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# verl's metric names. Losses report what they clip under different names; the first that is there counts.
COLUMNS = {
    "reward": ["critic/score/mean"],
    "accuracy": ["val-core/ledger/acc/mean@1"],
    "clip_fraction": ["actor/fspo/clip_fraction", "actor/pg_clipfrac"],
    "shortest": ["response_length/min"],
    "longest": ["response_length/max"],
    "seconds": ["timing_s/step"],
}


def metric_files(run: Path) -> list[Path]:
    """The metric files of a run's attempts, the oldest first."""
    return sorted(run.glob("metrics-*.jsonl"), key=lambda file: int(file.stem.split("-")[1]))


def read_metrics(files: Iterable[Path]) -> pd.DataFrame:
    """One row per training step, in order, from verl's metric files; where attempts overlap the latest counts."""
    rows = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed, or that is being written
            rows[record["step"]] = [
                next((record["data"][name] for name in names if name in record["data"]), None)
                for names in COLUMNS.values()
            ]
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS), dtype=float).sort_index()


def summarize(run: Path) -> dict[str, float]:
    """What a run has achieved."""
    metrics = read_metrics(metric_files(run))
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
    metrics = read_metrics(metric_files(run))
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
