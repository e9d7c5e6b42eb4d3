# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Losses compared over paired seeds: which one ends higher, how sure that is, and what to do next.

  python scripts/compare/compare.py runs/compare/runs

PATH is a folder of runs called LOSS-seedN (as scripts/compare_baselines.sh makes them), or the JSON that an earlier
comparison has written. DIR gets comparison.md, comparison.json and comparison.png; of a NAME.json, files of that name.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import measures
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from measures import MEASURES
from trials import Trial, losses, read_trials

from fspo_verl.analysis.clip_rates import Estimate, number
from fspo_verl.clips import MATCHED_RATE
from fspo_verl.output import markdown_table, one_line, percent, write_whole
from fspo_verl.report import figures
from fspo_verl.report.page import named

sys.path.append(str(Path(__file__).resolve().parents[1]))
from pictures import small_png  # noqa: E402

NAME = "comparison"
_POINTS = 5  # of accuracy: a difference worth showing
_NOTES = """\
Means over the seeds. ↑: more is better, ↓: less is. k: clip rate ∝ length^k, 0 is flat. Differences are paired by seed,
with intervals by all flips of signs, of {min_seeds} seeds or more, each for itself and for these validation questions.
They hold where differences are distributed symmetrically; a rare collapse that no seed shows is in none of them.
*{base} better*: in so many seeds, ties half. A verdict goes by p, which is adjusted for the number of losses (step-down
maxT of Westfall and Young), not for the number of measures."""


@dataclass(frozen=True)
class Comparison:
    """Trials, and all that is computed from them."""

    trials: list[Trial]
    baseline: str
    values: pd.DataFrame
    differences: pd.DataFrame
    clip_rates: pd.DataFrame
    on: str = ""  # model and data, as a reader knows them

    @property
    def losses(self) -> list[str]:
        """The baseline first."""
        return sorted(losses(self.trials), key=lambda loss: loss != self.baseline)

    @property
    def compared(self) -> str:
        """Say what was compared, on what, and how often."""
        base, *others = self.losses
        seeds, steps = counted(self.values.seed.nunique(), "seed"), counted(self.trials[0].steps, "training step")
        return (
            f"Compared: {base} with {', '.join(others) or 'no other'}{self.on and f', on {self.on}'}: {seeds}, {steps}."
        )

    def differing(self, beyond_noise: bool) -> str:
        """The measures in which a difference from some loss is shown, or is not, and these losses."""
        rows = self.differences[self.differences.verdict != measures.SAME]
        rows = rows[rows.verdict.str.startswith(self.baseline) == beyond_noise]
        texts = []
        for (name, verdict), group in rows.groupby(["metric", "verdict"], sort=False):
            names = "any other" if len(group) == len(self.losses) - 1 else ", ".join(group.loss)
            texts.append(
                f"{MEASURES[name].label} ({verdict} than {names})"
                if beyond_noise
                else f"{MEASURES[name].label} ({names})"
            )
        return "; ".join(texts) or "nothing"

    @property
    def _ends(self) -> pd.Series:
        """Mean accuracy at the end, by loss."""
        return self.values.groupby("loss").accuracy.mean()

    @property
    def _against(self) -> pd.DataFrame:
        """The differences in accuracy at the end, a row per loss but the baseline."""
        rows = self.differences[self.differences.metric == "accuracy"].set_index("loss").reindex(self.losses[1:])
        return rows.fillna({"seeds": 0, "verdict": measures.TOO_FEW})

    @property
    def headline(self) -> str:
        """Say which loss ends higher, and how sure that is."""
        ends, rows, base = self._ends.map(percent), self._against, self.baseline
        said = [f"{base} ends with {ends[base]} of the answers right."]
        sentences = {
            f"{base} higher": "It ends higher than {}.",
            f"{base} lower": "It ends lower than {}.",
            measures.SAME: "It ends the same in every seed as {}.",
            measures.NOT_SHOWN: "No difference from {} is shown; 95% intervals allow up to {:.0f} points.",
            measures.TOO_FEW: f"Too few seeds for a verdict on {{}}: that takes {measures.MIN_SEEDS}.",
        }
        for verdict, sentence in sentences.items():
            of = rows[rows.verdict == verdict]
            if len(of):
                bound = 100 * of[["lower", "upper"]].abs().max(axis=None)
                said.append(sentence.format(", ".join(f"{loss} ({ends[loss]})" for loss in of.index), bound))
        if rows.verdict.str.startswith(base).any():
            said.append(f"That is {measures.CONFIDENCE:.0%} sure, adjusted for {counted(rows.p.count(), 'loss')}.")
        return " ".join(said)

    @property
    def advice(self) -> str:
        """Return the next step."""
        rows, base = self._against, self.baseline
        better, unsure = rows[rows.verdict == f"{base} lower"].index, rows[rows.verdict.isin(measures.UNSURE)]
        if rows.empty:
            return "Train another loss with the same seeds."
        said = [f"Take {self._ends[better].idxmax()}."] if len(better) else [] if len(unsure) else [f"Keep {base}."]
        if len(unsure):
            seeds = measures.seeds_to_show(_POINTS / 100, unsure.spread.fillna(0).max(), len(rows))
            sure = "about" if unsure.spread.notna().any() else "at least"
            said.append(f"To show a difference of {_POINTS} points, train {sure} {seeds} seeds of each loss.")
        return " ".join(said)

    @property
    def warnings(self) -> list[str]:
        """Find what is unlike and should not be: accuracy before training within a seed, the clip within a loss."""
        starts = self.values.groupby("seed").accuracy_before.agg(["min", "max"])
        said = [
            f"Runs of one seed do not start alike: with seed {seed} accuracy before is {low:.3f} to {high:.3f}. "
            "Another model, or another machine?"
            for seed, low, high in starts.itertuples()
            if low < high
        ]
        trained = self.trained.loss
        otherwise = list(trained[trained.duplicated()].unique())
        differ = f"Seeds of one loss differ in what they clipped: {', '.join(otherwise)}; see What trained."
        return [*said, differ] if otherwise else said

    @property
    def trained(self) -> pd.DataFrame:
        """Return what trained, of trials with known settings: by loss its ``loss_mode``, its clip, and the seeds."""
        known = [(t.loss, t.settings.loss, t.settings.clip or "–", str(t.seed)) for t in self.trials if t.settings]
        rows = pd.DataFrame(known, columns=["loss", "verl `loss_mode`", "clip", "seeds"])
        together = rows.groupby(list(rows.columns[:3]), sort=False).seeds.agg(", ".join).reset_index()
        return together.sort_values("loss", key=lambda names: names.map(self.losses.index))

    @property
    def reached(self) -> pd.DataFrame:
        """A row per measure and loss: its mean over the seeds, and how far the baseline is from it. All cells are text.

        A last measure says in how many runs of a loss longer, or shorter, responses were clipped more.
        """
        against, base, rows = self.differences.set_index(["metric", "loss"]), self.baseline, []
        for (name, of), loss in itertools.product(MEASURES.items(), self.losses):
            values = self.values[name][self.values.loss == loss].dropna()
            if values.empty:
                continue
            row = {
                "measure": of.label + {1: " ↑", -1: " ↓", 0: ""}[of.better],
                "loss": loss,
                "seeds": str(len(values)),
                "mean": f"{values.mean():{of.form}}",
                "smallest to largest": f"{values.min():{of.form}} to {values.max():{of.form}}",
            }
            if of.better and (name, loss) in against.index:
                found = against.loc[(name, loss)]
                difference = Estimate(found.difference, found.lower, found.upper)
                row |= {
                    f"{base} minus it [95% interval]": f"{difference:+{of.form}}",
                    f"{base} better": f"{found.improvement * found.seeds:g} of {found.seeds}",
                    "p, adjusted": number(found.p, ".2g"),
                    "verdict": found.verdict,
                }
            rows.append(row)
        for loss in self.losses:
            told = Counter(t.clipped_more for t in self.trials if t.loss == loss and t.clipped_more)
            text = ", ".join(f"{which} in {runs}" for which, runs in sorted(told.items()))
            if told:
                rows.append({"measure": "clipped more, by the test of each run", "loss": loss, "mean": text})
        return pd.DataFrame(rows).fillna("")

    def to_json(self) -> dict:
        """Everything, as read back by :func:`load`; numbers that are not known are null."""
        tables = {name: getattr(self, name) for name in ("values", "differences", "clip_rates")}
        return {
            "headline": self.headline,
            "on": self.on,
            "advice": self.advice,
            "baseline": self.baseline,
            **{name: json.loads(table.to_json(orient="records", double_precision=6)) for name, table in tables.items()},
            "trials": [trial.to_json() for trial in self.trials],
        }

    def to_markdown(self, picture: str) -> str:
        """The page: the conclusion first, what to do next last."""
        paragraphs = [
            *(f"**{text}**" for text in (self.headline, *self.warnings)),
            self.compared,
            f"Differs by more than noise: {self.differing(beyond_noise=True)}.",
            f"No difference shown: {self.differing(beyond_noise=False)}.",
            f"![Learning and clip rates by length]({picture})",
            _table(self.reached),
            _NOTES.format(base=self.baseline, min_seeds=measures.MIN_SEEDS),
            *(["What trained:", _table(self.trained)] if len(self.trained) else []),
            self.advice,
        ]
        return "\n\n".join(paragraphs)


def counted(number: int, noun: str) -> str:
    """Count in words, for example "1 seed", "2 seeds", "2 losses"."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def _table(rows: pd.DataFrame) -> str:
    return markdown_table(list(rows.columns), rows.itertuples(index=False))


def compare(trials: Sequence[Trial], baseline: str = "fspo", on: str = "") -> Comparison:
    """Compare trials, paired by seed.

    Raises:
        ValueError: the baseline is missing, or trials differ in their length or in the steps at which they were
            validated.
    """
    if baseline not in losses(trials):
        raise ValueError(f"no run of the baseline {baseline!r}; there are {', '.join(losses(trials))}")
    if unlike := _unlike(trials, lambda trial: trial.steps):
        raise ValueError(f"the runs have different numbers of steps: {unlike}")
    if unlike := _unlike(trials, lambda trial: tuple(trial.validation)):
        raise ValueError(f"the runs were validated at different steps: {unlike}")
    values = measures.measure(trials)
    differences, clip_rates = measures.differences(values, baseline), measures.clip_rates(trials)
    return Comparison(list(trials), baseline, values, differences, clip_rates, on)


def _unlike(trials: Sequence[Trial], of: Callable[[Trial], object]) -> str:
    """Name what most trials have, and each trial that has something else; empty where all agree."""
    counts = Counter(map(of, trials)).most_common()
    others = (f"{trial.loss} seed {trial.seed} has {of(trial)}" for trial in trials if of(trial) != counts[0][0])
    return "" if len(counts) == 1 else f"most have {counts[0][0]}, {', '.join(others)}"


def load(path: Path) -> list[Trial]:
    """Trials from a folder of runs, or the JSON of a comparison.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no trials.
    """
    if path.is_dir():
        return read_trials(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file")
    try:
        return [Trial.from_json(trial) for trial in json.loads(path.read_text())["trials"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is neither a folder of runs nor a comparison.json: {error!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, write the page, and print the conclusion; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="folder of runs, or the JSON of a comparison")
    add("-o", "--output", type=Path, metavar="DIR", help="where results go (default: PATH, or its folder)")
    add("--baseline", default="fspo", metavar="LOSS", help="loss that others are compared to (default: %(default)s)")
    add("--on", default="", metavar="TEXT", help="model and data, for the page (default: as the JSON has them)")
    args = parser.parse_args(argv)
    path = args.path
    folder, name = (path, NAME) if path.is_dir() else (path.parent, path.stem)
    page = (args.output or folder) / f"{name}.md"
    try:
        trials = load(path)
        on = args.on or (json.loads(path.read_text()).get("on", "") if path.is_file() else "")
        comparison = compare(trials, args.baseline, on)
        write(comparison, page)
    except (OSError, ValueError) as error:
        print(f"compare: {one_line(error)}", file=sys.stderr)
        return 2
    means = comparison.reached.pivot_table("mean", "measure", "loss", "first", sort=False).fillna("")
    print(f"{comparison.headline}\n{comparison.compared}\n\n{means.to_string()}\n")
    print("\n".join([*comparison.warnings, f"written: {page}, {name}.json, {name}.png"]))
    print(comparison.advice)
    return 0


def write(comparison: Comparison, page: Path) -> None:
    """The page, and JSON and figure beside it: all of them or, where the disk is full, none."""
    (picture,) = figures.render(lambda: draw(comparison), "png")
    numbers = json.dumps(comparison.to_json(), allow_nan=False, separators=(",", ":"))
    numbers = numbers.replace('{"loss"', '\n{"loss"') + "\n"  # a line per trial
    text = comparison.to_markdown(f"{page.stem}.png") + "\n"
    files = [(page, text.encode()), (page.with_suffix(".json"), numbers.encode())]
    write_whole([*files, (page.with_suffix(".png"), small_png(picture))])


def draw(comparison: Comparison) -> Figure:
    """Curves of validation accuracy, and clip rates by length as trained and scaled to one rate."""
    styles = dict(zip(comparison.losses, figures.run_styles(comparison.losses), strict=True))
    modes = {trial.loss: trial.settings.loss for trial in comparison.trials if trial.settings}
    # An arm has a name of its own, which does not say what trains.
    names = {loss: loss if loss in figures.STYLES else named(loss, modes.get(loss)) for loss in styles}
    rates = comparison.clip_rates.rename(columns={"smallest": "lower", "largest": "upper"})

    def learning(axes: Axes) -> None:
        for loss, style in styles.items():
            seeds = [pd.Series(trial.validation) for trial in comparison.trials if trial.loss == loss]
            for seed in seeds:
                axes.plot(seed, color=style.color, lw=0.5, alpha=0.4)
            axes.plot(pd.concat(seeds, axis=1).mean(axis=1), label=names[loss], **style.line_kwargs())
        axes.set(title="accuracy (thin: each seed)", xlabel="training step", ylabel="share of right answers")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    def by_length(kind: str) -> list[figures.Series]:
        of_kind = rates[rates.kind == kind].groupby("loss")
        return [figures.Series(names[loss], styles[loss], table) for loss, table in of_kind]

    trained = (figures.clip_rates, "clip rate (bars: the seeds)", by_length("clipped"))
    matched = (figures.clip_rates, f"scaled to {MATCHED_RATE:.0%} overall", by_length("matched"), MATCHED_RATE)
    return figures.of_panels([(learning,), trained, matched], 3.2, columns=3)


if __name__ == "__main__":
    sys.exit(main())
