# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A launch as the checks read it: what it selects, and what follows from its config.

Every launch of verl passes here, also those that have nothing to do with this package: verl and Hydra are imported only
where they are asked.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from omegaconf import DictConfig, OmegaConf

from fspo_verl.findings import FIX, SEVERITIES, Finding
from fspo_verl.keys import ACTOR, GROUP, POLICY_LOSS
from fspo_verl.launch import hydra_files

TRACKER = "latest_checkpointed_iteration.txt"
"""The file that names the step of the last checkpoint of a folder; verl's find_latest_ckpt_path reads it."""


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
        id: the name of the check that yields it, which :func:`fspo_verl.launch.checks.run` fills in.
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

Need = Literal["files", "config", "folders", "loss", "fspo", "baseline", "doctor"]


class Check(NamedTuple):
    """A check of a launch."""

    find: Callable[["Launch"], Iterator[Finding]]
    needs: Need
    may_refuse: bool


CHECKS: list[Check] = []
"""All checks, in the order of their definitions."""


def check(needs: Need, may_refuse: bool = False) -> Callable:
    """Register a function from a :class:`Launch` to findings.

    Args:
        needs: ``files``: a launch that asks for a loss of this package, and the files that Hydra composed it from.
            ``config``: a launch of such a loss, and nothing but its config. ``folders``: its folders as well.
            ``loss``: its band, if it has one, has sound values. ``fspo``, ``baseline``: and its loss is fspo, or
            another one that is observed. ``doctor``: any launch without an error, in the doctor.
        may_refuse: it yields errors. Where it crashes the launch is refused, as it has not been judged.
    """

    def register(find: Callable[["Launch"], Iterator[Finding]]) -> Callable:
        CHECKS.append(Check(find, needs, may_refuse))
        return find

    return register


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

    @cached_property
    def choice(self) -> str | None:
        """The option of this package's config group that was asked for, whatever was composed; None without one."""
        return hydra_files.chosen(self.get(GROUP) is not None)

    @property
    def has_our_schema(self) -> bool:
        """Whether the policy loss is configured by a class of this package."""
        return str(self.get(f"{POLICY_LOSS}._target_")).startswith("fspo_verl.")

    @property
    def is_ours(self) -> bool:
        """Whether a loss of this package trains, or one that it observes."""
        return self.has_our_schema or self.get(f"{POLICY_LOSS}.loss_mode") in ("fspo", "observed")

    @property
    def selects_ours(self) -> bool:
        """Whether the launch asks for a loss of this package; nothing else is said of any other launch."""
        return self.has_actor and (self.is_ours or self.choice is not None)

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
    def has_reference(self) -> bool:
        """Whether a reference policy is held against this one."""
        return bool(self.actor.get("use_kl_loss") or self.get("algorithm.use_kl_in_reward"))

    @property
    def has_critic(self) -> bool:
        """Whether values are learned, too."""
        enabled = self.get("critic.enable")
        return self.get("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)

    @property
    def moves_nothing(self) -> bool:
        """Whether each response is trained on by the policy that its log-ratio compares it with."""
        return self.optimizer_steps_per_rollout == 1 and not self.bypasses

    @property
    def checkpoints(self) -> Path | None:
        """The folder for checkpoints."""
        folder = self.get("trainer.default_local_dir")
        return Path(folder) if isinstance(folder, str) else None

    @property
    def resume_point(self) -> tuple[Path, int] | None:
        """Folder of the checkpoints, and training step, from which a launch goes on; None if it starts anew.

        verl starts anew where the checkpoint that the tracker names is gone.
        """
        folder, mode = self.checkpoints, self.get("trainer.resume_mode")
        if folder is not None and mode == "auto":
            with contextlib.suppress(OSError, ValueError):  # without a tracker, or with one on which verl itself fails
                step = int((folder / TRACKER).read_text())
                return (folder, step) if (folder / f"global_step_{step}").exists() else None
        if mode == "resume_path":
            checkpoint = Path(str(self.get("trainer.resume_from_path")))
            name = re.fullmatch(r"global_step_(\d+)", checkpoint.name)
            return checkpoint.parent, int(name[1]) if name else 0
        return None
