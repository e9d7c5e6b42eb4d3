# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The overrides that the environment adds to every policy training: FSPO_VERL_OVERRIDES.

  FSPO_VERL_OVERRIDES="algorithm.policy_loss=fspo actor_rollout_ref.actor.policy_loss.eps=0.02" bash my_script.sh

:mod:`fspo_verl.launch.composition` asks for them where Hydra composes the config of a launch. Overrides of the launch
that are in the way of the loss are left out. The loss is added, and a folder for records beside the checkpoints. The
checks of a launch judge the composed config, and it alone goes on to Ray.
"""

import difflib
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import version
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fspo_verl.findings import Finding
from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS, RECORDS_DIR, SELECTS
from fspo_verl.launch.hydra_files import OPTIONS, as_value, leaves, option, override, parsed
from fspo_verl.launch.starts import TAKEN, Start, Taken
from fspo_verl.launch.view import Launch, error
from fspo_verl.output import see

_CLIP_RATIOS = {f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
_OF_ANY_LOSS = {*_CLIP_RATIOS, f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"}
_NAMES = re.compile(r"hydra\.|trainer\.(experiment_name|project_name|default_local_dir|\w+_data_dir)$")
_RECORDS = "fspo_records"  # beside the checkpoints


class Refused(ConfigCompositionException):
    """A launch is refused while its config is composed; Hydra prints the finding without a traceback."""

    def __init__(self, finding: Finding):
        super().__init__(finding.in_one_line)
        self.finding = finding


@dataclass(frozen=True)
class Request:
    """The request of the environment to every policy training."""

    loss: str
    """An option of the group."""

    others: Mapping[str, str]
    """The other overrides, by key."""

    @staticmethod
    def parse(text: str) -> "Request":
        """The request in a value of the variable.

        Raises:
            ValueError: it is no list of overrides, names no loss or several, or sets what may not be asked for.
        """
        try:
            words = parsed(shlex.split(text))
            if without := [one.input_line for one in words if one.is_delete() or one.is_sweep_override()]:
                raise ValueError(f"{without[0]} gives no value")
        except (HydraException, ValueError) as problem:
            line = str(problem).splitlines()[0]
            raise ValueError(f"{OVERRIDES}={text!r} is no list of KEY=VALUE: {line}") from None
        losses = [one.value() for one in words if one.key_or_group == GROUP]
        if len(losses) != 1 or losses[0] not in OPTIONS:
            named = " and ".join(map(str, losses)) or "none"
            raise ValueError(f"{OVERRIDES} names one loss, {GROUP}={'|'.join(OPTIONS)}; this one names {named}")
        others = {one.key_or_group: one.input_line.lstrip("+") for one in words if one.key_or_group != GROUP}
        _require_known(losses[0], others)
        return Request(losses[0], others)

    @staticmethod
    def of_environment() -> "Request":
        """The request in the variable; raises as :meth:`parse`."""
        return Request.parse(os.environ[OVERRIDES])


def _require_known(loss: str, keys: Collection[str]) -> None:
    """Refuse keys that may not be asked for beside a loss, and name the one that was meant."""
    allowed = {key for key in option(loss) if key.startswith(f"{POLICY_LOSS}.") and key != SELECTS[0]} | _OF_ANY_LOSS
    names = {key.rpartition(".")[2]: key for key in sorted(allowed)}
    for key in sorted({*keys} - allowed):
        near = difflib.get_close_matches(key.rpartition(".")[2], names, 1)
        meant = f"did you mean {names[near[0]]}?" if near else f"what can be set is {', '.join(names)}"
        raise ValueError(f"{OVERRIDES} cannot set {key} beside {GROUP}={loss}: {meant}")


def composed(compose: Callable[[list[str]], DictConfig], overrides: list[str]) -> tuple[DictConfig, Taken | None]:
    """The config of a launch with what the environment asks for, and what it takes of that; None if it trains nothing.

    ``compose`` is Hydra's composition of a list of overrides.

    Raises:
        Refused: the variable has a bad value, or the launch would train another loss.
    """
    plain = compose(overrides)
    if not _trains_a_policy(plain):
        return plain, None
    try:
        request = Request.of_environment()
    except ValueError as bad:
        raise Refused(error(str(bad), id="asked")) from None
    kept, added = overrides, [*request.others.values()]
    if selects := not _has(plain, request.loss):
        kept = [text for text in overrides if not _is_in_the_way(text, request.loss)]
        added = [f"+{GROUP}={request.loss}", *added]
    config = compose([*kept, *added])
    own = [text for text in kept if request.loss == "observed" and _key(text) in (SELECTS[0], POLICY_LOSS)]
    why = f"its own {own[-1]} keeps the loss from being observed" if own else "files of yours set another one"
    if (wrong := problem(config, why, own[-1:])) is not None:
        raise Refused(wrong)
    if selects and (back := _set_otherwise(config, request, kept)):
        added += back
        config = compose([*kept, *added])
    if records := _records(config, {*request.others, *map(_key, kept)}):
        added.append(records)
        OmegaConf.update(config, RECORDS_DIR, _parse(records).value())
        config.hydra.overrides.task.append(records)
    # It is pasted without a plus, which verl without this package refuses. Beside a key of the user's with the name
    # of the group it would be a value.
    if OmegaConf.select(plain, GROUP) is None:
        added = [text.removeprefix("+") for text in added]
    # A folder that is named by the overrides keeps its name, as a path in it would be other folders.
    config.hydra.job.override_dirname = plain.hydra.job.override_dirname
    job, same = config.hydra.job, [text for text in kept if not _NAMES.match(_key(text))]
    left_out = (text for text in overrides if text not in kept)
    rest = (job.name, job.config_name, *same)
    return config, Taken(loss=request.loss, added=(*added,), left_out=(*left_out,), rest=rest)


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


def _set_otherwise(config: DictConfig, request: Request, kept: Sequence[str]) -> list[str]:
    """The overrides that set back what a file, or an override of a whole section, sets otherwise than the option."""
    final, given = leaves(config), {*request.others, *map(_key, kept)}
    wanted = {key: value for key, value in option(request.loss).items() if key in final and key not in given}
    return [f"{key}={as_value(value)}" for key, value in wanted.items() if final[key] != value]


def problem(
    config: DictConfig, why: str = "its main makes the config itself, or changes it", remove: Sequence[str] = ()
) -> Finding | None:
    """Why a launch would not train what the environment asks for, however its config was made; None if it would.

    Args:
        why: the reason, and ``remove`` the overrides that it lies in, if it would not.
    """
    if not _trains_a_policy(config):
        return None
    try:
        request = Request.of_environment()
    except ValueError as bad:
        return error(str(bad), id="asked")
    wanted = {key: _parse(text).value() for key, text in request.others.items()}
    other = [key for key, value in wanted.items() if "${" not in str(value) and not _has_value(config, key, value)]
    if _trains(config, request.loss) and not other:
        return None
    selection = f"{GROUP}={request.loss}"
    there = f"select it there by {selection}{see('install.md')}, or start it with `env -u {OVERRIDES}`"
    what = f"{OVERRIDES} asks for {selection}, and this launch would not train it as asked"
    return error(what, why, f"{', or ' if remove else ''}{there}", id="asked", remove=remove)


def _has_value(config: DictConfig, key: str, value) -> bool:
    """Return whether a config has a value; records lie in a folder below the one that is asked for."""
    set_to = OmegaConf.select(config, key)
    if key == RECORDS_DIR and isinstance(set_to, str) and isinstance(value, str):
        return Path(set_to).is_relative_to(value)
    return set_to == value


def confirm(config: DictConfig, start: Start | None = None) -> None:
    """Tell of a launch that trains what is asked for."""
    if _trains_a_policy(config):
        start = start or Start()
        start.tell(TAKEN)
        start.note(TAKEN, config)


def _parse(text: str):
    """An override as Hydra reads it."""
    return parsed([text])[0]


def _key(text: str) -> str:
    return _parse(text).key_or_group


def _trains_a_policy(config: DictConfig) -> bool:
    """Whether a config is that of a policy training; verl's generation takes the same one."""
    generates = str(OmegaConf.select(config, "hydra.job.name")).startswith("main_generation")
    return Launch(config).trains_a_policy and not generates


def _trains(config: DictConfig, loss: str) -> bool:
    """Whether a config has the class and the loss of an option; each loss of this package is observed."""
    if loss == "observed":
        return Launch(config).is_ours
    return all(OmegaConf.select(config, key) == option(loss)[key] for key in SELECTS)


def _records(config: DictConfig, given: Collection[str]) -> str | None:
    """The override for a folder of records beside the checkpoints; each launch gets one of its own in it.

    It follows the checkpoints where a main moves them. None where a folder is ``given`` or set, or where there are no
    checkpoints to lie beside.
    """
    checkpoints = Launch(config).checkpoints
    if checkpoints is None or RECORDS_DIR in given or OmegaConf.select(config, RECORDS_DIR) is not None:
        return None
    folder = f"${{trainer.default_local_dir}}/{_RECORDS}"
    if not checkpoints.is_absolute():
        chdir, base = config.hydra.job.chdir, Path.cwd()
        if chdir is None:
            chdir = not version.base_at_least("1.2")
        if chdir and config.hydra.mode != RunMode.MULTIRUN:  # the folder of a job of several is not known yet
            base /= config.hydra.run.dir
        folder = f"{base}/{folder}"
    is_plain = re.fullmatch(r"[\w./+:@%${}-]+", folder, re.ASCII)
    return f"{RECORDS_DIR}={folder}" if is_plain else override(RECORDS_DIR, folder)
