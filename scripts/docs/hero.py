# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/hero.png, the first picture of the README, from docs/comparison.json: clip rate by response length.

python scripts/docs/hero.py [--output docs/hero.png]
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fspo_verl.clips import CLIPS, MATCHED_RATE
from fspo_verl.compare import page
from fspo_verl.report import figures

ROOT = Path(__file__).parents[2]
NAMES = {
    "gspo": "GSPO: range on the mean log-ratio",
    "fspo": "FSPO: range ∝ √L",
    "fixed_band": "fixed range on the ratio",
}


def draw(columns: int) -> Figure:
    """One panel; ``columns`` is there for :func:`fspo_verl.report.figures.render`."""
    trials, setup = page.load(ROOT / "docs/comparison.json")
    place = page.bin_places(trials).to_numpy()
    rates = page.compare(trials, setup, "fspo", 0.5).clip_rates.query("kind == 'matched'")
    figure = Figure(figsize=(8, 3.7), layout="constrained")
    axes = figure.subplots()
    axes.axhline(MATCHED_RATE, color=figures.GREY, lw=0.8, ls=":")
    for loss, name in NAMES.items():
        table = rates[rates.loss == loss]
        style = CLIPS[loss].style
        axes.fill_between(place, table.smallest, table.largest, color=style.color, alpha=0.12, lw=0)
        axes.plot(place, table.rate, **style.line_kwargs() | {"lw": 2.2, "ms": 6})
        label = f"{name}\n{table.rate.iloc[0]:.0%} of the shortest, {table.rate.iloc[-1]:.0%} of the longest"
        at = (place[-1], table.rate.iloc[-1])
        axes.annotate(label, at, xytext=(10, 0), textcoords="offset points", color=style.color, va="center")
    bins = rates[["low", "high"]].drop_duplicates()
    axes.set_xscale("log")
    axes.set_xticks(place, [f"{row.low}–{row.high}" for row in bins.itertuples()])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="response length (tokens)", ylabel="clipped", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    title = f"At {MATCHED_RATE:.0%} overall, GSPO clips the short, a fixed range the long, FSPO neither"
    axes.set_title(title, fontsize=11, fontweight="bold")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/hero.png")
    args = parser.parse_args()
    args.output.write_bytes(figures.render(draw, 1, "png")[0])
    print(args.output)


if __name__ == "__main__":
    main()
