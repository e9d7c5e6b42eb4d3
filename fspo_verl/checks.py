# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a composed launch config: functions from a launch to findings; :func:`findings` runs them all.

Both the launch itself (:mod:`fspo_verl.preflight`) and ``fspo-verl doctor`` run this list. Imported while verl is only
partly imported; hence ``import a.b.c``, and ``fspo_verl.config`` only inside functions.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from functools import cached_property
from importlib import resources
from pathlib import Path

import verl.trainer.ppo.core_algos
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import fspo_verl.loss
import fspo_verl.records
import fspo_verl.resume

SEVERITIES = ("error", "warning", "note")
GROUP = "algorithm.policy_loss"
ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
# verl's defaults (ActorConfig): any other value next to fspo is taken for an attempt to set its clip range.
_CLIP_RATIO_DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
_GRAD_CLIP_DEFAULT = 1.0
_WIDEST_USEFUL_BAND = 10.0  # nats: a ratio of e^10 = 22,026, far beyond what a clip is for
# Of seq-mean-token-sum-norm over max_response_length; the quickstart's runs had 0.02 to 0.18.
_USUAL_GRAD_NORM = 0.1


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
        return "; ".join(part for part in (": ".join(filter(None, (self.what, self.why))), self.fix) if part)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the checks read: a composed config with ``actor_rollout_ref.actor``, and what follows from it."""

    config: DictConfig

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
        """Whether the launch selected one of this package's losses or observations; others are none of its business."""
        return self.is_fspo or str(self.policy_loss.get("_target_", "")).startswith("fspo_verl.")

    @property
    def max_response_length(self) -> int | None:
        return OmegaConf.select(self.config, "data.max_response_length")

    @property
    def typical_lengths(self) -> list[int]:
        """Response lengths at which to look at a band, up to the longest of this launch."""
        return [*(n for n in (64, 256, 1024, 4096, 16384) if n < self.max_response_length), self.max_response_length]

    @cached_property
    def band(self) -> "fspo_verl.loss.Band":
        """The clip band of an fspo launch.

        Raises:
            ValueError: a field has a bad value.
        """
        from fspo_verl.config import FSPOPolicyLossConfig

        return FSPOPolicyLossConfig(**fspo_verl.loss.Band.fields_in(self.policy_loss))

    @property
    def half_width(self) -> float | None:
        """The band's upper half-width in nats at the longest response; None where it depends on the data."""
        if self.band.band_width == "realized" or not self.max_response_length:
            return None
        return self.band.eps_high * self.max_response_length**self.band.length_power

    @property
    def optimizer_steps_per_rollout(self) -> float | None:
        """Optimiser steps between two refreshes of the policy that responses are compared with; None if unknown."""
        asynchronous = OmegaConf.select(self.config, "async_training")
        if asynchronous is not None:
            return asynchronous.trigger_parameter_sync_step * asynchronous.require_batches * self.actor.ppo_epochs
        batch = OmegaConf.select(self.config, "data.train_batch_size")
        if not batch:
            return None
        separate = OmegaConf.select(self.config, "trainer.v1.trainer_mode") == "separate_async"
        updates = self.config.trainer.v1.separate_async.parameter_sync_step if separate else 1
        return batch / self.actor.ppo_mini_batch_size * self.actor.ppo_epochs * updates

    @property
    def bypasses(self) -> bool:
        """Whether the rollout engine's log-probs are taken as those of the old policy."""
        return bool(OmegaConf.select(self.config, "algorithm.rollout_correction.bypass_mode"))


def findings(config: DictConfig) -> list[Finding]:
    """Everything the config alone says about a launch, errors first; empty without ``actor_rollout_ref.actor``."""
    if OmegaConf.select(config, ACTOR) is None:
        return []
    launch = Launch(config)
    found = _run(_ANY_LAUNCH, launch)
    if launch.is_ours:
        found += _run(_PACKAGE_LAUNCH, launch)
    if launch.is_fspo:
        found += (errors := _run(_BAND_FIELDS, launch)) or _run(_FSPO_LAUNCH, launch)
        if not errors:
            found.append(band_in_effect(launch))
    return by_severity(found)


def by_severity(found: list[Finding]) -> list[Finding]:
    """The findings, errors first, then warnings, then notes."""
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _run(checks, launch: Launch) -> list[Finding]:
    return [finding for check in checks for finding in check(launch)]


# --- errors: another loss would train than the one asked for ---------------------------------------------------------


def dead_group_value(launch: Launch) -> Iterator[Finding]:
    """A plain value where the config group is meant: verl reads no such key."""
    value = OmegaConf.select(launch.config, GROUP)
    if value is not None:
        yield Finding(
            "error",
            "dead_group_value",
            f"{GROUP}={value!r} is a plain value in this config",
            f"verl reads no such key and would train loss_mode={launch.loss_mode!r}",
            f"select the config group instead: on the command line +{GROUP}={value}, or in your YAML "
            f"`defaults: [ppo_trainer, {GROUP}: {value}, _self_]` without the value under `algorithm:`",
        )


def hidden_files(_launch: Launch) -> Iterator[Finding]:
    """Hydra takes the first file of a name, and searches a directory given by --config-dir last."""
    if not HydraConfig.initialized():
        return
    packaged = Path(str(resources.files("fspo_verl.configs")))
    for source in HydraConfig.get().runtime.config_sources:
        if source.provider != "command-line" or source.schema != "file":
            continue
        for file in packaged.rglob("*.yaml"):
            if (hidden := Path(source.path) / file.relative_to(packaged)).exists():
                yield Finding(
                    "error",
                    "hidden_files",
                    f"{hidden} is not read",
                    "fspo_verl packages a config of that name, and Hydra takes the first it finds",
                    f"rename {hidden.name}",
                )


def overridden_group(launch: Launch) -> Iterator[Finding]:
    """A leftover ``loss_mode`` that beats the selected group."""
    if not HydraConfig.initialized():
        return
    choice = HydraConfig.get().runtime.choices.get(GROUP)
    selected = choice and _loss_mode_of_group(choice)
    if selected and launch.loss_mode != selected:
        yield Finding(
            "error",
            "overridden_group",
            f"{POLICY_LOSS}.loss_mode={launch.loss_mode!r} overrides {GROUP}={choice}, which sets loss_mode={selected}",
            "the leftover value would train",
            f"remove the override {POLICY_LOSS}.loss_mode={launch.loss_mode}, or select another {GROUP}",
        )


def _loss_mode_of_group(option: str) -> str | None:
    """The ``loss_mode`` that an option of the packaged group sets, itself or by what it inherits."""
    file = resources.files("fspo_verl.configs") / GROUP / f"{option}.yaml"
    if not file.is_file():
        return None
    group = OmegaConf.create(file.read_text())
    own = OmegaConf.select(group, f"{POLICY_LOSS}.loss_mode")
    return own or next(filter(None, map(_loss_mode_of_group, group.get("defaults", []))), None)


def used_records_dir(launch: Launch) -> Iterator[Finding]:
    """Records of an earlier run in the folder of one that starts anew."""
    folder = launch.policy_loss.get("records_dir")
    if folder is None or not fspo_verl.records.record_files(folder) or fspo_verl.resume.point(launch.config):
        return
    yield Finding(
        "error",
        "used_records_dir",
        f"{POLICY_LOSS}.records_dir={folder} holds records already, and this run starts anew",
        f"trainer.resume_mode={launch.config.trainer.resume_mode} and no checkpoint in "
        f"{launch.config.trainer.default_local_dir}; records of two runs in one folder cannot be told apart",
        f"{POLICY_LOSS}.records_dir={folder.rstrip('/')}-2, or remove the folder",
    )


def unknown_fields(launch: Launch) -> Iterator[Finding]:
    """Typos in the fields of the fspo policy loss, schema or not."""
    from fspo_verl.config import FSPOPolicyLossConfig

    known = [field.name for field in dataclasses.fields(FSPOPolicyLossConfig)]
    for key in launch.policy_loss:
        if key not in known:
            guess = difflib.get_close_matches(key, known, n=1)
            yield Finding(
                "error",
                "unknown_fields",
                f"{POLICY_LOSS}.{key}={launch.policy_loss[key]!r} is no field of the fspo policy loss"
                f"{f', did you mean {guess[0]}' if guess else ''}?",
                "it would set nothing",
                f"remove it; fields: {', '.join(field for field in known if not field.startswith('_'))}",
            )


def band_fields(launch: Launch) -> Iterator[Finding]:
    """Values from which no band can be built."""
    try:
        _ = launch.band
    except ValueError as error:
        yield Finding(
            "error", "band_fields", str(error), fix=f"remove that override of {POLICY_LOSS}, or give an allowed value"
        )


# --- warnings: it trains, but not as FSPO means to -------------------------------------------------------------------


def unregistered_loss(launch: Launch) -> Iterator[Finding]:
    """A ``loss_mode`` that nobody registered in this process."""
    known = verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY
    if launch.loss_mode in known:
        return
    guess = difflib.get_close_matches(launch.loss_mode.lower(), known, n=1)
    yield Finding(
        "warning",
        "unregistered_loss",
        f"{POLICY_LOSS}.loss_mode={launch.loss_mode!r} is not registered here",
        "unless a worker registers it, the run fails at its first actor update, after a whole rollout",
        f"{f'did you mean {POLICY_LOSS}.loss_mode={guess[0]!r}? ' if guess else ''}known: {', '.join(sorted(known))}",
    )


def changed_on_resume(launch: Launch) -> Iterator[Finding]:
    """A run that goes on from a checkpoint with another loss than trained it."""
    before = fspo_verl.resume.loss_before(launch.config)
    if before is None:
        return
    settings = fspo_verl.resume.loss_settings(launch.config)
    changed = [key for key in settings if key in before and settings[key] != before[key]]
    if changed:
        _, step = fspo_verl.resume.point(launch.config)
        yield Finding(
            "warning",
            "changed_on_resume",
            f"this run resumes after step {step} with "
            + ", ".join(f"{ACTOR}.{key}={settings[key]} (until then {before[key]})" for key in changed),
            "its later steps train another loss than its earlier ones",
            "if that is not meant: " + " ".join(f"{ACTOR}.{key}={before[key]}" for key in changed),
        )


def one_step_per_rollout(launch: Launch) -> Iterator[Finding]:
    """Nothing moves between rollout and update, so nothing can be clipped."""
    if launch.optimizer_steps_per_rollout != 1 or launch.bypasses:
        return
    why = "the ratio stays 1 and no clip can act"
    if OmegaConf.select(launch.config, "async_training") is not None:
        what = "trigger_parameter_sync_step * require_batches * ppo_epochs = 1"
        fix = "async_training.trigger_parameter_sync_step=4"
    else:
        what = f"data.train_batch_size == {ACTOR}.ppo_mini_batch_size and ppo_epochs=1"
        fix = f"{ACTOR}.ppo_mini_batch_size={max(1, launch.actor.ppo_mini_batch_size // 4)}"
    yield Finding("warning", "one_step_per_rollout", f"one optimiser step per rollout ({what})", why, fix)


def remote_code(launch: Launch) -> Iterator[Finding]:
    """Code out of a model's or a tokenizer's repository."""
    for key in ("actor_rollout_ref.model.trust_remote_code", "data.trust_remote_code"):
        if OmegaConf.select(launch.config, key):
            yield Finding(
                "warning",
                "remote_code",
                f"{key}=true",
                "every worker runs whatever Python lies in the model's folder or repository, with your rights; Qwen3 "
                "and all other architectures of transformers need none",
                f"{key}=false",
            )


def idle_clip_ratio(launch: Launch) -> Iterator[Finding]:
    """verl's ratio-space clip range, dual clip included, beside fspo."""
    changed = [
        f"{key}={launch.actor[key]}"
        for key, default in _CLIP_RATIO_DEFAULTS.items()
        if launch.actor.get(key) != default
    ]
    if changed:
        yield Finding(
            "warning",
            "idle_clip_ratio",
            f"{ACTOR}: {', '.join(changed)} has no effect with loss_mode=fspo",
            f"its clip range is {POLICY_LOSS}.eps_low, eps_high and eps_dual (log-ratio per sqrt(token), not ratios)",
            f"remove {' '.join(f'{ACTOR}.{item}' for item in changed)}",
        )


def mean_over_own_length(launch: Launch) -> Iterator[Finding]:
    """An aggregation that weighs responses by length."""
    if launch.actor.loss_agg_mode == "seq-mean-token-mean":
        yield Finding(
            "warning",
            "mean_over_own_length",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean divides each sequence's loss by its own length",
            "so it weighs short responses up, which FSPO's objective does not",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm "
            f"{ACTOR}.loss_scale_factor={launch.max_response_length}, or {ACTOR}.loss_agg_mode=token-mean",
        )


def varying_scale(launch: Launch) -> Iterator[Finding]:
    """A normaliser that is not the same for all micro-batches."""
    if launch.actor.loss_agg_mode == "seq-mean-token-sum-norm" and launch.actor.get("loss_scale_factor") is None:
        yield Finding(
            "warning",
            "varying_scale",
            f"{ACTOR}.loss_scale_factor=null makes verl divide by the padded width of each micro-batch",
            "the loss then depends on how the batch is cut",
            f"{ACTOR}.loss_scale_factor={launch.max_response_length}",
        )


def always_clipped_gradient(launch: Launch) -> Iterator[Finding]:
    """A loss so large that the gradient clip cuts every step to the same norm."""
    limit = OmegaConf.select(launch.actor, "optim.clip_grad")
    times = _times_the_norm_mode(launch)
    if not limit or times is None or times * _USUAL_GRAD_NORM < limit:
        return
    yield Finding(
        "warning",
        "always_clipped_gradient",
        f"{ACTOR}.loss_agg_mode={launch.actor.loss_agg_mode} with {ACTOR}.optim.clip_grad={limit:g} (grad_clip)",
        f"the loss is {times:,.0f} times that of seq-mean-token-sum-norm over max_response_length, whose gradient norm "
        f"is of the order of {_USUAL_GRAD_NORM:g}: every step is cut to the same norm, whatever the batch says",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor={launch.max_response_length}, or "
        f"{ACTOR}.optim.clip_grad={times:g}",
    )


def _times_the_norm_mode(launch: Launch) -> float | None:
    """The loss as a multiple of seq-mean-token-sum-norm's over max_response_length; None where lengths decide."""
    longest = launch.max_response_length
    if not longest:
        return None
    match launch.actor.loss_agg_mode:
        case "seq-mean-token-sum":
            return longest
        case "token-sum":
            return longest * launch.actor.ppo_mini_batch_size * launch.config.actor_rollout_ref.rollout.n
        case "seq-mean-token-sum-norm":
            return longest / (launch.actor.get("loss_scale_factor") or longest)
    return None


def unread_grad_clip(launch: Launch) -> Iterator[Finding]:
    """The key that verl's engines do not read."""
    value = launch.actor.get("grad_clip", _GRAD_CLIP_DEFAULT)
    if value not in (_GRAD_CLIP_DEFAULT, OmegaConf.select(launch.actor, "optim.clip_grad")):
        yield Finding(
            "warning",
            "unread_grad_clip",
            f"{ACTOR}.grad_clip={value} has no effect",
            f"verl 0.9's engines clip at {ACTOR}.optim.clip_grad, here {launch.actor.optim.clip_grad}",
            f"{ACTOR}.optim.clip_grad={value}",
        )


def one_sided_band(launch: Launch) -> Iterator[Finding]:
    """The one member of the family that is unfair by design."""
    if launch.band.band_center == "zero" and launch.band.band_width == "realized":
        yield Finding(
            "warning",
            "one_sided_band",
            f"{POLICY_LOSS}.band_width=realized with band_center=zero clips long or stale sequences on one side",
            "S drifts by about -Q/2, which outgrows a width of sqrt(Q)",
            f"{POLICY_LOSS}.band_center=realized",
        )


def band_beyond_use(launch: Launch) -> Iterator[Finding]:
    """An eps taken for a ratio bound."""
    if launch.half_width is not None and launch.half_width > _WIDEST_USEFUL_BAND:
        default = fspo_verl.loss.Band()
        yield Finding(
            "warning",
            "band_beyond_use",
            f"{POLICY_LOSS}.eps_high={launch.band.eps_high:g} is a log-ratio of {launch.half_width:.3g} at "
            f"data.max_response_length={launch.max_response_length}",
            "the clip will never act on long responses; eps is not a ratio bound like clip_ratio=0.2",
            f"{POLICY_LOSS}.eps_low={default.eps_low} {POLICY_LOSS}.eps_high={default.eps_high} "
            f"{POLICY_LOSS}.eps_dual={default.eps_dual}",
        )


def rollout_log_probs(launch: Launch) -> Iterator[Finding]:
    """A band that has to hold two engines' disagreement as well."""
    if launch.bypasses:
        yield Finding(
            "warning",
            "rollout_log_probs",
            "algorithm.rollout_correction.bypass_mode=True takes the rollout engine's log-probs as old",
            "the band must also absorb the mismatch between engine and trainer, and the staleness of the responses",
            "algorithm.rollout_correction.bypass_mode=False, or a wider eps",
        )


def followed_snapshot(launch: Launch) -> Iterator[Finding]:
    """An asynchronous launch that loses updates as it looks up its old policy: read in verl 0.9.1, not run on GPUs."""
    if OmegaConf.select(launch.config, "async_training") is None or launch.bypasses:
        return
    key = f"{ACTOR}.fsdp_config.param_offload"
    if launch.actor.strategy in ("fsdp2", "veomni") and OmegaConf.select(launch.config, key):
        yield Finding(
            "warning",
            "followed_snapshot",
            f"{key}=True in the asynchronous trainer",
            "verl keeps offloaded weights by reference, not as a copy: those of the last sync, restored for the old "
            "log-probs, then overwrite the ones that train",
            f"{key}=False",
        )


# --- notes -----------------------------------------------------------------------------------------------------------


def band_in_effect(launch: Launch) -> Finding:
    """The band, and what it is as importance-sampling ratios at a tenth of the longest response and at the longest."""
    text = f"policy loss fspo: {launch.band.describe()}"
    longest = launch.max_response_length
    if launch.half_width is not None and launch.band.band_center != "realized":
        ratios = band_as_ratios(launch.band, [max(1, longest // 10), longest])
        text += "; as ratios " + ", ".join(f"{low:.3g} to {high:.3g} at L={n}" for n, (low, high) in ratios.items())
    return Finding("note", "band_in_effect", text)


def band_as_ratios(band: "fspo_verl.loss.Band", lengths: list[int]) -> dict[int, tuple[float, float]]:
    """Length -> lowest and highest unclipped ratio exp(S), for a band that does not depend on the data."""
    import torch

    length = torch.tensor(lengths, dtype=torch.float64)
    low, high, _ = band.edges(length, torch.ones_like(length))  # these bands read of Q only that it is not 0
    return dict(zip(lengths, zip(low.exp().tolist(), high.exp().tolist(), strict=True), strict=True))


_ANY_LAUNCH = (dead_group_value, hidden_files, overridden_group, unregistered_loss, changed_on_resume)
_PACKAGE_LAUNCH = (used_records_dir, one_step_per_rollout, followed_snapshot, remote_code, unread_grad_clip)
_BAND_FIELDS = (unknown_fields, band_fields)
_FSPO_LAUNCH = (
    idle_clip_ratio,
    mean_over_own_length,
    varying_scale,
    always_clipped_gradient,
    one_sided_band,
    band_beyond_use,
    rollout_log_probs,
)
