# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Resumes: which loss a run has trained until its checkpoint, and whether this launch goes on with another.

verl's checkpoints hold no config. :func:`keep` notes the loss of a launch beside them.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fspo_verl import adaptive, output
from fspo_verl.band import DUAL
from fspo_verl.config import Observation
from fspo_verl.findings import Finding
from fspo_verl.keys import ACTOR, GONE, POLICY_LOSS
from fspo_verl.launch.hydra_files import as_value
from fspo_verl.launch.view import KEPT_LOSSES, TRACKER, Launch, check, warning
from fspo_verl.observe import attempts

# What shapes the loss besides ``policy_loss`` itself.
_ACTOR_KEYS = (
    *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "loss_scale_factor"),
    *("entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
)


@check(needs="folders")
def lost_checkpoint(launch: Launch) -> Iterator[Finding]:
    """A tracker of checkpoints that names a checkpoint which is gone."""
    step = launch.tracked_step
    if step is not None and launch.resume_point is None:
        tracker = Path(launch.config.trainer.default_local_dir) / TRACKER
        what = f"{tracker} names a checkpoint of step {step}, which is gone"
        yield warning(what, "verl starts anew, and only prints it", "write the step of one that is there, or remove it")


def loss_settings(launch: Launch) -> dict:
    """Everything in ``actor_rollout_ref.actor`` that shapes the loss, by key; how it is observed does not count.

    Of a band the values in effect count, however they are set.

    Raises:
        ValueError: a field of the band has a bad value.
    """
    if launch.is_fspo:
        # to_json has null where there is no edge, and in the config that is inf.
        band = {key: "inf" if key.startswith("eps") and v is None else v for key, v in launch.band.to_json().items()}
        policy_loss = {"loss_mode": launch.loss_mode} | band | {"target_clip_rate": launch.band.target_clip_rate}
    else:
        idle = {field.name for field in dataclasses.fields(Observation)} | {"_target_"}
        set_there: Any = OmegaConf.to_container(launch.policy_loss, resolve=True)
        policy_loss = {key: value for key, value in set_there.items() if key not in idle}
    settings = {f"policy_loss.{key}": value for key, value in policy_loss.items()}
    return settings | {key: launch.actor.get(key) for key in _ACTOR_KEYS}


@check(needs="loss")
def changed_on_resume(launch: Launch) -> Iterator[Finding]:
    """A run that goes on from a checkpoint with another loss than trained it, as far as that is known."""
    if (resumed := launch.resume_point) is None:
        return
    folder, step = resumed
    resumes = f"this run resumes after step {step}"
    kept = _kept_until(launch)
    if not kept:
        what = f"{resumes}, and which loss trained it until then is not known"
        fix = "compare .hydra/config.yaml of that run with this one; the loss of this launch is kept from now on"
        yield warning(what, f"{KEPT_LOSSES} in {folder} does not say", fix, id="unknown_before_resume")
        return
    before, now = kept[-1]["loss"], loss_settings(launch)
    other_loss = "its later steps train another loss"
    for name, instead in GONE.items():
        if (value := before.get(f"policy_loss.{name}")) is not None:
            yield warning(f"{resumes}, until which it trained with {POLICY_LOSS}.{name}={value}", other_loss, instead)
    changed = [key for key in now if key in before and as_value(now[key]) != as_value(before[key])]
    eps_file = folder / f"global_step_{step}" / "actor" / adaptive.FILE
    idle = _taken_from_the_checkpoint(changed, launch, before) if eps_file.exists() else []
    if idle:
        ignored = ", ".join(f"{ACTOR}.{key}={as_value(now[key])}" for key in idle)
        why = "target_clip_rate goes on with the eps of the checkpoint"
        fix = f"to start from the eps of this launch, remove {eps_file}"
        yield warning(f"{resumes} with {ignored}, which has no effect", why, fix)
    if acts := [key for key in changed if key not in idle]:
        values = [f"{ACTOR}.{key}={as_value(now[key])} (until then {as_value(before[key])})" for key in acts]
        fix = f"if that is not meant: {' '.join(_back_to(before, acts))}"
        yield warning(f"{resumes} with {', '.join(values)}", other_loss, fix)


def _taken_from_the_checkpoint(changed: list[str], launch: Launch, before: dict) -> list[str]:
    """Of the changed keys those that target_clip_rate takes from the checkpoint, as long as the width is the same."""
    is_adaptive = launch.is_fspo and launch.band.target_clip_rate is not None
    if not is_adaptive or "policy_loss.length_power" in changed:  # the eps there is in units of another width
        return []
    idle = ["policy_loss.eps_low", "policy_loss.eps_high"]
    high, dual = before.get("policy_loss.eps_high"), before.get("policy_loss.eps_dual")
    if launch.policy_loss.get("eps_dual") is None and isinstance(high, float) and dual == DUAL * high:
        idle.append("policy_loss.eps_dual")  # which follows the upper side, as it did before
    return [key for key in changed if key in idle]


def _back_to(before: dict, changed: list[str]) -> list[str]:
    """Overrides with which the loss before goes on."""
    back = [f"{ACTOR}.{key}={as_value(before[key])}" for key in changed]
    if {"policy_loss.eps_low", "policy_loss.eps_high"} <= set(changed):  # beside both, eps has no effect and is refused
        return [f"{POLICY_LOSS}.eps=null", *back]
    return back


def keep(launch: Launch) -> None:
    """Note what the launch trains with beside its checkpoints, after what is known of those it goes on from.

    Raises:
        OSError: the folder cannot be written.
    """
    kept = _kept_until(launch)
    now = {"loss": loss_settings(launch), "records_dir": launch.policy_loss.get("records_dir")}
    if not kept or kept[-1] | now != kept[-1]:
        _, step = launch.resume_point or (None, 0)
        kept.append({"after_step": step, **now})
    file = Path(launch.config.trainer.default_local_dir) / KEPT_LOSSES
    output.write_whole([(file, json.dumps(kept, indent=1).encode())])


def records_to_go_on_with(launch: Launch) -> str | None:
    """The folder of the records of the run that a launch resumes; None if there is none, or it is of another run."""
    checkpoints = Path(launch.config.trainer.default_local_dir)
    resumed = launch.resume_point
    if resumed is None or resumed[0].resolve() != checkpoints.resolve():  # a branch is a run of its own
        return None
    folders = [Path(entry["records_dir"]) for entry in reversed(_kept_until(launch)) if entry["records_dir"]]
    own = (str(folder) for folder in folders if folder.is_dir() and not attempts.why_taken(folder, checkpoints))
    return next(own, None)


def _kept_until(launch: Launch) -> list[dict]:
    """The entries up to the checkpoint; later ones belong to steps that will be done again. Empty if broken."""
    if (resumed := launch.resume_point) is None or not launch.resumes_ours:
        return []
    folder, step = resumed
    try:
        entries = json.loads((folder / KEPT_LOSSES).read_text())
        kept = [{"records_dir": None, **one, "loss": dict(one["loss"])} for one in entries]
        return [entry for entry in kept if entry["after_step"] < step]
    except (KeyError, TypeError, ValueError):
        return []
