# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A launch as the checks read it: what it selects, and what follows from its config.

Every launch of verl passes here, also those that have nothing to do with this package: verl and Hydra are imported only
where they are asked.
"""

import dataclasses
import functools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fspo_verl.findings import FIX, SEVERITIES, Finding
from fspo_verl.keys import ACTOR, POLICY_LOSS


def finding(
    severity: str,
    what: str,
    why: str = "",
    fix: str = "",
    id: str = "",
    remove: Sequence[str] = (),
    add: Sequence[str] = (),
) -> Finding:
    """A finding about a launch: what is the case, why it matters, and what corrects it.

    Args:
        fix: words of advice, behind what ``remove`` and ``add`` say.
        id: its name for programs; :func:`fspo_verl.launch.checks.run` takes that of the check.
        remove, add: overrides of the launch, see :class:`fspo_verl.findings.Finding`.
    """
    removal, addition = f"remove {' '.join(remove)}", " ".join(map(_pasted, add))
    advice = f"{removal}, and add {addition}" if remove and add else removal if remove else addition
    action = FIX if advice + fix else ""
    sentence = f"{what}: {why}." if why else f"{what}."
    return Finding(id, severity, sentence, advice + fix, action=action, remove=(*remove,), add=(*add,))


def _pasted(override: str) -> str:
    """An override for a shell, where it needs quotes."""
    return f'"{override}"' if set(override) & set("'\" $(){}&;|<>*?") else override


error, warning, note = (functools.partial(finding, severity) for severity in SEVERITIES)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A composed config and what follows from it, as the checks read it."""

    config: DictConfig

    def get(self, key: str):
        """The value of a dotted key of the config; None if it is not there, or an interpolation that leads nowhere."""
        if not OmegaConf.is_config(self.config):
            return None
        return OmegaConf.select(self.config, key, throw_on_resolution_failure=False)

    @property
    def has_actor(self) -> bool:
        """Whether this is a launch of policy training; all that reads :attr:`actor` needs one."""
        return self.actor is not None

    @property
    def trains_a_policy(self) -> bool:
        """Whether it does more than validate."""
        return self.has_actor and not self.get("trainer.val_only")

    @property
    def actor(self) -> DictConfig:
        return self.get(ACTOR)

    @property
    def has_our_schema(self) -> bool:
        """Whether the policy loss is configured by a class of this package."""
        return str(self.get(f"{POLICY_LOSS}._target_")).startswith("fspo_verl.")

    @property
    def is_ours(self) -> bool:
        """Whether a loss of this package trains, or one that it observes."""
        return self.has_our_schema or self.get(f"{POLICY_LOSS}.loss_mode") in ("fspo", "observed")

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
        """The length that the rollout engine generates up to; ``data.max_response_length`` is only its default."""
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
    def is_half_precision(self) -> bool:
        """Whether FSDP computes log-probs in bfloat16; of other engines that is not known."""
        fsdp = self.actor.get("fsdp_config")
        precision = fsdp and (fsdp.get("mixed_precision") or {"param_dtype": "bf16"}).get("param_dtype", "bf16")
        return precision in ("bf16", "bfloat16")

    @property
    def moves_nothing(self) -> bool:
        """Whether each response is trained on by the policy that its log-ratio compares it with."""
        return self.optimizer_steps_per_rollout == 1 and not self.bypasses

    @property
    def checkpoints(self) -> Path | None:
        """The folder for checkpoints."""
        folder = self.get("trainer.default_local_dir")
        return Path(folder) if isinstance(folder, str) else None
