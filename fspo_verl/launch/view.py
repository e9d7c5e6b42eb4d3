# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A launch as the checks read it: what it selects, what follows from its config, and the files it was composed from.

Every launch of verl passes here, also those that have nothing to do with this package: verl and Hydra are imported only
where they are asked.
"""

import dataclasses
import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

SEVERITIES = ("error", "warning", "note")
GROUP = "algorithm.policy_loss"
ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
OWN_CONFIGS = "pkg://fspo_verl.configs"
_PACKAGED = Path(__file__).parents[1] / "configs" / GROUP
OPTIONS = tuple(sorted(file.stem for file in _PACKAGED.glob("*.yaml")))
KEPT_LOSSES = "policy_loss.json"
"""In a folder of checkpoints, the losses that trained them: a list, a new entry for every change,
``{"after_step": n, "loss": {key: value}}``. verl's checkpoints hold no config."""
TRACKER = "latest_checkpointed_iteration.txt"
"""In a folder of checkpoints, the step of the last one; what verl's find_latest_ckpt_path looks for."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to know about a launch."""

    severity: str
    """``error`` (fails, or trains something else than it says), ``warning`` (works against the method) or ``note``."""

    check: str
    """Name of the check, for programs."""

    what: str
    why: str = ""
    fix: str = ""
    """What mends it: the override itself where there is one."""

    def __str__(self) -> str:
        return "; ".join(filter(None, (": ".join(filter(None, (self.what, self.why))), self.fix)))


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the checks read: a composed config, and what follows from it."""

    config: DictConfig

    def get(self, key: str):
        """The value of a dotted key of the config; None if it is not there."""
        return OmegaConf.select(self.config, key) if OmegaConf.is_config(self.config) else None

    @property
    def has_actor(self) -> bool:
        """Whether this is a launch of policy training; all that reads :attr:`actor` needs one."""
        return self.get(ACTOR) is not None

    @property
    def actor(self) -> DictConfig:
        """``actor_rollout_ref.actor``."""
        return self.get(ACTOR)

    @property
    def choice(self) -> str | None:
        """The option of this package's config group that the running Hydra application selects."""
        hydra = sys.modules.get("hydra.core.hydra_config")
        if hydra is None or not hydra.HydraConfig.initialized():
            return None
        return hydra.HydraConfig.get().runtime.choices.get(GROUP)

    @property
    def packaged_loss_mode(self) -> str | None:
        """The ``loss_mode`` that the chosen option sets; None without one, and for ``observed``, which takes any."""
        option = self.choice if self.choice in OPTIONS else None
        while option:
            content = OmegaConf.load(_PACKAGED / f"{option}.yaml")
            if mode := OmegaConf.select(content, f"{POLICY_LOSS}.loss_mode"):
                return mode
            option = next(iter(OmegaConf.select(content, "defaults", default=[])), None)  # what it builds on
        return None

    @property
    def has_our_schema(self) -> bool:
        """Whether the policy loss is configured by a class of this package."""
        section = self.get(POLICY_LOSS)
        return OmegaConf.is_dict(section) and str(section.get("_target_")).startswith("fspo_verl.")

    @property
    def is_ours(self) -> bool:
        """Whether a loss of this package trains, or one that it observes."""
        section = self.get(POLICY_LOSS)
        named = OmegaConf.is_dict(section) and section.get("loss_mode") in ("fspo", "observed")
        return named or self.has_our_schema

    @property
    def selects_ours(self) -> bool:
        """Whether the launch asks for a loss of this package; nothing else is said of any other launch."""
        return self.has_actor and (self.is_ours or self.choice is not None)

    def lost_selections(self) -> Iterator[Finding]:
        """Keys that look as if they were to select a loss of this package, where nothing reads them.

        Such a key stands at the top, or below ``algorithm`` or ``actor_rollout_ref``. It is an error where it can mean
        nothing else: its value is ``fspo`` and its name close to ``policy_loss`` or ``loss_mode``, or it is the key of
        the group and its value nearly an option. Other options, such as ``gspo``, are everybody's names: of the keys
        that misspell the group and have one of those the first is a warning. Any other key is the user's.
        """
        if not self.has_actor:
            return
        found = [*filter(None, (self._lost_selection(*leaf) for leaf in leaves(self.config).items()))]
        yield from (finding for finding in found if finding.severity == "error")
        yield from [finding for finding in found if finding.severity == "warning"][:1]
        yield from self._unregistered_loss()
        yield from self._loss_as_advantages()

    def _lost_selection(self, key: str, value) -> Finding | None:
        """What there is to say of one key of the config."""
        sections = re.split("[./@]", key)
        names = sections[1:] if sections[0] in ("algorithm", "actor_rollout_ref") else sections[:1]
        if key.startswith(f"{POLICY_LOSS}.") or not isinstance(value, str):
            return None
        group = max(_likeness(name, "policy_loss") for name in names or [""])
        mode = max(_likeness(name, "loss_mode") for name in names or [""])
        option = next((option for option in ("fspo", *OPTIONS) if _is_close(value, option)), None)
        if option == "fspo" and max(group, mode) > _CLOSE:
            severity = "error"
        elif option is not None and key == GROUP and value != option:
            severity = "error"
        elif option is not None and group > _MISSPELT:
            severity = "warning"
        else:
            return None
        why = f"verl reads no such key and would train loss_mode={self.get(f'{POLICY_LOSS}.loss_mode')!r}"
        fix = (
            f"if it was to select the config group: {GROUP}={option} on the command line, or in your YAML "
            f"`defaults: [ppo_trainer, {GROUP}: {option}, _self_]`"
        )
        return Finding(severity, "lost_selection", f"{key}={value!r} selects nothing", why, fix)

    def _loss_as_advantages(self) -> Iterator[Finding]:
        """A loss named as the advantage estimator, unless a plugin has registered an estimator of that name."""
        estimator = self.get("algorithm.adv_estimator")
        if estimator != "fspo" and not (self.selects_ours and estimator in OPTIONS):
            return
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

        if estimator not in ADV_ESTIMATOR_REGISTRY:
            what = f"algorithm.adv_estimator={estimator} names a policy loss"
            fix = "algorithm.adv_estimator=grpo" + ("" if self.selects_ours else f" {GROUP}={estimator}")
            yield Finding("error", "loss_as_advantages", what, "the run fails after its first rollout", fix)

    def _unregistered_loss(self) -> Iterator[Finding]:
        """A loss to observe, or one of nearly the name fspo, that no plugin has registered in this process."""
        mode = self.get(f"{POLICY_LOSS}.loss_mode")
        if not isinstance(mode, str) or not (self.is_ours or _is_close(mode, "fspo")):
            return
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        if mode not in POLICY_LOSS_REGISTRY:
            what = f"{POLICY_LOSS}.loss_mode={mode!r} is not registered here"
            why = "unless a worker registers it, the run fails at its first actor update, after a whole rollout"
            known = ", ".join(sorted(POLICY_LOSS_REGISTRY))
            fix = f"{GROUP}=fspo if it was to be FSPO, or one of {known}"
            yield Finding("warning", "unregistered_loss", what, why, fix)

    @cached_property
    def parts(self) -> "list[Part]":
        """The files that the config was composed from, in their order."""
        return parts()

    @property
    def policy_loss(self) -> DictConfig:
        return self.actor.policy_loss

    @property
    def loss_mode(self) -> str:
        return self.policy_loss.get("loss_mode", "vanilla")

    @property
    def is_fspo(self) -> bool:
        return self.loss_mode == "fspo"

    @property
    def max_response_length(self) -> int | None:
        """What the rollout engine generates up to; ``data.max_response_length`` is only its default."""
        return self.get("actor_rollout_ref.rollout.response_length") or self.get("data.max_response_length")

    @cached_property
    def band(self):
        """The :class:`fspo_verl.adaptive.AdaptiveBand` of an fspo launch.

        Raises:
            ValueError: a field has a bad value.
        """
        from fspo_verl.config import FSPOPolicyLossConfig

        follows = {name: self.policy_loss.get(name) for name in ("target_clip_rate", "eps_max")}
        return FSPOPolicyLossConfig(**FSPOPolicyLossConfig.fields_in(self.policy_loss), **follows)

    @property
    def rounds_per_sync(self) -> int | None:
        """Rounds of old log-probs and update between two weight syncs of an asynchronous trainer; None in others."""
        if (fully_async := self.get("async_training")) is not None:
            return fully_async.trigger_parameter_sync_step
        separate = self.get("trainer.use_v1") and self.config.trainer.v1.trainer_mode == "separate_async"
        return self.config.trainer.v1.separate_async.parameter_sync_step if separate else None

    @property
    def prompts_per_rollout(self) -> int | None:
        """Prompts between two refreshes of the policy that responses are compared with; None if unknown."""
        if (fully_async := self.get("async_training")) is not None:
            return self.rounds_per_sync * fully_async.require_batches * self.actor.ppo_mini_batch_size
        return self.get("data.train_batch_size")

    @property
    def optimizer_steps_per_rollout(self) -> int | None:
        """Optimiser steps between two refreshes of the policy that responses are compared with; None if unknown.

        verl fills the last mini-batch with padding.
        """
        prompts = self.prompts_per_rollout
        return prompts and -(-prompts // self.actor.ppo_mini_batch_size) * self.actor.ppo_epochs

    @property
    def bypasses(self) -> bool:
        """Whether the rollout engine's log-probs are taken as those of the old policy."""
        return bool(self.get("algorithm.rollout_correction.bypass_mode"))

    @property
    def tracked_step(self) -> int | None:
        """The step of the checkpoint that the tracker names, be it there or not; None if there is none to follow."""
        trainer = self.config.trainer
        tracker = Path(trainer.default_local_dir) / TRACKER
        text = tracker.read_text().strip() if trainer.resume_mode == "auto" and tracker.exists() else ""
        return int(text) if text.isdigit() else None  # verl itself fails on a tracker that holds something else

    @property
    def resume_point(self) -> tuple[Path, int] | None:
        """Folder of the checkpoints, and training step, from which a launch goes on; None if it starts anew.

        verl starts anew where the checkpoint that the tracker names is gone.
        """
        trainer = self.config.trainer
        if (step := self.tracked_step) is not None:
            folder = Path(trainer.default_local_dir)
            return (folder, step) if (folder / f"global_step_{step}").exists() else None
        if trainer.resume_mode == "resume_path":
            checkpoint = Path(str(trainer.resume_from_path))
            name = re.fullmatch(r"global_step_(\d+)", checkpoint.name)
            return checkpoint.parent, int(name[1]) if name else 0
        return None

    @property
    def resumes_ours(self) -> bool:
        """Whether a loss of this package has trained the run that this launch goes on with."""
        resumed = self.resume_point
        return resumed is not None and (resumed[0] / KEPT_LOSSES).exists()


def leaves(content, prefix: str = "") -> dict[str, object]:
    """Dotted key to value of every leaf of a config, interpolations as written; a list or empty mapping is a leaf."""
    if OmegaConf.is_config(content):
        content = OmegaConf.to_container(content, resolve=False)
    found: dict[str, object] = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        found |= leaves(value, path) if isinstance(value, dict) and value else {path: value}
    return found


_CLOSE, _MISSPELT = 0.8, 0.9  # likenesses above which a name is close to another one, or a misspelling of it


def _is_close(text: str, word: str) -> bool:
    return _likeness(text, word) > _CLOSE


def _likeness(text: str, word: str) -> float:
    """1 for a word, and for the word with its letters mixed up; less for other letters, more or fewer."""
    text = text.lower().replace("-", "_")
    return 1.0 if sorted(text) == sorted(word) else difflib.SequenceMatcher(None, text, word).ratio()


# --- the files of the config -----------------------------------------------------------------------------------------
# Hydra tells a running application its sources, the overrides and the choices of groups. The defaults list, in which a
# later file wins, is computed from these once more with internals of Hydra (1.3): there is no public way.


class Part(NamedTuple):
    """One config file that went into the composed config."""

    name: str  # as in the defaults list, such as actor/dp_actor
    source: str  # the entry of Hydra's search path that holds it, such as pkg://verl.trainer.config
    content: DictConfig  # under the package it was composed into, interpolations as written

    @property
    def file(self) -> str:
        return f"{self.source.removeprefix('file://')}/{self.name}.yaml"


def is_of_user(source: str) -> bool:
    """Whether neither verl nor this package nor Hydra ships what an entry of Hydra's search path holds."""
    if source.startswith("pkg://"):
        return source.removeprefix("pkg://").split(".")[0] not in ("verl", "fspo_verl", "hydra")
    # A main that is started as a file, and the asynchronous ones, name verl's own folders by path.
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        return True
    return not Path(source.removeprefix("file://")).is_relative_to(Path(verl.origin).parent)


def has_files_of_the_user() -> bool:
    """Whether the search path of the running Hydra application has an entry of a user's."""
    return any(is_of_user(source) for source in _sources() if not source.startswith("structured://"))


def _sources() -> list[str]:
    """The search path of the running Hydra application, first entry first; empty outside of one."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return []
    return [f"{source.schema}://{source.path}" for source in HydraConfig.get().runtime.config_sources]


def parts() -> list[Part]:
    """The files of the running Hydra application in the order in which they were merged."""
    from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

    hydra = HydraConfig.get()
    search_path = ConfigSearchPathImpl()
    for source in hydra.runtime.config_sources:
        search_path.append(source.provider, f"{source.schema}://{source.path}")
    # Cached, as each file is needed twice: for its defaults and for its content.
    repository = CachingConfigRepository(ConfigRepository(search_path))
    overrides = OverridesParser.create().parse_overrides([*hydra.overrides.hydra, *hydra.overrides.task])
    name = hydra.job.config_name
    defaults = create_defaults_list(repository, name, overrides, prepend_hydra=True, skip_missing=False).defaults
    found = []
    for default in defaults:
        loaded = repository.load_config(default.config_path)
        if loaded is None or loaded.provider == "hydra":
            continue
        package = loaded.header["package"] if default.package is None else default.package
        content = OmegaConf.create() if package else loaded.config
        if package:
            OmegaConf.update(content, package, loaded.config)
        found.append(Part(default.config_path, loaded.path, content))
    return found


def passed_over() -> list[Path]:
    """Files of a user's that Hydra does not read, as this package ships one of the same name and comes first."""
    sources, own = _sources(), _folder(OWN_CONFIGS)
    if OWN_CONFIGS not in sources or own is None:
        return []
    names = [file.relative_to(own) for file in own.rglob("*.yaml")]
    later = filter(None, map(_folder, sources[sources.index(OWN_CONFIGS) + 1 :]))
    return [folder / name for folder in later for name in names if (folder / name).exists()]


def _folder(source: str) -> Path | None:
    """The folder of an entry of Hydra's search path; None for one that is no folder."""
    scheme, path = source.split("://", 1)
    if scheme == "pkg":
        spec = importlib.util.find_spec(path)
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    return Path(path) if scheme == "file" else None
