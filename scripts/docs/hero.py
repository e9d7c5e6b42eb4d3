# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/hero.png, the first picture of the README: clip rate by response length, each clip scaled to one rate.

From scripts/studies/comparison/comparison.json: small models, mean and range of the seeds.

python scripts/docs/hero.py
"""

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fspo_verl.clips import MATCHED_RATE
from fspo_verl.report import figures
from fspo_verl.report.figures import STYLES

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts/compare"), str(ROOT / "scripts")]
from compare import compare, load  # noqa: E402
from pictures import small_png  # noqa: E402

LOSSES = {"fixed_band": "fixed band", "fspo": "FSPO: ∝ √length", "gspo": "GSPO: ∝ length"}


def small_models() -> pd.DataFrame:
    """Clip rates of the comparison: columns loss, low, high, length, rate, smallest, largest."""
    trials = load(ROOT / "scripts/studies/comparison/comparison.json")
    return compare(trials).clip_rates.query("kind == 'matched' and loss in @LOSSES")


def draw(columns: int) -> Figure:
    """A line with its range for each loss; ``columns`` is there for :func:`fspo_verl.report.figures.render`."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(MATCHED_RATE, color=figures.GREY, lw=0.8, ls=":")
    for loss, table in small_models().groupby("loss", sort=False):
        style = STYLES[loss]
        axes.fill_between(table.length, table.smallest, table.largest, color=style.color, alpha=0.12, lw=0)
        axes.plot(table.length, table.rate, **style.line_kwargs() | {"lw": 2.2, "ms": 6})
        end = (table.length.iloc[-1], table.rate.iloc[-1])
        axes.annotate(LOSSES[loss], end, xytext=(10, 0), textcoords="offset points", color=style.color, va="center")
    axes.set_xscale("log")
    axes.set_xticks(table.length, [f"{row.low:,}–{row.high:,}" for row in table.itertuples()])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="response length (tokens)", ylabel=f"clipped, {MATCHED_RATE:.0%} overall", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_title(
        "Who is clipped? GSPO: short. Fixed band: long. FSPO: both alike.", fontsize=11, fontweight="bold", loc="left"
    )
    return figure


if __name__ == "__main__":
    (picture,) = figures.render(draw, 1, "png")
    (ROOT / "docs/hero.png").write_bytes(small_png(picture))
