# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what a training run of verl left behind: metrics, per-response records, config.

Nothing here imports verl, so a run can be read on any machine. All that a run holds is text: no config is resolved
beyond its own values, and none leads out of the folder that was named.
"""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from os.path import getmtime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fspo_verl.analysis import logs
from fspo_verl.analysis.evidence import TRAINED
from fspo_verl.band import Band
from fspo_verl.keys import ACTOR, POLICY_LOSS, RECORDS_DIR
from fspo_verl.observe.attempts import attempts_below, files_below
from fspo_verl.observe.records import Records, read
from fspo_verl.observe.settings import RunSettings, clip_ratios
from fspo_verl.output import plain

logger = logging.getLogger("fspo_verl")

RECORDS = "step-*-rank-*.parquet"
_LARGEST_CONFIG = 2**18  # bytes; a composed config of verl has 35,000
_REFERENCE = re.compile(r"\$\{([\w-]+(?:\.[\w-]+)*)\}")
_REFERENCES = 32  # that lead to each other


@dataclass
class Run:
    """One training run. What it did not log is an empty table, or None."""

    name: str
    folder: Path  # that it was read from, or its one log
    log: logs.Log
    recorded: Records  # of all responses, rejected ones included
    config: dict | None = None  # as composed by Hydra, interpolations as written

    @property
    def broken(self) -> tuple[str, ...]:
        """Metrics of the training that are NaN or inf in some step, with the first of these steps."""
        steps = self.log.not_finite
        return tuple(f"{name} from step {steps[name][0]} on" for name in steps if name.startswith(TRAINED))

    @property
    def metrics(self) -> pd.DataFrame:
        """Metrics by step."""
        return self.log.metrics

    @property
    def rollouts(self) -> pd.DataFrame:
        """Records of all responses."""
        return self.recorded.table

    @cached_property
    def records(self) -> pd.DataFrame:
        """Records of the responses that trained: without those that a rollout correction took out of the loss."""
        trained = self.rollouts["length"] > 0
        return self.rollouts if trained.all() else self.rollouts[trained]

    @property
    def settings(self) -> RunSettings | None:
        """Settings of the run as the records have them, or else as the config has them; None without either."""
        return self.recorded.settings or settings_of(self.config)


def settings_of(config: Mapping | None) -> RunSettings | None:
    """Loss, band and clip range of a run as its config has them; None where it names no loss.

    A value that is not of its kind, such as a text for a number, is not known.
    """

    def number(key: str) -> float | None:
        value = setting(config, key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    policy_loss, loss = setting(config, POLICY_LOSS), setting(config, f"{POLICY_LOSS}.loss_mode")
    if not isinstance(policy_loss, Mapping) or not isinstance(loss, str):
        return None
    band = None
    if loss == "fspo":
        with contextlib.suppress(TypeError, ValueError):
            band = Band(**{name: setting(config, f"{POLICY_LOSS}.{name}") for name in Band.fields_in(policy_loss)})
    return RunSettings(
        plain(loss),
        band,
        **clip_ratios(lambda key: number(f"{ACTOR}.{key}")),
        target_clip_rate=number(f"{POLICY_LOSS}.target_clip_rate"),
        old_log_probs_from_rollout=setting(config, "algorithm.rollout_correction.bypass_mode") is True,
    )


def setting(config: Mapping | None, key: str) -> Any:
    """A value of a config; None where it is not set.

    ``${another.key}`` is the value of that key. Any other interpolation is a text: its value is that of the machine
    that trained.
    """
    value: Any = config
    parts, references = key.split("."), 0
    while True:
        if isinstance(value, str) and references < _REFERENCES and (reference := _REFERENCE.fullmatch(value)):
            value, parts, references = config, [*reference[1].split("."), *parts], references + 1
        elif not parts:
            return value
        elif isinstance(value, Mapping):
            value = value.get(parts.pop(0))
        else:
            return None


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
    names = list(map(plain, names))
    if len(names) != len(paths) or len(set(names)) < len(names):
        raise ValueError(f"{len(paths)} runs need as many different names; got {', '.join(names)}")
    rows = None if max_rows is None else max_rows // len(paths)
    return (read_run(path, name, rows) for path, name in zip(paths, names, strict=True))


def read_run(path: Path, name: str, max_rows: int | None = None) -> Run:
    """Read one run, finished or not.

    Args:
        path: a folder, searched with all folders in it, or one log of any kind in :mod:`fspo_verl.analysis.logs`.
        name: what to call the run.
        max_rows: read about this many records, a random choice, where there are more.

    Raises:
        FileNotFoundError: there is nothing of a run at ``path``; says what was looked for.
        ValueError: ``path`` is no log, or holds several runs.
    """
    path, name = Path(path), plain(name)
    if path.is_dir():
        return _read_folder(path, name, max_rows)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such folder or file")
    if path.stat().st_size == 0:  # verl opens it when it starts, and logs its first line a step later
        raise FileNotFoundError(f"{path}: nothing is logged yet")
    if (log := logs.read(path)) is None:
        raise ValueError(f"{path} holds no step of a training run. What is read: {logs.READS}")
    return Run(name, path, log, read(path))  # no records lie below a file


def _read_folder(folder: Path, name: str, max_rows: int | None) -> Run:
    below = files_below(folder)
    config = _last_config(below, ".hydra/config.yaml") or _last_config(below, "files/config.yaml")
    log = _read_logged(metric_files(folder))
    _of_one_run({attempt.run for attempt in attempts_below(folder)}, folder, "records")
    recorded = read(folder, max_rows, True)
    elsewhere = setting(config, RECORDS_DIR)
    if recorded.table.empty and isinstance(elsewhere, str) and not Path(elsewhere).is_relative_to(folder.absolute()):
        logger.warning(
            "%s: this run was to record into %s; name that folder to read its records, they are in no other",
            folder,
            elsewhere,
        )
    if log.metrics.empty:
        try:
            log = logs.read(folder) or log
        except ValueError as error:
            if recorded.table.empty:
                raise
            logger.warning("The records are read without metrics: %s", error)
    if log.metrics.empty and recorded.table.empty and config is None:
        raise FileNotFoundError(
            f"{folder} holds no run. Looked in it and all folders below for metrics of verl's file logger (*.jsonl, "
            f"trainer.logger=[console,file]), records ({RECORDS}, {RECORDS_DIR}=DIR), .hydra/config.yaml "
            f"and other logs ({', '.join(logs.PATTERNS)})"
        )
    return Run(name, folder, log, recorded, config)


def metric_files(folder: Path) -> list[Path]:
    """The files of verl's file logger below a folder, the earliest attempt first.

    Attempts are ordered by the number that ends their names (``metrics-1.jsonl``), or by time of modification where one
    has no number. Other ``.jsonl`` files, such as dumps of responses, are passed over.

    Raises:
        ValueError: the files lie in several folders.
    """
    files = [file for file in files_below(folder) if file.match("*.jsonl") and logs.is_file_logger(file)]
    _of_one_run({file.parent for file in files}, folder, "metrics")
    if len({re.sub(r"\W?\d+$", "", file.stem) for file in files}) > 1:
        logger.warning(
            "%s: %s are read as attempts of one run, of which the latest counts for each step; if they are different "
            "runs, name one file",
            folder,
            ", ".join(sorted(file.name for file in files)),
        )
    numbers = {file: int(number[0]) for file in files if (number := re.search(r"\d+$", file.stem))}
    return sorted(files, key=numbers.__getitem__ if len(numbers) == len(files) else getmtime)


def read_metrics(files: Iterable[Path]) -> pd.DataFrame:
    """Read all metrics of a run, as :class:`fspo_verl.analysis.logs.Log` has them.

    Args:
        files: of verl's file logger, the earliest attempt first: of steps that were trained again, the latest counts.
    """
    return _read_logged(files).metrics


def _read_logged(files: Iterable[Path]) -> logs.Log:
    return logs.Log.of(logs.newest(chain.from_iterable(map(logs.file_logger, files)), logs.FILE_LOGGER))


def _of_one_run(parents: set[Path], folder: Path, what: str) -> None:
    if len(parents) > 1:
        named = ", ".join(sorted(map(str, parents)))
        raise ValueError(f"{folder} holds {what} of several runs; name one of these folders: {named}")


class _Config(yaml.SafeLoader):
    """YAML 1.2's null, booleans and numbers, of which 1e-6 is one; no aliases, which let few bytes stand for many."""

    yaml_implicit_resolvers: dict = {}

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds aliases, which no config of Hydra has")
        return super().compose_node(parent, index)


for _kind, _form in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9]\d{0,99})",
    "float": r"[-+]?(?:\d{1,99}\.?\d{0,99}|\.\d{1,99})(?:[eE][-+]?\d{1,3})?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}.items():
    _Config.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_form})$"), None)


def _read_yaml(file: Path) -> Any:
    """Return the content of a config.

    Raises:
        OSError, ValueError: it cannot be read; the latter in one line.
    """
    with file.open("rb") as opened:
        content = opened.read(_LARGEST_CONFIG + 1)
    if len(content) > _LARGEST_CONFIG:
        raise ValueError(f"it is larger than {_LARGEST_CONFIG:,} bytes, and no config of verl is")
    try:
        return yaml.load(content, _Config)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _last_config(below: Iterable[Path], pattern: str) -> dict | None:
    """The newest config of this pattern that can be read, of Hydra or as W&B keeps it; None without one."""
    for file in reversed(sorted((file for file in below if file.match(pattern)), key=getmtime)):
        try:
            config = _read_yaml(file)
            if file.parent.name == "files" and isinstance(config, dict):
                entries = {key: entry for key, entry in config.items() if isinstance(entry, dict)}
                config = {key: entry["value"] for key, entry in entries.items() if "value" in entry}
            if config and isinstance(config, dict):
                return config
            raise ValueError("it holds no config of a run")
        except (OSError, ValueError) as error:
            logger.warning("%s is left out, it cannot be read: %s", file.parent, error)
    return None
