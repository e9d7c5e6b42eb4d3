# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Check the loss on this machine, and measure its noise floor for eps.

  fspo-verl selftest                     the loss against float64, and the noise of verl's engine
  fspo-verl selftest --model FOLDER      ... with the noise of a model of yours
  fspo-verl selftest --device cpu        on the CPU, in smaller sizes

It takes minutes, and writes nothing. Without verl only the loss is checked.

Exit code: 0 if nothing failed, 1 if something did, 2 for a wrong call.
"""

import argparse
import json
import os
import platform
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from fspo_verl import findings, output, versions
from fspo_verl.band import Band
from fspo_verl.findings import ERROR, FIX, NOTE, WARNING, Finding
from fspo_verl.keys import POLICY_LOSS
from fspo_verl.loss import MAX_LOG_RATIO, fspo_loss
from fspo_verl.observe import noise
from fspo_verl.selftest import worker

EPS = {torch.float32: 0.03, torch.bfloat16: 0.3}  # rounding to bfloat16 moves S/sqrt(L) by some thousandths
# Relative errors. Sums of 32,768 float32 numbers are right to some 1e-5; a gradient in bfloat16 is rounded once.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-3 + 2**-8}
# Where S lies, in half-widths of the band: on every side of every edge (the dual clip is at 3), and clear of it, so
# that rounding cannot move it to the other side.
_PLACES = torch.tensor([-2.5, -1.25, -0.75, -0.1, 0.1, 0.75, 1.25, 2.5, 3.75])


def main(args: argparse.Namespace) -> int:
    """Print the conclusion, then a finding for each check; returns the exit code that the module's text says."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here: nvidia-smi says whether there is one, torch.version.cuda for what")
    if args.model and not (args.model / "config.json").is_file():
        raise ValueError(f"--model={args.model} holds no config.json: name the folder of a model")
    machine = [torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"]
    machine += [f"{name} {versions.installed(name)}" for name in ("fspo-verl", "verl", "torch", "transformers")]
    with output.reserved():  # for this package: verl prints as well
        checks = examine(device, args.model)
    found = [conclusion(checks), *checks, Finding("machine", NOTE, f"{', '.join(machine)}.")]
    if args.json:
        print(json.dumps({"findings": [one.to_json() for one in found]}, indent=1))
    else:
        findings.show(found)
    return findings.exit_code(found)


def examine(device: str, model: Path | None = None, loss=fspo_loss) -> list[Finding]:
    """What each check finds, an error if it fails; ``value`` is the smallest eps above the noise.

    On ``cuda`` or ``cpu``; a model of None is a small random one, and tests bring another loss.
    """
    checks = {
        f"loss_{name}": partial(check_loss, loss, getattr(torch, name), device) for name in ("float32", "bfloat16")
    }
    if versions.installed("verl") and (device == "cuda" or versions.installed("fspo-verl-cpu")):
        os.environ |= {"VERL_PLATFORM": "cpu"} if device == "cpu" else {}  # verl chooses it once, when it is imported
        checks |= {f"noise_{dtype}": partial(check_noise, dtype, model) for dtype in ("fp32", "bf16")}
    found = []
    for name, check in tqdm(checks.items(), leave=False, disable=None):
        try:
            found.append(Finding(name, NOTE, **check()))
        except Exception as problem:  # of a device, a driver, another package: it is shown, and the other checks go on
            found.append(Finding(name, ERROR, (str(problem).strip() or repr(problem)).splitlines()[-1]))
    return found


def conclusion(checks: list[Finding]) -> Finding:
    """What follows from the checks, and what to do."""
    if failed := [one.id for one in checks if one.severity == ERROR]:
        what = f"This machine does not train FSPO right: {', '.join(failed)} failed."
        advice = "Report this with `pip freeze`; until then, train with another torch or driver."
        return Finding("selftest", ERROR, what, advice, action=FIX)
    exact = "The loss of FSPO is exact on this machine."
    eps = {one.id.removeprefix("noise_"): one.value for one in checks if one.value is not None}
    if not eps:
        missing, how = ("fspo-verl-cpu", " ./cpu in a clone") if versions.installed("verl") else ("verl", " verl")
        what = f"{exact} Noise was not measured: {missing} is not installed."
        return Finding("selftest", WARNING, what, f"pip install{how}, and try again.", action=FIX)
    what = f"{exact} The smallest eps above its noise is {' and '.join(f'{of:g} in {at}' for at, of in eps.items())}."
    if eps["bf16"] <= Band().high:
        return Finding("selftest", NOTE, what)
    advice = f"In bf16 take this eps or a larger one, or use {noise.HELP}."
    return Finding("selftest", WARNING, what, advice, eps["bf16"], FIX, {f"{POLICY_LOSS}.eps": eps["bf16"]})


# --- the loss, without verl ------------------------------------------------------------------------------------------


def make_batch(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """New and old log-probs of a dtype, advantages and mask, ``[rows, width]`` each.

    Responses of 1 to ``width`` tokens with holes in their masks, one without any token, and NaN in the padding.
    """
    random = torch.Generator().manual_seed(0)
    mask = torch.arange(width) < torch.logspace(0, 1, rows, width).round()[:, None]
    mask &= torch.rand(rows, width, generator=random) < 0.9  # holes, as tool calls leave them
    mask[rows // 2] = False
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    place = _PLACES[torch.randint(len(_PLACES), (rows, 1), generator=random)]
    log_ratio = EPS[dtype] * torch.randn(rows, width, generator=random) * mask
    log_ratio += (place * EPS[dtype] * count.sqrt() - log_ratio.sum(-1, keepdim=True)) / count
    old = -2 * torch.rand(rows, width, generator=random)
    new = (old + log_ratio).masked_fill(~mask, torch.nan)
    advantages = torch.randn(rows, 1, generator=random).expand(rows, width)
    return new.to(dtype), old.to(dtype), advantages, mask


def reference(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Loss ``[rows]`` and gradient ``[rows, width]`` in float64: J = min(w A, clip(w) A), the dual clip, ∇J = w A."""
    s = torch.where(mask, new.double() - old.double(), 0.0).sum(-1, keepdim=True)
    length, a = mask.sum(-1, keepdim=True), advantages[:, :1].double()
    edge = EPS[new.dtype] * length.double().sqrt()
    used = torch.where(a > 0, s.minimum(edge), s.maximum(-edge).minimum(3 * edge))
    term = -a * used.clamp(max=MAX_LOG_RATIO).exp()  # of a token
    return (length * term)[:, 0], torch.where(mask & (used == s), term, 0.0)


def check_loss(loss, dtype: torch.dtype, device: str) -> dict:
    """Short and long responses: values, gradients and clips are those of :func:`reference`; fields of a finding."""
    width = 32768 if device == "cuda" else 4096
    batch = make_batch(72, width, dtype)
    new, old, advantages, mask = (x.to(device, copy=True) for x in batch)
    values = loss(new.requires_grad_(), old, advantages, mask, Band(EPS[dtype])).loss
    values.sum().backward()
    for value, true in zip((values.detach(), new.grad), reference(*batch), strict=True):
        torch.testing.assert_close(value.double().cpu(), true, rtol=TOLERANCE[dtype], atol=0)
    return {"sentence": f"Values and gradients are within {TOLERANCE[dtype]:.1%} of float64, up to {width:,} tokens."}


# --- verl's FSDP engine ----------------------------------------------------------------------------------------------


def check_noise(dtype: str, model: Path | None) -> dict:
    """How far a token's log-prob moves (sigma, nats) between two cuts into micro-batches; the smallest eps above.

    Padded rows are compared with padded ones, and packed with packed: a run of verl has one layout throughout.
    """
    from verl.utils.device import get_platform

    with tempfile.TemporaryDirectory() as scratch:
        folder = model or worker.small_model(scratch)
        batch = worker.sample(folder, 32, 16, 128 if get_platform().device_name == "cpu" else 1024)
        trainer = worker.training_worker(folder, dtype)
    sigma = {}
    for packed, old, *others in ((False, 8, 1, 32), (True, 4, 16)):
        reference = torch.cat(worker.log_probs(trainer, batch, worker.micro_batches(old, packed)))
        for rows in others:
            moved = torch.cat(worker.log_probs(trainer, batch, worker.micro_batches(rows, packed))) - reference
            name = f"{'packed' if packed else 'padded'}, {old} rows and {rows}"
            sigma[name] = moved.double().square().mean().sqrt().item()
    eps = noise.rounded_up(noise.EPS_IN_SIGMA * max(sigma.values())) if any(sigma.values()) else 0.0
    moves = "; ".join(f"{value:.2g} ({name})" for name, value in sigma.items())
    sentence = f"An eps below {eps:g} is lost in rounding, which moves a token by sigma = {moves}."
    return {"sentence": sentence, "value": eps}
