# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The config schema of the ``fspo`` policy loss: ``actor_rollout_ref.actor.policy_loss``."""

from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig

from fspo_verl.loss import Band


@dataclass
class FSPOPolicyLossConfig(Band, PolicyLossConfig):
    """verl's policy-loss config plus the clip band; the band's fields are documented in :class:`fspo_verl.loss.Band`.

    Named by ``_target_`` in the packaged configs, it is built by verl's ``validate_config`` in the driver, before Ray
    starts, and again in every worker. Bad values and typos therefore fail at start, and so does a worker in which
    fspo_verl is not installed.

    Raises:
        ValueError: a field has a bad value, fields contradict each other, or ``loss_mode`` is not ``fspo``.
    """

    loss_mode: str = "fspo"

    key_prefix = "actor_rollout_ref.actor.policy_loss."

    def __post_init__(self):
        super().__post_init__()
        if self.loss_mode != "fspo":
            raise ValueError(
                f"{self.key_prefix}loss_mode={self.loss_mode!r} is not allowed beside algorithm.policy_loss=fspo (or "
                "rloo), which sets loss_mode=fspo: remove the leftover loss_mode override, or select another loss "
                "with algorithm.policy_loss=gspo or grpo"
            )
        # Registers the loss even where verl was told not to load plugins (VERL_USE_EXTERNAL_PLUGINS=none), and makes
        # an import error loud that verl's plugin loader would have swallowed.
        import fspo_verl.register  # noqa: F401
