# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A comparison: trials, read from folders of runs or from earlier comparisons, and all that is computed from them."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fspo_verl.analysis.verdict import percent
from fspo_verl.compare import paired
from fspo_verl.compare.measures import measure
from fspo_verl.compare.trials import Trial, losses, pool, read_trials

_POINTS = 5  # of accuracy: a difference worth showing


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

    @property
    def _ends(self) -> pd.Series:
        """Mean accuracy at the end, by loss."""
        return self.values.groupby("loss").accuracy.mean()

    @property
    def _against(self) -> pd.DataFrame:
        """The differences in accuracy at the end, a row per loss but the baseline."""
        rows = self.differences[self.differences.metric == "accuracy"].set_index("loss").reindex(self.losses[1:])
        return rows.fillna({"seeds": 0, "verdict": paired.TOO_FEW})

    @property
    def headline(self) -> str:
        """Which loss ends higher, and how sure that is."""
        ends, rows, base = self._ends.map(percent), self._against, self.baseline
        said = [f"{base} ends with {ends[base]} of the answers right."]
        sentences = {
            f"{base} higher": "It ends higher than {}.",
            f"{base} lower": "It ends lower than {}.",
            paired.SAME: "It ends the same in every seed as {}.",
            paired.NOT_SHOWN: "No difference from {} is shown; 95% intervals allow up to {:.0f} points.",
            paired.TOO_FEW: f"Too few seeds for a verdict on {{}}: that takes {paired.MIN_SEEDS}.",
        }
        for verdict, sentence in sentences.items():
            of = rows[rows.verdict == verdict]
            if len(of):
                bound = 100 * of[["lower", "upper"]].abs().max(axis=None)
                said.append(sentence.format(", ".join(f"{loss} ({ends[loss]})" for loss in of.index), bound))
        if rows.verdict.str.startswith(base).any():
            said.append(f"That is {paired.CONFIDENCE:.0%} sure, adjusted for {counted(rows.p.count(), 'loss')}.")
        return " ".join(said)

    @property
    def advice(self) -> str:
        """What to do next."""
        rows, base = self._against, self.baseline
        better, unsure = rows[rows.verdict == f"{base} lower"].index, rows[rows.verdict.isin(paired.UNSURE)]
        if rows.empty:
            return "Train another loss with the same seeds."
        said = [f"Take {self._ends[better].idxmax()}."] if len(better) else [] if len(unsure) else [f"Keep {base}."]
        if len(unsure):
            seeds = paired.seeds_to_show(_POINTS / 100, unsure.spread.fillna(0).max(), len(rows))
            sure = "about" if unsure.spread.notna().any() else "at least"
            said.append(f"To show a difference of {_POINTS} points, train {sure} {seeds} seeds of each loss.")
        return " ".join(said)

    @property
    def warnings(self) -> list[str]:
        """What is not alike though it should be: accuracy before training within a seed, the clip within a loss."""
        starts = self.values.groupby("seed").accuracy_before.agg(["min", "max"])
        said = [
            f"Runs of one seed do not start alike: with seed {seed} accuracy before is {low:.3f} to {high:.3f}. "
            "Another model, or another machine?"
            for seed, low, high in starts.itertuples()
            if low < high
        ]
        trained = self.trained.index
        otherwise = list(trained[trained.duplicated()].unique())
        differ = f"Seeds of one loss differ in what they clipped: {', '.join(otherwise)}; see What trained."
        return [*said, differ] if otherwise else said

    @property
    def trained(self) -> pd.DataFrame:
        """What trained, of the trials whose settings are known: by loss its ``loss_mode``, its clip, and the seeds."""
        known = [(t.loss, t.settings.loss, t.settings.clip or "–", str(t.seed)) for t in self.trials if t.settings]
        rows = pd.DataFrame(known, columns=["loss", "verl `loss_mode`", "clip", "seeds"])
        together = rows.groupby(list(rows.columns[:3]), sort=False).seeds.agg(", ".join).reset_index()
        return together.sort_values("loss", key=lambda names: names.map(self.losses.index)).set_index("loss")

    def to_json(self) -> dict:
        """Everything, as read back by :func:`load`; numbers that are not known are null."""
        tables = {name: getattr(self, name) for name in ("values", "differences", "clip_rates")}
        return {
            "headline": self.headline,
            "advice": self.advice,
            "baseline": self.baseline,
            "target": self.target,
            **{name: json.loads(table.to_json(orient="records", double_precision=6)) for name, table in tables.items()},
            "setup": self.setup,
            "trials": [trial.to_json() for trial in self.trials],
        }


def counted(number: int, noun: str) -> str:
    """For example "1 seed", "2 seeds", "2 losses"."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def compare(
    trials: Sequence[Trial], setup: dict | None = None, baseline: str = "fspo", target: float = 0.5
) -> Comparison:
    """Compare trials, paired by seed.

    Raises:
        ValueError: the baseline is missing, or trials differ in their length or in the steps at which they were
            validated.
    """
    if baseline not in losses(trials):
        raise ValueError(f"no run of the baseline {baseline!r}; there are {', '.join(losses(trials))}")
    if unlike := _unlike(trials, lambda trial: trial.steps):
        raise ValueError(f"the runs have different numbers of steps: {unlike}; --steps N compares the first N")
    if unlike := _unlike(trials, lambda trial: tuple(trial.validation)):
        raise ValueError(f"the runs were validated at different steps: {unlike}")
    values = measure(trials, target)
    differences, clip_rates = paired.differences(values, baseline), paired.clip_rates(trials)
    return Comparison(setup or {}, list(trials), baseline, target, values, differences, clip_rates)


def _unlike(trials: Sequence[Trial], of: Callable[[Trial], object]) -> str:
    """What most trials have, and each trial that has something else; empty where all agree."""
    counts = Counter(map(of, trials)).most_common()
    others = (f"{trial.loss} seed {trial.seed} has {of(trial)}" for trial in trials if of(trial) != counts[0][0])
    return "" if len(counts) == 1 else f"most have {counts[0][0]}, {', '.join(others)}"


def load(*paths: Path) -> tuple[list[Trial], dict]:
    """Trials and setup, from folders of runs or JSON of comparisons; pooled in the length bins of the first path.

    The setup is that of the first.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no trials, or two paths contradict each other, see :func:`pool`.
    """
    trials, setup = _load(Path(paths[0]), None)
    if len(paths) == 1:
        return trials, setup
    edges = next((trial.clips.edges[1:-1] for trial in trials if trial.clips), None)
    return pool(trials, *(_load(Path(path), edges)[0] for path in paths[1:])), setup


def _load(path: Path, inner_edges: Sequence[int] | None) -> tuple[list[Trial], dict]:
    if path.is_dir():
        setup = path / "setup.json"
        return read_trials(path, inner_edges), json.loads(setup.read_text()) if setup.exists() else {}
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file")
    try:
        data = json.loads(path.read_text())
        return [Trial.from_json(trial) for trial in data["trials"]], data["setup"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is neither a folder of runs nor a comparison.json: {error!r}") from None
