# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A launch as the checks read it, and what they find. Imports nothing of verl."""

import dataclasses
from functools import cached_property

from omegaconf import DictConfig, OmegaConf

from fspo_verl.preflight import composition

SEVERITIES = ("error", "warning", "note")
GROUP = "algorithm.policy_loss"
ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"


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
    """What the checks read: a composed config with ``actor_rollout_ref.actor``, and what follows from it."""

    config: DictConfig

    def get(self, key: str):
        """The value of a dotted key of the config; None if it is not there."""
        return OmegaConf.select(self.config, key)

    @cached_property
    def parts(self) -> list[composition.Part]:
        """The files that the config was composed from; see :func:`fspo_verl.preflight.composition.parts`."""
        return composition.parts()

    @property
    def actor(self) -> DictConfig:
        return self.config.actor_rollout_ref.actor

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
    def is_ours(self) -> bool:
        """Whether the launch selected one of this package's losses or observations; others are not checked."""
        return self.is_fspo or str(self.policy_loss.get("_target_", "")).startswith("fspo_verl.")

    @property
    def max_response_length(self) -> int | None:
        return self.get("data.max_response_length")

    @property
    def typical_lengths(self) -> list[int]:
        """Response lengths at which to look at a band, up to the longest of this launch."""
        return [*(n for n in (64, 256, 1024, 4096, 16384) if n < self.max_response_length), self.max_response_length]

    @cached_property
    def band(self):
        """The :class:`fspo_verl.band.Band` of an fspo launch.

        Raises:
            ValueError: a field has a bad value.
        """
        from fspo_verl.config import FSPOPolicyLossConfig

        return FSPOPolicyLossConfig(**FSPOPolicyLossConfig.fields_in(self.policy_loss))

    @property
    def clip_range(self) -> tuple[float, float]:
        """What verl's own losses leave unclipped below and above a ratio of 1."""
        from fspo_verl.observe.settings import clip_ratios  # imports torch

        ratios = clip_ratios(self.actor.get)
        return ratios["clip_ratio_low"], ratios["clip_ratio_high"]

    @property
    def half_widths(self) -> dict[str, tuple[float, float]]:
        """Config key of each clip edge to its value, and to its distance from the centre at the longest response.

        The distance is in nats of S. Empty where the data decide, and for losses that clip tokens.
        """
        longest = self.max_response_length
        if longest and self.is_fspo and not self.band.is_studentized:
            scale = longest**self.band.length_power
            edges = {"eps_low": self.band.low, "eps_high": self.band.high}
            return {f"{POLICY_LOSS}.{side}": (eps, eps * scale) for side, eps in edges.items()}
        if longest and self.loss_mode == "gspo":  # clips S/L
            from fspo_verl.observe.settings import log_range

            keys, edges = ("clip_ratio_low", "clip_ratio_high"), self.clip_range
            halves = (edge * longest for edge in log_range(*edges))
            return {f"{ACTOR}.{key}": values for key, *values in zip(keys, edges, halves, strict=True)}
        return {}

    def with_eps(self, low: float, high: float) -> str:
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
    def rollout_pool(self) -> DictConfig | None:
        """Nodes and GPUs that only generate (``nnodes``, ``n_gpus_per_node``); None where those that train do."""
        if self.get("rollout.n_gpus_per_node") is not None:
            return self.config.rollout  # fully-async and one-step-off
        return None if self.rounds_per_sync is None else self.config.actor_rollout_ref.rollout

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
