# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The overrides that the environment adds to every policy training: FSPO_VERL_OVERRIDES.

  FSPO_VERL_OVERRIDES="algorithm.policy_loss=fspo actor_rollout_ref.actor.policy_loss.eps=0.02" bash my_script.sh

Hydra hands the overrides of a launch to :mod:`fspo_verl.verl_patches` before it composes the config. Those of the
launch that are in the way of the loss are left out. The loss is added, and a folder for records beside the checkpoints.
The checks of a launch judge the composed config, and it alone goes on to Ray.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hydra import version
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS, RECORDS_DIR, SELECTS
from fspo_verl.launch.hydra_files import OPTIONS, as_value, leaves, option, override
from fspo_verl.launch.hydra_files import parsed as parsed_overrides
from fspo_verl.launch.view import Launch

RECEIPT = "FSPO_VERL_RECEIPT"
"""The environment variable with the file in which ``fspo-verl run`` is told of each launch that takes the loss."""
_CLIP_RATIOS = {f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
_OF_ANY_LOSS = {*_CLIP_RATIOS, f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"}
_NAMES = re.compile(r"hydra\.|trainer\.(experiment_name|project_name|default_local_dir|\w+_data_dir)$")
_RECORDS = "fspo_records"  # beside the checkpoints
_taken: dict[str, Any] = {}  # what the launch that was composed last has taken


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """The option of the group, and the other overrides by key, that a value of the variable holds.

    Raises:
        ValueError: it is no list of overrides, names no loss or several, or sets what may not be asked for.
    """
    try:
        words = parsed_overrides(shlex.split(text))
        if without := [one.input_line for one in words if one.is_delete() or one.is_sweep_override()]:
            raise ValueError(f"{without[0]} gives no value")
    except (HydraException, ValueError) as error:
        raise ValueError(f"{OVERRIDES}={text!r} is no list of KEY=VALUE: {str(error).splitlines()[0]}") from None
    losses = [one.value() for one in words if one.key_or_group == GROUP]
    if len(losses) != 1 or losses[0] not in OPTIONS:
        named = " and ".join(map(str, losses)) or "none"
        raise ValueError(f"{OVERRIDES} names one loss, {GROUP}={'|'.join(OPTIONS)}; this one names {named}")
    others = {one.key_or_group: one.input_line.lstrip("+") for one in words if one.key_or_group != GROUP}
    fields = {key for key in option(losses[0]) if key.startswith(f"{POLICY_LOSS}.") and key != SELECTS[0]}
    if unknown := others.keys() - fields - _OF_ANY_LOSS:
        what = f"{OVERRIDES} cannot set {', '.join(sorted(unknown))} beside {GROUP}={losses[0]}"
        allowed = ", ".join(sorted(key.removeprefix(f"{ACTOR}.") for key in fields | _OF_ANY_LOSS))
        raise ValueError(f"{what}; of {ACTOR} it can set {allowed}")
    return losses[0], others


def composed(compose: Callable[[list[str]], DictConfig], overrides: list[str]) -> DictConfig:
    """The config of a launch, with what the environment asks for if it trains a policy; one line on stderr says so.

    ``compose`` is Hydra's composition of a list of overrides.

    Raises:
        ConfigCompositionException: the variable has a bad value, or the launch would train another loss.
    """
    plain = compose(overrides)
    if not (os.environ.get(OVERRIDES) and _trains_a_policy(plain)):
        return plain
    try:
        loss, asked = parsed(os.environ[OVERRIDES])
    except ValueError as error:
        raise ConfigCompositionException(str(error)) from None  # which Hydra prints without a traceback
    if _has(plain, loss):
        kept, added = overrides, [*asked.values()]
        config = compose([*kept, *added])
    else:
        kept = [text for text in overrides if not _is_in_the_way(text, loss)]
        config, added = _with_the_loss(compose, plain, kept, loss, asked)
    left_out = [text for text in overrides if text not in kept]
    if records := _records(config, {*asked, *map(_key, kept)}):
        added.append(records)
        OmegaConf.update(config, RECORDS_DIR, _parse(records).value())
        config.hydra.overrides.task.append(records)
    # A folder that is named by the overrides keeps its name, as a path in it would be other folders.
    config.hydra.job.override_dirname = plain.hydra.job.override_dirname
    line = f"added {shlex.join(added) or 'nothing'}{f'; left out {shlex.join(left_out)}' if left_out else ''}"
    if config.hydra.mode == RunMode.MULTIRUN:  # each job is composed once more before any of them starts
        _taken["line"] = line
    else:
        _say(line)
    job, same = config.hydra.job, [text for text in kept if not _NAMES.match(_key(text))]
    _taken.update(added=added, left_out=left_out, rest=[job.name, job.config_name, *same])
    return config


def _has(plain: DictConfig, loss: str) -> bool:
    """Whether a launch trains an option by itself; options such as no_clip have the class and the loss of others."""
    return _trains(plain, loss) and (loss == "observed" or plain.hydra.runtime.choices.get(GROUP) == loss)


def _is_in_the_way(text: str, loss: str) -> bool:
    """Whether an override of the launch is about its own loss, and would change another one or do nothing."""
    key = _key(text)
    if loss == "observed":
        return False
    if key in (GROUP, POLICY_LOSS) or key in _CLIP_RATIOS:
        return True
    if key.startswith(f"{POLICY_LOSS}."):
        return key in SELECTS or key not in option("observed")  # what is measured stays
    return key in option(loss)


def _with_the_loss(
    compose: Callable[[list[str]], DictConfig], plain: DictConfig, kept: list[str], loss: str, asked: dict[str, str]
) -> tuple[DictConfig, list[str]]:
    """The config with the option selected, and the overrides that this takes.

    A file of the launch may come after the option. What it sets otherwise is set back by overrides.
    """
    hydra, wanted, added = plain.hydra, option(loss), [*asked.values()]
    # In its own defaults list a config has the group already, and Hydra then takes no plus.
    is_in_a_file = GROUP in hydra.runtime.choices and GROUP not in map(_key, hydra.overrides.task)
    select = f"{'' if is_in_a_file else '+'}{GROUP}={loss}"
    config = compose([*kept, select, *added])
    final = leaves(config)
    if missing := wanted.keys() - final.keys():
        why = f"{min(missing)} is not in the config, as if another file of that name came before the packaged one"
        raise ConfigCompositionException(_other_loss(loss, why))
    given = {*asked, *map(_key, kept)}
    back = [f"{key}={as_value(value)}" for key, value in wanted.items() if key not in given and final[key] != value]
    if back:
        config = compose([*kept, select, *added, *back])
    return config, [f"{GROUP}={loss}", *added, *back]


def check(config: DictConfig) -> None:
    """Refuse a launch that would not train what the environment asks for, however its config was made.

    Raises:
        ValueError: it trains another loss or with other values; or the variable has a bad value.
    """
    if not _trains_a_policy(config):
        return
    if "line" in _taken:
        _say(_taken.pop("line"))
    loss, asked = parsed(os.environ[OVERRIDES])
    wanted = {key: _parse(text).value() for key, text in asked.items()}
    other = [key for key, value in wanted.items() if "${" not in str(value) and OmegaConf.select(config, key) != value]
    if not _trains(config, loss) or other:
        raise ValueError(_other_loss(loss, "its main makes the config itself, or changes it"))


def confirm(config: DictConfig) -> None:
    """Tell ``fspo-verl run`` of a launch; say if it differs from an earlier one only in what was left out."""
    receipt = os.environ.get(RECEIPT)
    if not receipt or not _trains_a_policy(config):
        return
    launch = {"loss": parsed(os.environ[OVERRIDES])[0], "records": OmegaConf.select(config, RECORDS_DIR), **_taken}
    with contextlib.suppress(OSError):  # the command has ended, or runs elsewhere
        earlier = [json.loads(line) for line in Path(receipt).read_text().splitlines()]
        with open(receipt, "a") as file:
            file.write(json.dumps(launch) + "\n")
        for number, other in enumerate(earlier, 1):
            if other.get("rest") == launch.get("rest") and other.get("left_out") != launch.get("left_out"):
                _say(f"this is the same training as launch {number}: what they differ in was left out")


def _say(text: str) -> None:
    # Hydra has not set up logging yet, and whoever has forgotten the variable has to see it.
    print(f"fspo_verl: {OVERRIDES}: {text}", file=sys.stderr, flush=True)


def _parse(text: str):
    """An override as Hydra reads it."""
    return parsed_overrides([text])[0]


def _key(text: str) -> str:
    return _parse(text).key_or_group


def _trains_a_policy(config: DictConfig) -> bool:
    """Whether a config is that of a policy training; verl's generation takes the same one."""
    generates = str(OmegaConf.select(config, "hydra.job.name")).startswith("main_generation")
    return Launch(config).has_actor and not OmegaConf.select(config, "trainer.val_only") and not generates


def _trains(config: DictConfig, loss: str) -> bool:
    """Whether a config has the class and the loss of an option; each loss of this package is observed."""
    if loss == "observed":
        return Launch(config).is_ours
    return all(OmegaConf.select(config, key) == option(loss)[key] for key in SELECTS)


def _other_loss(loss: str, why: str) -> str:
    what = f"{OVERRIDES} asks for {GROUP}={loss}, and this launch would not train it as asked: {why}"
    return f"{what}; select it there (docs/install.md), or start this launch with `env -u {OVERRIDES}`"


def _records(config: DictConfig, given: Collection[str]) -> str | None:
    """The override for the folder of the records: one of this launch alone, or of the run that it resumes.

    None where a folder is ``given`` or set, or where there are no checkpoints to lie beside.
    """
    if Launch(config).checkpoints is None or RECORDS_DIR in given or OmegaConf.select(config, RECORDS_DIR) is not None:
        return None
    chdir, base = config.hydra.job.chdir, Path.cwd()
    if chdir is None:
        chdir = not version.base_at_least("1.2")
    if chdir and config.hydra.mode != RunMode.MULTIRUN:  # the folder of a job of several is not known yet
        base /= config.hydra.run.dir
    checkpoints = base / config.trainer.default_local_dir
    trainer = {key: config.trainer.get(key) for key in ("resume_mode", "resume_from_path")}
    launch = Launch(OmegaConf.create({"trainer": trainer | {"default_local_dir": str(checkpoints)}}))
    own = None
    if (resumed := launch.resume_point) and resumed[0].resolve() == checkpoints.resolve():  # no branch of another run
        from fspo_verl.observe import attempts

        # The last recorded step is the checkpoint's, or fewer than records_freq steps before it.
        freq = OmegaConf.select(config, f"{POLICY_LOSS}.records_freq")
        recorded = resumed[1] - (freq if isinstance(freq, int) else 1) + 1
        own = attempts.of_the_run(checkpoints / _RECORDS, checkpoints, recorded)
    start = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    folder = str(own or checkpoints / _RECORDS / start)
    is_plain = re.fullmatch(r"[\w./+:@%-]+", folder, re.ASCII)
    return f"{RECORDS_DIR}={folder}" if is_plain else override(RECORDS_DIR, folder)
