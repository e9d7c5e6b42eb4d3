# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Examine an installation and a launch, before anything is trained.

  fspo-verl doctor                                          the installation, here and in a Ray worker
  fspo-verl doctor +algorithm.policy_loss=fspo data.train_batch_size=512 ...
                                                            ... and what these overrides make of verl's main_ppo
  fspo-verl doctor -- python3 -m verl.trainer.main_ppo --config-name fspo_trainer ...
                                                            ... and a whole command line: data, model, verl's own checks

The config is composed by the main itself, which is stopped where it would go on. A Ray worker is asked what it sees:
one of the running cluster (RAY_ADDRESS, or the one that `ray start` left on this machine), on every node, or one of a
local Ray that is started for this and stopped again.

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
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist

from fspo_verl import versions, workers

DEFAULT_MAIN = "verl.trainer.main_ppo"
_DEFAULT_OVERRIDES = ["+algorithm.policy_loss=fspo"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fspo-verl doctor``."""
    parser.add_argument("launch", nargs="*", help="Hydra overrides of main_ppo, or after -- a command with -m MAIN")
    parser.add_argument("--plan", action="store_true", help="also show what the launch will do: batches, band, memory")
    parser.add_argument(
        "--sigma", type=float, help="spread of a token's log-ratio (root of actor/fspo/sigma_squared), to judge eps by"
    )
    parser.add_argument("--records", type=Path, metavar="RUN", help="judge eps by the records below this folder")
    parser.add_argument("--no-worker", action="store_true", help="do not ask a Ray worker")
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the findings; returns the exit code that the module's text promises."""
    module, overrides = split_command(args.launch)
    if versions.installed("verl") is None:
        raise ValueError(f"verl is not installed in {sys.prefix}: pip install 'verl{versions.SUPPORTED_VERL}'")
    # Ray starts while this process imports verl, which takes both of them some seconds.
    asked = None if args.no_worker else workers.Workers()
    try:
        found, plan = examine(module, overrides, complete="-m" in args.launch, args=args, asked=asked)
    finally:
        if asked:
            asked.close()
    counts = Counter(finding.severity for finding in found)
    if args.json:
        rows = [dataclasses.asdict(row) for row in plan]
        output = {"main": module, "overrides": overrides, "errors": counts["error"], "warnings": counts["warning"]}
        print(json.dumps(output | {"plan": rows, "findings": [dataclasses.asdict(f) for f in found]}, indent=1))
    else:
        _print(found, plan, counts)
    return int(counts["error"] > 0 or (args.strict and counts["warning"] > 0))


def split_command(launch: list[str]) -> tuple[str, list[str]]:
    """The main's module and its arguments, from a command line with ``-m`` or from overrides alone.

    Raises:
        ValueError: a command line that does not run a module of Python.
    """
    if "-m" in launch[:-1]:
        position = launch.index("-m")
        return launch[position + 1], launch[position + 2 :]
    if launch and (Path(launch[0]).exists() or re.fullmatch(r"(.*/)?python[\d.]*", launch[0])):
        raise ValueError("only overrides, or a command with `-m MAIN`, can be examined: name verl's main by its module")
    return DEFAULT_MAIN, launch or list(_DEFAULT_OVERRIDES)


def examine(module: str, overrides: list[str], complete: bool, args: argparse.Namespace, asked: workers.Workers | None):
    """All findings about the installation and the launch, errors first, and the plan if asked for.

    Args:
        complete: the overrides are a whole launch, so that data, model and verl's own checks count as well.
    """
    from omegaconf import OmegaConf

    from fspo_verl import checks
    from fspo_verl.plan import plan

    def look(config):
        if OmegaConf.select(config, checks.ACTOR) is None:
            raise ValueError(f"the config has no {checks.ACTOR}: no launch of policy training")
        return config, checks.findings(config)

    found, rows, config = [*installation()], [], None
    try:
        config, composed = with_config(module, overrides, look)
    except Exception as error:  # whatever stops Hydra or the import of the main stops the launch
        found.append(checks.Finding("error", "composition", f"{module} composes no config", str(error).strip()))
    else:
        found += [*composed, *selects_no_loss_of_ours(config)]
        if complete:
            found += [*data_files(config), *model_folder(config), *verls_own_checks(module, config)]
        if not any(finding.severity == "error" for finding in composed):
            found += judge_eps(config, args.sigma, args.records)
            rows = plan(config) if args.plan else []
    if asked:
        found += workers.findings(asked, config)
        if complete and config is not None:
            found += workers.gpus(asked, config)
    return checks.by_severity(found), rows


# --- the config, from the main that would run ------------------------------------------------------------------------


class _Composed(BaseException):
    """Leaves a verl main at the point where it hands its config to verl."""


def with_config(module: str, arguments: list[str], look: Callable):
    """Run a verl main as ``python -m`` does, up to its call of ``auto_set_device(config)``; returns ``look(config)``.

    That call is where a launch is checked, too (:mod:`fspo_verl.register`). Hydra's own state (config sources, choices
    of groups) is there while ``look`` runs. Nothing is left behind: Hydra's output goes to a temporary folder.

    Raises:
        ValueError: the module makes no such call, so that it could not be stopped.
        Exception: what Hydra raises on a config that it cannot compose.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or "auto_set_device(config)" not in Path(spec.origin).read_text():
        raise ValueError(f"{module} is no main of verl: it does not call auto_set_device(config)")
    import verl.utils.device

    seen = []

    def take(config):
        seen.append(look(config))
        raise _Composed

    before = sys.argv, verl.utils.device.auto_set_device, os.environ.get("HYDRA_FULL_ERROR")
    with tempfile.TemporaryDirectory() as scratch:
        sys.argv = [spec.origin, *arguments, f"hydra.run.dir={scratch}", "hydra.output_subdir=null"]
        verl.utils.device.auto_set_device = take
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are raised, not printed
        try:
            # verl and Hydra print; stdout is for findings. What verl warns about, it says again at the launch.
            with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except _Composed:
            return seen[0]
        finally:
            sys.argv, verl.utils.device.auto_set_device, full_error = before
            if full_error is None:
                del os.environ["HYDRA_FULL_ERROR"]
    raise ValueError(f"{module} ended before it handed over its config")


# --- checks of this machine ------------------------------------------------------------------------------------------


def installation() -> Iterator:
    """Versions, and whether verl and Hydra find this package here."""
    from importlib import metadata

    from fspo_verl.checks import Finding

    found = {package: versions.installed(package) for package in versions.TESTED}
    text = ", ".join(f"{package} {version or 'not installed'}" for package, version in found.items())
    yield Finding("note", "versions", f"{text}, Python {sys.version.split()[0]}")
    if problem := versions.unsupported_verl():
        yield Finding("error", "verl_version", *problem.split("; "))
    untested = [f"{p} {v}" for p, v in found.items() if v and v not in versions.TESTED[p]]
    if untested:
        tested = "; ".join(f"{package} {', '.join(known)}" for package, known in versions.TESTED.items())
        yield Finding("note", "untested_versions", f"not among the tested versions: {', '.join(untested)}", tested)
    if not any(point.value == "fspo_verl.plugin" for point in metadata.entry_points(group="verl.plugins")):
        why = "the package is imported, not installed"
        yield Finding("error", "entry_point", "verl finds no plugin fspo_verl", why, workers.INSTALL)
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins is None or importlib.util.find_spec("hydra_plugins.fspo_verl_searchpath") is None:
        why = "Hydra does not see the packaged configs, and +algorithm.policy_loss=fspo would be a dead value"
        yield Finding("error", "search_path", "hydra_plugins.fspo_verl_searchpath is missing", why, workers.INSTALL)
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if policy != "auto" and "fspo_verl" not in policy:
        why = "the launch is not checked before Ray starts, and baselines are not observed"
        yield Finding("warning", "plugins_off", f"VERL_USE_EXTERNAL_PLUGINS={policy}", why, "unset it")


# --- checks of the launch that verl or the machine decide -------------------------------------------------------------


def selects_no_loss_of_ours(config) -> Iterator:
    """A launch that trains without this package."""
    from fspo_verl.checks import POLICY_LOSS, Finding, Launch

    launch = Launch(config)
    if not launch.is_ours:
        what, why = f"{POLICY_LOSS}.loss_mode={launch.loss_mode} trains", "neither FSPO nor one of its baselines"
        yield Finding("warning", "not_selected", what, why, "+algorithm.policy_loss=fspo")
    elif not launch.is_fspo:
        yield Finding("note", "observed", f"policy loss {launch.loss_mode}, trained as verl has it and observed")


def data_files(config) -> Iterator:
    """Data sets that are not there."""
    from fspo_verl.checks import Finding

    for key in ("train_files", "val_files"):
        files = config.data[key]
        for file in [files] if isinstance(files, str) else files:
            if "://" not in file and not Path(file).expanduser().exists():
                fix = f"data.{key}=[FILE, ...]; scripts/prepare_data.py makes them"
                yield Finding("error", "data_files", f"data.{key}: {file} does not exist", fix=fix)


def model_folder(config) -> Iterator:
    """A model that is neither a folder with a model nor a name on a hub."""
    from fspo_verl.checks import Finding

    path = str(config.actor_rollout_ref.model.path)
    folder = Path(path).expanduser()
    if "://" in path or (folder / "config.json").is_file():
        return
    key = "actor_rollout_ref.model.path"
    if folder.exists():
        yield Finding("error", "model_folder", f"{key}={path} holds no config.json", fix=f"{key}=FOLDER of the model")
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        yield Finding("note", "model_folder", f"{key}={path} is no folder here: taken for a name on the model hub")
    else:
        yield Finding("error", "model_folder", f"{key}={path} does not exist", fix=f"{key}=FOLDER or NAME/ON-THE-HUB")


def verls_own_checks(module: str, config) -> Iterator:
    """What verl's ``validate_config`` refuses, where the main would call it."""
    from fspo_verl.checks import Finding

    validate = getattr(importlib.import_module(module), "validate_config", None)
    if validate is None:
        return
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    except Exception as error:  # AssertionError, ValueError and Hydra's own
        yield Finding("error", "validate_config", f"verl refuses this config: {error}")


def judge_eps(config, sigma: float | None, records_folder: Path | None) -> list:
    """Whether the band lets (nearly) everything through, or (nearly) nothing, at the spread that was measured.

    Args:
        sigma: standard deviation of a token's log-ratio, nats. S of L tokens is then taken as normal with variance
            Q = L·sigma² and mean −Q/2 (derived here from E_old[e^S] = 1).
        records_folder: a run whose recorded S and L are taken instead.
    """
    from fspo_verl.checks import POLICY_LOSS, Finding, Launch

    launch = Launch(config)
    if not launch.is_fspo or (sigma is None and records_folder is None):
        return []
    if records_folder is not None:
        outside, sigma = _outside_recorded(launch.band, records_folder)
    else:
        outside = {f"L={n}": _outside(launch.band, n, sigma) for n in launch.typical_lengths}
    rates = ", ".join(f"{rate:.2g} at {where}" for where, rate in outside.items())
    found = [Finding("note", "outside_band", f"share of responses outside the band at sigma={sigma:.3g}: {rates}")]
    # The unit of eps is such that the longest response's S has standard deviation 1.
    realized = launch.band.band_width == "realized"
    unit = 1 if realized else sigma * launch.max_response_length ** (0.5 - launch.band.length_power)
    wanted = " ".join(f"{POLICY_LOSS}.eps_{side}={times * unit:.3g}" for side, times in _EPS_IN_UNITS.items())
    if max(outside.values()) < 1 / _responses_per_step(config):
        what = f"eps_low={launch.band.eps_low:g}, eps_high={launch.band.eps_high:g} clip less than one response a step"
        found.append(Finding("warning", "eps_never_binds", what, f"share outside the band: {rates}", wanted))
    crowded = [where for where, rate in outside.items() if rate > 0.5]
    if crowded:
        what = f"eps_low={launch.band.eps_low:g}, eps_high={launch.band.eps_high:g} leave most responses outside"
        drifts = min(outside.values()) < 0.5 and launch.band.band_center == "zero"
        fix = f"{POLICY_LOSS}.band_center=realized (long responses drift), or fewer stale steps" if drifts else wanted
        found.append(Finding("warning", "eps_always_binds", what, f"at {', '.join(crowded)}; {rates}", fix))
    return found


# 2 leaves about 5% of undrifted responses outside; the dual clip is at 3 half-widths, as by default.
_EPS_IN_UNITS = {"low": 2, "high": 2, "dual": 6}


def _responses_per_step(config) -> int:
    prompts = config.data.train_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    return prompts * config.actor_rollout_ref.rollout.n


def _outside(band, length: int, sigma: float) -> float:
    """Probability that S lies outside the band."""
    import torch

    variation = length * sigma**2
    low, high, _ = (edge.item() for edge in band.edges(*torch.tensor([[length], [variation]], dtype=torch.float64)))
    law = NormalDist(-variation / 2, variation**0.5)
    return law.cdf(low) + 1 - law.cdf(high)


def _outside_recorded(band, folder: Path) -> tuple[dict[str, float], float]:
    """Share of the recorded responses outside the band, all and by thirds of length, and their sigma.

    Raises:
        ValueError: no response that moved is recorded there.
    """
    import pandas as pd
    import torch

    from fspo_verl.records import read_records

    records = read_records(folder, ["length", "log_ratio", "quadratic_variation"], max_rows=1_000_000)
    records = records[records.quadratic_variation > 0]
    if records.empty:
        raise ValueError(f"{folder} holds no records of responses that moved (records_dir, several steps per rollout)")
    length, variation = (torch.tensor(records[c].to_numpy("float64")) for c in ("length", "quadratic_variation"))
    low, high, _ = band.edges(length, variation)
    outside = ~records.log_ratio.between(low.numpy(), high.numpy())
    thirds = outside.groupby(pd.qcut(records.length, 3, duplicates="drop"), observed=True).mean()
    by_length = {f"L={third.left:.0f}-{third.right:.0f}": share for third, share in thirds.items()}
    sigma = (records.quadratic_variation.sum() / records.length.sum()) ** 0.5
    return {"all": outside.mean(), **by_length}, sigma


# --- output ----------------------------------------------------------------------------------------------------------


def _print(found: list, plan: list, counts: Counter) -> None:
    for row in plan:
        print(f"{row.name:<34} {row.value:>20}  {row.how}".rstrip())
    for finding in found:
        print(f"{finding.severity:<8} {finding.what}")
        for label, text in (("", finding.why), ("fix: ", finding.fix)):
            if text:
                print(f"{'':<8} {label}{text}")
    print(f"fspo-verl doctor: {counts['error']} errors, {counts['warning']} warnings")
