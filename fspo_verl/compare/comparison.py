# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A comparison: trials, read from folders of runs or from earlier comparisons, and all that is computed from them."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fspo_verl.compare.measures import measure
from fspo_verl.compare.paired import MIN_SEEDS, TOO_FEW, clip_rates, differences
from fspo_verl.compare.trials import Trial, losses, pool, read_trials

_ADDED = "added to these, and made otherwise (loss and seed)"  # an entry of a setup


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
    def headline(self) -> str:
        """The verdicts on the accuracy over the run, in one sentence."""
        if len(self.losses) == 1:
            return f"{self.baseline} alone: nothing to compare it with."
        rows = self.differences[self.differences.metric == "accuracy_area"].set_index("loss")
        verdicts = rows.verdict.where(rows.seeds >= MIN_SEEDS, TOO_FEW).reindex(self.losses[1:], fill_value=TOO_FEW)
        said = (f"{verdict} ({', '.join(part.index)})" for verdict, part in verdicts.groupby(verdicts, sort=False))
        return f"Accuracy over the run, {self.baseline} against each other loss: {'; '.join(said)}."

    @property
    def unlike_starts(self) -> dict[int, tuple[float, float]]:
        """The lowest and the highest accuracy before training, of the seeds whose runs do not agree on it."""
        starts = self.values.groupby("seed").accuracy_before.agg(["min", "max"])
        return {seed: (low, high) for seed, low, high in starts.itertuples() if low < high}

    @property
    def trained(self) -> list[tuple[str, str, str, str]]:
        """Loss, verl's name of what trained, its clip, and the seeds; of the trials whose settings are known."""
        seeds: dict[tuple[str, str, str], list[int]] = {}
        for trial in sorted(self.trials, key=lambda trial: self.losses.index(trial.loss)):
            if trial.settings:
                of = (trial.loss, trial.settings.loss, trial.settings.clip or "–")
                seeds.setdefault(of, []).append(trial.seed)
        return [(*of, ", ".join(map(str, sorted(numbers)))) for of, numbers in seeds.items()]

    @property
    def clipped_otherwise(self) -> list[str]:
        """The losses of which some seeds trained with another clip than others."""
        return [loss for loss, clips in Counter(row[0] for row in self.trained).items() if clips > 1]

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
    paired = differences(values, baseline)
    return Comparison(setup or {}, list(trials), baseline, target, values, paired, clip_rates(trials))


def _unlike(trials: Sequence[Trial], of: Callable[[Trial], object]) -> str:
    """What most trials have, and each trial that has something else; empty where all agree."""
    counted = Counter(map(of, trials)).most_common()
    others = (f"{trial.loss} seed {trial.seed} has {of(trial)}" for trial in trials if of(trial) != counted[0][0])
    return "" if len(counted) == 1 else f"most have {counted[0][0]}, {', '.join(others)}"


def load(*paths: Path) -> tuple[list[Trial], dict]:
    """Trials and setup, from folders of runs or JSON of comparisons; pooled in the length bins of the first path.

    The setup is that of the first, and names the runs that it is not of.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no trials, or two paths contradict each other, see :func:`pool`.
    """
    trials, setup = _load(Path(paths[0]), None)
    if len(paths) == 1:
        return trials, setup
    edges = next((trial.clips.edges[1:-1] for trial in trials if trial.clips), None)
    pooled = pool(trials, *(_load(Path(path), edges)[0] for path in paths[1:]))
    first = {(trial.loss, trial.seed) for trial in trials}
    added = [f"{trial.loss} {trial.seed}" for trial in pooled if (trial.loss, trial.seed) not in first]
    if setup and added:
        setup = setup | {_ADDED: ", ".join(filter(None, [setup.get(_ADDED), *added]))}
    return pooled, setup


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
