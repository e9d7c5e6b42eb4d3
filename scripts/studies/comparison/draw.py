# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The README's picture: who loses gradient to a clip, by response length, with three ranges on the same responses.

python scripts/studies/comparison/draw.py      writes docs/clip_rates.png

Left, runs without a clip in 4_steps.json; right, the responses of ../law that the CPU has measured.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(HERE.parent / "law")]
import law  # noqa: E402
from pictures import small_png  # noqa: E402

from fspo_verl.report import figures  # noqa: E402

CLIPS = {"gspo": ("GSPO's", "L"), "fspo": ("FSPO's", "√L"), "fixed_band": ("fixed", "fixed")}  # in law's terms, too
EVEN, FIFTHS = 0.1, 5  # of all responses: what each range takes


def small_models() -> pd.DataFrame:
    """Clip rates of runs without a clip: a row per range and bin of length; mean, least and most of the seeds."""
    rows = []
    for trial in json.loads((HERE / "4_steps.json").read_text())["trials"]:
        if trial["loss"] == "no_clip":
            responses, length = np.sum(trial["clips"]["responses"], 0), np.exp(trial["clips"]["mean_log"])
            for clip in CLIPS:
                rates = np.sum(trial["clips"]["matched"][clip], 0) / responses
                rows.append(pd.DataFrame({"clip": clip, "place": range(len(rates)), "length": length, "rate": rates}))
    grouped = pd.concat(rows).groupby(["clip", "place"])
    return grouped.rate.agg(["mean", "min", "max"]).assign(length=grouped.length.mean())


def language_model() -> pd.DataFrame:
    """Clip rates of SmolLM2-135M over all kinds of prompts: a row per range and fifth of the lengths."""
    records = law.read("cpu")
    counted, rows = (records.advantage != 0).to_numpy(), []
    place = pd.qcut(records.length[counted].rank(method="first"), FIFTHS, labels=False)
    for clip, (_, width) in CLIPS.items():
        found = pd.DataFrame({"mean": law.clipped(records, width)[counted], "length": records.length[counted]})
        fifths = found.groupby(place.to_numpy()).agg({"mean": "mean", "length": lambda all: np.exp(np.log(all).mean())})
        rows.append(fifths.assign(clip=clip).set_index("clip", append=True).swaplevel())
    return pd.concat(rows).rename_axis(["clip", "place"])


def panel(axes: Axes, rates: pd.DataFrame, title: str, ticks: list[int], end: float) -> None:
    axes.grid(False)
    axes.axhline(EVEN, color=figures.GREY, ls="--", lw=1)
    for side, (clip, (name, _)) in enumerate(CLIPS.items(), -1):
        own, wide, color = rates.loc[clip], clip == "fspo", figures.STYLES[clip].color
        axes.plot(own.length, own["mean"], lw=3 if wide else 1.8, color=color, zorder=3 if wide else 2)
        for row in own.itertuples() if "min" in own else ():  # beside each other, or they would hide each other
            axes.plot([row.length * 1.015**side] * 2, [row.min, row.max], color=color, alpha=0.35)
        last = own.iloc[-1]
        axes.text(last.length * 1.1, max(last["mean"], 0.008), name, color=color, va="center", weight="bold")
    axes.set_xscale("log")
    axes.set(xlim=(ticks[0] * 0.9, end), ylim=(0, 0.32), xlabel="response length (tokens)", title=title)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def draw() -> Figure:
    figure = Figure(figsize=(7.6, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panel(left, small_models(), "Small models through verl", [5, 10, 20, 40], 115)
    panel(right, language_model(), "SmolLM2-135M", [20, 50, 100, 200, 500, 1000], 1900)
    left.set_ylabel("responses clipped")
    left.yaxis.set_major_formatter(PercentFormatter(1, 0))
    return figure


if __name__ == "__main__":
    (ROOT / "docs/clip_rates.png").write_bytes(small_png(figures.render(draw, "png")[0]))
