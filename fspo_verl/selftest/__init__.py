# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does this machine train FSPO right, and which is the smallest eps that means anything on it?

  fspo-verl selftest                     loss, ranks and waits for the GPU; a step of verl's engine, and its noise
  fspo-verl selftest --model FOLDER      ... with the noise of a model of yours
  fspo-verl selftest --device cpu        on the CPU, in smaller sizes

It takes minutes, and writes nothing. What needs a GPU or verl is skipped where there is none.

Exit code: 0 if nothing failed, 1 if something did, 2 for a wrong call.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from fspo_verl import terminal, versions
from fspo_verl.band import Band
from fspo_verl.loss import fspo_loss
from fspo_verl.observe import noise
from fspo_verl.selftest import exact


def main(args: argparse.Namespace) -> int:
    """Print a conclusion, a line per check and what to do next; returns the exit code that the module's text says."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here: nvidia-smi says whether there is one, torch.version.cuda for what")
    if args.model and not (args.model / "config.json").is_file():
        raise ValueError(f"--model={args.model} holds no config.json: name the folder of a model")
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    for package in ("fspo-verl", "verl", "torch", "transformers"):
        machine += f", {package} {versions.installed(package)}"
    with terminal.reserved():  # for this package: verl prints as well
        checks = examine(device, args.model)
    conclusion, advice = summary(checks)
    if args.json:
        print(json.dumps({"conclusion": conclusion, "machine": machine, "checks": checks, "next": advice}, indent=1))
    else:
        print(f"{conclusion}\n{machine}")
        terminal.show([(check["status"], check["name"], check["text"]) for check in checks], widths=(8, 13))
        print(f"Next: {advice}")
    return int(any(check["status"] == "error" for check in checks))


def examine(device: str, model: Path | None = None, loss=fspo_loss) -> list[dict]:
    """Of every check ``name``, ``status`` (ok, error or skipped) and ``text``, of noise ``sigma`` and ``eps`` as well.

    Args:
        device: ``cuda`` or ``cpu``.
        model: folder of the model whose noise is measured; None for a small random one.
        loss: with the arguments of :func:`fspo_verl.loss.fspo_loss`.
    """
    checks = {
        "loss_float32": lambda: exact.check_loss(loss, torch.float32, device),
        "loss_bfloat16": lambda: exact.check_loss(loss, torch.bfloat16, device),
        "ranks": lambda: exact.check_ranks(loss, device),
        "waits": lambda: exact.check_waits(loss, device),
    }
    skipped = []
    if versions.installed("verl"):
        os.environ |= {"VERL_PLATFORM": "cpu"} if device == "cpu" else {}  # verl chooses it once, when it is imported
        checks["step"] = lambda: _engine().check_step()
        checks["noise_fp32"] = lambda: _engine().check_noise("fp32", model)
        checks["noise_bf16"] = lambda: _engine().check_noise("bf16", model)
    else:
        text = "verl is not installed: no optimiser step of its engine, and no noise"
        skipped.append({"name": "step", "status": "skipped", "text": text})
    return [{"name": name} | _outcome(check) for name, check in tqdm(checks.items(), leave=False)] + skipped


def _engine():
    from fspo_verl.selftest import engine

    return engine


def _outcome(check: Callable[[], dict]) -> dict:
    try:
        return {"status": "ok"} | check()
    except Exception as error:  # of a device, a driver, another package: it is shown, and the other checks go on
        return {"status": "error", "text": (str(error).strip() or repr(error)).splitlines()[-1]}


def summary(checks: list[dict]) -> tuple[str, str]:
    """The conclusion, and what to do next."""
    failed = [check["name"] for check in checks if check["status"] == "error"]
    if failed:
        return (
            f"This machine does not train FSPO right: {', '.join(failed)} failed.",
            "report the failed lines with `pip freeze`; until then train with another version of torch or driver",
        )
    eps = {check["name"].removeprefix("noise_"): check["eps"] for check in checks if "eps" in check}
    if not eps:
        return "The loss of FSPO is exact on this machine; no step of verl's was tried.", "install verl and run again"
    above_noise = " and ".join(f"{smallest:g} in {dtype}" for dtype, smallest in eps.items())
    conclusion = f"This machine trains FSPO right. The smallest eps above its noise is {above_noise}."
    if eps["bf16"] > Band().high:
        return conclusion, f"in bf16 set eps to {eps['bf16']:g} or more, or use {noise.HELP}"
    return conclusion, f"`fspo-verl doctor` with your launch; the default eps of {Band().high:g} is above the noise"
