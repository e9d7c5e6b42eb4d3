# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The figures of the report page: each function draws a panel from finished tables and computes no result.

A loss has one colour and one marker in all figures, of those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which
colour-blind readers can tell apart; further runs of the same loss differ by line and hollow marker.
"""

import io
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from fspo_verl.analysis.clip_rates import has_enough_data


class Style(NamedTuple):
    """How a run or a clip is drawn."""

    color: str
    marker: str
    line: str = "-"
    hollow: bool = False

    def line_kwargs(self) -> dict:
        """Keyword arguments for :meth:`Axes.plot` and :meth:`Axes.errorbar` of matplotlib."""
        face = "white" if self.hollow else self.color
        return {"color": self.color, "marker": self.marker, "ls": self.line, "mfc": face, "mew": 1.1}


STYLES = {
    "fspo": Style("#0072B2", "o"),
    "fspo_drift_corrected": Style("#56B4E9", "v", "--"),
    "gspo": Style("#D55E00", "s"),
    "grpo": Style("#009E73", "^"),
    "fixed_band": Style("#CC79A7", "D"),
    "no_clip": Style("#882255", "X"),
}
"""Styles of the losses that this package trains with, and of the clips in figures; others are in tables only."""

_LENGTH = "response length L (tokens)"
BLACK, GREY = "#000000", "#7f7f7f"
"""Colours of what is no loss, such as tasks or kinds of prompts; colours of STYLES mean losses."""
_STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "svg.hashsalt": "fspo_verl",  # the same figure is the same file
    "text.parse_math": False,  # names of runs are texts
}
_LEGEND_ROW, _LEGEND_COLUMNS = 0.18, 3  # the height in inches
_OTHER_LOSSES = [Style(BLACK, "*"), Style("#666633", "h")]
_REPEATS = [("-", False), ("--", True), (":", False), ("-.", True)]


def run_styles(losses: Sequence[str | None]) -> list[Style]:
    """One style per run, that of the loss it trained with; others take theirs in order."""
    known = [loss if loss in STYLES else None for loss in losses]
    styles = []
    for i, loss in enumerate(known):
        own = [STYLES[loss]] if loss else _OTHER_LOSSES
        repeats, place = divmod(known[:i].count(loss), len(own))
        line, hollow = _REPEATS[repeats % len(_REPEATS)]
        styles.append(own[place]._replace(line=line, hollow=hollow))
    return styles


class Series(NamedTuple):
    """A table by length, with columns low, high, ``column``, lower, upper and, where known, n; and how to draw it."""

    label: str
    style: Style
    table: pd.DataFrame
    column: str = "rate"


def render(draw: Callable[[], Figure], *kinds: str) -> list[bytes]:
    """The figure that ``draw`` makes, as ``svg`` or ``png``.

    The same figure gives the same bytes, whatever the user's matplotlibrc says.
    """
    images = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = draw()
        for kind in kinds:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
            images.append(buffer.getvalue())
    return images


def by_length(axes: Axes, series: Sequence[Series]) -> None:
    """Values by length bin with their intervals, on a logarithmic length axis.

    Bins with too few responses or prompts to take part in an LRE are pale marks without bars, to which no line
    leads and the vertical axis does not stretch.
    """
    for i, (label, style, table, column) in enumerate(series):
        # Bars of different series would hide each other at one and the same place.
        table = table.assign(place=np.sqrt(table.low * table.high) * 1.02 ** (i - (len(series) - 1) / 2))
        drawn = has_enough_data(table) if "n" in table else table[column].notna()
        solid, pale = table[drawn], table[~drawn & table[column].notna()]
        value, lower, upper = solid[[column, "lower", "upper"]].to_numpy().T
        # matplotlib refuses negative bars, which rounding can bring about where an end of the interval is the value.
        bars = np.maximum([value - lower, upper - value], 0)
        place = solid.place.to_numpy()
        label = f" {label}" if label.startswith("_") else label  # or no legend would have it
        axes.errorbar(place, value, bars, label=label, capsize=2, elinewidth=0.9, **style.line_kwargs())
        marks = Line2D(pale.place, pale[column], **style._replace(line="none").line_kwargs(), alpha=0.3)
        axes.add_artist(marks) if drawn.any() else axes.add_line(marks)  # an artist has no part in the axis's limits
    binned = [table for *_, table, _ in series if len(table)]
    low = min((table.low.min() for table in binned), default=1)
    high = max((table.high.max() for table in binned), default=1)
    axes.set_xscale("log")
    axes.set(xlim=(low / 1.15, high * 1.15), xlabel=_LENGTH)
    round_ticks(axes.xaxis)


def over_steps(axes: Axes, title: str, courses: Sequence[tuple[str, Style, pd.DataFrame]], column: str) -> None:
    """A column of :func:`fspo_verl.analysis.length_effect.slopes_of_steps` by training step, of each run."""
    for label, style, table in courses:
        values = table[column]
        bars = None
        if column == "slope":
            bars = [values - table["lower"], table["upper"] - values]
        axes.errorbar(table.index, values, bars, label=f" {label}", capsize=2, elinewidth=0.9, **style.line_kwargs())
    axes.set_title(f"{title} by training step")
    axes.set(xlabel="training step", ylabel=title)
    if column == "slope":
        axes.axhline(0, color=BLACK, lw=0.8)
    else:
        axes.set(ylim=(0, None))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))


def round_ticks(axis: Axis) -> None:
    """Round numbers on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:.3g}"))


def of_panels(panels: Sequence[tuple], height: float, columns: int = 2) -> Figure:
    """A figure of panels of ``height`` inches, at most ``columns`` in a row, with one legend for all below them.

    Args:
        panels: each a function below, and its arguments but the axes.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    handles: dict[str, object] = {}
    figure = Figure(figsize=(8.0, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[len(panels) :]:
        unused.remove()
    for place, (draw, *args) in zip(axes, panels, strict=False):
        draw(place, *args)
        handles |= {label: handle for handle, label in zip(*place.get_legend_handles_labels(), strict=True)}
    figure.set_figheight(height * rows + _LEGEND_ROW * math.ceil(len(handles) / _LEGEND_COLUMNS))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=_LEGEND_COLUMNS)
    return figure


def clip_rates(axes: Axes, title: str, series: Sequence[Series], level: float | None = None) -> None:
    """Clip rate by length, and a line at ``level``, the overall rate, where all series have the same."""
    if level is not None:
        axes.axhline(level, color=BLACK, lw=0.8)
    by_length(axes, series)
    axes.set_title(title)
    axes.set(ylim=(0, None), ylabel="clip rate")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
