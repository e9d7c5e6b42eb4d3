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
import math
import os
import re
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from statistics import NormalDist

from omegaconf import DictConfig

from fspo_verl import terminal, versions
from fspo_verl.preflight import ray_workers
from fspo_verl.preflight.launch import ACTOR, POLICY_LOSS, Finding, Launch, by_severity
from fspo_verl.preflight.overrides import override

DEFAULT_MAIN = "verl.trainer.main_ppo"
_DEFAULT_OVERRIDES = ["+algorithm.policy_loss=fspo"]
_EXAMPLE = "as an example, for no launch was given, +algorithm.policy_loss=fspo on verl's defaults"


def main(args: argparse.Namespace) -> int:
    """Print the findings; returns the exit code that the module's text promises."""
    module, overrides = split_command(args.launch)
    refuse_malformed(overrides)
    if args.sigma is not None and not 0 < args.sigma < math.inf:
        raise ValueError(f"--sigma={args.sigma:g} must be a positive number")
    if args.records is not None and not args.records.exists():
        raise FileNotFoundError(f"--records={args.records} does not exist")
    if os.getcwd() not in sys.path:  # where `python -m` looks first: in a checkout of verl, that one runs
        sys.path.insert(0, os.getcwd())
    if versions.installed("verl") is None:
        raise ValueError(f"verl is not installed in {sys.prefix}: pip install 'verl{versions.SUPPORTED_VERL}'")
    # Ray starts while this process imports verl, which takes both of them some seconds.
    with contextlib.nullcontext() if args.no_worker else contextlib.closing(ray_workers.Workers()) as asked:
        found, plan = examine(module, overrides, complete="-m" in args.launch, args=args, asked=asked)
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


def refuse_malformed(arguments: list[str]) -> None:
    """Parse a main's arguments as Hydra will, before anything slow is imported.

    Raises:
        ValueError: one of them is neither an option of Hydra nor an override.
    """
    from hydra._internal.utils import get_args_parser  # the parser of every Hydra application; there is no public way
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    options, unknown = get_args_parser().parse_known_args(arguments)
    if unknown:
        raise ValueError(f"{unknown[0]} is no option of Hydra")
    parser = OverridesParser.create()
    for text in options.overrides:
        try:
            parser.parse_override(text)
        except HydraException as error:
            raise ValueError(f"{text!r} is no override KEY=VALUE: {str(error).splitlines()[0]}") from None


def examine(
    module: str, overrides: list[str], complete: bool, args: argparse.Namespace, asked: ray_workers.Workers | None
):
    """All findings about the installation and the launch, errors first, and the plan if asked for.

    Args:
        complete: the overrides are a whole launch, so that data, model and verl's own checks count as well.
    """
    from fspo_verl.preflight import checks
    from fspo_verl.preflight.plan import plan

    def look(config):
        if Launch(config).get(ACTOR) is None:
            raise ValueError(f"the config has no {ACTOR}: no launch of policy training")
        return config, checks.findings(config)

    found, rows, config = [*installation()], [], None
    try:
        config, composed = with_config(module, overrides, look)
    except Exception as error:  # whatever stops Hydra or the import of the main stops the launch
        found.append(composes_nothing(module, error))
    else:
        errors = {finding.check for finding in composed if finding.severity == "error"}
        if not args.launch:
            composed = [dataclasses.replace(finding, what=f"{_EXAMPLE}: {finding.what}") for finding in composed]
        launch = Launch(config)
        found += [*composed, *selects_no_loss_of_ours(launch)]
        if complete:
            found += [*data_files(config, "warning" if args.dry_run else "error"), *model_folders(config)]
        if complete and errors <= {"unjudged"}:  # verl would refuse again what is an error already
            found += verls_own_checks(module, config)
        if not errors and launch.is_fspo:
            records = _recorded(args.records) if args.records else None
            found += [*judge_eps(launch, args.sigma, records), *judge_noise(launch, args.noise, records)]
        if not errors and args.plan:
            try:
                rows = plan(config)
            except (ArithmeticError, TypeError, ValueError) as error:
                found.append(plans_nothing(error))
    if asked:
        found += ray_workers.findings(asked, config)
        if complete and config is not None:
            found += ray_workers.gpus(asked, config)
    return by_severity(found), rows


def composes_nothing(module: str, error: Exception) -> Finding:
    """What stops Hydra, or the import of the main."""
    return Finding("error", "composition", f"{module} composes no config", str(error).strip())


def plans_nothing(error: Exception) -> Finding:
    """A config that ``--plan`` can make no plan of."""
    what = f"no plan can be made of this config: {type(error).__name__}: {error}"
    return Finding("warning", "plan", what, "a number in it is missing, 0 or a text")


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
        sys.argv = [spec.origin, *arguments, override("hydra.run.dir", scratch), "hydra.output_subdir=null"]
        verl.utils.device.auto_set_device = take
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are raised, not printed
        try:
            with terminal.reserved():  # what verl warns about, it says again at the launch
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except _Composed:
            return seen[0]
        finally:
            sys.argv, verl.utils.device.auto_set_device, full_error = before
            del os.environ["HYDRA_FULL_ERROR"]
            if full_error is not None:
                os.environ["HYDRA_FULL_ERROR"] = full_error
    raise ValueError(f"{module} ended before it handed over its config")


# --- checks of this machine ------------------------------------------------------------------------------------------


def installation() -> Iterator[Finding]:
    """Versions, and whether verl and Hydra find this package here."""
    from fspo_verl.preflight import contract

    found = {package: versions.installed(package) for package in versions.TESTED}
    text = ", ".join(f"{package} {version or 'not installed'}" for package, version in found.items())
    yield Finding("note", "versions", f"{text}, Python {sys.version.split()[0]}")
    if problem := versions.unsupported_verl():
        yield Finding("error", "verl_version", *problem)
    else:
        on_cpu = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
        broken = [*contract.findings("loss", "launch", "records", "live", *(["cpu"] if on_cpu else []))]
        if untested := versions.untested_verl():
            tested = f"tested are {', '.join(versions.TESTED['verl'])}"
            held = "" if broken else "; what fspo_verl takes for granted of verl holds here, see docs/verl_internals.md"
            yield Finding("warning", "untested_verl", f"verl {untested} was not tested with fspo_verl", tested + held)
        yield from broken
    others = [f"{p} {v}" for p, v in found.items() if p != "verl" and v and v not in versions.TESTED[p]]
    if others:
        tested = "; ".join(f"{package} {', '.join(known)}" for package, known in versions.TESTED.items())
        yield Finding("note", "untested_versions", f"not among the tested versions: {', '.join(others)}", tested)
    if not any(point.value == "fspo_verl.plugin" for point in metadata.entry_points(group="verl.plugins")):
        why = "the package is imported, not installed"
        yield Finding("error", "entry_point", "verl finds no plugin fspo_verl", why, ray_workers.INSTALL)
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins is None or importlib.util.find_spec("hydra_plugins.fspo_verl_searchpath") is None:
        why = "Hydra does not see the packaged configs, and +algorithm.policy_loss=fspo would be a dead value"
        yield Finding("error", "search_path", "hydra_plugins.fspo_verl_searchpath is missing", why, ray_workers.INSTALL)
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if policy != "auto" and "fspo_verl" not in policy:
        why = "the launch is not checked before Ray starts, and baselines are not observed"
        yield Finding("warning", "plugins_off", f"VERL_USE_EXTERNAL_PLUGINS={policy}", why, "unset it")


# --- checks of the launch that verl or the machine decide -------------------------------------------------------------


def selects_no_loss_of_ours(launch: Launch) -> Iterator[Finding]:
    """A launch that trains without this package."""
    if not launch.is_ours:
        what, why = f"{POLICY_LOSS}.loss_mode={launch.loss_mode} trains", "neither FSPO nor one of its baselines"
        yield Finding("warning", "not_selected", what, why, "+algorithm.policy_loss=fspo")


def is_pattern(path: str | Path) -> bool:
    """Whether the library ``datasets``, with which verl reads data, or OmegaConf takes a path for more than a name."""
    return re.search(r"[*?]|\[.*\]|\$\{", str(path)) is not None


def data_files(config: DictConfig, severity: str) -> Iterator[Finding]:
    """Data sets that are not there, or that verl would read as something else."""
    for key in ("train_files", "val_files"):
        files = config.data[key]
        for file in [files] if isinstance(files, str) else files:
            if "://" in file:
                continue
            if not Path(file).expanduser().exists():
                fix = f"data.{key}=[FILE, ...]; scripts/prepare_data.py makes them"
                yield Finding(severity, "data_files", f"data.{key}: {file} does not exist", fix=fix)
            elif is_pattern(file):
                why = "verl reads data with `datasets`, to which * ? and [...] are a pattern: it may read other files"
                yield Finding("error", "data_files", f"data.{key}: {file} is no plain name", why, "rename it")


def model_folders(config: DictConfig) -> Iterator[Finding]:
    """Models of the actor and the critic that are neither a folder with a model nor a name on a hub."""
    for section in ("actor_rollout_ref", *(["critic"] if _needs_critic(config) else [])):
        key, path = f"{section}.model.path", str(config[section].model.path)
        if "://" in path or _holds_model(path):
            continue
        if Path(path).expanduser().exists():
            fix = f"{key}=FOLDER of the model"
            yield Finding("error", "model_folder", f"{key}={path} holds no config.json", fix=fix)
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            yield Finding("note", "model_folder", f"{key}={path} is no folder here: taken for a name on the model hub")
        else:
            fix = f"{key}=FOLDER or NAME/ON-THE-HUB"
            yield Finding("error", "model_folder", f"{key}={path} does not exist", fix=fix)


def _holds_model(path: str) -> bool:
    return (Path(path).expanduser() / "config.json").is_file()


def _needs_critic(config: DictConfig) -> bool:
    from verl.trainer.ppo.utils import need_critic

    with terminal.reserved():
        return need_critic(config)


def verls_own_checks(module: str, config: DictConfig) -> Iterator[Finding]:
    """What verl's ``validate_config`` refuses, where the main would call it.

    Two of its checks look beyond the config: they load the critic's model, and vLLM. Where these are elsewhere, the
    rest is checked.
    """
    validate = getattr(importlib.import_module(module), "validate_config", None)
    if validate is None:
        return
    from verl.trainer.ppo.utils import need_reference_policy

    config, critic = config.copy(), _needs_critic(config)
    if critic and not _holds_model(str(config.critic.model.path)):
        config.critic.model = None
    model = config.actor_rollout_ref.model
    rank = 0 if model.lora.merge else model.lora.rank or model.lora_rank
    if rank and config.actor_rollout_ref.rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        model.lora.rank = model.lora_rank = 0
        what = f"whether vLLM has adapters of rank {rank} is not known, as it is not installed here"
        why = "verl's main asks it before Ray starts, and fails without it"
        yield Finding("warning", "lora_rank", what, why, "launch from a machine with vLLM")
    try:
        with terminal.reserved():
            validate(config, use_reference_policy=need_reference_policy(config), use_critic=critic)
    except Exception as error:  # AssertionError, ValueError and Hydra's own
        said = " ".join(str(error).split()) or type(error).__name__
        yield Finding("error", "validate_config", f"verl refuses this config: {said}")


def _recorded(folder: Path):
    """A table of the records by which a band is judged.

    Raises:
        ValueError: no response that moved is recorded there.
    """
    from fspo_verl.observe.records import read_records

    records = read_records(folder, ["mini_batch", "length", "log_ratio", "quadratic_variation"], max_rows=1_000_000)
    if not (records.quadratic_variation > 0).any():
        raise ValueError(f"{folder} holds no records of responses that moved (records_dir, several steps per rollout)")
    return records


def judge_eps(launch: Launch, sigma: float | None, records) -> Iterator[Finding]:
    """Whether the band lets (nearly) everything through, or (nearly) nothing, at the spread that was measured.

    Args:
        sigma: standard deviation of a token's log-ratio, nats. S of L tokens is then taken as normal with variance
            Q = L·sigma² and mean −Q/2 (derived here from E_old[e^S] = 1).
        records: of a run, whose S and L are taken instead; or None.
    """
    band = launch.band
    if records is not None:
        outside, sigma = _outside_recorded(band, records)
    elif sigma is not None:
        outside = {f"L={n}": _outside(band, n, sigma) for n in launch.typical_lengths}
    else:
        return
    rates = ", ".join(f"{rate:.2g} at {where}" for where, rate in outside.items())
    yield Finding("note", "outside_band", f"share of responses outside the band at sigma={sigma:.3g}: {rates}")
    # The unit of eps is such that the longest response's S has standard deviation 1.
    unit = 1 if band.is_studentized else sigma * launch.max_response_length ** (0.5 - band.length_power)
    wanted = launch.with_eps(2 * unit, 2 * unit)  # leaves about 5% of undrifted responses outside
    responses = (launch.prompts_per_rollout or 1) * launch.config.actor_rollout_ref.rollout.n
    eps = f"eps_low={band.low:g}, eps_high={band.high:g}"
    if max(outside.values()) < 1 / responses:
        what = f"{eps} clip less than one response a step"
        yield Finding("warning", "eps_never_binds", what, f"share outside the band: {rates}", wanted)
    if crowded := [where for where, rate in outside.items() if rate > 0.5]:
        drifts = min(outside.values()) < 0.5 and band.normalization == "plain"
        corrected = f"{POLICY_LOSS}.normalization=drift_corrected (long responses drift), or fewer stale steps"
        fix = corrected if drifts else wanted
        why = f"at {', '.join(crowded)}; {rates}"
        yield Finding("warning", "eps_always_binds", f"{eps} leave most responses outside", why, fix)


def judge_noise(launch: Launch, sigma: float | None, records) -> Iterator[Finding]:
    """Whether the band tells a move from numerical noise (:mod:`fspo_verl.observe.noise`).

    Args:
        sigma: standard deviation of a token's log-ratio with nothing moved, nats. S of L tokens is then taken as normal
            with mean 0 and variance L·sigma²: noises of tokens that are independent.
        records: of a run, whose unmoved responses are taken instead, if it has any; or None.
    """
    from fspo_verl.observe import noise

    band = launch.band
    if sigma is not None:
        outside = max(_outside(band, length, sigma, drift=0.0) for length in launch.typical_lengths)
        spread = sigma * max(length ** (0.5 - band.length_power) for length in launch.typical_lengths)
        widen = noise.EPS_IN_SIGMA * spread / min(band.low, band.high)
        below = outside > noise.SHARE and not band.is_studentized
    elif records is not None and (unmoved := noise.of_records(records, records.attrs["settings"], band)):
        sigma, outside, widen = unmoved.sigma, unmoved.outside, unmoved.widen
        below = noise.warning(unmoved, band) is not None
    else:
        return
    what = f"with nothing moved, {outside:.2g} of the responses lie outside the band (noise of {sigma:.2g} per token)"
    if below:
        low, high = (noise.rounded_up(widen * eps) for eps in (band.low, band.high))
        fix = f"{launch.with_eps(low, high)}, or {noise.HELP}"
        yield Finding("warning", "eps_below_noise", what, "it clips rounding, not moves", fix)
    else:
        yield Finding("note", "noise", what)


def _outside(band, length: int, sigma: float, drift: float = 1.0) -> float:
    """Probability that S, normal with variance Q = L·sigma² and mean −drift·Q/2, lies outside the band."""
    import torch

    variation = length * sigma**2
    low, high, _ = (edge.item() for edge in band.edges(*torch.tensor([[length], [variation]], dtype=torch.float64)))
    law = NormalDist(-drift * variation / 2, variation**0.5)
    return law.cdf(low) + 1 - law.cdf(high)


def _outside_recorded(band, records) -> tuple[dict[str, float], float]:
    """Share of the responses that moved outside the band, all and by thirds of length, and their sigma."""
    import pandas as pd
    import torch

    records = records[records.quadratic_variation > 0]
    length, variation = (torch.tensor(records[c].to_numpy("float64")) for c in ("length", "quadratic_variation"))
    low, high, _ = band.edges(length, variation)
    outside = ~records.log_ratio.between(low.numpy(), high.numpy())
    thirds = outside.groupby(pd.qcut(records.length, 3, duplicates="drop"), observed=True).mean()
    by_length = {f"L={third.left:.0f}-{third.right:.0f}": share for third, share in thirds.items()}
    sigma = (records.quadratic_variation.sum() / records.length.sum()) ** 0.5
    return {"all": outside.mean(), **by_length}, sigma


# --- output ----------------------------------------------------------------------------------------------------------


def _print(found: list, plan: list, counts: Counter) -> None:
    terminal.show([(row.name, row.value.rjust(20), row.how) for row in plan], widths=(34, 20))
    for finding in found:
        lines = [(finding.severity, finding.what), ("", finding.why), ("fix:", finding.fix)]
        terminal.show([line for line in lines if line[1]], widths=(8,))
    said = [f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}" for severity in ("error", "warning")]
    print(f"fspo-verl doctor: {', '.join(said)}")
