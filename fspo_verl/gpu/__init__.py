# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does this machine train FSPO right, and how small an eps means anything on it? A line per check, in minutes.

  fspo-verl gpu                     the loss against float64, its waits and memory, time, noise floor, a step of verl's
  fspo-verl gpu --model FOLDER      ... with the noise floor of a model of yours
  fspo-verl gpu --device cpu        without a GPU: the same checks in small sizes, what needs one skipped

It needs torch and transformers. What needs verl too (other losses beside this one, a step of its FSDP engine, its fused
kernels) is skipped where verl is not installed. Nothing is trained and nothing is written.

Exit code: 0 without errors (warnings are printed), 1 with errors, 2 for a wrong call.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path


def main(args: argparse.Namespace) -> int:
    """Print a line per check; returns the exit code that the module's text promises."""
    import torch
    from tqdm import tqdm

    from fspo_verl import terminal

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here: nvidia-smi says whether there is one, torch.version.cuda for what")
    if args.model and not (args.model / "config.json").is_file():
        raise ValueError(f"--model={args.model} holds no config.json: name the folder of a model")
    about = machine(device)
    if not args.json:
        print("  ".join(f"{name} {value}" for name, value in about.items()))
    found = []
    for line in examine(args, device):
        found.append(line)
        if not args.json:
            with tqdm.external_write_mode():
                rows = [(line.status, line.check, line.what), ("", "", line.why), ("fix:", "", line.fix)]
                terminal.show([row for row in rows if row[2]], widths=(8, 16))
    count = {status: sum(line.status == status for line in found) for status in ("error", "warning", "skipped")}
    if args.json:
        output = {"machine": about, **count, "lines": [_plain(dataclasses.asdict(line)) for line in found]}
        print(json.dumps(output, indent=1, allow_nan=False))
    else:
        print(f"fspo-verl gpu: {count['error']} errors, {count['warning']} warnings, {count['skipped']} skipped")
    return int(count["error"] > 0)


def _plain(value):
    """What JSON can hold: None for a number that is not finite."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine(device: str) -> dict[str, str]:
    """What the figures depend on."""
    import platform

    import torch

    from fspo_verl import versions

    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    count = torch.cuda.device_count() if device == "cuda" else torch.get_num_threads()
    found = {"device": name, "GPUs" if device == "cuda" else "threads": str(count)}
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
    packages = ("fspo-verl", "verl", "torch", "transformers", "flash-attn")
    found |= {package: versions.installed(package) or "not installed" for package in packages}
    return found | {"Python": sys.version.split()[0]}


def examine(args: argparse.Namespace, device: str, loss=None):
    """The lines of all checks that were asked for, each as soon as it is known.

    Args:
        args: of ``fspo-verl gpu``, see :func:`fspo_verl.cli.gpu_arguments`.
        device: ``cuda`` or ``cpu``.
        loss: for :func:`fspo_verl.loss.fspo_loss` another one, as tests of these checks have it.
    """
    from fspo_verl.gpu.lines import Line
    from fspo_verl.loss import fspo_loss

    if device == "cpu":
        yield Line("skipped", "device", "no GPU: everything runs on the CPU, in small sizes")
    for name in args.checks:
        try:
            yield from _CHECKS[name](args, device, loss or fspo_loss)
        except Exception as error:  # of a device, a driver, another package: the other checks go on
            what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            yield Line(
                "error", name, what, "the check could not be made", f"fspo-verl gpu --checks {name}, and report it"
            )


def _loss(args, device, loss):
    from fspo_verl.gpu import exact

    return exact.lines(loss, device, args.longest or _LONGEST[device])


def _ranks(args, device, loss):
    from fspo_verl.gpu import exact

    yield exact.ranks_line(loss, device, args.longest or _LONGEST[device])


def _meter(_args, device, loss):
    from fspo_verl.gpu import cost

    return cost.meter_lines(loss, device)


def _time(args, device, loss):
    from fspo_verl.gpu import cost

    return cost.time_lines(loss, device, cost.SIZES[device], args.rounds)


def _compile(args, device, loss):
    from fspo_verl.gpu import cost
    from fspo_verl.gpu.lines import Line

    if device == "cpu":
        yield Line("skipped", "compile", "torch.compile of the loss is measured on GPUs")
    else:
        yield cost.compile_line(loss, device, cost.SIZES[device][0], args.rounds)


def _noise(args, device, _loss):
    import transformers

    from fspo_verl.gpu import floor

    transformers.utils.logging.disable_progress_bar()
    length = args.response_length or _RESPONSE_LENGTH[device]
    return floor.lines(device, args.model, args.responses, length)


def _step(_args, device, _loss):
    import tempfile

    from fspo_verl.gpu import responses, step

    with tempfile.TemporaryDirectory() as scratch:
        yield step.line(device, responses.small_model(Path(scratch)))


_CHECKS = {
    "loss": _loss,
    "ranks": _ranks,
    "meter": _meter,
    "time": _time,
    "compile": _compile,
    "noise": _noise,
    "step": _step,
}
# Tokens: of the loss, and of the noise floor.
_LONGEST = {"cuda": 32768, "cpu": 4096}
_RESPONSE_LENGTH = {"cuda": 2048, "cpu": 128}
