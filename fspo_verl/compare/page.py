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
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fspo_verl.clips import CLIPS, MATCHED_RATE
from fspo_verl.compare import thresholds
from fspo_verl.compare.measures import METRICS, clip_table, measure
from fspo_verl.compare.paired import MIN_SEEDS, NOT_TOLD, SAME, TOO_FEW, clip_rates, differences
from fspo_verl.compare.trials import Trial, losses, pool, read_trials
from fspo_verl.files import between, markdown_table, write_whole
from fspo_verl.report import figures

NAME = "comparison"
_ADDED = "added to these, and made otherwise (loss and seed)"  # an entry of a setup
LEARNED = 0.95
"""Best training reward of a loss that has learned problems which the start solves sometimes (arXiv 2510.26788)."""
_BEGIN, _END = "<!-- begin of what `fspo-verl compare` writes -->", "<!-- end of what `fspo-verl compare` writes -->"


# --- the whole comparison ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Trials, how they were made, and all that is computed from them."""

    setup: dict
    trials: list[Trial]
    baseline: str
    target: float
    values: pd.DataFrame
    differences: pd.DataFrame
    clip_rates: pd.DataFrame

    @property
    def losses(self) -> list[str]:
        """The baseline first."""
        return sorted(losses(self.trials), key=lambda loss: loss != self.baseline)

    @property
    def seeds(self) -> list[int]:
        """All seeds of any loss."""
        return sorted(set(self.values.seed))

    def to_json(self) -> dict:
        """Everything, as read back by :func:`load`; numbers that are not known are null."""
        tables = {name: getattr(self, name) for name in ("values", "differences", "clip_rates")}
        return {
            "baseline": self.baseline,
            "target": self.target,
            **{name: json.loads(table.to_json(orient="records", double_precision=6)) for name, table in tables.items()},
            "setup": self.setup,
            "trials": [trial.to_json() for trial in self.trials],
        }


def compare(
    trials: Sequence[Trial], setup: dict | None = None, baseline: str = "fspo", target: float = 0.5
) -> Comparison:
    """Compare trials, paired by seed.

    Raises:
        ValueError: the baseline is missing, or trials differ in their length, in the steps at which they were
            validated or, within a seed, in the questions of that.
    """
    if baseline not in losses(trials):
        raise ValueError(f"no run of the baseline {baseline!r}; there are {', '.join(losses(trials))}")
    lengths = {trial.steps for trial in trials}
    if len(lengths) > 1:
        raise ValueError(f"the runs have different numbers of steps, {sorted(lengths)}; --steps N compares the first N")
    if len(validated := {tuple(trial.validation) for trial in trials}) > 1:
        raise ValueError(f"the runs were validated at different steps, {' and '.join(map(str, sorted(validated)))}")
    questions: dict[int, str] = {}
    for trial in trials:
        if trial.questions and questions.setdefault(trial.seed, trial.questions) != trial.questions:
            raise ValueError(f"the runs of seed {trial.seed} were validated on different questions")
    values = measure(trials, target)
    paired = differences(trials, values, baseline)
    return Comparison(setup or {}, list(trials), baseline, target, values, paired, clip_rates(trials))


def load(path: Path, inner_edges: Sequence[int] | None = None) -> tuple[list[Trial], dict]:
    """Trials and setup, from a folder of runs (see :func:`read_trials` on the edges) or from a comparison.json.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no trials.
    """
    path = Path(path)
    if path.is_dir():
        setup = path / "setup.json"
        return read_trials(path, inner_edges), json.loads(setup.read_text()) if setup.exists() else {}
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file")
    try:
        data = json.loads(path.read_text())
        return [Trial.from_json(trial) for trial in data["trials"]], data["setup"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is neither a folder of runs nor a comparison.json") from None


def load_all(paths: Sequence[Path]) -> tuple[list[Trial], dict]:
    """:func:`load`, and for several paths their trials pooled in the length bins of the first.

    The setup is that of the first, and names the runs that it is not of.
    """
    trials, setup = load(paths[0])
    if len(paths) == 1:
        return trials, setup
    edges = next((trial.clips.edges[1:-1] for trial in trials if trial.clips), None)
    pooled = pool(trials, *(load(path, edges)[0] for path in paths[1:]))
    first = {(trial.loss, trial.seed) for trial in trials}
    added = [f"{trial.loss} {trial.seed}" for trial in pooled if (trial.loss, trial.seed) not in first]
    if setup and added:
        setup = setup | {_ADDED: ", ".join(filter(None, [setup.get(_ADDED), *added]))}
    return pooled, setup


# --- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison, name: str = NAME) -> str:
    """The tables of a comparison, and how its runs were made; ``name`` is that of its picture."""
    return "\n\n".join(_paragraphs(comparison, name)) + "\n"


def headline(c: Comparison) -> str:
    """What can be told of the accuracies over the run, in one sentence."""
    if len(c.losses) == 1:
        return f"{c.baseline} alone: nothing to compare it with."
    rows = c.differences[c.differences.metric == "accuracy_area"].set_index("loss")
    verdicts = rows.verdict.where(rows.seeds >= MIN_SEEDS, TOO_FEW).reindex(c.losses[1:], fill_value=TOO_FEW)
    if (verdicts == TOO_FEW).all():
        return f"Accuracy over the run: no verdict with fewer than {MIN_SEEDS} seeds."
    words = {
        f"{c.baseline} higher": "higher than",
        f"{c.baseline} lower": "lower than",
        SAME: "the same as",
        NOT_TOLD: "not to be told from",
        TOO_FEW: f"not compared, for want of {MIN_SEEDS} seeds, to",
    }
    of = {text: ", ".join(verdicts.index[verdicts == verdict]) for verdict, text in words.items()}
    return (
        f"Accuracy over the run: {c.baseline} is {'; '.join(f'{text} {names}' for text, names in of.items() if names)}."
    )


def _paragraphs(c: Comparison, name: str) -> Iterator[str]:
    seeds, of_loss = ", ".join(map(str, c.seeds)), c.values.loss.value_counts()
    fewer = [f"{loss} {of_loss[loss]} of {len(c.seeds)}" for loss in c.losses if of_loss[loss] < len(c.seeds)]
    each = f"({seeds}), but {', '.join(fewer)}" if fewer else f"each ({seeds})"
    yield (
        f"{len(c.losses)} losses, {len(c.seeds)} seeds {each}, {c.trials[0].steps} training steps. Runs of one seed "
        "share the model that they start from, the prompts and their order."
    )
    before = c.values.groupby("seed").accuracy_before
    if unlike := sorted(before.nunique().loc[lambda starts: starts > 1].index):
        yield (
            f"**Runs of one seed do not start alike: with seed {unlike[0]} accuracy before is "
            f"{before.min()[unlike[0]]:.3f} to {before.max()[unlike[0]]:.3f}.** Another model, or another machine?"
        )
    trained = _trained(c)
    several = Counter(loss for loss, *_ in trained)
    if unlike := [f"{loss} ({clips})" for loss, clips in several.items() if clips > 1]:
        yield f"**Seeds of one loss differ in what they clipped: {', '.join(unlike)}**; see *What trained*."
    yield f"**{headline(c)}**"
    yield f"![Learning, paired differences of accuracy, clip rates by length]({name}.png)"
    yield _in_practice(c)
    yield from _reached(c)
    yield from _by_length(c)
    if tuning := c.setup.get("tuning"):
        yield (
            f"### Clip ranges\n\nEach of these losses had the same budget: {tuning['what']}. Mean over seeds "
            f"{', '.join(map(str, tuning['seeds']))}, {tuning['steps']} steps; the chosen one is bold."
        )
        yield markdown_table(["loss", *(f"x {factor:.3g}" for factor in tuning["factors"])], _tuning_rows(tuning))
        ends = tuning["factors"][0], tuning["factors"][-1]
        if at_end := [loss for loss, factor in tuning["chosen"].items() if factor in ends]:
            yield f"At the end of what was tried, so that a range beyond may be better: {', '.join(at_end)}."
    if trained:
        rows = ([*names, ", ".join(map(str, sorted(seeds)))] for names, seeds in trained.items())
        yield "### What trained\n\n" + markdown_table(["loss", "verl's `loss_mode`", "clip", "seeds"], rows)
    if c.setup:
        yield "### How it was run"
        yield "\n".join(
            f"- {name}: " + (f"`{value}`" if name == "command" else str(value))
            for name, value in c.setup.items()
            if isinstance(value, str | int | float)
        )


def _trained(c: Comparison) -> dict[tuple[str, str, str], list[int]]:
    """Seeds by loss, verl's name of what trained, and its clip; of the trials whose settings are known."""
    seeds: dict[tuple[str, str, str], list[int]] = {}
    for trial in sorted(c.trials, key=lambda trial: c.losses.index(trial.loss)):
        if trial.settings:
            of = (trial.loss, trial.settings.loss, trial.settings.clip or "–")
            seeds.setdefault(of, []).append(trial.seed)
    return seeds


def _in_practice(c: Comparison) -> str:
    """What a user gets for each loss at one tuning budget."""
    seconds, tuning = c.setup.get("seconds", {}), c.setup.get("tuning")
    columns: dict[str, Callable[[str, pd.DataFrame], str]] = {
        "accuracy at the end": lambda _, rows: f"{rows.accuracy.mean():.3f}",
        "mean over the run": lambda _, rows: f"{rows.accuracy_area.mean():.3f}",
        "collapses": lambda _, rows: _share_of(rows.collapsed),
    }
    if c.setup.get("solvable problems"):
        columns[f"reached {LEARNED:.0%} in training"] = lambda _, rows: _share_of(rows.reward_best >= LEARNED)
    if seconds:
        columns["seconds of a run"] = lambda loss, _: _number(seconds.get(loss, math.nan), ".0f")
    if tuning:
        columns["clip ranges tried that earn within 2% of the best"] = lambda loss, _: _forgiving(tuning, loss)
    by_loss = c.values.groupby("loss")
    rows = ([loss, *(of(loss, by_loss.get_group(loss)) for of in columns.values())] for loss in c.losses)
    return "### In practice\n\nMeans over the seeds.\n\n" + markdown_table(["loss", *columns], rows)


def _share_of(seeds: pd.Series) -> str:
    return f"{seeds.sum():.0f} of {len(seeds)}"


def _forgiving(tuning: dict, loss: str) -> str:
    if loss not in tuning["scores"]:
        return "–"
    rewards = [score["reward"] for score in tuning["scores"][loss]]
    return f"{sum(reward >= 0.98 * max(rewards) for reward in rewards)} of {len(rewards)}"


def _reached(c: Comparison) -> Iterator[str]:
    yield "### What each loss reached\n\nMean over the seeds (smallest to largest seed). ↑: more is better, ↓: less is."
    by_loss = c.values.groupby("loss")
    spreads = {
        _label(name, c.target): {loss: _spread(values, metric.form) for loss, values in by_loss[name]}
        for name, metric in METRICS.items()
    }
    yield _table("", c.losses, spreads)
    yield "Every seed: accuracy at the end (mean over the run)."
    accuracies = {
        str(seed): {row.loss: f"{row.accuracy:.3f} ({row.accuracy_area:.3f})" for row in rows.itertuples()}
        for seed, rows in c.values.groupby("seed")
    }
    yield _table("seed", c.losses, accuracies)
    if len(c.losses) == 1:
        return
    yield f"### Paired differences, {c.baseline} minus the other loss\n\n" + _interval_note(c)
    judged = [row for row in c.differences.itertuples() if METRICS[row.metric].better]
    header = ["", "loss", "difference", "over seeds", "over seeds and questions", f"{c.baseline} better", "verdict"]
    rows = [_difference_cells(row, c) for row in judged if row.verdict != SAME]
    told = [i for i in range(len(header)) if any(row[i] != "–" for row in rows)]
    if rows:
        yield markdown_table([header[i] for i in told], ([row[i] for i in told] for row in rows))
    if same := dict.fromkeys(_label(row.metric, c.target) for row in judged if row.verdict == SAME):
        yield f"Left out where they are {SAME}: {', '.join(same)}."


def _by_length(c: Comparison) -> Iterator[str]:
    for kind, title in (
        ("clipped", "Clip rate by length"),
        ("matched", f"Clip rate by length, each clip scaled to {MATCHED_RATE:.0%} of the responses of its run"),
    ):
        rates = c.clip_rates[c.clip_rates.kind == kind]
        if len(rates):
            of_loss = c.values.loss.value_counts()
            fewer = rates[rates.seeds < rates.loss.map(of_loss)].drop_duplicates("loss")
            known = "".join(f", of {row.loss} {row.seeds} of {of_loss[row.loss]}" for row in fewer.itertuples())
            yield f"### {title}\n\nShare of the N responses with advantage != 0; mean over the seeds{known}."
            texts = {
                f"{low} to {high}": {row.loss: f"{_number(row.rate, '.1%')} of {row.n:,}" for row in part.itertuples()}
                for (low, high), part in rates.groupby(["low", "high"])
            }
            yield _table("tokens", [loss for loss in c.losses if loss in set(rates.loss)], texts)
    if others := [name for name in CLIPS if f"k_{name}" in c.values]:
        yield (
            f"### Other clips on the same responses\n\nk in clip rate ∝ length^k, had each clip taken "
            f"{MATCHED_RATE:.0%} of the responses of a loss; mean over the seeds. 0 is flat, above 0 clips long "
            "responses more."
        )
        k = c.values.groupby("loss")[[f"k_{name}" for name in others]].mean().map(_number, form="+.2f")
        yield _table("", c.losses, {CLIPS[name].label: k[f"k_{name}"] for name in others})


def _table(corner: str, losses: Sequence[str], texts: Mapping[str, Mapping[str, str]]) -> str:
    """A row per label, a column per loss; a dash for a loss that has no text."""
    rows = ([label, *(by_loss.get(loss, "–") for loss in losses)] for label, by_loss in texts.items())
    return markdown_table([corner, *losses], rows)


def _interval_note(c: Comparison) -> str:
    if c.differences.empty:
        return f"None: no loss has a seed of {c.baseline}'s."
    if (seeds := c.differences.seeds.max()) < MIN_SEEDS:
        return f"No interval: {seeds} seed(s), fewer than {MIN_SEEDS}. *{c.baseline} better*: in so many, ties half."
    return (
        f"95% intervals by all flips of signs, over {seeds} seeds, and over seeds and validation questions where the "
        "answers are at hand (scripts/studies/coverage tells how often they are right). They hold where differences "
        "are distributed symmetrically, normal or not; a rare collapse that no seed shows is in none of them. They are "
        f"not adjusted for their number. *{c.baseline} better*: share of the seeds, ties half, and its Wilson interval."
    )


def _label(name: str, target: float) -> str:
    metric = METRICS[name]
    return metric.label.format(target=target) + {1: " ↑", -1: " ↓", 0: ""}[metric.better]


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"


def _spread(values: pd.Series, form: str) -> str:
    known = values.dropna()
    if known.empty:
        return "–"
    text = f"{known.mean():{form}} ({known.min():{form}} to {known.max():{form}})"
    return text if len(known) == len(values) else f"{text}, {len(known)} of {len(values)} seeds"


def _difference_cells(row, c: Comparison) -> list[str]:
    form = "+" + METRICS[row.metric].form.lstrip("+")
    ends = [(row.lower, row.upper), (row.lower_questions, row.upper_questions)]
    better = f"{row.improvement:.2f} ({row.improvement_lower:.2f} to {row.improvement_upper:.2f})"
    return [
        _label(row.metric, c.target),
        row.loss,
        f"{row.difference:{form}}" + ("" if row.seeds == len(c.seeds) else f" ({row.seeds} pairs)"),
        *("–" if math.isnan(lower) else f"{lower:{form}} to {upper:{form}}" for lower, upper in ends),
        f"{row.improvement * row.seeds:g} of {row.seeds}" if row.seeds < MIN_SEEDS else better,
        row.verdict,
    ]


def _tuning_rows(tuning: dict) -> Iterator[list[str]]:
    for loss, scores in tuning["scores"].items():
        chosen = tuning["chosen"][loss]
        cells = (f"{score['reward']:.3f} (clip rate {score['clip_rate']:.1%})" for score in scores)
        yield [loss, *(f"**{c}**" if f == chosen else c for c, f in zip(cells, tuning["factors"], strict=True))]


def inserted(text: str, file: Path) -> str:
    """What the file is to hold: the text, and of a file with this module's two marks all that is not between them."""
    old = file.read_text() if file.exists() else ""
    return between(old if _BEGIN in old else "", _BEGIN, _END, text)


# --- figure -----------------------------------------------------------------------------------------------------------


def draw(comparison: Comparison) -> Figure:
    """Curves of learning, paired differences of every seed, and clip rates by length."""
    figure = Figure(figsize=(10, 8.3), layout="constrained")
    figure.suptitle(textwrap.fill(headline(comparison), 100), fontsize=11, fontweight="bold")
    axes = list(figure.subplots(2, 2).flat)
    styles = dict(zip(comparison.losses, figures.run_styles(comparison.losses), strict=True))
    _draw_learning(axes[0], comparison, styles)
    _draw_differences(axes[1], comparison, styles)
    _draw_clip_rates(axes[2], comparison, styles, "clipped", "clip rate by length")
    _draw_clip_rates(axes[3], comparison, styles, "matched", f"the same, scaled to {MATCHED_RATE:.0%} overall")
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=len(comparison.losses))
    return figure


def _draw_learning(axes: Axes, c: Comparison, styles: dict) -> None:
    """Curves of validation accuracy; where it was only taken before and after, those of the reward."""
    is_validated = len(c.trials[0].validation) > 2  # of all at the same steps
    for loss in c.losses:
        trials = [trial for trial in c.trials if trial.loss == loss]
        curves = [pd.Series(trial.validation) if is_validated else _reward_so_far(trial) for trial in trials]
        for curve in curves:
            axes.plot(curve, color=styles[loss].color, lw=0.6, alpha=0.5)
        axes.plot(pd.concat(curves, axis=1).mean(axis=1), label=loss, **styles[loss].line_kwargs())
    if is_validated:
        axes.set(title="validation accuracy (thin: each seed)", ylabel="share of right answers")
    else:
        axes.set(title="mean training reward so far (thin: each seed)", ylabel="reward")
    axes.set(xlabel="training step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _reward_so_far(trial: Trial) -> pd.Series:
    """Single steps are too few prompts to show anything."""
    return pd.Series(trial.series("reward"), range(1, trial.steps + 1)).expanding().mean()


def _draw_differences(axes: Axes, c: Comparison, styles: dict) -> None:
    rows = c.differences[c.differences.metric.isin(["accuracy", "accuracy_area"])]
    for i, row in enumerate(rows.itertuples()):
        color, table = styles[row.loss].color, c.values.pivot(index="seed", columns="loss", values=row.metric)
        each = table[c.baseline] - table[row.loss]
        axes.plot(each, np.full(len(each), -i), "o", color=color, ms=3.5, alpha=0.5)
        for lower, upper, width in ((row.lower_questions, row.upper_questions, 0.8), (row.lower, row.upper, 2)):
            axes.plot([lower, upper], [-i - 0.25] * 2, color=color, lw=width)
    axes.axvline(0, color=figures.GREY, lw=0.8)
    labels = [f"{row.loss}, {'end' if row.metric == 'accuracy' else 'mean'}" for row in rows.itertuples()]
    axes.set_yticks(-np.arange(len(labels)), labels)
    axes.set(title=f"accuracy: {c.baseline} minus the other (points: seeds)", xlabel="difference")
    axes.locator_params(axis="x", nbins=6)


def bin_places(trials: Sequence[Trial]) -> pd.Series:
    """Where each length bin is drawn, by its first length: at the geometric mean of the lengths in it."""
    tables = [clip_table(trial) for trial in trials if trial.clips]
    if not tables:
        return pd.Series(dtype=np.float64)
    bins = pd.concat(tables)
    middle = bins.assign(place=np.log(bins.low * bins.high) / 2).groupby("low").place.first()  # of an empty bin
    return np.exp(bins[bins.n > 0].groupby("low").mean_log.mean().reindex(middle.index).fillna(middle))


def _draw_clip_rates(axes: Axes, c: Comparison, styles: dict, kind: str, title: str) -> None:
    places = bin_places(c.trials)
    for loss in c.losses:
        table = c.clip_rates[(c.clip_rates.loss == loss) & (c.clip_rates.kind == kind)].dropna(subset="rate")
        if len(table):
            place = places[table.low].to_numpy()
            axes.fill_between(place, table.smallest, table.largest, color=styles[loss].color, alpha=0.15, lw=0)
            axes.plot(place, table.rate, label=loss, **styles[loss].line_kwargs())
    bins = c.clip_rates[["low", "high"]].drop_duplicates()
    axes.set_xscale("log")
    axes.set_xticks(places[bins.low], [f"{row.low}–{row.high}" for row in bins.itertuples()])
    axes.xaxis.set_minor_locator(NullLocator())
    if kind == "matched":
        axes.axhline(MATCHED_RATE, color=figures.GREY, lw=0.8, ls=":")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.set(title=title, xlabel="response length (tokens; shaded: the seeds)", ylabel="clip rate", ylim=(0, None))


# --- command line -----------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """Compare, and check or update thresholds; returns 1 where a threshold is not kept."""
    trials, setup = load_all(args.paths)
    if args.steps is not None:
        if args.steps < 1:
            raise ValueError(f"--steps {args.steps}: a comparison takes one step or more")
        if args.paths[0].is_file() and args.output is None:
            raise ValueError(f"--steps would leave the first {args.steps} steps in {args.paths[0]}; name an --output")
        trials = [trial.first(args.steps) for trial in trials]
    comparison = compare(trials, setup, args.baseline, args.target)
    if args.update:
        print(thresholds.update(args.update, comparison.values))
        return 0
    first = args.paths[0]
    folder, name = (first, NAME) if first.is_dir() else (first.parent, first.stem)
    page = (args.output or folder) / f"{name}.md"
    write(comparison, page)
    print(markdown(comparison))
    print(f"written: {page}, {name}.json, {name}.png")
    if args.check:
        report, kept = thresholds.check(args.check, comparison.values)
        print(report)
        return 0 if kept else 1
    return 0


def write(comparison: Comparison, page: Path) -> None:
    """The page, and JSON and figure beside it: all of them or, where the disk is full, none."""
    # Without matplotlib's version in it, so that the same comparison is the same file.
    picture = io.BytesIO()
    draw(comparison).savefig(picture, dpi=130, metadata={"Software": None})
    text = json.dumps(comparison.to_json(), allow_nan=False, separators=(",", ":"))
    text = text.replace('{"loss"', '\n{"loss"') + "\n"  # a line per trial
    files = {page: inserted(markdown(comparison, page.stem), page).encode(), page.with_suffix(".json"): text.encode()}
    write_whole([*files.items(), (page.with_suffix(".png"), picture.getvalue())])
