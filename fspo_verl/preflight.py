# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a composed launch config, before Ray starts: what would train another loss than asked for is refused."""

import dataclasses
import difflib
import logging
from importlib import resources
from pathlib import Path

import torch
import verl.trainer.ppo.core_algos
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import fspo_verl.loss

logger = logging.getLogger("fspo_verl")

GROUP = "algorithm.policy_loss"
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
# verl's defaults (ActorConfig): any other value next to fspo is taken for an attempt to set its clip range.
_CLIP_RATIO_DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
_WIDEST_USEFUL_BAND = 10.0  # nats: a ratio of e^10 = 22,026, far beyond what a clip is for


def check(config: DictConfig) -> None:
    """Refuse or warn about a launch config; say which band is in effect if the loss is ``fspo``.

    Args:
        config: the composed config of a verl main. Anything without ``actor_rollout_ref.actor`` is left alone.

    Raises:
        ValueError: the config asks for a loss that it would not train, or a field of the band is wrong.
    """
    actor = OmegaConf.select(config, "actor_rollout_ref.actor")
    if actor is None:
        return
    policy_loss = actor.policy_loss
    loss_mode = policy_loss.get("loss_mode", "vanilla")
    _refuse_dead_key(config, loss_mode)
    _refuse_hidden_files()
    _refuse_overridden_group(loss_mode)
    if loss_mode != "fspo":
        _warn_unregistered(loss_mode)
        return
    _refuse_unknown_fields(policy_loss)
    band = _build_band(policy_loss)
    for warning in _warnings(config, actor, band):
        logger.warning(warning)
    logger.info("policy loss fspo: %s%s", band.describe(), _as_ratios(band, config))


def _refuse_dead_key(config: DictConfig, loss_mode: str) -> None:
    value = OmegaConf.select(config, GROUP)
    if value is not None:
        raise ValueError(
            f"{GROUP}={value!r} is a plain value in this config; verl reads no such key and would train "
            f"loss_mode={loss_mode!r}. Select the config group instead: on the command line +{GROUP}={value}, or in "
            f"your YAML `defaults: [ppo_trainer, {GROUP}: {value}, _self_]` without the value under `algorithm:`"
        )


def _refuse_hidden_files() -> None:
    """Hydra takes the first file of a name, and searches a directory given by --config-dir last."""
    if not HydraConfig.initialized():
        return
    packaged = Path(str(resources.files("fspo_verl.configs")))
    for source in HydraConfig.get().runtime.config_sources:
        if source.provider != "command-line" or source.schema != "file":
            continue
        for file in packaged.rglob("*.yaml"):
            if (hidden := Path(source.path) / file.relative_to(packaged)).exists():
                raise ValueError(f"{hidden} is not read, as fspo_verl packages a config of that name: rename it")


def _refuse_overridden_group(loss_mode: str) -> None:
    if not HydraConfig.initialized():
        return
    choice = HydraConfig.get().runtime.choices.get(GROUP)
    group_file = resources.files("fspo_verl.configs") / GROUP / f"{choice}.yaml"
    if choice is None or not group_file.is_file():
        return
    # `rloo` inherits its loss_mode from the group's `fspo`.
    selected = OmegaConf.select(OmegaConf.create(group_file.read_text()), f"{POLICY_LOSS}.loss_mode") or "fspo"
    if loss_mode != selected:
        raise ValueError(
            f"{POLICY_LOSS}.loss_mode={loss_mode!r} overrides {GROUP}={choice}, which sets loss_mode={selected}: "
            f"remove the leftover loss_mode override, or select another {GROUP}"
        )


def _warn_unregistered(loss_mode: str) -> None:
    known = verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY
    if loss_mode in known:
        return
    guess = difflib.get_close_matches(loss_mode.lower(), known, n=1)
    logger.warning(
        f"{POLICY_LOSS}.loss_mode={loss_mode!r} is not registered here; unless a worker registers it, the run fails at "
        f"its first actor update. {f'Did you mean {guess[0]!r}? ' if guess else ''}Known: {', '.join(sorted(known))}"
    )


def _refuse_unknown_fields(policy_loss: DictConfig) -> None:
    # Imported here: verl.workers.config is not importable while verl itself is being imported.
    from fspo_verl.config import FSPOPolicyLossConfig

    known = [field.name for field in dataclasses.fields(FSPOPolicyLossConfig)]
    for key in policy_loss:
        if key not in known:
            guess = difflib.get_close_matches(key, known, n=1)
            raise ValueError(
                f"{POLICY_LOSS}.{key}={policy_loss[key]!r} is no field of the fspo policy loss"
                f"{f', did you mean {guess[0]}' if guess else ''}? Fields: {', '.join(known[1:])}"
            )


def _build_band(policy_loss: DictConfig) -> "fspo_verl.loss.Band":
    from fspo_verl.config import FSPOPolicyLossConfig

    return FSPOPolicyLossConfig(**fspo_verl.loss.Band.fields_in(policy_loss))


def _warnings(config: DictConfig, actor: DictConfig, band: "fspo_verl.loss.Band"):
    changed = [f"{key}={actor[key]}" for key, default in _CLIP_RATIO_DEFAULTS.items() if actor.get(key) != default]
    if changed:
        yield (
            f"actor_rollout_ref.actor: {', '.join(changed)} has no effect with loss_mode=fspo, whose clip range is "
            f"{POLICY_LOSS}.eps_low, eps_high and eps_dual (log-ratio per sqrt(token), not ratios)"
        )
    if actor.loss_agg_mode == "seq-mean-token-mean":
        yield (
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean divides each sequence's loss by its own length "
            "and so weights short responses up, which FSPO's objective does not; use seq-mean-token-sum-norm with a "
            "constant actor_rollout_ref.actor.loss_scale_factor, or token-mean"
        )
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        yield (
            "actor_rollout_ref.actor.loss_scale_factor=null makes verl divide by the padded width of each micro-batch, "
            "so the loss depends on how the batch is cut; set loss_scale_factor=${data.max_response_length}"
        )
    if band.band_center == "zero" and band.band_width == "realized":
        yield (
            f"{POLICY_LOSS}.band_width=realized with band_center=zero clips long or stale sequences on one side, as "
            "S drifts by about -Q/2, which outgrows a width of sqrt(Q); set band_center=realized"
        )
    half_width = _half_width(band, config)
    if half_width is not None and half_width > _WIDEST_USEFUL_BAND:
        yield (
            f"{POLICY_LOSS}.eps_high={band.eps_high:g} is a log-ratio of {half_width:.3g} at "
            f"data.max_response_length={config.data.max_response_length}: the clip will never act on long responses. "
            "eps is not a ratio bound like clip_ratio=0.2; values near 0.03 are usual"
        )
    steps = _optimizer_steps_per_rollout(config)
    if steps == 1:
        yield (
            "one optimiser step per rollout (data.train_batch_size == actor_rollout_ref.actor.ppo_mini_batch_size and "
            "ppo_epochs=1): the ratio stays 1 and no clip can act; lower ppo_mini_batch_size to use FSPO"
        )
    if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        yield (
            "algorithm.rollout_correction.bypass_mode=True takes the rollout engine's log-probs as old: the band must "
            "also absorb the mismatch between engine and trainer, so widen eps or recompute with bypass_mode=False"
        )


def _optimizer_steps_per_rollout(config: DictConfig) -> float | None:
    batch = OmegaConf.select(config, "data.train_batch_size")
    if not batch or OmegaConf.select(config, "async_training") is not None:
        return None  # asynchronous mains choose their own batch
    actor = config.actor_rollout_ref.actor
    return batch / actor.ppo_mini_batch_size * actor.ppo_epochs


def _half_width(band: "fspo_verl.loss.Band", config: DictConfig) -> float | None:
    longest = OmegaConf.select(config, "data.max_response_length")
    if band.band_width == "realized" or not longest:
        return None
    return band.eps_high * longest**band.length_power


def _as_ratios(band: "fspo_verl.loss.Band", config: DictConfig) -> str:
    """The band as importance-sampling ratios at a tenth of the longest response and at the longest, for intuition."""
    longest = OmegaConf.select(config, "data.max_response_length")
    if band.band_width == "realized" or band.band_center == "realized" or not longest:
        return ""
    lengths = torch.tensor([max(1.0, longest // 10), longest], dtype=torch.float64)
    low, high, _ = band.edges(lengths, torch.ones_like(lengths))  # these bands read of Q only that it is not 0
    ratios = zip(low.exp().tolist(), high.exp().tolist(), lengths.tolist(), strict=True)
    return "; as ratios " + ", ".join(f"{a:.3g} to {b:.3g} at L={length:.0f}" for a, b, length in ratios)
