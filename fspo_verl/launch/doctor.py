# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Examine an installation and a launch, before anything is trained.

  fspo-verl doctor                                          the installation
  fspo-verl doctor algorithm.policy_loss=fspo data.train_batch_size=512 ...
                                                            ... and what these overrides make of verl's main_ppo
  fspo-verl doctor -- python3 -m verl.trainer.main_ppo --config-name fspo_trainer ...
                                                            ... and a whole command line, of any of its mains

The config is composed by the main itself, which is stopped where it would go on. Nothing else starts.

Exit code: 0 without errors (warnings are printed), 1 with errors, or with --strict warnings; 2 for a wrong call.
"""

import argparse
import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from omegaconf import DictConfig

from fspo_verl import findings, output, verl_patches, versions
from fspo_verl.band import Band
from fspo_verl.findings import ERROR, NOTE, SEVERITIES, WARNING, Finding
from fspo_verl.keys import ACTOR, GROUP, POLICY_LOSS
from fspo_verl.launch import installation, override
from fspo_verl.launch.view import Launch, check, error, note, warning
from fspo_verl.observe.noise import EPS_IN_SIGMA

DEFAULT_MAIN = "verl.trainer.main_ppo"
_DEFAULT_OVERRIDES = [f"{GROUP}=fspo"]
_ROLLOUT = "actor_rollout_ref.rollout"
# Spread of a token's log-ratio by bfloat16 alone, in dynamic batches: scripts/bench/noise.py on a CPU, and noise_8b.py,
# of a random model of Qwen3-8B's shape, on an H100.
_BF16_SIGMA = (0.0035, 0.14)
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}  # by their modules


def main(args: argparse.Namespace) -> int:
    """Print the findings; without a launch, those of verl's defaults with fspo. Returns the exit code."""
    module, overrides = split_command(args.launch)
    if os.getcwd() not in sys.path:  # where `python -m` looks first: in a checkout of verl, that one runs
        sys.path.insert(0, os.getcwd())
    if versions.installed("verl") is None:
        raise ValueError(f"verl is not installed in {sys.prefix}: pip install 'verl{installation.SUPPORTED_VERL}'")
    found = examine(module, overrides)
    if not args.launch:  # of verl's defaults no more counts than that they compose
        found = [one for one in found if one.severity == ERROR]
        found.append(note("No launch given; verl's defaults compose with algorithm.policy_loss=fspo", id="example"))
    found = sorted([*found, *installation.findings()], key=lambda one: SEVERITIES.index(one.severity))
    counts = Counter(one.severity for one in found)
    if args.json:
        told = {"main": module, "overrides": overrides, "errors": counts[ERROR], "warnings": counts[WARNING]}
        print(json.dumps(told | {"findings": [one.to_json() for one in found]}, indent=1))
    else:
        said = [f"{counts[severity]} {severity}{'s' * (counts[severity] != 1)}" for severity in (ERROR, WARNING)]
        print(f"fspo-verl doctor: {', '.join(said)}")
        findings.show(found)
        output.show([("next:", _next_step(found[0], args.launch))], widths=(8,))
    return findings.exit_code(found, args.strict)


def _next_step(gravest: Finding, launch: list[str]) -> str:
    if gravest.severity != NOTE:
        return gravest.advice
    if not launch:
        return f"fspo-verl doctor -- python3 -m {DEFAULT_MAIN} ..., the command of your launch"
    return "start the launch" if "-m" in launch else f"python3 -m {DEFAULT_MAIN} {shlex.join(launch)}"


def split_command(launch: list[str]) -> tuple[str, list[str]]:
    """The main's module and its arguments, from a command line with ``-m`` or from overrides alone.

    Raises:
        ValueError: neither one: it does not run a module of Python, or its first word is no override.
    """
    if "-m" in launch[:-1]:
        position = launch.index("-m")
        return launch[position + 1], launch[position + 2 :]
    if launch and not re.match(r"[-~]|[^=]+=", launch[0]):
        raise ValueError(
            f"{launch[0]} begins neither overrides (KEY=VALUE ...) nor a command with `-m MAIN` (a module of Python); "
            "for a script, write down the command that it runs"
        )
    return DEFAULT_MAIN, launch or list(_DEFAULT_OVERRIDES)


def examine(module: str, overrides: list[str]) -> list[Finding]:
    """All findings about the launch."""
    if installation.too_old() is not None:  # nothing of it can be composed here
        return []
    from fspo_verl.launch import checks

    config, found = compose(module, overrides)
    if config is not None and not findings.exit_code(found):
        found += checks.run(Launch(config), "doctor")
    return found


# --- the config, from the main that would run ------------------------------------------------------------------------


def compose(module: str, overrides: list[str]) -> tuple[DictConfig | None, list[Finding]]:
    """What stops Hydra or the import of the main; the config, if nothing does, and what its checks find."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from fspo_verl.launch import checks

    def look(config):
        if Launch(config).get(ACTOR) is None:
            raise ValueError(f"the config has no {ACTOR}: no launch of policy training")
        found = checks.findings(config)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            what = "of a launch with --multirun only the first job is examined"
            found.append(warning(what, fix="examine each job by its own overrides", id="multirun"))
        return config, found

    try:
        return with_config(module, overrides, look)
    except Exception as problem:
        text = " ".join(str(problem).split()).removesuffix(".")
        fix = "correct what it names, and run this again"
        return None, [error(f"{module} composes no config", text, fix, id="composition")]


class _Composed(BaseException):
    """Leaves a verl main at the point where it hands its config to verl."""


def with_config(module: str, arguments: list[str], look: Callable):
    """Run a verl main as ``python -m`` does, up to its call of ``auto_set_device(config)``; returns ``look(config)``.

    That call is where a launch is checked, too (:mod:`fspo_verl.launch.hook`). Hydra's own state (config sources,
    choices of groups) is there while ``look`` runs. Hydra's output goes to a temporary folder.

    Raises:
        ValueError: the module makes no such call, so that it could not be stopped.
        Exception: what Hydra raises on a config that it cannot compose.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or "auto_set_device(config)" not in Path(spec.origin).read_text():
        raise ValueError(f"{module} is no main of verl: it does not call auto_set_device(config)")

    def take(config):
        raise _Composed(look(config))

    with tempfile.TemporaryDirectory() as scratch:
        folders = [override(f"hydra.{mode}.dir", scratch) for mode in ("run", "sweep")]
        # Hydra wants all overrides together: ours come after the last one that is given.
        given = [place for place, text in enumerate(arguments, 1) if re.match(r"~|[^-=][^=]*=", text)]
        last = max(given, default=len(arguments))
        argv = [spec.origin, *arguments[:last], *folders, "hydra.output_subdir=null", *arguments[last:]]
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"),  # Hydra raises its errors, and prints none
            verl_patches.handed_over(take),
            output.reserved(),  # what verl warns about, it says again at the launch
        ):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except _Composed as composed:
                return composed.args[0]
    raise ValueError(f"{module} ended before it handed over its config")


# --- checks of the doctor alone --------------------------------------------------------------------------------------


@check(needs="doctor")
def not_selected(launch: Launch) -> Iterator[Finding]:
    """A launch that trains without this package."""
    if not launch.is_ours:
        what, why = f"{POLICY_LOSS}.loss_mode={launch.loss_mode} trains", "neither FSPO nor one of its baselines"
        yield warning(what, why, f"{GROUP}=fspo")


@check(needs="doctor")
def batches(launch: Launch) -> Iterator[Finding]:
    """Responses and optimiser steps between two refreshes of the old policy."""
    prompts, n = launch.prompts_per_rollout, launch.config.actor_rollout_ref.rollout.n
    what = f"{prompts} prompts x {n} = {prompts * n:,} responses per rollout"
    mini, epochs, steps = launch.actor.ppo_mini_batch_size, launch.actor.ppo_epochs, launch.optimizer_steps_per_rollout
    said = f"{steps} optimiser step{'s' * (steps != 1)} on them ({prompts} / {mini}, rounded up, x {epochs})"
    yield note(f"{what}, {said}")


@check(needs="doctor")
def noise_of_half_precision(launch: Launch) -> Iterator[Finding]:
    """Log-probs of FSDP in bfloat16, whose noise a narrow band may not leave behind; docs/noise.md has its size."""
    if not launch.is_fspo or launch.moves_nothing:  # of which it is said that the clip takes nothing but noise
        return
    fsdp, band = launch.actor.get("fsdp_config"), launch.band
    precision = fsdp and (fsdp.get("mixed_precision") or {"param_dtype": "bf16"}).get("param_dtype", "bf16")
    low, high = (EPS_IN_SIGMA * sigma for sigma in _BF16_SIGMA)
    eps = min(band.low, band.high)
    narrow = band.form == Band().form and eps < high
    same = _same_micro_batches(launch)
    if precision in ("bf16", "bfloat16") and narrow and same:
        what = f"log-probs in bfloat16 and eps={eps:g}, and updates in other micro-batches than old log-probs"
        why = f"noise alone fills a band of eps < {low:.2g} to {high:.2g}, by model, machine and micro-batches"
        fix = f"{' '.join(same)}, or an eps of {EPS_IN_SIGMA:.1f} times fspo/noise_sigma in the first step"
        yield warning(what, why, fix)


def _same_micro_batches(launch: Launch) -> list[str]:
    """Overrides with which old log-probs and updates are cut into micro-batches of the same rows; none if they are."""
    size = launch.actor.get("ppo_micro_batch_size_per_gpu") or 2  # as in scripts/launch/body.sh
    wanted: dict[str, bool | int] = {f"{ACTOR}.use_dynamic_bsz": False}
    wanted |= {f"{_ROLLOUT}.log_prob_use_dynamic_bsz": False} | ({f"{ACTOR}.shuffle": False} if size > 1 else {})
    wanted |= {f"{ACTOR}.ppo_micro_batch_size_per_gpu": size, f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": size}
    return [f"{key}={value}" for key, value in wanted.items() if launch.get(key) != value]


@check(needs="doctor")
def engine(launch: Launch) -> Iterator[Finding]:
    """A rollout engine that is not installed here; a note where a cluster is named."""
    name = launch.get(f"{_ROLLOUT}.name")
    if name in _ENGINES and importlib.util.find_spec(_ENGINES[name]) is None:
        what = f"{_ROLLOUT}.name={name} is not installed in {sys.prefix}"
        fix = f"pip install {name}, or another {_ROLLOUT}.name"
        yield _here(launch)(what, "no worker of this machine can generate", fix)


@check(needs="doctor")
def gpus(launch: Launch) -> Iterator[Finding]:
    """Fewer GPUs on this machine than the launch asks for; a note where a cluster is named."""
    from verl.utils import device

    pools = [launch.get(section) for section in ("trainer", "rollout" if launch.get("rollout") else _ROLLOUT)]
    asked = sum((pool.get("nnodes") or 0) * (pool.get("n_gpus_per_node") or 0) for pool in pools)
    visible = device.get_torch_device().device_count()
    if device.get_device_name() != "cpu" and visible < asked:
        what = f"the launch asks for {asked} GPUs (nnodes x n_gpus_per_node), and {visible} are visible here"
        fix = f"trainer.n_gpus_per_node={visible}" if visible else f"start it on a machine with {asked} GPUs"
        yield _here(launch)(what, "Ray waits for the others, and verl ends", fix)


def _here(launch: Launch) -> Callable:
    """How grave it is where this machine lacks something: in a cluster others may have it."""
    several = (launch.get("trainer.nnodes") or 1) > 1 or launch.get("ray_kwargs.ray_init.address")
    return note if several or os.environ.get("RAY_ADDRESS") else warning
