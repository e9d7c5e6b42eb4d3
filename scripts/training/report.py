# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the metrics of a run, draws them, and says what it has achieved."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fspo_verl.analysis import runs
from fspo_verl.observe.metrics import NAMES
from fspo_verl.report import figures

COLUMNS = {key: [NAMES[key]] for key in ("reward", "clip_rate", "shortest", "longest", "seconds")}
ACCURACY = re.compile(r"val-core/[^/]+/acc/mean@1")  # the data set's name is in between
EDGE = 3  # steps at each end of a run whose mean reward is shown, if there are as many


def read_metrics(files: Iterable[Path]) -> pd.DataFrame:
    """One row per training step, in order, from verl's metric files; where attempts overlap the latest counts."""
    metrics = runs.read_metrics(file for file in files if file.exists())  # one that is awaited need not be there yet
    names = COLUMNS | {"accuracy": [name for name in metrics.columns if ACCURACY.fullmatch(name)] or ["accuracy"]}
    columns = {column: metrics.reindex(columns=found).bfill(axis=1).iloc[:, 0] for column, found in names.items()}
    return pd.DataFrame(columns)


def summarize(run: Path) -> dict[str, float]:
    """Return the results of a run."""
    metrics = read_metrics(runs.metric_files(run))
    validated = metrics.accuracy.dropna().to_list() or [math.nan]  # an override may leave validation out
    reward = metrics.reward.dropna()
    edge = max(1, min(EDGE, len(reward) // 2))
    return {
        "edge_steps": edge,
        "reward_first": reward.iloc[:edge].mean(),
        "reward_last": reward.iloc[-edge:].mean(),
        "accuracy_before": validated[0],
        "accuracy_after": validated[-1],
        "clip_rate_median": metrics.clip_rate.median(),
        "shortest": metrics.shortest.min(),
        "longest": metrics.longest.max(),
        "seconds_per_step": metrics.seconds.median(),
    }


def draw(run: Path, title: str) -> None:
    """Draw reward, validation accuracy and clip rate over the steps into ``run/progress.png``."""
    metrics = read_metrics(runs.metric_files(run))
    accuracy = metrics.accuracy.dropna()
    if len(accuracy):
        title = f"accuracy {accuracy.iloc[0]:.2f} → {accuracy.iloc[-1]:.2f} in {accuracy.index[-1]} steps ({title})"
    (run / "progress.png").write_bytes(*figures.render(lambda: _progress(metrics, title), "png"))


def _progress(metrics: pd.DataFrame, title: str) -> Figure:
    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    # Neutral colours: those of fspo_verl.clips mean losses.
    upper.plot(metrics.reward.dropna(), color=figures.GREY, lw=1, label="training reward (sampled)")
    upper.plot(metrics.accuracy.dropna(), "o-", color=figures.BLACK, label="validation accuracy (greedy)")
    upper.set_title(title, fontsize=11, fontweight="bold")
    upper.set(ylabel="right answers", ylim=(0, 1))
    upper.legend(loc="lower right")
    lower.plot(metrics.clip_rate.dropna(), color=figures.GREY, lw=1)
    lower.set(xlabel="training step", ylabel="clip rate", ylim=(0, None))
    for axes in (upper, lower):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def show(summary: dict, run: Path) -> None:
    """Print the summary of a run: what :func:`summarize` returns and ``seconds`` by phase."""
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    print(
        f"\nreward               {summary['reward_first']:.2f} at first, {summary['reward_last']:.2f} at last "
        f"(steps in each mean: {summary['edge_steps']:.0f})\n"
        f"validation accuracy  {summary['accuracy_before']:.2f} before, {summary['accuracy_after']:.2f} after\n"
        f"clip rate            {summary['clip_rate_median']:.1%} (median over the steps)\n"
        f"response lengths     {summary['shortest']:.0f} to {summary['longest']:.0f} tokens\n"
        f"time                 {times} ({summary['seconds_per_step']:.1f} s per step)\n"
        f"picture              {run / 'progress.png'}\n"
        f"metrics and log      {run / 'metrics-*.jsonl'}, {run / 'train.log'}\n"
        f"trained model        {next(run.glob('checkpoints/global_step_*/actor/huggingface'), 'none')}"
    )
