# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where does a clip matter? fspo and no clip over a grid of optimiser steps per rollout and learning rates.

The more steps a policy takes on one rollout, and the larger they are, the further it moves from the policy that
sampled, and the more a clip has to do. Passes over each rollout (ppo_epochs) multiply the steps. In every regime the
losses train from the same warm starts on the same prompts. What has finished is not run again.

  python scripts/studies/regimes/regimes.py                  train what is missing in runs/regimes, write JSON and page
  python scripts/studies/regimes/regimes.py --redraw         table and figure again, from regimes.json beside this file
"""

import argparse
import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "compare"), str(HERE.parents[1])]
import baselines  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from measures import measure  # noqa: E402
from pictures import small_png  # noqa: E402
from trials import read_trials  # noqa: E402

from fspo_verl.output import between, markdown_table, write_whole  # noqa: E402
from fspo_verl.report import figures  # noqa: E402

LOSSES, SEEDS = "fspo,no_clip", "10"
EPOCHS, LEARNING_RATES = (1, 4, 16), (5e-4, 1.5e-3)
STEPS = 4  # optimiser steps of one pass over a rollout
BEGIN, END = "<!-- begin of what regimes.py writes -->", "<!-- end of what it writes -->"
COLUMNS = {  # names of measures.MEASURES: titles and formats
    "accuracy": ("accuracy at the end", ".3f"),
    "accuracy_area": ("mean over the run", ".3f"),
    "clip_rate": ("clip rate", ".1%"),
}


def run(args: argparse.Namespace) -> int:
    """Train what is missing and write what came out."""
    regimes = list(itertools.product(EPOCHS, LEARNING_RATES))
    runs = [run for regime in regimes for run in runs_of(args, *regime)]
    baselines.refuse_others(runs)
    baselines.run_all(args, runs)
    found = [cell for epochs, rate in regimes for cell in results(folder(args, epochs, rate), epochs * STEPS, rate)]
    write({"setup": baselines.describe(runs), "cells": found}, args.output)
    return 0


def folder(args: argparse.Namespace, epochs: int, learning_rate: float) -> Path:
    """Of the runs of a regime."""
    return args.output / f"epochs-{epochs}-lr-{learning_rate:g}"


def runs_of(args: argparse.Namespace, epochs: int, learning_rate: float) -> list:
    """The runs of a regime; warm starts are those of all regimes."""
    regime = argparse.Namespace(**vars(args) | {"epochs": epochs, "learning_rate": learning_rate})
    runs = [baselines.training_run(regime, arm, seed, 1.0) for seed in args.seeds for arm in args.arms]
    return [dataclasses.replace(run, folder=folder(args, epochs, learning_rate) / run.folder.name) for run in runs]


def results(folder: Path, steps_per_rollout: int, learning_rate: float) -> list[dict]:
    """What each run of a regime came to."""
    trials = read_trials(folder)
    rows = measure(trials).astype(object)
    rows = rows.where(rows.notna(), None).to_dict("records")
    return [
        {"steps_per_rollout": steps_per_rollout, "learning_rate": learning_rate}
        | {name: row[name] for name in ("loss", "seed", *COLUMNS)}
        | {"validation": trial.validation}
        for trial, row in zip(trials, rows, strict=True)
    ]


def write(found: dict, folder: Path) -> None:
    """The results as JSON, and page and figure of them beside it."""
    text = json.dumps(found, separators=(",", ":")).replace('{"steps_per', '\n{"steps_per') + "\n"
    page, picture = folder / "README.md", io.BytesIO()
    found = json.loads(text)
    draw(found["cells"]).savefig(picture, dpi=130, metadata={"Software": None})
    content = between(page.read_text() if page.exists() else "", BEGIN, END, table(found))
    files = {"README.md": content.encode(), "regimes.json": text.encode(), "regimes.png": small_png(picture.getvalue())}
    write_whole((folder / name, data) for name, data in files.items())


def table(found: dict) -> str:
    """A row per training run, and how they were made."""
    rows = [
        [str(cell["steps_per_rollout"]), f"{cell['learning_rate']:g}", cell["loss"], str(cell["seed"])]
        + ["–" if cell[name] is None else format(cell[name], form) for name, (_, form) in COLUMNS.items()]
        for cell in found["cells"]
    ]
    header = ["steps per rollout", "learning rate", "loss", "seed", *(title for title, _ in COLUMNS.values())]
    settings = "\n".join(f"- {name}: {value}" for name, value in found["setup"].items() if isinstance(value, str))
    return f"{markdown_table(header, rows)}\n\n{settings}"


def draw(cells: Sequence[dict]) -> Figure:
    """Validation accuracy over the steps: a panel per regime, a line per training run."""
    steps, rates = (sorted({cell[name] for cell in cells}) for name in ("steps_per_rollout", "learning_rate"))
    names = list(dict.fromkeys(cell["loss"] for cell in cells))
    styles = dict(zip(names, figures.run_styles(names), strict=True))
    figure = Figure(figsize=(3 * len(steps) + 1, 2.4 * len(rates) + 0.6), layout="constrained")
    panels = figure.subplots(len(rates), len(steps), squeeze=False, sharex=True, sharey=True)
    for cell in cells:
        axes = panels[rates.index(cell["learning_rate"])][steps.index(cell["steps_per_rollout"])]
        axes.plot(list(map(int, cell["validation"])), cell["validation"].values(), **styles[cell["loss"]].line_kwargs())
        title = f"{cell['steps_per_rollout']} steps per rollout, learning rate {cell['learning_rate']:g}"
        axes.set_title(title, fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("training step")
    for axes in panels[:, 0]:
        axes.set_ylabel("validation accuracy")
    panels[0][0].legend(panels[0][0].lines, names)
    return figure


def main() -> None:
    if sys.argv[1:] == ["--redraw"]:
        write(json.loads((HERE / "regimes.json").read_text()), HERE)
        return
    args = ["--losses", LOSSES, "--seeds", SEEDS, "--output", "runs/regimes", *sys.argv[1:]]
    baselines.guarded(baselines.parse_args(args), run)


if __name__ == "__main__":
    main()
