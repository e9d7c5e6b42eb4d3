# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does eps find the wished clip rate? Clip rate and eps over the steps of runs with ``target_clip_rate``.

python scripts/studies/target_clip_rate/follow.py runs/target_clip_rate/*-seed*    table and figure of runs
python scripts/studies/target_clip_rate/follow.py                                  of steps.csv beside this file
"""

import io
import re
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fspo_verl.analysis import runs
from fspo_verl.output import between, markdown_table, write_whole
from fspo_verl.report.figures import AMBER, BLACK, BROWN, GREY

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))
from pictures import small_png  # noqa: E402

BEGIN, END = "<!-- begin of what follow.py writes -->", "<!-- end of what it writes -->"
TARGET = 0.1
COLUMNS = {"fspo/clip_rate/all": "rate", "fspo/eps_low": "eps_low", "fspo/eps_high": "eps_high"}
SHOWN = {
    "target": "quickstart, 4 steps\nper rollout",
    "target16": "quickstart, 16 steps\nper rollout",
    "real": "SmolLM2-135M",
}
"""What a name of runs is called in the figure."""
ACCURACY = re.compile(r"val-core/[^/]+/acc/mean@1")  # the data set's name is in between


def steps_of(run: Path) -> pd.DataFrame:
    """A row per step of a run: name, seed, step, rate, eps_low, eps_high, accuracy; NaN where it is not known."""
    metrics = runs.read_metrics(runs.metric_files(run))
    accuracy = next(name for name in metrics if ACCURACY.fullmatch(name))
    name, seed = re.fullmatch(r"(.+)-hf-seed(\d+)", run.name).groups()
    table = metrics.reindex(columns=[*COLUMNS, accuracy]).rename(columns=COLUMNS | {accuracy: "accuracy"})
    return table.reset_index(names="step").assign(name=name, seed=int(seed))


def table(steps: pd.DataFrame) -> str:
    """A row per run; the clip rate is that of the later two thirds of its steps."""
    rows = []
    for (name, seed), run in steps.groupby(["name", "seed"], sort=True):
        later = run.rate[run.step > run.step.max() / 3]
        accuracy, last = run.accuracy.dropna(), run.iloc[-1]
        ends = "fixed" if pd.isna(last.eps_low) else f"{last.eps_low:.3g}, {last.eps_high:.3g}"
        rate = f"{later.mean():.1%}", f"{later.std():.1%}"
        rows.append([name, str(seed), *rate, ends, f"{accuracy.iloc[0]:.2f}", f"{accuracy.iloc[-1]:.2f}"])
    header = ["run", "seed", "mean clip rate", "sd of a step", "eps_low, eps_high at the end"]
    return markdown_table([*header, "accuracy before", "after"], rows)


def draw(steps: pd.DataFrame) -> Figure:
    """Clip rate, dashed what was asked for, above eps of both sides: a column per name, a line per seed."""
    names = list(dict.fromkeys(steps.dropna(subset="eps_low").name))
    figure = Figure(figsize=(2.8 * len(names), 4.6), layout="constrained")
    panels = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey="row")
    for name, (upper, lower) in zip(names, panels.T, strict=True):
        for _, run in steps[steps.name == name].groupby("seed"):
            upper.plot(run.step, run.rate, color=GREY, lw=1)
            sides = lower.plot(run.step, run.eps_high, color=BROWN, lw=1)
            sides += lower.plot(run.step, run.eps_low, color=AMBER, lw=1)
        asked = upper.axhline(TARGET, color=BLACK, lw=1, ls="--")
        upper.set_title(SHOWN.get(name, name), fontsize=10)
        lower.set(xlabel="training step", yscale="log")
    panels[0, 0].set_ylabel("clip rate")
    panels[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[1, 0].set_ylabel("eps")
    labels = [f"asked: {TARGET:.0%}", "eps_high", "eps_low"]
    figure.legend([asked, *sides], labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:]]
    steps = pd.concat(map(steps_of, folders)) if folders else pd.read_csv(HERE / "steps.csv")
    picture, page = io.BytesIO(), HERE / "README.md"
    draw(steps).savefig(picture, dpi=110, metadata={"Software": None})
    content = between(page.read_text(), BEGIN, END, table(steps))
    data = steps.to_csv(index=False).encode()
    files = {"steps.csv": data, "follow.png": small_png(picture.getvalue()), "README.md": content.encode()}
    write_whole((HERE / name, content) for name, content in files.items())


if __name__ == "__main__":
    main()
