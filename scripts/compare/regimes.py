# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Where does a clip matter? Each loss over a grid of regimes: optimiser steps per rollout, and learning rate.

The more steps a policy takes on one rollout, and the larger they are, the further it moves from the policy that
sampled, and the more a clip has to do. Passes over each rollout (ppo_epochs) multiply the steps. In every regime all
losses train from the same warm starts on the same prompts, as in the comparison, whose options hold here, too (but for
those of tuning and checking: each loss has its packaged clip range).

A finished cell is never run again. Results: OUTPUT/regimes.json, .md and .png, and a folder per regime and cell.
"""

from __future__ import annotations  # so that a Python too old to train with can still say what is wrong with a call

import argparse
import dataclasses
import io
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import arms  # noqa: E402
import comparison  # noqa: E402

_BEGIN, _END = "<!-- begin of what `scripts/compare/regimes.py` writes -->", "<!-- end of what it writes -->"
EXAMPLES = """examples:
  bash scripts/compare_baselines.sh regimes                            two losses in nine regimes, an hour or two
  bash scripts/compare_baselines.sh regimes --epochs 4 --learning-rates 5e-4,5e-3 --losses fspo,gspo,no_clip
  .venv/bin/python scripts/compare/regimes.py --redraw docs/regimes.json    page and figure beside it, in seconds
"""
UNUSED = {"--learning-rate", "--factors", "--tuning-seeds", "--tuning-steps", "--target", "--check"}
"""Options of the comparison that would change nothing here."""
# What of a trial is kept: names of fspo_verl.compare.measures.METRICS.
_KEPT = "accuracy_before accuracy accuracy_area reward clip_rate drawdown nonfinite_steps".split()


class Regime(NamedTuple):
    epochs: int
    learning_rate: float

    @property
    def name(self) -> str:
        return f"epochs-{self.epochs}-lr-{self.learning_rate:g}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash scripts/compare_baselines.sh regimes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--epochs", type=comparison.integers, default=[1, 4, 16], help="passes over a rollout (default: 1,4,16)")
    add("--learning-rates", type=numbers, default=[5e-4, 1.5e-3, 5e-3], help="default: 5e-4,1.5e-3,5e-3")
    add("--redraw", type=Path, metavar="JSON", help="only write page and figure again, beside the file")
    own, others = parser.parse_known_args(argv)
    if unused := {option.partition("=")[0] for option in others} & UNUSED:
        parser.error(f"a map has --learning-rates, and is neither tuned nor checked: no {', '.join(sorted(unused))}")
    args = comparison.parse_args(["--losses", "fspo,no_clip", "--seeds", "10", "--output", "runs/regimes", *others])
    if arms.CALIBRATED in args.losses:
        parser.error(f"a map is not tuned: no {arms.CALIBRATED}")
    args.regimes = list(itertools.starmap(Regime, itertools.product(own.epochs, own.learning_rates)))
    args.redraw = own.redraw
    return args


def numbers(text: str) -> list[float]:
    """For example 1e-3,0.01."""
    return [float(number) for number in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Train what is missing and write what came out."""
    cells = {regime: cells_of(args, regime) for regime in args.regimes}
    flat = list(itertools.chain.from_iterable(cells.values()))
    comparison.refuse_others(flat)
    progress = comparison.Progress(args, flat)
    progress.run("warm start", comparison.one_per_start(flat))
    progress.run("train", flat)
    steps = args.prompts // args.mini_batch
    found = [result for regime in args.regimes for result in results(args.output / regime.name, regime, steps)]
    setup = comparison.describe(args, {arm.name: 1.0 for arm in args.arms}, None, flat)
    setup |= {
        "command": f"bash scripts/compare_baselines.sh regimes {shlex.join(sys.argv[1:])}".strip(),
        "rollouts": f"{comparison.rollout(args)}, {args.steps} of them",
    }
    write({"setup": setup, "cells": found}, args.output / "regimes.json")
    return 0


def cells_of(args: argparse.Namespace, regime: Regime) -> list:
    """The cells of a regime, in a folder of their own."""
    of_regime = argparse.Namespace(**vars(args) | regime._asdict())
    cells = [comparison._cell(of_regime, arm, seed, 1.0) for seed in args.seeds for arm in args.arms]
    return [dataclasses.replace(cell, folder=args.output / regime.name / cell.folder.name) for cell in cells]


def results(folder: Path, regime: Regime, mini_batches: int) -> list[dict]:
    """What each cell of a regime came to."""
    from fspo_verl.compare.measures import measure
    from fspo_verl.compare.trials import read_trials

    trials = read_trials(folder)
    rows = measure(trials, target=1.0).astype(object)
    rows = rows.where(rows.notna(), None)
    return [
        {"steps_per_rollout": regime.epochs * mini_batches, "learning_rate": regime.learning_rate}
        | {name: row[name] for name in ("loss", "seed", *_KEPT)}
        | {"validation": trial.validation}
        for trial, row in zip(trials, rows.to_dict("records"), strict=True)
    ]


def write(found: dict, file: Path) -> None:
    """The results as JSON, and page and figure of them beside it."""
    from fspo_verl.files import between, write_whole

    text = json.dumps(found, separators=(",", ":")).replace('{"steps_per', '\n{"steps_per') + "\n"
    page, picture = file.with_suffix(".md"), io.BytesIO()
    found = json.loads(text)
    old = page.read_text() if page.exists() else ""
    draw(found["cells"]).savefig(picture, dpi=130, metadata={"Software": None})
    content = between(old, _BEGIN, _END, table(found))
    write_whole([(page, content.encode()), (file, text.encode()), (file.with_suffix(".png"), picture.getvalue())])
    print(f"written: {file}, {page.name}, {page.stem}.png")


def _by_regime(cells: Sequence[dict]) -> dict[tuple[int, float], dict[str, list[dict]]]:
    """Cells by regime, and in it by loss."""
    found: dict = {}
    for cell in cells:
        losses = found.setdefault((cell["steps_per_rollout"], cell["learning_rate"]), {})
        losses.setdefault(cell["loss"], []).append(cell)
    return dict(sorted(found.items()))


def table(found: dict) -> str:
    """A row per regime and loss, means over the seeds."""
    from fspo_verl.files import markdown_table

    def mean(cells: list[dict], name: str, form: str) -> str:
        known = [cell[name] for cell in cells if cell[name] is not None]
        return format(sum(known) / len(known), form) if known else "–"

    columns = {
        "accuracy at the end": ("accuracy", ".3f"),
        "mean over the run": ("accuracy_area", ".3f"),
        "clip rate": ("clip_rate", ".1%"),
        "worst drawdown": ("drawdown", ".3f"),
    }
    rows = [
        [str(steps), f"{rate:g}", loss, str(len(cells)), *(mean(cells, *column) for column in columns.values())]
        for (steps, rate), losses in _by_regime(found["cells"]).items()
        for loss, cells in losses.items()
    ]
    settings = "\n".join(f"- {name}: {value}" for name, value in found["setup"].items() if isinstance(value, str))
    header = ["steps per rollout", "learning rate", "loss", "seeds", *columns]
    return f"{markdown_table(header, rows)}\n\n{settings}"


def draw(cells: Sequence[dict]):
    """Validation accuracy over the steps: a panel per regime, a line per loss (thin: each seed)."""
    import numpy as np
    from matplotlib.figure import Figure

    from fspo_verl.report import figures

    regimes = _by_regime(cells)
    steps, rates = (sorted({regime[i] for regime in regimes}) for i in (0, 1))
    names = list(dict.fromkeys(cell["loss"] for cell in cells))
    styles = dict(zip(names, figures.run_styles(names), strict=True))
    figure = Figure(figsize=(3 * len(steps) + 1, 2.4 * len(rates) + 0.6), layout="constrained")
    panels = figure.subplots(len(rates), len(steps), squeeze=False, sharex=True, sharey=True)
    for (count, rate), losses in regimes.items():
        axes = panels[rates.index(rate)][steps.index(count)]
        for loss, of_loss in losses.items():
            curves = np.array([list(cell["validation"].values()) for cell in of_loss])
            place = [int(step) for step in of_loss[0]["validation"]]
            axes.plot(place, curves.T, color=styles[loss].color, lw=0.6, alpha=0.5)
            axes.plot(place, curves.mean(0), label=loss, **styles[loss].line_kwargs())
        axes.set_title(f"{count} steps per rollout, learning rate {rate:g}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("training step")
    for axes in panels[:, 0]:
        axes.set_ylabel("validation accuracy")
    panels[0][0].legend()
    return figure


def main() -> None:
    args = parse_args()
    if args.parse_only:
        return
    if args.redraw:
        write(json.loads(args.redraw.read_text()), args.redraw)
    else:
        comparison.guarded(args, run)


if __name__ == "__main__":
    main()
