# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A launch as the checks read it: what it selects, and what follows from its config. Imports neither verl nor Hydra.

Every launch of verl passes here, also those that have nothing to do with this package.
"""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

SEVERITIES = ("error", "warning", "note")
GROUP = "algorithm.policy_loss"
ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
_PACKAGED = Path(__file__).parents[1] / "configs" / GROUP
OPTIONS = tuple(sorted(file.stem for file in _PACKAGED.glob("*.yaml")))


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


def by_severity(found: list[Finding]) -> list[Finding]:
    """The findings, errors first, then warnings, then notes."""
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


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
    def is_ours(self) -> bool:
        """Whether a loss of this package trains, or one that it observes."""
        section = self.get(POLICY_LOSS)
        if not OmegaConf.is_dict(section):
            return False
        return section.get("loss_mode") in ("fspo", "observed") or _is_schema(section.get("_target_"))

    @property
    def selects_ours(self) -> bool:
        """Whether the launch asks for a loss of this package; nothing else is said of any other launch."""
        return self.has_actor and (self.is_ours or self.choice is not None)

    def lost_selections(self) -> Iterator[Finding]:
        """Keys that plainly were to select a loss of this package, in a place where nothing reads them.

        Such a key stands at the top, or below ``algorithm`` or ``actor_rollout_ref``. It is close to ``policy_loss``
        (or to ``loss_mode``), and its value is, or nearly is, an option of the group (or ``fspo``). Any other key is
        the user's.
        """
        if not self.has_actor:
            return
        for key, value in leaves(self.config).items():
            sections = re.split("[./@]", key)
            names = sections[1:] if sections[0] in ("algorithm", "actor_rollout_ref") else sections[:1]
            if key.startswith(f"{POLICY_LOSS}.") or not isinstance(value, str):
                continue
            options = OPTIONS if any(_is_close(name, "policy_loss") for name in names) else ()
            options = options or (("fspo",) if any(_is_close(name, "loss_mode") for name in names) else ())
            for option in (option for option in options if _is_close(value, option)):
                why = f"verl reads no such key and would train loss_mode={self.get(f'{POLICY_LOSS}.loss_mode')!r}"
                fix = (
                    f"select the config group instead: +{GROUP}={option} on the command line, or in your YAML "
                    f"`defaults: [ppo_trainer, {GROUP}: {option}, _self_]`"
                )
                yield Finding("error", "lost_selection", f"{key}={value!r} selects nothing", why, fix)
                break
        yield from self._unregistered_loss()
        yield from self._loss_as_advantages()

    def _loss_as_advantages(self) -> Iterator[Finding]:
        """A loss named as the advantage estimator, unless a plugin has registered an estimator of that name."""
        estimator = self.get("algorithm.adv_estimator")
        if estimator != "fspo" and not (self.selects_ours and estimator in OPTIONS):
            return
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

        if estimator not in ADV_ESTIMATOR_REGISTRY:
            what = f"algorithm.adv_estimator={estimator} names a policy loss"
            fix = "algorithm.adv_estimator=grpo" + ("" if self.selects_ours else f" +{GROUP}={estimator}")
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
            fix = f"+{GROUP}=fspo if it was to be FSPO, or one of {known}"
            yield Finding("warning", "unregistered_loss", what, why, fix)

    @cached_property
    def parts(self) -> list:
        """The files that the config was composed from; see :func:`fspo_verl.launch.composition.parts`."""
        from fspo_verl.launch import composition

        return composition.parts()

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

    def with_eps(self, low: float | None, high: float | None) -> str:
        """Overrides that give the band these half-widths, in the keys that the launch sets."""
        band = self.band
        one_number = low == high and band.eps_low is None and band.eps_high is None
        values = {"eps": low} if one_number else {"eps": None, "eps_low": low, "eps_high": high}
        values |= {} if band.eps_dual is None else {"eps_dual": None}
        return " ".join(f"{POLICY_LOSS}.{k}={'null' if v is None else format(v, '.3g')}" for k, v in values.items())

    def band_as_ratios(self, lengths: list[int]) -> dict[int, tuple[float, float]]:
        """Length -> lowest and highest unclipped ratio exp(S), for a band that does not depend on the data."""
        import torch

        length = torch.tensor(lengths, dtype=torch.float64)
        low, high, _ = self.band.edges(length, torch.ones_like(length))  # these bands read of Q only that it is not 0
        return dict(zip(lengths, zip(low.exp().tolist(), high.exp().tolist(), strict=True), strict=True))

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


def leaves(content, prefix: str = "") -> dict[str, object]:
    """Dotted key to value of every leaf of a config, interpolations as written; a list or empty mapping is a leaf."""
    if OmegaConf.is_config(content):
        content = OmegaConf.to_container(content, resolve=False)
    found: dict[str, object] = {}
    for key, value in content.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        found |= leaves(value, path) if isinstance(value, dict) and value else {path: value}
    return found


def _is_close(text: str, word: str) -> bool:
    """Whether a text is a word, or the word with its letters mixed up, or one of them too many or too few."""
    text = text.lower().replace("-", "_")
    return sorted(text) == sorted(word) or difflib.SequenceMatcher(None, text, word).ratio() > 0.8


def _is_schema(target) -> bool:
    return isinstance(target, str) and target.startswith("fspo_verl.")
