# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The figure of a comparison: learning, and clip rates by length."""

import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fspo_verl.clips import MATCHED_RATE
from fspo_verl.compare.comparison import Comparison
from fspo_verl.report import figures


def draw(comparison: Comparison) -> Figure:
    """Curves of validation accuracy, and clip rates by length as trained and scaled to one rate."""
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    figure.suptitle(textwrap.fill(comparison.headline, 130), fontsize=11, fontweight="bold")
    learning, trained, matched = figure.subplots(1, 3)
    styles = dict(zip(comparison.losses, figures.run_styles(comparison.losses), strict=True))
    for loss, style in styles.items():
        curves = [pd.Series(trial.validation) for trial in comparison.trials if trial.loss == loss]
        for curve in curves:
            learning.plot(curve, color=style.color, lw=0.6, alpha=0.5)
        learning.plot(pd.concat(curves, axis=1).mean(axis=1), label=loss, **style.line_kwargs())
    learning.set(title="validation accuracy (thin: each seed)", xlabel="training step", ylabel="share of right answers")
    learning.xaxis.get_major_locator().set_params(integer=True)
    rates = comparison.clip_rates
    _clip_rates(trained, rates[rates.kind == "clipped"], styles, "clip rate by length")
    _clip_rates(matched, rates[rates.kind == "matched"], styles, f"the same, scaled to {MATCHED_RATE:.0%} overall")
    matched.axhline(MATCHED_RATE, color=figures.GREY, lw=0.8, ls=":")
    figure.legend(*learning.get_legend_handles_labels(), loc="outside lower center", ncols=len(styles))
    return figure


def _clip_rates(axes: Axes, rates: pd.DataFrame, styles: dict, title: str) -> None:
    for loss, table in rates.dropna(subset="rate").groupby("loss"):
        axes.fill_between(table.length, table.smallest, table.largest, color=styles[loss].color, alpha=0.15, lw=0)
        axes.plot(table.length, table.rate, **styles[loss].line_kwargs())
    places = rates.groupby(["low", "high"]).length.mean().dropna()
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{low}–{high}" for low, high in places.index])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.set(title=title, xlabel="response length (tokens; shaded: the seeds)", ylabel="clip rate", ylim=(0, None))
