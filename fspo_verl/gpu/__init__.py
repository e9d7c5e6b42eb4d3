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
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from fspo_verl import versions
from fspo_verl.gpu.lines import Line, first_line


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
        text = json.dumps({"machine": about, **count, "lines": [dataclasses.asdict(line) for line in found]})
        output = json.loads(text, parse_constant=lambda _: None)  # null for NaN and infinity, which JSON lacks
        print(json.dumps(output, indent=1))
    else:
        print(f"fspo-verl gpu: {count['error']} errors, {count['warning']} warnings, {count['skipped']} skipped")
    return int(count["error"] > 0)


def machine(device: str) -> dict[str, str]:
    """What the figures depend on."""
    import torch

    if device == "cuda":
        found = {"device": torch.cuda.get_device_name(), "GPUs": str(torch.cuda.device_count())}
        found["CUDA"] = str(torch.version.cuda)
    else:
        found = {"device": f"{platform.machine()} CPU", "threads": str(torch.get_num_threads())}
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
    from fspo_verl.loss import fspo_loss

    if device == "cpu":
        yield Line("skipped", "device", "no GPU: everything runs on the CPU, in small sizes")
    checks = _checks(args, device, loss or fspo_loss)
    for name in args.checks:
        try:
            yield from checks[name]()
        except Exception as error:  # of a device, a driver, another package: the other checks go on
            what = f"{type(error).__name__}: {first_line(error)}"
            fix = f"fspo-verl gpu --checks {name}, and report it"
            yield Line("error", name, what, "the check could not be made", fix)


def _checks(args: argparse.Namespace, device: str, loss) -> dict[str, Callable[[], Iterable[Line]]]:
    """What gives the lines of each check."""
    from fspo_verl.gpu import cost, exact

    gpu = device == "cuda"
    longest = args.longest or (32768 if gpu else 4096)  # tokens
    no_compile = Line("skipped", "compile", "torch.compile of the loss is measured on GPUs")
    return {
        "loss": lambda: exact.lines(loss, device, longest),
        "ranks": lambda: [exact.ranks_line(loss, device, longest)],
        "meter": lambda: cost.meter_lines(loss, device),
        "time": lambda: cost.time_lines(loss, device, args.rounds),
        "compile": lambda: [cost.compile_line(loss, device, cost.SIZES[device][0], args.rounds) if gpu else no_compile],
        "noise": lambda: _noise(args, device),
        "step": lambda: _step(device),
    }


def _noise(args: argparse.Namespace, device: str) -> Iterable[Line]:
    from fspo_verl.gpu import floor  # here: without transformers the other checks go on

    return floor.lines(device, args.model, args.responses, args.response_length or (2048 if device == "cuda" else 128))


def _step(device: str) -> Iterable[Line]:
    from fspo_verl.gpu import responses, step

    with tempfile.TemporaryDirectory() as scratch:
        yield step.line(device, responses.small_model(Path(scratch)))
