# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Losses compared over paired seeds: what each of them reached, and which differences can be told.

PATH is a folder of runs called LOSS-seedN (as scripts/compare_baselines.sh makes them), or the comparison.json that an
earlier comparison has written. DIR gets comparison.md, comparison.json and comparison.png.
"""

import argparse
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy import optimize

from fspo_verl.analysis.clip_rates import MIN_COUNT, length_reweighting_error, rate_by_length
from fspo_verl.analysis.resampling import UNKNOWN, Estimate, t_quantile
from fspo_verl.clips import CLIPS, MATCHED_RATE
from fspo_verl.compare import thresholds
from fspo_verl.compare.trials import Trial, read_trials
from fspo_verl.files import between, markdown_table, write_whole
from fspo_verl.report import figures

MIN_SEEDS = 3  # of an interval
LATE = 5  # steps whose mean is the value at the end of a run
SPIKE = 5.0  # a gradient norm above this many medians of its run
_DRAWS = 10_000
_BEGIN, _END = "<!-- begin of what `fspo-verl compare` writes -->", "<!-- end of what `fspo-verl compare` writes -->"


# --- what one trial has reached ---------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """A number per trial."""

    label: str
    better: int  # 1: more is better, -1: less is, 0: neither
    form: str  # of a value in a table
    of: Callable[[Trial, float], float]  # given the stated accuracy


def area_weights(steps: Sequence[int]) -> np.ndarray:
    """Weights ``[steps]`` of the mean height of a curve through values at these steps, straight lines in between."""
    if len(steps) == 1:
        return np.ones(1)
    return np.convolve(np.diff(steps), [0.5, 0.5]) / (steps[-1] - steps[0])


def accuracy_area(trial: Trial) -> float:
    """Mean height of the curve of validation accuracy over the steps."""
    return float(area_weights(list(trial.validation)) @ list(trial.validation.values()))


def steps_to(trial: Trial, target: float) -> float:
    """The step at which the straight lines between validations first reach an accuracy; NaN if they never do."""
    steps, values = np.array(list(trial.validation.items())).T
    reached = np.flatnonzero(values >= target)
    if not len(reached):
        return math.nan
    around = slice(max(reached[0] - 1, 0), reached[0] + 1)
    return float(np.interp(target, values[around], steps[around]))


def drawdown(trial: Trial) -> float:
    """The largest fall of validation accuracy below the highest value before it."""
    values = np.array(list(trial.validation.values()))
    return float((np.maximum.accumulate(values) - values).max())


def nonfinite_steps(trial: Trial) -> int:
    """Steps whose loss or gradient norm is not finite, or in which some response held NaN or inf."""
    logged = [~np.isfinite(trial.series(name)) for name in ("loss", "grad_norm") if name in trial.training]
    responses = trial.series("nonfinite_responses") > 0
    return int(np.logical_or.reduce([responses, *logged]).sum())


def gradient_spikes(trial: Trial) -> int:
    """Steps whose gradient norm is above 5 times the run's median."""
    norm = trial.series("grad_norm")
    return int((norm > SPIKE * np.nanmedian(norm)).sum()) if np.isfinite(norm).any() else 0


def _clip_table(trial: Trial, band: str | None = None) -> pd.DataFrame | None:
    """Low, high, n, mean_log and rate of each length bin over all steps, as it was or had ``band`` clipped."""
    if trial.clips is None or band not in (None, *trial.clips.matched):
        return None
    counts = trial.clips.clipped if band is None else trial.clips.matched[band]
    n, clipped = np.sum(trial.clips.responses, axis=0), np.sum(counts, axis=0)
    low, high = trial.clips.edges[:-1], np.array(trial.clips.edges[1:]) - 1
    rate = np.where(n > 0, clipped / np.maximum(n, 1), np.nan)
    return pd.DataFrame({"low": low, "high": high, "n": n, "rate": rate, "mean_log": trial.clips.mean_log})


def clip_rate(trial: Trial) -> float:
    """Σ clipped over the responses with advantage != 0."""
    table = _clip_table(trial)
    return math.nan if table is None else float((table.n * table.rate.fillna(0)).sum() / table.n.sum())


def length_exponent(trial: Trial, band: str | None = None) -> float:
    """k in clip rate ∝ length^k, by maximum likelihood (Poisson): 0 is flat, above 0 clips long responses more.

    With ``band``: had that band clipped. Unlike the LRE, k does not shrink with the clip rate. The likelihood is
    largest where the mean log length of the clipped responses equals that of all responses weighted with length^k.
    Derived here. NaN where nothing is clipped, or only the shortest or the longest bin is.
    """
    table = _clip_table(trial, band)
    if table is None:
        return math.nan
    n, x, rate = table.loc[table.n > 0, ["n", "mean_log", "rate"]].to_numpy(np.float64).T
    clipped = n * rate
    if not clipped.sum() or not x.min() < (mean := clipped @ x / clipped.sum()) < x.max():
        return math.nan

    def excess(k: float) -> float:
        weight = n * np.exp(k * (x - x.mean()))
        return weight @ x / weight.sum() - mean

    return float(optimize.brentq(excess, -50, 50))


def lre(trial: Trial, band: str | None = None) -> float:
    """Worst-bin LRE, as it was or had ``band`` clipped."""
    table = _clip_table(trial, band)
    return math.nan if table is None else length_reweighting_error(table, MIN_COUNT).worst


def late(trial: Trial, name: str) -> float:
    """Mean of a per-step series over the last steps."""
    return float(np.mean(trial.series(name)[-LATE:]))


METRICS = {
    "accuracy_before": Metric("accuracy before", 0, ".3f", lambda t, _: t.validation.get(0, math.nan)),
    "accuracy": Metric("accuracy at the end", 1, ".3f", lambda t, _: t.validation[max(t.validation)]),
    "accuracy_area": Metric("accuracy, mean over the run", 1, ".3f", lambda t, _: accuracy_area(t)),
    "reward": Metric("training reward, mean over the run", 1, ".3f", lambda t, _: np.mean(t.series("reward"))),
    "steps_to_target": Metric("steps to accuracy {target:g}", -1, ".1f", steps_to),
    "response_length": Metric(f"response length, last {LATE} steps", 0, ".1f", lambda t, _: late(t, "response_length")),
    "entropy": Metric(f"entropy, last {LATE} steps (nats)", 0, ".4f", lambda t, _: late(t, "entropy")),
    "clip_rate": Metric("clip rate", 0, ".2%", lambda t, _: clip_rate(t)),
    "length_exponent": Metric("k in clip rate ∝ length^k", 0, "+.2f", lambda t, _: length_exponent(t)),
    "length_bias": Metric("size of k", -1, ".2f", lambda t, _: abs(length_exponent(t))),
    "length_bias_matched": Metric(
        f"size of k at clip rate {MATCHED_RATE:.0%}", -1, ".2f", lambda t, _: abs(length_exponent(t, t.loss))
    ),
    "lre": Metric("LRE", -1, ".3f", lambda t, _: lre(t)),
    "lre_matched": Metric(f"LRE at clip rate {MATCHED_RATE:.0%}", -1, ".3f", lambda t, _: lre(t, t.loss)),
    "drawdown": Metric("worst drawdown of accuracy", -1, ".3f", lambda t, _: drawdown(t)),
    "nonfinite_steps": Metric("non-finite steps", -1, ".1f", lambda t, _: nonfinite_steps(t)),
    "gradient_spikes": Metric(
        f"steps with a gradient norm above {SPIKE:g} medians", -1, ".1f", lambda t, _: gradient_spikes(t)
    ),
    "grad_norm": Metric("gradient norm, median", 0, ".3g", lambda t, _: np.nanmedian(t.series("grad_norm"))),
    "grad_norm_largest": Metric("gradient norm, largest", 0, ".3g", lambda t, _: np.nanmax(t.series("grad_norm"))),
}


def measure(trials: Sequence[Trial], target: float) -> pd.DataFrame:
    """All :data:`METRICS`, one row per trial: columns loss, seed, the metrics, and ``k_BAND`` for every band.

    ``k_BAND`` is the length exponent of that band, had it clipped the trial's own responses at one common rate.
    """
    return pd.DataFrame(
        {"loss": trial.loss, "seed": trial.seed}
        | {name: metric.of(trial, target) for name, metric in METRICS.items()}
        | {f"k_{band}": length_exponent(trial, band) for band in (trial.clips.matched if trial.clips else ())}
        for trial in trials
    )


# --- paired differences -----------------------------------------------------------------------------------------------


def paired_interval(differences: np.ndarray, rng: np.random.Generator) -> Estimate:
    """Mean of paired differences, with a 95% bootstrap interval over seeds and, if there are several, over items.

    Seeds and items are resampled independently of each other, whole rows and whole columns. The interval is mean ±
    t · sqrt(n/(n−1)) · (standard deviation over the draws), Student's t with n − 1 degrees of freedom for n seeds: with
    a handful of seeds the percentiles of a bootstrap are too narrow. For one item it is Student's interval; for several
    it is rather too wide, as the noise of single answers counts both ways (Owen 2007, "The pigeonhole bootstrap").

    Args:
        differences: ``[seeds, items]``.
        rng: source of the draws of the interval, which is NaN for fewer than 3 seeds.
    """
    seeds, items = differences.shape
    value = float(differences.mean())
    if seeds < MIN_SEEDS:
        return Estimate(value, math.nan, math.nan)
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), _DRAWS) / seeds
    drawn = by_seed @ differences
    by_item = rng.multinomial(items, np.full(items, 1 / items), _DRAWS) / items
    deviation = (drawn * by_item).sum(-1).std(ddof=1) * math.sqrt(seeds / (seeds - 1))
    half = float(t_quantile(seeds - 1) * deviation)
    return Estimate(value, value - half, value + half)


def answer_differences(first: Sequence[Trial], second: Sequence[Trial], metric: str) -> np.ndarray | None:
    """Differences ``[seeds, questions]`` between paired trials, whose means are those of the metric.

    None where the metric is not made of answers, or answers to the same questions at the same steps are not at hand.
    """
    trials, steps = [*first, *second], sorted(first[0].validation)
    paired = len({trial.questions for trial in trials}) == 1 and all(sorted(t.answers) == steps for t in trials)
    if metric not in ("accuracy", "accuracy_area") or not paired:
        return None
    weights = area_weights(steps) if metric == "accuracy_area" else np.arange(len(steps)) == len(steps) - 1

    def right(trial: Trial) -> np.ndarray:
        return weights @ np.array([list(trial.answers[step]) for step in steps], dtype=np.float64)

    return np.array([right(a) - right(b) for a, b in zip(first, second, strict=True)])


def differences(trials: Sequence[Trial], values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Paired differences of the baseline to every other loss: a row per metric and loss.

    Columns: metric, loss, seeds (pairs), difference (baseline − loss), lower, upper (over seeds), lower_questions,
    upper_questions (over seeds and validation questions), improvement (share of pairs in which the baseline is better,
    ties count half), improvement_lower, improvement_upper (Wilson), verdict. A seed in which one of the two losses has
    no value is no pair.
    """
    by_key = {(trial.loss, trial.seed): trial for trial in trials}
    rows = []
    for name, metric in METRICS.items():
        table = values.pivot(index="seed", columns="loss", values=name)
        for loss in table.columns.drop(baseline):
            pair = table[[baseline, loss]].dropna()
            difference = (pair[baseline] - pair[loss]).to_numpy()
            if not len(difference):
                continue
            rng = np.random.default_rng(0)
            interval = paired_interval(difference[:, None], rng)
            answers = answer_differences(*([by_key[of, seed] for seed in pair.index] for of in (baseline, loss)), name)
            both = UNKNOWN if answers is None else paired_interval(answers, rng)
            better = _improvement(difference * metric.better) if metric.better else UNKNOWN
            said = verdict(difference, [interval, both], baseline)
            rows.append((name, loss, len(difference), *interval, *both[1:], *better, said))
    columns = ["metric", "loss", "seeds", "difference", "lower", "upper", "lower_questions", "upper_questions"]
    columns += ["improvement", "improvement_lower", "improvement_upper", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def _improvement(gain: np.ndarray) -> Estimate:
    share = np.where(gain == 0, 0.5, gain > 0)
    rate, *ends = rate_by_length(np.ones(len(share)), share, [1, 2])[["rate", "lower", "upper"]].to_numpy()[0]
    return Estimate(rate, *(ends if len(share) >= MIN_SEEDS else UNKNOWN[1:]))


def verdict(difference: np.ndarray, intervals: Sequence[Estimate], baseline: str) -> str:
    """What can be said of paired differences, in words: a difference counts where no interval holds 0."""
    if len(difference) < MIN_SEEDS:
        return f"no interval with fewer than {MIN_SEEDS} seeds"
    if not difference.any():
        return "the same in every seed"
    known = [interval for interval in intervals if not math.isnan(interval.lower)]
    if any(interval.lower <= 0 <= interval.upper for interval in known):
        return "no difference can be told"
    return f"{baseline} {'higher' if intervals[0].value > 0 else 'lower'}"


def clip_rates(trials: Sequence[Trial]) -> pd.DataFrame:
    """Clip rate by loss and length bin: the mean over seeds of each seed's rate, with an interval over seeds.

    Columns: loss, kind (``clipped``, or ``matched`` for the loss's band scaled to one rate), low, high, n (responses
    with advantage != 0), rate, lower, upper.
    """
    rows = []
    for loss, kind in itertools.product(_losses(trials), ("clipped", "matched")):
        tables = [_clip_table(trial, None if kind == "clipped" else loss) for trial in trials if trial.loss == loss]
        if any(table is None for table in tables):
            continue
        for (low, high), seeds in pd.concat(tables).groupby(["low", "high"]):
            rates = seeds.rate.dropna().to_numpy()
            mean = paired_interval(rates[:, None], np.random.default_rng(0)) if len(rates) else UNKNOWN
            rows.append((loss, kind, low, high, seeds.n.sum(), *mean))
    return pd.DataFrame(rows, columns=["loss", "kind", "low", "high", "n", "rate", "lower", "upper"])


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
        return sorted(_losses(self.trials), key=lambda loss: loss != self.baseline)

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
        ValueError: the baseline is missing, or trials of different length are given.
    """
    if baseline not in _losses(trials):
        raise ValueError(f"no run of the baseline {baseline!r}; there are {', '.join(_losses(trials))}")
    lengths = {trial.steps for trial in trials}
    if len(lengths) > 1:
        raise ValueError(f"the runs have different numbers of steps, {sorted(lengths)}; --steps N compares the first N")
    values = measure(trials, target)
    paired = differences(trials, values, baseline)
    return Comparison(setup or {}, list(trials), baseline, target, values, paired, clip_rates(trials))


def load(path: Path) -> tuple[list[Trial], dict]:
    """Trials and setup, from a folder of runs or from a comparison.json.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no trials.
    """
    path = Path(path)
    if path.is_dir():
        setup = path / "setup.json"
        return read_trials(path), json.loads(setup.read_text()) if setup.exists() else {}
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file")
    try:
        data = json.loads(path.read_text())
        return [Trial.from_json(trial) for trial in data["trials"]], data["setup"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is neither a folder of runs nor a comparison.json") from None


def _losses(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(trial.loss for trial in trials))


# --- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison) -> str:
    """The tables of a comparison, and how its runs were made."""
    return "\n\n".join(_paragraphs(comparison)) + "\n"


def _paragraphs(c: Comparison) -> Iterator[str]:
    seeds = ", ".join(map(str, c.seeds))
    yield (
        f"{len(c.losses)} losses, {len(c.seeds)} seeds each ({seeds}), {c.trials[0].steps} training steps. Runs of one "
        "seed share the warm-started model, the prompts and their order."
    )
    yield "![Validation accuracy, paired differences and clip rates by length](comparison.png)"
    yield from _reached(c)
    yield from _by_length(c)
    if tuning := c.setup.get("tuning"):
        yield (
            f"### Clip ranges\n\nEvery loss had the same budget: {tuning['what']}. Mean over seeds "
            f"{', '.join(map(str, tuning['seeds']))}, {tuning['steps']} steps; the chosen one is bold."
        )
        yield markdown_table(["loss", *(f"x {factor:.3g}" for factor in tuning["factors"])], _tuning_rows(tuning))
    if c.setup:
        yield "### How it was run\n\n" + "\n".join(
            f"- {name}: " + (f"`{value}`" if name == "command" else str(value))
            for name, value in c.setup.items()
            if isinstance(value, str | int | float)
        )


def _reached(c: Comparison) -> Iterator[str]:
    yield "### What each loss reached\n\nMean over the seeds (smallest to largest seed)."
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
    yield f"### Paired differences, {c.baseline} minus the other loss\n\n" + _interval_note(len(c.seeds))
    yield markdown_table(
        ["", "loss", "difference", "over seeds", "over seeds and questions", f"P({c.baseline} better)", "verdict"],
        (_difference_cells(row, c) for row in c.differences.itertuples() if METRICS[row.metric].better),
    )


def _by_length(c: Comparison) -> Iterator[str]:
    for kind, title in (
        ("clipped", "Clip rate by length"),
        ("matched", f"Clip rate by length, each clip scaled to {MATCHED_RATE:.0%} of the responses of its run"),
    ):
        rates = c.clip_rates[c.clip_rates.kind == kind]
        if len(rates):
            yield f"### {title}\n\nShare of the responses with advantage != 0; mean over the seeds."
            texts = {
                f"{low} to {high}": {row.loss: _number(row.rate, ".2%") for row in part.itertuples()}
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


def _interval_note(seeds: int) -> str:
    if seeds < MIN_SEEDS:
        return f"No interval: {seeds} seed(s), fewer than {MIN_SEEDS}."
    return (
        f"95% intervals: bootstrap standard error times Student's t, over {seeds} seeds, and over seeds and validation "
        f"questions where the answers are at hand. {seeds} seeds make a coarse interval, which rests on differences "
        "that are about normal; see every seed above. Intervals are not adjusted for their number. P: share of seeds "
        "in which the loss is better, ties half, with its Wilson interval."
    )


def _label(name: str, target: float) -> str:
    return METRICS[name].label.format(target=target)


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
    wilson = f" ({row.improvement_lower:.2f} to {row.improvement_upper:.2f})"
    return [
        _label(row.metric, c.target),
        row.loss,
        f"{row.difference:{form}}" + ("" if row.seeds == len(c.seeds) else f" ({row.seeds} pairs)"),
        *("–" if math.isnan(lower) else f"{lower:{form}} to {upper:{form}}" for lower, upper in ends),
        f"{row.improvement:.2f}" + ("" if math.isnan(row.improvement_lower) else wilson),
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
    """Validation accuracy over the steps, paired differences of every seed, and clip rates by length."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    axes = figure.subplots(2, 2).flat
    styles = dict(zip(comparison.losses, figures.run_styles(comparison.losses), strict=True))
    _draw_accuracy(axes[0], comparison, styles)
    _draw_differences(axes[1], comparison, styles)
    _draw_clip_rates(axes[2], comparison, styles, "clipped", "clip rate by length")
    _draw_clip_rates(axes[3], comparison, styles, "matched", f"the same, scaled to {MATCHED_RATE:.0%} overall")
    return figure


def _draw_accuracy(axes: Axes, c: Comparison, styles: dict) -> None:
    for loss in c.losses:
        curves = [pd.Series(trial.validation) for trial in c.trials if trial.loss == loss]
        for curve in curves:
            axes.plot(curve, color=styles[loss].color, lw=0.6, alpha=0.5)
        axes.plot(pd.concat(curves, axis=1).mean(axis=1), label=loss, **styles[loss].line_kwargs())
    axes.set(title="validation accuracy (thin: each seed)", xlabel="training step", ylabel="share of right answers")
    axes.legend()


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


def bin_places(trials: Sequence[Trial]) -> pd.Series:
    """Where each length bin is drawn, by its first length: at the geometric mean of the lengths in it."""
    tables = [_clip_table(trial) for trial in trials if trial.clips]
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
            lower, upper = table.lower.clip(0), table.upper.clip(upper=1)
            axes.fill_between(place, lower, upper, color=styles[loss].color, alpha=0.15, lw=0)
            axes.plot(place, table.rate, label=loss, **styles[loss].line_kwargs())
    bins = c.clip_rates[["low", "high"]].drop_duplicates()
    axes.set_xscale("log")
    axes.set_xticks(places[bins.low], [f"{row.low}–{row.high}" for row in bins.itertuples()])
    axes.xaxis.set_minor_locator(NullLocator())
    if kind == "matched":
        axes.axhline(MATCHED_RATE, color=figures.GREY, lw=0.8, ls=":")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")
    axes.set(title=title, xlabel="response length (tokens; shaded: 95% interval)", ylabel="clip rate", ylim=(0, None))


# --- command line -----------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """Compare, and check or update thresholds; returns 1 where a threshold is not kept."""
    trials, setup = load(args.path)
    if args.steps is not None:
        trials = [trial.first(args.steps) for trial in trials]
    comparison = compare(trials, setup, args.baseline, args.target)
    if args.update:
        print(thresholds.update(args.update, comparison.values))
        return 0
    output = args.output or (args.path if args.path.is_dir() else args.path.parent)
    write(comparison, output)
    print(markdown(comparison))
    print(f"written: {output / 'comparison.md'}, comparison.json, comparison.png")
    if args.check:
        report, kept = thresholds.check(args.check, comparison.values)
        print(report)
        return 0 if kept else 1
    return 0


def write(comparison: Comparison, output: Path) -> None:
    """comparison.md, comparison.json and comparison.png in a folder: all of them or, where the disk is full, none."""
    # Without matplotlib's version in it, so that the same comparison is the same file.
    picture = io.BytesIO()
    draw(comparison).savefig(picture, dpi=130, metadata={"Software": None})
    text = json.dumps(comparison.to_json(), allow_nan=False, separators=(",", ":"))
    text = text.replace('{"loss"', '\n{"loss"') + "\n"  # a line per trial
    page = output / "comparison.md"
    files = {page: inserted(markdown(comparison), page).encode(), output / "comparison.json": text.encode()}
    write_whole([*files.items(), (output / "comparison.png", picture.getvalue())])
