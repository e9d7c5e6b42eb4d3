# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what a training run of verl left behind: metrics, per-response records, config.

Nothing here imports verl, so a run can be read on any machine.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fspo_verl.band import Band
from fspo_verl.observe.folder import record_files
from fspo_verl.observe.metrics import LENGTH_BIN
from fspo_verl.observe.records import read_records
from fspo_verl.observe.settings import RunSettings, clip_ratios

logger = logging.getLogger("fspo_verl")

_ACTOR = "actor_rollout_ref.actor"
RECORDS_DIR = f"{_ACTOR}.policy_loss.records_dir"


@dataclass
class Run:
    """One training run. What it did not log is an empty table, or None."""

    name: str
    folder: Path
    """The folder the run was read from, or its one metrics file."""

    metrics: pd.DataFrame
    """Indexed by ``step``, one float column per logged metric; NaN where a step did not log it."""

    records: pd.DataFrame
    """One row per response and optimiser step, see :data:`fspo_verl.observe.records.COLUMNS`; with ``max_rows`` a
    random part of ``attrs["rows"]``. ``attrs["settings"]`` are those of the run."""

    config: dict | None
    """The composed Hydra config, interpolations as written."""

    overrides: list[str]
    """The Hydra overrides of the launch."""

    rejected: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Records of responses that a rollout correction has taken out of the loss; no others hold them."""

    @property
    def rollouts(self) -> pd.DataFrame:
        """The records of all responses, those of :attr:`rejected` included."""
        return self.records if self.rejected.empty else pd.concat([self.records, self.rejected], ignore_index=True)

    @property
    def settings(self) -> RunSettings | None:
        """As the records have them, or else loss, band and clip range out of the config; None without either."""
        recorded = self.records.attrs["settings"]
        policy_loss = _select(self.config, f"{_ACTOR}.policy_loss") or {}
        if recorded or "loss_mode" not in policy_loss:
            return recorded
        loss = policy_loss["loss_mode"]
        band = Band(**Band.fields_in(policy_loss)) if loss == "fspo" else None
        target = policy_loss.get("target_clip_rate")
        clip_range = clip_ratios(lambda key: _select(self.config, f"{_ACTOR}.{key}"))
        bypass = bool(_select(self.config, "algorithm.rollout_correction.bypass_mode"))
        return RunSettings(loss, band, target_clip_rate=target, old_log_probs_from_rollout=bypass, **clip_range)


def read_runs(paths: Sequence[Path], names: Sequence[str] | None = None, max_rows: int | None = None) -> Iterator[Run]:
    """:func:`read_run` for several; without ``names`` each is called like its folder, or like its path where two agree.

    ``max_rows`` is for all of them together.

    Raises:
        ValueError: not one name per run, or a name given twice.
    """
    paths = [Path(path) for path in paths]
    if names is None:
        names = [path.resolve().stem if path.is_file() else path.resolve().name for path in paths]
        if len(set(names)) < len(names):
            names = [str(path) for path in paths]
    if len(names) != len(paths) or len(set(names)) < len(names):
        raise ValueError(f"{len(paths)} runs need as many different names; got {', '.join(names)}")
    rows = None if max_rows is None else max_rows // len(paths)
    return (read_run(path, name, rows) for path, name in zip(paths, names, strict=True))


def read_run(path: Path, name: str, max_rows: int | None = None) -> Run:
    """Read one run, finished or not.

    Args:
        path: a folder, searched with all folders in it, or one metrics file of verl's file logger.
        name: what to call the run.
        max_rows: read about this many records, a random choice, where there are more.

    Raises:
        FileNotFoundError: there is nothing of a run at ``path``; says what was looked for.
        ValueError: ``path`` is another kind of file, or holds several runs.
    """
    path = Path(path)
    if path.is_file():
        if path.stat().st_size == 0:  # verl opens it when it starts, and logs its first line a step later
            raise FileNotFoundError(f"{path}: nothing is logged yet")
        if not _is_metrics_file(path):
            raise ValueError(f'{path} is no metrics file of verl, whose lines are {{"step": ..., "data": {{...}}}}')
        return Run(name, path, read_metrics([path]), read_records(path), None, [])  # no records lie below a file
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder or file")

    config, overrides = _read_hydra(sorted(path.rglob(".hydra/config.yaml"), key=_modified))
    metrics = read_metrics(metric_files(path))
    records, rejected = _read_records(path, config, max_rows)
    run = Run(name, path, metrics, records, config, overrides, rejected)
    if metrics.empty and run.records.empty and config is None:
        raise FileNotFoundError(
            f"{path} holds no run. Looked in it and all folders below for metrics of verl's file logger (*.jsonl, "
            f"trainer.logger=[console,file]), records (step-*-rank-*.parquet, {RECORDS_DIR}=DIR) and "
            ".hydra/config.yaml"
        )
    return run


def written(path: Path) -> set[tuple[Path, int, int]]:
    """What a run has written so far: every file that :func:`read_run` may read, its time of modification and size.

    It changes with every step of a run that goes on, and is empty where there is no run yet.
    """
    path = Path(path)
    configs = sorted(path.rglob(".hydra/config.yaml"), key=_modified)
    files = [path, *configs, *path.rglob("*.jsonl"), *record_files(path)]
    elsewhere = _select(_read_hydra(configs)[0], RECORDS_DIR)
    if elsewhere is not None:
        files += record_files(elsewhere)
    found = set()
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a resumed run removes records of its own
            if file.is_file():
                found.add((file, file.stat().st_mtime_ns, file.stat().st_size))
    return found


def metric_files(folder: Path) -> list[Path]:
    """The files of verl's file logger below a folder, the earliest attempt first.

    Attempts are ordered by the number that ends their names (``metrics-1.jsonl``), or by time of modification where one
    has no number. Other ``.jsonl`` files, such as dumps of responses, are passed over.

    Raises:
        ValueError: the files lie in several folders.
    """
    files = _of_one_run([file for file in folder.rglob("*.jsonl") if _is_metrics_file(file)], folder, "metrics")
    if len({re.sub(r"\W?\d+$", "", file.stem) for file in files}) > 1:
        logger.warning(
            "%s: %s are read as attempts of one run, of which the latest counts for each step; if they are different "
            "runs, name one file",
            folder,
            ", ".join(sorted(file.name for file in files)),
        )
    numbers = [int(number[0]) for file in files if (number := re.search(r"\d+$", file.stem))]
    if len(numbers) == len(files):
        return [file for _, file in sorted(zip(numbers, files, strict=True))]
    return sorted(files, key=_modified)


def read_metrics(files: Iterable[Path]) -> pd.DataFrame:
    """All metrics of a run: index ``step``, one float column per metric, NaN where a step has not logged it.

    Args:
        files: files of verl's file logger, the earliest attempt first. Where attempts logged the same step, the latest
            value counts. A last line that is cut off, as in a run that was killed or goes on, is left out.
    """
    rows: dict[int, dict[str, float]] = {}
    for file in files:
        for step, data in _metric_lines(file):
            # Metrics of one step may come in several lines: a resumed run validates the step of its checkpoint again.
            rows.setdefault(step, {}).update({k: v for k, v in data.items() if isinstance(v, int | float)})
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float).sort_index()
    frame.index = frame.index.astype(int).rename("step")
    return frame


def live_clip_rates(metrics: pd.DataFrame) -> pd.DataFrame:
    """Clip rate by length bin, over all steps, of the ``actor/fspo/length_*`` metrics, which need no records.

    Returns:
        One row per length bin with a response, columns ``low``, ``high`` (tokens, both in the bin; the last bin has no
        ``high``), ``responses``, ``clipped`` (shares of a step's rows, counting those with an advantage, summed over
        the steps) and ``rate`` = clipped / responses.
    """
    bins: dict[tuple[str, str | None], dict[str, float]] = {}
    for match in filter(None, map(LENGTH_BIN.fullmatch, metrics.columns)):
        low, high, share = match.groups()
        bins.setdefault((low, high), {"low": float(low), "high": float(high or "nan")})[share] = metrics[match[0]].sum()
    table = pd.DataFrame(list(bins.values()), columns=["low", "high", "responses", "clipped"], dtype=float)
    table = table[table.responses > 0].astype({"low": int}).sort_values("low", ignore_index=True)
    return table.assign(rate=table.clipped / table.responses)


def _is_metrics_file(file: Path) -> bool:
    with file.open("rb") as lines:
        return _entry(lines.readline()) is not None


def _entry(line: bytes) -> tuple[int, dict] | None:
    """Step and metrics of one line of verl's file logger; None for any other line, or a part of one."""
    try:
        match json.loads(line):
            case {"step": int(step), "data": dict(data)}:
                return step, data
    except ValueError:  # neither JSON nor, where a write was cut, UTF-8
        pass
    return None


def _metric_lines(file: Path) -> Iterator[tuple[int, dict]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            entry = _entry(line)
            if entry is not None:
                yield entry
            elif line.endswith(b"\n"):
                logger.warning("%s: line %d is left out, as it is no metrics of verl", file, number)


def _of_one_run(files: list[Path], folder: Path, what: str) -> list[Path]:
    parents = sorted({str(file.parent) for file in files})
    if len(parents) > 1:
        raise ValueError(f"{folder} holds {what} of several runs; name one of these folders: {', '.join(parents)}")
    return files


def _read_hydra(files: Sequence[Path]) -> tuple[dict | None, list[str]]:
    """Config and overrides out of the last of these files that can be read; None and nothing without one."""
    for file in reversed(files):
        try:
            # OmegaConf's loader, as plain YAML reads the learning rate 1e-6 as a string.
            config = OmegaConf.to_container(OmegaConf.load(file))
            beside = file.with_name("overrides.yaml")
            overrides = OmegaConf.to_container(OmegaConf.load(beside)) if beside.exists() else []
            if config and isinstance(config, dict) and isinstance(overrides, list):
                return config, overrides
            error = "it holds no config of Hydra"
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as broken:
            error = " ".join(str(broken).split())
        logger.warning("%s is left out, it cannot be read: %s", file.parent, error)
    return None, []


def _read_records(folder: Path, config: dict | None, max_rows: int | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Those of the responses that trained, and those of the rejected ones."""
    files = _of_one_run(record_files(folder), folder, "records")
    elsewhere = _select(config, RECORDS_DIR)
    records = read_records(folder if files or elsewhere is None else elsewhere, max_rows=max_rows, rejected=True)
    is_rejected = records["length"] == 0
    return records[~is_rejected], records[is_rejected]


def _select(config: dict | None, key: str):
    """A value of the config, resolved; None where it is not set, or where only the training machine can resolve it."""
    if config is None:
        return None
    return OmegaConf.select(OmegaConf.create(config), key, throw_on_resolution_failure=False)


def _modified(file: Path) -> float:
    return file.stat().st_mtime
