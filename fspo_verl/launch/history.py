# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The loss a run's checkpoints were trained with, kept beside them, so that a resume that changes it can be told.

verl's checkpoints hold no config. ``policy_loss.json`` in ``trainer.default_local_dir`` does: a list, a new entry for
every change, ``{"after_step": n, "loss": {key: value}}``.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

import fspo_verl.files
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
    """The step of the checkpoint that the tracker names, be it there or not; None where a launch has none to follow.

    Raises:
        ValueError: the tracker holds no number.
    """
    tracker = Path(config.trainer.default_local_dir) / TRACKER
    return int(tracker.read_text()) if config.trainer.resume_mode == "auto" and tracker.exists() else None


def saved_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, finished or not."""
    names = (re.fullmatch(r"global_step_(\d+)", path.name) for path in folder.glob("global_step_*"))
    return [int(name[1]) for name in names if name]


def point(config: DictConfig) -> tuple[Path, int] | None:
    """Folder of the checkpoints, and training step, from which a launch goes on; None if it starts anew.

    verl starts anew where the checkpoint that the tracker names is gone, and fails where it names none.
    """
    trainer = config.trainer
    with contextlib.suppress(ValueError):
        if (step := tracked(config)) is not None:
            folder = Path(trainer.default_local_dir)
            return (folder, step) if (folder / f"global_step_{step}").exists() else None
    if trainer.resume_mode == "resume_path":
        checkpoint = Path(str(trainer.resume_from_path))
        step = re.fullmatch(r"global_step_(\d+)", checkpoint.name)
        return checkpoint.parent, int(step[1]) if step else 0
    return None


def loss_settings(config: DictConfig) -> dict:
    """Everything in ``actor_rollout_ref.actor`` that shapes the loss, by key; how it is observed does not count."""
    from fspo_verl.config import Observation  # not while verl is being imported

    actor = config.actor_rollout_ref.actor
    idle = {field.name for field in dataclasses.fields(Observation)} | {"_target_"}
    policy_loss = OmegaConf.to_container(actor.policy_loss, resolve=True)
    settings = {f"policy_loss.{key}": value for key, value in policy_loss.items() if key not in idle}
    return settings | {key: actor.get(key) for key in _ACTOR_KEYS}


def is_kept(config: DictConfig) -> bool:
    """Whether a loss of this package has trained the run that a launch goes on with."""
    resumed = point(config)
    return resumed is not None and (resumed[0] / FILE).exists()


def changed_on_resume(config: DictConfig) -> Iterator[Finding]:
    """A run that goes on from a checkpoint with another loss than trained it, as far as that is known."""
    if (resumed := point(config)) is None:
        return
    folder, step = resumed
    before, silent = None, Launch(config).is_ours and f"{FILE} in {folder} does not say"
    try:
        before = loss_before(config)
    except ValueError as problem:
        silent = str(problem)
    if before is None:
        if silent:
            what = f"this run resumes after step {step}, and which loss trained it until then is not known"
            fix = "compare .hydra/config.yaml of that run with this one; the loss of this launch is kept from now on"
            yield Finding("warning", "unknown_before_resume", what, silent, fix)
        return
    settings = loss_settings(config)
    changed = [key for key in settings if key in before and settings[key] != before[key]]
    settings, before = ({k: "null" if v is None else v for k, v in found.items()} for found in (settings, before))
    if changed:
        yield Finding(
            "warning",
            "changed_on_resume",
            f"this run resumes after step {step} with "
            + ", ".join(f"{ACTOR}.{key}={settings[key]} (until then {before[key]})" for key in changed),
            "its later steps train another loss than its earlier ones",
            "if that is not meant: " + " ".join(f"{ACTOR}.{key}={before[key]}" for key in changed),
        )


def loss_before(config: DictConfig) -> dict | None:
    """The :func:`loss_settings` that the checkpoint of a resume was trained with; None if it is not known.

    Raises:
        ValueError: the file that tells is broken.
    """
    history = _history(config)
    return history[-1]["loss"] if history else None


def keep(config: DictConfig) -> None:
    """Note what the launch trains with beside its checkpoints, after what is known of those it goes on from.

    A broken file is written anew.

    Raises:
        OSError: the folder cannot be written.
    """
    history, settings = [], loss_settings(config)
    with contextlib.suppress(ValueError):
        history = _history(config)
    if not history or history[-1]["loss"] != settings:
        _, step = point(config) or (None, 0)
        history.append({"after_step": step, "loss": settings})
    file = Path(config.trainer.default_local_dir) / FILE
    fspo_verl.files.write_whole([(file, json.dumps(history, indent=1).encode())])


def _history(config: DictConfig) -> list[dict]:
    """The entries up to the checkpoint; later ones belong to steps that will be done again.

    Raises:
        ValueError: the file is broken; names it.
    """
    if (resumed := point(config)) is None:
        return []
    folder, step = resumed
    file = folder / FILE
    if not file.exists():
        return []
    try:
        entries = list.copy(json.loads(file.read_text()))
        return [{"after_step": e["after_step"], "loss": dict(e["loss"])} for e in entries if e["after_step"] < step]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is broken ({error})") from None
