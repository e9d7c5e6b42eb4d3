# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trials: training runs of several losses and seeds, each reduced to the few kilobytes that a comparison needs.

A trial is read from the folder of a run (:func:`read_trials`) or from the JSON of an earlier comparison, so that
results can be kept without the runs.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from fspo_verl.analysis.clip_rates import length_cells, length_edges, sides
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.analysis.runs import Run, read_runs
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip
from fspo_verl.observe.metrics import NAMES
from fspo_verl.observe.settings import RunSettings

logger = logging.getLogger("fspo_verl")

# Folders of runs: fspo-hf-seed3, gspo-seed11; not warm-start-seed3.
_NAME = re.compile(r"(?!warm-)([a-z0-9_]+)(?:-[a-z0-9_-]+)?-seed(\d+)")
_ACCURACY = re.compile(r"val-core/.+/acc/mean@\d+")
# Per-step columns of a trial, by the keys of observe.metrics.NAMES.
# Not the entropy, which verl aggregates as each loss is, so that between losses its levels are no comparison.
_SERIES = ("reward", "response_length", "grad_norm", "loss", "nonfinite_responses")
BANDS = ("fspo", "gspo", "fixed_band")
"""Bands that are applied to the responses of every trial; names of :data:`fspo_verl.clips.CLIPS`."""


@dataclass(frozen=True)
class Clips:
    """Count what was clipped per step and length bin; counts are of responses with advantage != 0.

    Attributes:
        edges: of the length bins, see :func:`fspo_verl.analysis.clip_rates.length_edges`.
        mean_log: ``[bins]`` mean log length in each bin, 0 in an empty one.
        responses: ``[steps, bins]``.
        clipped: ``[steps, bins]``; a response of which a part is clipped counts with its share.
        matched: by name of a clip, likewise, had it clipped the same responses at :data:`fspo_verl.clips.MATCHED_RATE`
            overall: :data:`BANDS`, and the band that trained under the name of its loss, unless it clipped nothing. One
            that too few responses have moved enough to reach is left out.
    """

    edges: list[int]
    mean_log: list[float]
    responses: list[list[int]]
    clipped: list[list[float]]
    matched: dict[str, list[list[int]]]


@dataclass(frozen=True)
class Trial:
    """One training run. Row i of the per-step lists belongs to step i + 1.

    Attributes:
        loss: what trains, as its folder is called.
        seed: trials of one seed share model, prompts and their order.
        settings: of the run, None where neither records nor config tell them.
        training: per step, one list per key of ``_SERIES`` that is logged; None where a value is not finite.
        validation: accuracy by step, 0 being the start.
        clips: None without records.
        clipped_more: which responses are, by :func:`fspo_verl.analysis.length_effect.length_effect` of the whole run:
            "shorter", "longer", "both ends", "the middle", "not shown" or "too few to say". None without records.
    """

    loss: str
    seed: int
    settings: RunSettings | None
    training: dict[str, list[float | None]]
    validation: dict[int, float]
    clips: Clips | None
    clipped_more: str | None = field(default=None, compare=False)

    @property
    def steps(self) -> int:
        """Training steps logged."""
        return max(map(len, self.training.values()))

    def series(self, name: str) -> np.ndarray:
        """A per-step list as an array; NaN where a value is not finite, or nothing is logged under the name."""
        return np.array(self.training.get(name, [None] * self.steps), dtype=np.float64)

    def to_json(self) -> dict:
        """Plain lists and numbers; floats with 7 significant digits."""
        data = dataclasses.asdict(self) | {"settings": self.settings and self.settings.to_json()}
        return json.loads(json.dumps(data), parse_float=lambda text: float(f"{float(text):.7g}"))

    @staticmethod
    def from_json(data: dict) -> "Trial":
        """The inverse of :meth:`to_json`."""
        validation = {int(step): value for step, value in data["validation"].items()}
        clips = data["clips"] and Clips(**data["clips"])
        settings = data["settings"] and RunSettings.from_json(data["settings"])
        return Trial(**data | {"validation": validation, "clips": clips, "settings": settings})


def read_trials(folder: Path) -> list[Trial]:
    """The trials of all runs in a folder; each run is a folder called LOSS-seedN or LOSS-...-seedN.

    Length bins are log-spaced over the lengths of all runs.

    Raises:
        ValueError: there is none, or two are of the same loss and seed.
    """
    places = [path for path in sorted(folder.iterdir()) if path.is_dir() and any(path.iterdir())]
    found = {path: (name[1], int(name[2])) for path in places if (name := _NAME.fullmatch(path.name))}
    if not found:
        raise ValueError(f"{folder} holds no runs: folders called LOSS-seedN, such as fspo-seed3 or gspo-hf-seed3")
    if len(set(found.values())) < len(found):
        raise ValueError(f"{folder} holds several runs of one loss and seed: {', '.join(path.name for path in found)}")
    runs = list(read_runs(list(found)))
    edges = _edges(np.concatenate([run.records["length"].to_numpy() for run in runs]))
    trials = (_trial(run, *identity, edges) for run, identity in zip(runs, found.values(), strict=True))
    # Rounded as in JSON, so that a comparison from the runs and one from its JSON agree to the last digit.
    return [Trial.from_json(trial.to_json()) for trial in trials]


def losses(trials: Sequence[Trial]) -> list[str]:
    """Each loss once, in the order of the trials."""
    return list(dict.fromkeys(trial.loss for trial in trials))


def _edges(lengths: np.ndarray) -> np.ndarray:
    """Log-spaced bins; the few shortest and longest lengths join the first and the last one."""
    if not len(lengths):
        return length_edges(lengths)
    inner = length_edges(lengths.clip(*np.quantile(lengths, [0.005, 0.995], method="nearest")), bins=6)[1:-1]
    return np.array([min(lengths.min(), *inner), *inner, max(lengths.max() + 1, *inner)])


def _trial(run: Run, loss: str, seed: int, edges: np.ndarray) -> Trial:
    metrics = run.metrics[run.metrics.index > 0]
    names = [name for name in run.metrics if _ACCURACY.fullmatch(name)]
    if not names or metrics.empty:
        raise ValueError(f"{run.folder} has not logged any {'step' if metrics.empty else 'val-core/*/acc/mean@*'}")
    accuracy = run.metrics[names].mean(axis=1).dropna()
    logged = {key: NAMES[key] for key in _SERIES if NAMES[key] in metrics}
    finite = metrics.astype(object).where(np.isfinite(metrics), None)
    return Trial(
        loss=loss,
        seed=seed,
        settings=run.settings,
        training={key: finite[name].tolist() for key, name in logged.items()},
        validation=accuracy.to_dict(),
        clips=None if run.records.empty else _clips(run, loss, edges, list(metrics.index)),
        clipped_more=None if run.records.empty else _clipped_more(run.records),
    )


def _clipped_more(records: pd.DataFrame) -> str:
    effect = length_effect(records)
    if effect is None:
        return "too few to say"
    return effect.who if effect.depends and effect.who else "not shown"


def _clips(run: Run, loss: str, edges: np.ndarray, steps: list[int]) -> Clips:
    row = pd.Index(steps).get_indexer(run.records["step"])
    records, row = run.records[row >= 0], row[row >= 0]  # a run may end between records and metrics
    counted = sides(records)["all"]
    length = records["length"].to_numpy()
    cell, bins = length_cells(length, edges)
    cell = row * bins + cell

    def count(weights: np.ndarray) -> np.ndarray:
        return np.bincount(cell[counted], weights[counted], len(steps) * bins).reshape(len(steps), bins)

    responses = count(np.ones(len(records)))
    logs = count(np.log(length)).sum(0) / np.maximum(responses.sum(0), 1)
    clips = {name: CLIPS[name] for name in BANDS}
    band = run.settings and run.settings.trained_band
    if band and records["clipped"].any():
        clips[loss] = BandClip(loss, loss, band)
    matched = {}
    for name, clip in clips.items():
        try:
            matched[name] = count(clip.matched(records, MATCHED_RATE).clipped(records)).astype(int).tolist()
        except ValueError as error:
            logger.warning("%s: %s", loss, error)
    return Clips(
        edges=edges.tolist(),
        mean_log=logs.tolist(),
        responses=responses.astype(int).tolist(),
        clipped=count(records["clipped"].to_numpy(np.float64)).tolist(),
        matched=matched,
    )
