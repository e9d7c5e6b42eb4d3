# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The loss a run's checkpoints were trained with, kept beside them, so that a resume that changes it can be told.

verl's checkpoints hold no config. ``policy_loss.json`` in ``trainer.default_local_dir`` does: a list, a new entry for
every change, ``{"after_step": n, "loss": {key: value}}``.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import fspo_verl.output
from fspo_verl.launch.view import ACTOR, Finding, Launch

FILE = "policy_loss.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""In a folder of checkpoints, the step of the last one; what verl's find_latest_ckpt_path looks for."""

# What shapes the loss besides ``policy_loss`` itself.
_ACTOR_KEYS = (
    *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "loss_scale_factor"),
    *("entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
)


def tracked(config: DictConfig) -> int | None:
    """The step of the checkpoint that the tracker names, be it there or not; None where a launch has none to follow."""
    tracker = Path(config.trainer.default_local_dir) / TRACKER
    text = tracker.read_text().strip() if config.trainer.resume_mode == "auto" and tracker.exists() else ""
    return int(text) if text.isdigit() else None  # verl itself fails on a tracker that holds something else


def resume_point(config: DictConfig) -> tuple[Path, int] | None:
    """Folder of the checkpoints, and training step, from which a launch goes on; None if it starts anew.

    verl starts anew where the checkpoint that the tracker names is gone.
    """
    trainer = config.trainer
    if (step := tracked(config)) is not None:
        folder = Path(trainer.default_local_dir)
        return (folder, step) if (folder / f"global_step_{step}").exists() else None
    if trainer.resume_mode == "resume_path":
        checkpoint = Path(str(trainer.resume_from_path))
        name = re.fullmatch(r"global_step_(\d+)", checkpoint.name)
        return checkpoint.parent, int(name[1]) if name else 0
    return None


def loss_settings(config: DictConfig) -> dict:
    """Everything in ``actor_rollout_ref.actor`` that shapes the loss, by key; how it is observed does not count.

    Of a band the values in effect count, however they are set.

    Raises:
        ValueError: a field of the band has a bad value.
    """
    from fspo_verl.config import Observation  # not while verl is being imported

    launch = Launch(config)
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


def is_kept(config: DictConfig) -> bool:
    """Whether a loss of this package has trained the run that a launch goes on with."""
    resumed = resume_point(config)
    return resumed is not None and (resumed[0] / FILE).exists()


def changed_on_resume(config: DictConfig) -> Iterator[Finding]:
    """A run that goes on from a checkpoint with another loss than trained it, as far as that is known."""
    if (resumed := resume_point(config)) is None:
        return
    folder, step = resumed
    if not (history := _history(config)):
        what = f"this run resumes after step {step}, and which loss trained it until then is not known"
        fix = "compare .hydra/config.yaml of that run with this one; the loss of this launch is kept from now on"
        yield Finding("warning", "unknown_before_resume", what, f"{FILE} in {folder} does not say", fix)
        return
    losses = loss_settings(config), history[-1]["loss"]
    now, before = ({key: _as_override(value) for key, value in loss.items()} for loss in losses)
    changed = [key for key in now if key in before and now[key] != before[key]]
    if changed:
        values = ", ".join(f"{ACTOR}.{key}={now[key]} (until then {before[key]})" for key in changed)
        what, why = f"this run resumes after step {step} with {values}", "its later steps train another loss"
        sides = {"policy_loss.eps_low", "policy_loss.eps_high"}
        back = [f"{ACTOR}.policy_loss.eps=null"] if sides <= set(changed) else []  # or eps would have no effect
        back += [f"{ACTOR}.{key}={before[key]}" for key in changed]
        yield Finding("warning", "changed_on_resume", what, why, f"if that is not meant: {' '.join(back)}")


def _as_override(value) -> str:
    """A value as Hydra reads it on a command line."""
    return "null" if value is None else str(value).replace(" ", "")


def keep(config: DictConfig) -> None:
    """Note what the launch trains with beside its checkpoints, after what is known of those it goes on from.

    Raises:
        OSError: the folder cannot be written.
    """
    history, settings = _history(config), loss_settings(config)
    if not history or history[-1]["loss"] != settings:
        _, step = resume_point(config) or (None, 0)
        history.append({"after_step": step, "loss": settings})
    file = Path(config.trainer.default_local_dir) / FILE
    fspo_verl.output.write_whole([(file, json.dumps(history, indent=1).encode())])


def _history(config: DictConfig) -> list[dict]:
    """The entries up to the checkpoint; later ones belong to steps that will be done again. None of a broken file."""
    if (resumed := resume_point(config)) is None or not is_kept(config):
        return []
    folder, step = resumed
    try:
        entries = [(entry["after_step"], dict(entry["loss"])) for entry in json.loads((folder / FILE).read_text())]
        return [{"after_step": after, "loss": loss} for after, loss in entries if after < step]
    except (KeyError, TypeError, ValueError):
        return []
