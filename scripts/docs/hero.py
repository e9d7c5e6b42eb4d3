# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/hero.png, the first picture of the README: clip rate by response length, each clip scaled to one rate.

Left from scripts/studies/comparison/comparison.json (small models, mean and range of the seeds), right from the records
of the law (a pretrained language model, mean and range of three updates).

python scripts/docs/hero.py [--output docs/hero.png]
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fspo_verl.analysis import clip_rates
from fspo_verl.clips import CLIPS, MATCHED_RATE
from fspo_verl.compare import compare, load
from fspo_verl.observe.records import read_records
from fspo_verl.report import at_one_rate, counterfactuals, figures
from fspo_verl.report.figures import STYLES

ROOT = Path(__file__).parents[2]
LOSSES = {"fixed_band": "fixed band", "fspo": "FSPO, ∝ √L", "gspo": "GSPO, ∝ L"}
UPDATES = ("grpo-4-float32", "warm-4-float32", "random-4-float32")  # cells of the law
_LENGTH_BINS = 4  # of the law's lengths, so that each holds 50 responses and more


def small_models() -> pd.DataFrame:
    """Clip rates of the comparison: columns loss, low, high, place, rate, smallest, largest."""
    trials = load(ROOT / "scripts/studies/comparison/comparison.json")
    rates = compare(trials).clip_rates.query("kind == 'matched' and loss in @LOSSES")
    return rates.rename(columns={"length": "place"})


def real_model() -> pd.DataFrame:
    """The same of the law's responses, which all updates share."""
    updates = [read_records(ROOT / "scripts/studies/law/records" / name) for name in UPDATES]
    edges = clip_rates.length_edges(updates[0].length, _LENGTH_BINS)
    clips = {name: CLIPS[name] for name in LOSSES}
    rates = pd.concat(counterfactuals(records, edges, at_one_rate(records, clips)).by_length for records in updates)
    bins = rates.rename_axis("loss").groupby(["loss", "low", "high"]).rate
    table = bins.agg(rate="mean", smallest="min", largest="max").reset_index()
    cell, _ = clip_rates.length_cells(updates[0].length, edges)
    place = np.exp(np.log(updates[0].length).groupby(edges[cell]).mean())
    return table.assign(place=table.low.map(place))


def _draw(axes: Axes, rates: pd.DataFrame, title: str, labelled: int) -> None:
    """Lines with their range, each named beside its first (0) or last (-1) point; the title says which is flattest."""
    axes.axhline(MATCHED_RATE, color=figures.GREY, lw=0.8, ls=":")
    for loss, table in rates.groupby("loss", sort=False):
        style = STYLES[loss]
        axes.fill_between(table.place, table.smallest, table.largest, color=style.color, alpha=0.12, lw=0)
        axes.plot(table.place, table.rate, **style.line_kwargs() | {"lw": 2.2, "ms": 6})
        falls = table.rate.iloc[1] < table.rate.iloc[0]
        offset = (10, 0) if labelled else (8, 8) if falls else (8, -8)
        point = (table.place.iloc[labelled], table.rate.iloc[labelled])
        name = LOSSES[loss] if labelled else LOSSES[loss].split(",")[0]
        axes.annotate(name, point, xytext=offset, textcoords="offset points", color=style.color, va="center")
    axes.set_xscale("log")
    axes.set_xticks(table.place, [f"{row.low:,}–{row.high:,}" for row in table.itertuples()])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="response length (tokens)")
    flattest = LOSSES[rates.groupby("loss").rate.agg(np.ptp).idxmin()]
    axes.set_title(f"{title}\nflattest: {flattest}", fontsize=11, fontweight="bold")


def draw(columns: int) -> Figure:
    """Two panels; ``columns`` is there for :func:`fspo_verl.report.figures.render`."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, small_models(), "Small models, trained with each loss", -1)
    _draw(right, real_model(), "SmolLM2-135M, updated without long responses", 0)
    left.set(ylabel=f"clipped, {MATCHED_RATE:.0%} overall", ylim=(0, None))
    left.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/hero.png")
    args = parser.parse_args()
    args.output.write_bytes(figures.render(draw, 1, "png")[0])
    print(args.output)


if __name__ == "__main__":
    main()
