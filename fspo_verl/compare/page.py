# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Losses compared over paired seeds: what each of them reached, and which differences can be told.

PATH is a folder of runs called LOSS-seedN (as scripts/compare_baselines.sh makes them), or the JSON that an earlier
comparison has written. DIR gets comparison.md, comparison.json and comparison.png; of a NAME.json, files of that name.
Of several PATHs the runs are pooled, in the length bins of the first: `fspo-verl compare kept.json runs` adds what runs
holds to kept.json. What the page tells of how runs were made is of the first.
"""

import argparse
import io
import json
import math
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup

from fspo_verl.clips import MATCHED_RATE
from fspo_verl.compare import figure, thresholds
from fspo_verl.compare.comparison import Comparison, compare, load
from fspo_verl.compare.measures import METRICS
from fspo_verl.compare.paired import MIN_SEEDS, SAME
from fspo_verl.output import between, write_whole

NAME = "comparison"
_BEGIN, _END = "<!-- begin of what `fspo-verl compare` writes -->", "<!-- end of what `fspo-verl compare` writes -->"


def main(args: argparse.Namespace) -> int:
    """Compare, and check or update thresholds; returns 1 where a threshold is not kept."""
    trials, setup = load(*args.paths)
    first = args.paths[0]
    if args.steps is not None:
        if args.steps < 1:
            raise ValueError(f"--steps {args.steps}: a comparison takes one step or more")
        if first.is_file() and args.output is None:
            raise ValueError(f"--steps would leave the first {args.steps} steps in {first}; name an --output")
        trials = [trial.first(args.steps) for trial in trials]
    comparison = compare(trials, setup, args.baseline, args.target)
    if args.update:
        thresholds.update(args.update, comparison.values)
        print(f"written: {args.update}")
        return 0
    folder, name = (first, NAME) if first.is_dir() else (first.parent, first.stem)
    page = (args.output or folder) / f"{name}.md"
    write(comparison, page)
    print(markdown(comparison, name))
    print(f"written: {page}, {name}.json, {name}.png")
    if not args.check:
        return 0
    report, kept = thresholds.check(args.check, comparison.values)
    print(report)
    return 0 if kept else 1


def write(comparison: Comparison, page: Path) -> None:
    """The page, and JSON and figure beside it: all of them or, where the disk is full, none.

    Of a page that has this module's two marks, what is not between them stays.
    """
    # Without matplotlib's version in it, so that the same comparison is the same file.
    picture = io.BytesIO()
    figure.draw(comparison).savefig(picture, dpi=130, metadata={"Software": None})
    numbers = json.dumps(comparison.to_json(), allow_nan=False, separators=(",", ":"))
    numbers = numbers.replace('{"loss"', '\n{"loss"') + "\n"  # a line per trial
    old = page.read_text() if page.exists() else ""
    text = between(old if _BEGIN in old else "", _BEGIN, _END, markdown(comparison, page.stem))
    files = [(page, text.encode()), (page.with_suffix(".json"), numbers.encode())]
    write_whole([*files, (page.with_suffix(".png"), picture.getvalue())])


def markdown(comparison: Comparison, name: str = NAME) -> str:
    """The tables of a comparison, and how its runs were made; ``name`` is that of its picture."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fspo_verl.compare", "."),
        autoescape=True,  # names of losses, and what a setup says, come from files
        finalize=_in_a_cell,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _code, "number": _number, "range": _range}
    template = environment.get_template("page.md.jinja")
    return template.render(c=comparison, name=name, metrics=METRICS, min_seeds=MIN_SEEDS, same=SAME, rate=MATCHED_RATE)


def _in_a_cell(value):
    """A value of the template, which may stand in a table: no text may end its cell or its row."""
    return " ".join(value.replace("|", "\\|").split()) if type(value) is str else value


def _code(text: str) -> Markup:
    """Inline code, in which nothing needs to be escaped but what ends it."""
    return Markup("`{}`").format(Markup(" ".join(text.replace("`", "'").split())))


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _range(values: pd.Series, form: str) -> str:
    """Mean (smallest to largest) of the seeds' values, and how many have one if not all."""
    known = values.dropna()
    if known.empty:
        return "–"
    text = f"{known.mean():{form}} ({known.min():{form}} to {known.max():{form}})"
    return text if len(known) == len(values) else f"{text}, {len(known)} of {len(values)} seeds"
