# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the cells say: prints the verdicts and numbers of an experiment, and draws them beside this file.

python scripts/studies/shape/analyse.py a        of scripts/studies/shape/records
"""

import argparse
import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from run import HERE, RECORDS, SEEDS, SUM, stored

sys.path.insert(0, str(HERE.parents[1] / "compare"))
from measures import CONFIDENCE, LATE, MIN_SEEDS, adjusted_p, sign_flip_interval
from pictures import small_png

from fspo_verl.output import markdown_table, write_whole
from fspo_verl.report.figures import BLACK, GREY, STYLES

SHOWN = {
    "sqrt": ("a width of √L (fspo)", STYLES["fspo"].color),
    "linear": ("a width of L (GSPO's)", STYLES["gspo"].color),
    "measured": ("a measured width", BLACK),
    "fixed": ("a fixed width", STYLES["fixed_band"].color),
    "none": ("no clip", STYLES["no_clip"].color),
    "random": ("clipped at random", GREY),
}
"""What an arm is called in a figure, and its colour: that of the loss whose shape it has."""
MARGIN = 0.03  # of accuracy, within which arms are equivalent
_POWER = 0.8


class EndPoint(NamedTuple):
    """A number per cell."""

    label: str
    of: Callable[[dict], float]


def drift(cell: dict) -> float:
    """Slope of log length over the later half of the steps, per 10 steps."""
    later = np.log(cell["length"][len(cell["length"]) // 2 :])
    return 10 * float(np.polyfit(np.arange(len(later)), later, 1)[0])


END_POINTS = {
    "length": EndPoint("log response length, last 5 steps", lambda cell: math.log(np.mean(cell["length"][-LATE:]))),
    "drift": EndPoint("drift of log length per 10 steps", drift),
    "reward": EndPoint("training reward, mean over the run", lambda cell: float(np.mean(cell["reward"]))),
    "accuracy": EndPoint("accuracy on the fixed problems", lambda cell: cell["accuracy"]),
}


def read(folder: Path, experiment: str) -> pd.DataFrame:
    """Cells, by seed (rows) and arm (columns; of experiment d the aggregation); seeds that lack a cell are left out."""
    cells = stored(experiment, folder).table().to_pylist()
    name = "aggregation" if experiment == "d" else "arm"
    table = pd.Series({(cell["seed"], cell[name]): cell for cell in cells}).unstack()
    return table[table.index < SEEDS].dropna()  # pilot seeds lie above


def smallest_effect(spread: float, seeds: int, arms: int) -> float:
    """The mean difference that so many seeds show in 4 of 5 studies, by the normal law with Bonferroni's correction."""
    normal = NormalDist()
    quantiles = normal.inv_cdf(1 - (1 - CONFIDENCE) / 2 / arms) + normal.inv_cdf(_POWER)
    return quantiles * spread / math.sqrt(seeds)


def differences(cells: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """A row per end point and arm: paired difference arm − baseline, and what can be told from it."""
    rows = []
    for name, end_point in END_POINTS.items():
        values = cells.map(end_point.of)
        pairs = values.drop(columns=baseline).sub(values[baseline], axis=0)
        p = adjusted_p(pairs.to_numpy())
        for (arm, pair), adjusted in zip(pairs.items(), p, strict=True):
            low, high = sign_flip_interval(pair.to_numpy())
            found = "no difference shown" if adjusted > 1 - CONFIDENCE else "higher" if pair.mean() > 0 else "lower"
            if name == "accuracy" and -MARGIN <= low and high <= MARGIN:
                found += f", equivalent within {MARGIN:g}"
            effect = smallest_effect(pair.std(), len(pair), len(p))
            rows.append((name, arm, found, pair.mean(), low, high, adjusted, pair.std(), effect, len(pair)))
    columns = "end_point arm verdict difference lower upper p spread smallest_effect seeds".split()
    return pd.DataFrame(rows, columns=columns)


def tables(found: pd.DataFrame, levels: pd.DataFrame, baseline: str) -> str:
    """Markdown: the verdict per end point and arm first, then the numbers."""
    verdicts = found.pivot(index="arm", columns="end_point", values="verdict")[[*END_POINTS]]
    first = markdown_table(["arm", *END_POINTS], ([arm, *row] for arm, row in verdicts.T.items()))
    numbers = [
        [END_POINTS[row.end_point].label, row.arm, f"{row.difference:+.3f} [{row.lower:+.3f}, {row.upper:+.3f}]"]
        + [f"{row.p:.3f}", f"{row.smallest_effect:.3f}", str(row.seeds)]
        for row in found.itertuples()
    ]
    header = ["end point", "arm", f"difference to {baseline}", "p, adjusted", "smallest effect to be seen", "seeds"]
    means = [[arm, *(f"{value:.3f}" for value in row)] for arm, row in levels.T.items()]
    return "\n\n".join([first, markdown_table(header, numbers), markdown_table(["arm", *levels.columns], means)])


def means(cells: pd.DataFrame) -> pd.DataFrame:
    """The mean of each end point and of the clip rate, a row per arm."""
    of = {name: end_point.of for name, end_point in END_POINTS.items()}
    of["clip rate"] = lambda cell: np.mean(cell["clip_rate"])
    return pd.DataFrame({name: cells.map(number).mean() for name, number in of.items()})


def draw(cells: pd.DataFrame, baseline: str) -> Figure:
    """Length over the steps relative to the baseline: mean over the seeds, and its interval."""
    lengths = cells.map(lambda cell: np.log(cell["length"]))
    others = [arm for arm in cells if arm != baseline]
    figure = Figure(figsize=(2.6 * len(others), 2.8), layout="constrained")
    for arm, panel in zip(others, figure.subplots(1, len(others), sharey=True, squeeze=False)[0], strict=True):
        ratio = np.stack((lengths[arm] - lengths[baseline]).to_numpy())  # [seeds, steps]
        steps = np.arange(1, ratio.shape[1] + 1)
        low, high = np.transpose([sign_flip_interval(step) for step in ratio.T])
        name, color = SHOWN.get(arm, (arm, BLACK))
        panel.fill_between(steps, percent(low), percent(high), color=color, alpha=0.25, lw=0)
        panel.plot(steps, percent(ratio.mean(0)), color=color)
        panel.axhline(0, color="0.5", lw=0.8)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("training step")
    figure.axes[0].set_ylabel(f"length against\n{SHOWN.get(baseline, (baseline,))[0]}")
    figure.axes[0].yaxis.set_major_formatter(PercentFormatter(decimals=0))
    return figure


def percent(log_ratio: np.ndarray) -> np.ndarray:
    """How much longer, in percent."""
    return 100 * np.expm1(log_ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    args = parser.parse_args()
    cells = read(args.folder, args.experiment)
    if len(cells) < MIN_SEEDS:
        raise SystemExit(f"{len(cells)} seeds have all their cells, and an interval needs {MIN_SEEDS}")
    baseline = SUM if args.experiment == "d" else "sqrt"
    found, levels, picture = differences(cells, baseline), means(cells), io.BytesIO()
    draw(cells, baseline).savefig(picture, dpi=110, format="png", metadata={"Software": None})
    print(tables(found, levels, baseline))
    stem = args.experiment.replace("%", "")  # which links would have to escape
    write_whole([(HERE / f"{stem}_length.png", small_png(picture.getvalue()))])


if __name__ == "__main__":
    main()
