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
    if not (kept := _kept_until(launch)):
        what = f"this run resumes after step {step}, and which loss trained it until then is not known"
        fix = "compare .hydra/config.yaml of that run with this one; the loss of this launch is kept from now on"
        yield warning(what, f"{KEPT_LOSSES} in {folder} does not say", fix, id="unknown_before_resume")
        return
    losses = loss_settings(launch), kept[-1]["loss"]
    now, before = ({key: as_value(value) for key, value in loss.items()} for loss in losses)
    for name in GONE:
        if (value := kept[-1]["loss"].get(f"policy_loss.{name}")) is not None:
            what = f"this run resumes after step {step}, until which it trained with {POLICY_LOSS}.{name}={value}"
            yield warning(what, "its later steps train another loss", GONE[name])
    changed = [key for key in now if key in before and now[key] != before[key]]
    eps = folder / f"global_step_{step}" / "actor" / adaptive.FILE
    if idle := _without_effect(launch, changed, eps):
        values = ", ".join(f"{ACTOR}.{key}={now[key]}" for key in idle)
        what = f"this run resumes after step {step} with {values}, which has no effect"
        why = "target_clip_rate goes on with the eps of the checkpoint"
        yield warning(what, why, f"to start from the eps of this launch, remove {eps}")
        old = kept[-1]["loss"]
        if launch.policy_loss.get("eps_dual") is None and _dual_follows(old):
            idle.append("policy_loss.eps_dual")
        changed = [key for key in changed if key not in idle]
    if changed:
        values = ", ".join(f"{ACTOR}.{key}={now[key]} (until then {before[key]})" for key in changed)
        what, why = f"this run resumes after step {step} with {values}", "its later steps train another loss"
        sides = {"policy_loss.eps_low", "policy_loss.eps_high"}
        back = [f"{ACTOR}.policy_loss.eps=null"] if sides <= set(changed) else []  # or eps would have no effect
        back += [f"{ACTOR}.{key}={before[key]}" for key in changed]
        yield warning(what, why, f"if that is not meant: {' '.join(back)}")


def _without_effect(launch: Launch, changed: list[str], eps: Path) -> list[str]:
    """Of the changed keys those that target_clip_rate takes from the checkpoint, as long as the width is the same."""
    if not (launch.is_fspo and launch.band.target_clip_rate and eps.exists()):
        return []
    if "policy_loss.length_power" in changed:
        return []  # the checkpoint's eps is in units of another width
    return [key for key in changed if key in ("policy_loss.eps_low", "policy_loss.eps_high")]


def _dual_follows(loss: dict) -> bool:
    """Whether the dual clip of a loss is at its default, three times the upper side."""
    dual, high = loss.get("policy_loss.eps_dual"), loss.get("policy_loss.eps_high")
    return isinstance(high, float) and dual == DUAL * high


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
    folders = [entry["records_dir"] for entry in _kept_until(launch) if entry["records_dir"]]
    known = [
        folder for folder in folders if Path(folder).is_dir() and not attempts.why_taken(Path(folder), checkpoints)
    ]
    return known[-1] if known else None


def _kept_until(launch: Launch) -> list[dict]:
    """The entries up to the checkpoint; later ones belong to steps that will be done again. Empty if broken."""
    if (resumed := launch.resume_point) is None or not launch.resumes_ours:
        return []
    folder, step = resumed
    try:
        entries = json.loads((folder / KEPT_LOSSES).read_text())
        kept = [
            {"after_step": one["after_step"], "loss": dict(one["loss"]), "records_dir": one.get("records_dir")}
            for one in entries
        ]
        return [entry for entry in kept if entry["after_step"] < step]
    except (KeyError, TypeError, ValueError):
        return []
