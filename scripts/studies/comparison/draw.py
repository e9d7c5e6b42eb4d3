# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The README's picture: who loses gradient to a clip, by response length, with three clips at one overall clip rate.

python scripts/studies/comparison/draw.py      writes docs/clip_rates.png, from 4_steps.json beside this file
"""

import json
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from pictures import small_png  # noqa: E402

from fspo_verl.report import figures  # noqa: E402

CLIPS = {"gspo": "GSPO's range", "fspo": "FSPO's range", "fixed_band": "fixed range"}
EVEN = 0.1  # of all responses: what each clip takes


def draw(_columns: int) -> Figure:
    figure = Figure(figsize=(5.6, 2.7), layout="constrained")
    axes = figure.subplots()
    axes.grid(False)
    axes.axhline(EVEN, color=figures.GREY, ls="--", lw=1)
    axes.text(70, EVEN, "even", color=figures.GREY, va="center")
    rates = pd.DataFrame(json.loads((Path(__file__).parent / "4_steps.json").read_text())["clip_rates"])
    for place, (clip, name) in enumerate(CLIPS.items(), -1):
        color, wide = figures.STYLES[clip].color, clip == "fspo"
        own = rates[(rates.kind == "matched") & (rates.loss == clip)]
        axes.plot(own.length, own.rate, color=color, lw=3 if wide else 1.8, zorder=3 if wide else 2)
        for row in own.itertuples():  # beside each other, or they would hide each other
            axes.plot([row.length * 1.015**place] * 2, [row.smallest, row.largest], color=color, alpha=0.35)
        axes.text(70, own.rate.iloc[-1] + 0.008 * wide, name, color=color, va="center", weight="bold")
    axes.set_xscale("log")
    axes.set(xlim=(4.6, 68), ylim=(0, 0.3), xlabel="response length (tokens)", ylabel="responses clipped")
    axes.set_xticks([5, 10, 20, 40, 65], ["5", "10", "20", "40", "65"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.set_yticks([0, 0.1, 0.2, 0.3])
    return figure


if __name__ == "__main__":
    (ROOT / "docs/clip_rates.png").write_bytes(small_png(figures.render(draw, 1, "png")[0]))
