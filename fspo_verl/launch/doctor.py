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
import contextlib
import dataclasses
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

from omegaconf import DictConfig

from fspo_verl import output, verl_patches, versions
from fspo_verl.band import Band
from fspo_verl.keys import ACTOR, GROUP, POLICY_LOSS
from fspo_verl.launch import installation, override
from fspo_verl.launch.view import SEVERITIES, Finding, Launch
from fspo_verl.observe.noise import EPS_IN_SIGMA

DEFAULT_MAIN = "verl.trainer.main_ppo"
_DEFAULT_OVERRIDES = [f"{GROUP}=fspo"]
# Spread of a token's log-ratio by bfloat16 alone: dynamic batches on a CPU, 8 rows and 1 on an H200.
_BF16_SIGMA = (0.0035, 0.066)
_EXAMPLE = "No launch given; checked verl's defaults with algorithm.policy_loss=fspo"


def main(args: argparse.Namespace) -> int:
    """Print the findings; returns the exit code that the module's text promises."""
    module, overrides = split_command(args.launch)
    if os.getcwd() not in sys.path:  # where `python -m` looks first: in a checkout of verl, that one runs
        sys.path.insert(0, os.getcwd())
    if versions.installed("verl") is None:
        raise ValueError(f"verl is not installed in {sys.prefix}: pip install 'verl{installation.SUPPORTED_VERL}'")
    findings = examine(module, overrides)
    if not args.launch:
        findings.append(Finding("note", "example", _EXAMPLE))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    counts = Counter(finding.severity for finding in findings)
    if args.json:
        told = {"main": module, "overrides": overrides, "errors": counts["error"], "warnings": counts["warning"]}
        print(json.dumps(told | {"findings": [*map(dataclasses.asdict, findings)]}, indent=1))
    else:
        _print(findings, counts, args.launch)
    return int(counts["error"] > 0 or (args.strict and counts["warning"] > 0))


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
    """All findings about the installation and the launch."""
    if installation.too_old() is not None:  # nothing of it can be composed here
        return [*installation.findings()]
    from fspo_verl.launch import checks

    config, findings = compose(module, overrides)
    if config is not None:
        launch = Launch(config)
        sound = not any(finding.severity == "error" for finding in findings)
        own = (batches, noise_of_half_precision) if launch.is_fspo else (batches,)
        findings += [*selects_no_loss_of_ours(launch), *(checks.run(own, launch) if sound else ())]
    return [*installation.findings(), *findings]


# --- the config, from the main that would run ------------------------------------------------------------------------


def compose(module: str, overrides: list[str]) -> tuple[DictConfig | None, list[Finding]]:
    """What stops Hydra or the import of the main; the config, if nothing does, and what its checks find."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from fspo_verl.launch import checks

    def look(config):
        if Launch(config).get(ACTOR) is None:
            raise ValueError(f"the config has no {ACTOR}: no launch of policy training")
        findings = checks.findings(config)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            what = "of a launch with --multirun only the first job is examined"
            findings.append(Finding("warning", "multirun", what, fix="examine each job by its own overrides"))
        return config, findings

    try:
        return with_config(module, overrides, look)
    except Exception as error:
        what = f"{module} composes no config"
        return None, [Finding("error", "composition", what, str(error).strip())]


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
            _command_line(argv),
            verl_patches.handed_over(take),
            output.reserved(),  # what verl warns about, it says again at the launch
        ):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except _Composed as composed:
                return composed.args[0]
    raise ValueError(f"{module} ended before it handed over its config")


@contextlib.contextmanager
def _command_line(argv: list[str]) -> Iterator[None]:
    """Run a Hydra application as with these words, and have it raise its errors instead of printing them."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


# --- checks of the doctor alone --------------------------------------------------------------------------------------


def selects_no_loss_of_ours(launch: Launch) -> Iterator[Finding]:
    """A launch that trains without this package."""
    if not launch.is_ours:
        what, why = f"{POLICY_LOSS}.loss_mode={launch.loss_mode} trains", "neither FSPO nor one of its baselines"
        yield Finding("warning", "not_selected", what, why, f"{GROUP}=fspo")


def batches(launch: Launch) -> Iterator[Finding]:
    """Responses and optimiser steps between two refreshes of the old policy."""
    prompts, n = launch.prompts_per_rollout, launch.config.actor_rollout_ref.rollout.n
    what = f"{prompts} prompts x {n} = {prompts * n:,} responses per rollout"
    mini, epochs = launch.actor.ppo_mini_batch_size, launch.actor.ppo_epochs
    steps = f"{launch.optimizer_steps_per_rollout} optimiser steps on them ({prompts} / {mini}, rounded up, x {epochs})"
    yield Finding("note", "batches", f"{what}, {steps}")


def noise_of_half_precision(launch: Launch) -> Iterator[Finding]:
    """Log-probs of FSDP in bfloat16, whose noise a narrow band may not leave behind; docs/noise.md has its size."""
    fsdp, band = launch.actor.get("fsdp_config"), launch.band
    precision = fsdp and (fsdp.get("mixed_precision") or {"param_dtype": "bf16"}).get("param_dtype", "bf16")
    low, high = (EPS_IN_SIGMA * sigma for sigma in _BF16_SIGMA)
    eps = min(band.low, band.high)
    narrow = band.form == Band().form and eps < high
    if precision in ("bf16", "bfloat16") and narrow and not _same_micro_batches(launch):
        what = f"log-probs in bfloat16 and eps={eps:g}"
        why = f"noise alone fills a band of eps < {low:.2g} to {high:.2g}, by model, machine and micro-batches"
        fix = f"an eps of {EPS_IN_SIGMA:.1f} times fspo/noise_sigma in the first step; docs/noise.md removes the noise"
        yield Finding("warning", "noise_of_half_precision", what, why, fix)


def _same_micro_batches(launch: Launch) -> bool:
    """Whether old log-probs and updates are computed in micro-batches of the same rows, and so without noise."""
    actor, rollout = launch.actor, launch.config.actor_rollout_ref.rollout
    size = actor.get("ppo_micro_batch_size_per_gpu")
    dynamic = actor.get("use_dynamic_bsz") or rollout.get("log_prob_use_dynamic_bsz")
    same = size is not None and size == rollout.get("log_prob_micro_batch_size_per_gpu") and not dynamic
    return same and (size == 1 or not actor.get("shuffle"))


# --- output ----------------------------------------------------------------------------------------------------------


def _print(findings: list[Finding], counts: Counter, launch: list[str]) -> None:
    """The conclusion, the findings, and what to do next."""
    said = [f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}" for severity in ("error", "warning")]
    print(f"fspo-verl doctor: {', '.join(said)}")
    for finding in findings:
        lines = [(finding.severity, finding.what), ("", finding.why), ("fix:", finding.fix)]
        output.show([line for line in lines if line[1]], widths=(8,))
    output.show([("next:", _next_step(counts["error"], launch))], widths=(8,))


def _next_step(errors: int, launch: list[str]) -> str:
    if errors:
        return "fix the errors, and run this again"
    if not launch:
        return f"fspo-verl doctor -- python3 -m {DEFAULT_MAIN} ..., the command of your launch"
    return "start the launch" if "-m" in launch else f"python3 -m {DEFAULT_MAIN} {shlex.join(launch)}"
