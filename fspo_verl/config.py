# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The config schemas of ``actor_rollout_ref.actor.policy_loss``: the fspo loss, and any other loss under observation.

Named by ``_target_`` in the packaged configs, a schema is built by verl's ``validate_config`` in the driver, before Ray
starts, and again in every worker. Bad values and typos therefore fail at start, and so does a worker in which fspo_verl
is not installed. The import of this module registers the losses and arms the wraps that they need of verl.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from verl.workers.config import PolicyLossConfig

import fspo_verl.register  # noqa: F401  the losses, also where verl loads no plugins
from fspo_verl import verl_patches
from fspo_verl.adaptive import AdaptiveBand, Controller
from fspo_verl.band import BadField, Band, require
from fspo_verl.keys import POLICY_LOSS
from fspo_verl.observe.metrics import LENGTH_BINS

verl_patches.arm(verl_patches.WORKERS)


@dataclass
class Observation:
    """The measurements of a policy loss in training; none of them changes the training."""

    length_bins: list[int] = field(default_factory=lambda: list(LENGTH_BINS))
    """Inner edges of the length bins of the ``actor/fspo/length_*`` metrics, in response tokens."""

    records_dir: str | None = None
    """Folder (absolute path) for one Parquet row per response and optimiser step; null writes none. On several nodes it
    has to be a shared folder, or each node keeps the records of its own ranks."""

    records_freq: int = 1
    """Record every N-th training step."""

    alerts: bool = True
    """Whether the trainer's log says, once per cause, what is wrong; docs/measure.md has the causes."""

    key_prefix = f"{POLICY_LOSS}."

    def _check_observation(self):
        edges, freq, folder = self.length_bins, self.records_freq, self.records_dir
        whole = isinstance(edges, Sequence) and all(type(edge) is int for edge in edges) and bool(edges)
        rising = whole and all(a < b for a, b in pairwise([1, *edges]))
        require(rising, self, "length_bins", "rising whole numbers above 1, one at least")
        if folder is not None:
            require(isinstance(folder, str), self, "records_dir", "null or an absolute path")
            own = f"as every Ray worker has a working directory of its own, for example {Path(folder).absolute()}"
            require(Path(folder).is_absolute(), self, "records_dir", f"an absolute path, {own}")
        require(type(freq) is int and freq > 0, self, "records_freq", "a whole number above 0")
        require(isinstance(self.alerts, bool), self, "alerts", "true or false")


@dataclass
class FSPOPolicyLossConfig(AdaptiveBand, Observation, PolicyLossConfig):
    """verl's policy-loss config plus the clip range, whose fields :class:`fspo_verl.band.Band` documents.

    Attributes:
        controller: what moves eps after each training step; None without ``target_clip_rate``.

    Raises:
        ValueError: a field has a bad value or no effect beside others, or ``loss_mode`` is not ``fspo``.
    """

    loss_mode: str = "fspo"

    key_prefix = Observation.key_prefix

    def __post_init__(self):
        super().__post_init__()
        if self.loss_mode != "fspo":
            raise BadField.of(
                "loss_mode",
                f"{POLICY_LOSS}.loss_mode={self.loss_mode!r} is not allowed beside algorithm.policy_loss=fspo (or "
                "fixed_band), which sets loss_mode=fspo: remove the leftover loss_mode override, or add "
                f"{POLICY_LOSS}.loss_mode=fspo after it, or select another loss, algorithm.policy_loss=gspo or grpo",
            )
        if self.eps not in (None, Band.eps) and None not in (self.eps_low, self.eps_high):
            raise BadField.of(
                "eps",
                f"{POLICY_LOSS}.eps={self.eps!r} is not allowed beside eps_low={self.eps_low:g} and "
                f"eps_high={self.eps_high:g}, which leave it without effect: remove eps, or set the two to null",
            )
        self._check_observation()
        self.controller = None if self.target_clip_rate is None else Controller(self)


@dataclass
class ObservedPolicyLossConfig(Observation, PolicyLossConfig):
    """verl's policy-loss config for a loss that is trained as it is and observed: metrics and records as fspo has.

    ``loss_mode`` names the loss, as without observation. In the built config it is ``observed``, the registered
    wrapper, and ``inner`` is the loss.

    Raises:
        ValueError: a field has a bad value, or there is nothing to observe.
    """

    loss_mode: str = PolicyLossConfig.loss_mode

    inner: str = ""

    _mutable_fields = {"loss_mode", "inner"}

    def __post_init__(self):
        if self.loss_mode != "observed":
            self.inner, self.loss_mode = self.loss_mode, "observed"
        if self.inner in (None, "", "observed", "fspo"):
            raise BadField.of(
                "loss_mode",
                f"{POLICY_LOSS}.loss_mode={self.inner!r} cannot be observed: name the loss that trains, such as "
                "vanilla or gspo; fspo measures itself, without algorithm.policy_loss=observed",
            )
        self._check_observation()
