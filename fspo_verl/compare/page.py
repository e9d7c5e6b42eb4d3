# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Losses compared over paired seeds: which one ends higher, how sure that is, and what to do next.

PATH is a folder of runs called LOSS-seedN (as scripts/compare_baselines.sh makes them), or the JSON that an earlier
comparison has written. DIR gets comparison.md, comparison.json and comparison.png; of a NAME.json, files of that name.
Of several PATHs the runs are pooled, in the length bins of the first: `fspo-verl compare kept.json runs` adds what runs
holds to kept.json. What the page tells of how runs were made is of the first.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jinja2
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fspo_verl.clips import MATCHED_RATE
from fspo_verl.compare import thresholds
from fspo_verl.compare.comparison import Comparison, compare, counted, load
from fspo_verl.compare.measures import MEASURES
from fspo_verl.compare.paired import MIN_SEEDS, SAME
from fspo_verl.output import between, markdown_table, write_whole
from fspo_verl.report import figures

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
        thresholds.update(args.update, trials)
        print(f"written: {args.update}")
        return 0
    folder, name = (first, NAME) if first.is_dir() else (first.parent, first.stem)
    page = (args.output or folder) / f"{name}.md"
    write(comparison, page)
    print(f"{comparison.headline}\n\n{_reached(comparison, _mean).to_string()}\n")
    print("\n".join([*comparison.warnings, f"written: {page}, {name}.json, {name}.png"]))
    report, kept = thresholds.check(args.check, trials) if args.check else ("", True)
    print("\n".join(filter(None, [report, comparison.advice])))
    return 0 if kept else 1


def write(comparison: Comparison, page: Path) -> None:
    """The page, and JSON and figure beside it: all of them or, where the disk is full, none.

    Of a page that has this module's two marks, what is not between them stays.
    """
    (picture,) = figures.render(lambda columns: draw(comparison, columns), 3, "png")
    numbers = json.dumps(comparison.to_json(), allow_nan=False, separators=(",", ":"))
    numbers = numbers.replace('{"loss"', '\n{"loss"') + "\n"  # a line per trial
    old = page.read_text() if page.exists() else ""
    text = between(old if _BEGIN in old else "", _BEGIN, _END, markdown(comparison, page.stem))
    files = [(page, text.encode()), (page.with_suffix(".json"), numbers.encode())]
    write_whole([*files, (page.with_suffix(".png"), picture)])


def draw(comparison: Comparison, columns: int) -> Figure:
    """Curves of validation accuracy, and clip rates by length as trained and scaled to one rate."""
    styles = dict(zip(comparison.losses, figures.run_styles(comparison.losses), strict=True))
    rates = comparison.clip_rates.rename(columns={"smallest": "lower", "largest": "upper"})

    def learning(axes: Axes) -> None:
        for loss, style in styles.items():
            seeds = [pd.Series(trial.validation) for trial in comparison.trials if trial.loss == loss]
            for seed in seeds:
                axes.plot(seed, color=style.color, lw=0.5, alpha=0.4)
            axes.plot(pd.concat(seeds, axis=1).mean(axis=1), label=loss, **style.line_kwargs())
        axes.set(title="accuracy (thin: each seed)", xlabel="training step", ylabel="share of right answers")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    def by_length(kind: str) -> list[figures.Series]:
        of_kind = rates[rates.kind == kind].groupby("loss")
        return [figures.Series(loss, styles[loss], table) for loss, table in of_kind]

    trained = (figures.clip_rates, "clip rate (bars: the seeds)", by_length("clipped"))
    matched = (figures.clip_rates, f"scaled to {MATCHED_RATE:.0%} overall", by_length("matched"), MATCHED_RATE)
    return figures.of_panels([(learning,), trained, matched], columns, 3.2)


def markdown(comparison: Comparison, name: str = NAME) -> str:
    """The page of a comparison; ``name`` is that of its picture."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fspo_verl.compare", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"counted": counted, "table": _markdown}
    tables = {
        "reached": _reached(comparison, _range),
        "seeds": _seeds(comparison),
        "differences": _differences(comparison),
        "trained": comparison.trained,
        "rates": {kind: _rates(part, comparison) for kind, part in comparison.clip_rates.groupby("kind")},
    }
    template = environment.get_template("page.md.jinja")
    return template.render(c=comparison, name=name, min_seeds=MIN_SEEDS, rate=MATCHED_RATE, **tables)


def _markdown(table: pd.DataFrame) -> str:
    rows = ([str(place), *cells] for place, *cells in table.itertuples())
    return markdown_table([table.index.name or "", *table.columns], rows)


def _label(name: str, comparison: Comparison) -> str:
    arrow = {1: " ↑", -1: " ↓", 0: ""}[MEASURES[name].better]
    return MEASURES[name].label.format(target=comparison.target) + arrow


def _reached(comparison: Comparison, cell: Callable[[pd.Series, str], str]) -> pd.DataFrame:
    """A row per measure, a column per loss; ``cell`` puts the values of the seeds into words."""
    values = comparison.values.set_index("loss")
    rows = {
        _label(name, comparison): [cell(values.loc[[loss], name], of.form) for loss in comparison.losses]
        for name, of in MEASURES.items()
    }
    tests = [
        Counter(t.clipped_more for t in comparison.trials if t.loss == loss and t.clipped_more)
        for loss in comparison.losses
    ]
    if any(tests):
        rows["clipped more, by the test of each run"] = [
            ", ".join(f"{which} in {runs}" for which, runs in sorted(test.items())) or "–" for test in tests
        ]
    return pd.DataFrame.from_dict(rows, orient="index", columns=comparison.losses)


def _range(values: pd.Series, form: str) -> str:
    """Mean (smallest to largest) of the seeds' values, and how many have one if not all."""
    known = values.dropna()
    if known.empty:
        return "–"
    text = f"{known.mean():{form}} ({known.min():{form}} to {known.max():{form}})"
    return text if len(known) == len(values) else f"{text}, {len(known)} of {len(values)} seeds"


def _mean(values: pd.Series, form: str) -> str:
    return "–" if values.isna().all() else format(values.mean(), form)


def _seeds(comparison: Comparison) -> pd.DataFrame:
    """A row per seed: accuracy at the end, and its mean over the run."""
    values = comparison.values
    cells = values.accuracy.map("{:.3f}".format) + values.accuracy_area.map(" ({:.3f})".format)
    return values.assign(cell=cells).pivot(index="seed", columns="loss", values="cell")[comparison.losses].fillna("–")


def _differences(comparison: Comparison) -> pd.DataFrame:
    """A row per measure and loss, of the measures that are judged and differ."""
    rows, labels, base = [], [], comparison.baseline
    for row in comparison.differences.itertuples():
        of = MEASURES[row.metric]
        if of.better and row.verdict != SAME:
            known = not math.isnan(row.lower)
            interval = f"{row.lower:+{of.form}} to {row.upper:+{of.form}}" if known else "–"
            better, p = f"{row.improvement * row.seeds:g} of {row.seeds}", f"{row.p:.2g}" if known else "–"
            rows.append((row.loss, f"{row.difference:+{of.form}}", interval, better, p, row.verdict))
            labels.append(_label(row.metric, comparison))
    columns = ["loss", "difference", "95% interval", f"{base} better", "p, adjusted", "verdict"]
    return pd.DataFrame(rows, labels, columns)


def _rates(rates: pd.DataFrame, comparison: Comparison) -> pd.DataFrame:
    """A row per length bin, a column per loss."""
    cells = rates.rate.map(lambda rate: "–" if math.isnan(rate) else f"{rate:.1%}") + rates.n.map(" of {:,}".format)
    table = rates.assign(cell=cells).pivot(index=["low", "high"], columns="loss", values="cell")
    table.index = pd.Index([f"{low} to {high}" for low, high in table.index], name="tokens")
    return table[[loss for loss in comparison.losses if loss in table]]
