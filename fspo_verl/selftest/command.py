# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Check the loss on this machine, and measure its noise floor for eps.

  fspo-verl selftest                     loss, ranks and waits for the GPU; a step of verl's engine, and its noise
  fspo-verl selftest --model FOLDER      ... with the noise of a model of yours
  fspo-verl selftest --device cpu        on the CPU, in smaller sizes

It takes minutes, and writes nothing. What needs verl is skipped where there is none.

Exit code: 0 if nothing failed, 1 if something did, 2 for a wrong call.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from tqdm import tqdm

from fspo_verl import loss as passes
from fspo_verl import output, versions
from fspo_verl.band import Band
from fspo_verl.loss import MAX_LOG_RATIO, fspo_loss
from fspo_verl.observe import columns, noise
from fspo_verl.selftest import worker

EPS = {torch.float32: 0.03, torch.bfloat16: 0.3}  # rounding to bfloat16 moves S/sqrt(L) by some thousandths
# Relative errors. Sums of 32,768 float32 numbers are right to some 1e-5; a gradient in bfloat16 is rounded once.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-3 + 2**-8}
# Where S lies, in half-widths of the band: on every side of every edge (the dual clip is at 3), and clear of it, so
# that rounding cannot move it to the other side.
_PLACES = torch.tensor([-2.5, -1.25, -0.75, -0.1, 0.1, 0.75, 1.25, 2.5, 3.75])


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
    with output.reserved():  # for this package: verl prints as well
        checks = examine(device, args.model)
    conclusion, advice = summary(checks)
    if args.json:
        print(json.dumps({"conclusion": conclusion, "machine": machine, "checks": checks, "next": advice}, indent=1))
    else:
        print(f"{conclusion}\n{machine}")
        output.show([(check["status"], check["name"], check["text"]) for check in checks], widths=(8, 13))
        print(f"Next: {advice}")
    return int(any(check["status"] == "error" for check in checks))


def examine(device: str, model: Path | None = None, loss=fspo_loss) -> list[dict]:
    """Run all checks: ``name``, ``status`` (ok or error) and ``text`` of each; noise has ``sigma`` and ``eps`` as well.

    On ``cuda`` or ``cpu``; a model of None is a small random one, and tests bring another loss.
    """
    checks = {
        "loss_float32": lambda: check_loss(loss, torch.float32, device),
        "loss_bfloat16": lambda: check_loss(loss, torch.bfloat16, device),
        "ranks": lambda: check_ranks(loss, device),
        "waits": lambda: check_waits(loss, device),
    }
    if device == "cuda":
        checks["speed"] = lambda: check_speed(device, 512, 8192)
    if versions.installed("verl") and (device == "cuda" or versions.installed("fspo-verl-cpu")):
        os.environ |= {"VERL_PLATFORM": "cpu"} if device == "cpu" else {}  # verl chooses it once, when it is imported
        checks["step"] = lambda: check_step()
        checks["noise_fp32"] = lambda: check_noise("fp32", model)
        checks["noise_bf16"] = lambda: check_noise("bf16", model)
    outcomes = {}
    for name, check in tqdm(checks.items(), leave=False, disable=None):
        try:
            outcomes[name] = {"status": "ok"} | check()
        except Exception as error:  # of a device, a driver, another package: it is shown, and the other checks go on
            outcomes[name] = {"status": "error", "text": (str(error).strip() or repr(error)).splitlines()[-1]}
    return [{"name": name} | outcome for name, outcome in outcomes.items()]


def summary(checks: list[dict]) -> tuple[str, str]:
    """The conclusion, and what to do next."""
    failed = [check["name"] for check in checks if check["status"] == "error"]
    if failed:
        conclusion = f"This machine does not train FSPO right: {', '.join(failed)} failed."
        return conclusion, "report these lines with `pip freeze`; until then, train with another torch or driver"
    eps = {check["name"].removeprefix("noise_"): check["eps"] for check in checks if "eps" in check}
    if not eps:
        cpu = "fspo-verl-cpu", " (pip install ./cpu in a clone)"
        missing, how = cpu if versions.installed("verl") else ("verl", "")
        skipped = f"A step and noise were skipped: {missing} is not installed."
        return f"The loss of FSPO is exact on this machine. {skipped}", f"install {missing}{how}, and run this again"
    above_noise = " and ".join(f"{smallest:g} in {dtype}" for dtype, smallest in eps.items())
    conclusion = f"This machine trains FSPO right. The smallest eps above its noise is {above_noise}."
    if eps["bf16"] > Band().high:
        return conclusion, f"in bf16 set eps to {eps['bf16']:g} or more, or use {noise.HELP}"
    return conclusion, f"`fspo-verl doctor` with your launch; the default eps of {Band().high:g} is above the noise"


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


def compare(loss, batch: tuple[Tensor, ...], device: str) -> Tensor:
    """Assert that a loss on a device is :func:`reference`, and clips the same; returns its values ``[rows]``."""
    new, old, advantages, mask = (x.to(device, copy=True) for x in batch)
    eps = EPS[new.dtype]
    values = loss(new.requires_grad_(), old, advantages, mask, Band(eps)).loss
    values.sum().backward()
    for value, true in zip((values.detach(), new.grad), reference(*batch), strict=True):
        torch.testing.assert_close(value.double().cpu(), true, rtol=TOLERANCE[new.dtype], atol=0)
    return values.detach().double()


def check_loss(loss, dtype: torch.dtype, device: str) -> dict:
    """Short and long responses against float64; returns what was found."""
    width = 32768 if device == "cuda" else 4096
    compare(loss, make_batch(72, width, dtype), device)
    return {"text": f"values and gradients within {TOLERANCE[dtype]:.1%} of float64, up to {width:,} tokens"}


def check_ranks(loss, device: str) -> dict:
    """The loss cut over ranks, a GPU each (NCCL) or two processes (gloo): each share is right, and so is their sum."""
    ranks = torch.cuda.device_count() if device == "cuda" else 2
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(_rank, (ranks, f"file://{scratch}/ranks", loss, device), nprocs=ranks)
    return {"text": f"each share of {ranks} ranks is that of float64, and so is their sum"}


def _rank(rank: int, ranks: int, rendezvous: str, loss, device: str) -> None:
    own = f"cuda:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(init_method=rendezvous, rank=rank, world_size=ranks)
    whole = make_batch(36, 4096)
    total = compare(loss, tuple(part[rank::ranks] for part in whole), own).sum()
    torch.distributed.all_reduce(total)
    true, _ = reference(*whole)
    torch.testing.assert_close(total.cpu(), true.sum(), rtol=0, atol=1e-3 * true.abs().sum().item())
    torch.distributed.destroy_process_group()


def check_waits(loss, device: str) -> dict:
    """The loss makes the host wait for no value, forward and backward: a wait stalls the kernels of a GPU.

    Without a GPU this is asked of torch's meta device, whose tensors have no values that one could wait for.
    """
    new, old, advantages, mask = (x.to("cuda" if device == "cuda" else "meta") for x in make_batch(36, 512))
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        sequences = loss(new.requires_grad_(), old, advantages, mask, Band())
        columns.loss_columns(sequences)
        sequences.loss.sum().backward()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"text": "a call of the loss waits for the device once, when its metrics are fetched"}


def check_speed(device: str, rows: int, width: int) -> dict:
    """How long the passes over the tokens take, as kernels and as operations of torch, beside a copy of their input."""
    new, old, advantages, mask = (x.to(device).contiguous() for x in make_batch(rows, width))
    kernels = passes._kernels_for(new, old)
    keep, weights = passes._bits(mask.any(-1), torch.float32), torch.ones(2, rows, device=device)

    def milliseconds(sums, gradient) -> float:
        def both():
            return sums(new, old, advantages, mask), gradient(advantages, mask, weights, keep, torch.float32)

        return 1e3 * Timer("both()", globals={"both": both}).blocked_autorange(min_run_time=0.5).median

    copied = 1e3 * Timer("[x.clone() for x in xs]", globals={"xs": (new, old, advantages, mask)}).timeit(20).median
    times = f"{milliseconds(passes._token_sums, passes._token_gradient):.2g} ms as operations of torch"
    if kernels:
        times = f"{milliseconds(kernels.token_sums, kernels.token_gradient):.2g} ms as kernels, {times}"
    used = "kernels" if kernels else "no kernels, which Triton could not run here"
    text = f"the loss uses {used}: its passes over {rows} x {width:,} tokens take {times}; a copy takes {copied:.2g} ms"
    return {"text": text}


# --- verl's FSDP engine, on a small model -----------------------------------------------------------------------------


def check_step() -> dict:
    """One optimiser step with fspo in float32 on a small model."""
    from fspo_verl.config import FSPOPolicyLossConfig

    with tempfile.TemporaryDirectory() as folder:
        worker.small_model(folder)
        batch, cut = worker.sample(folder, 16, 1, 96), worker.micro_batches(4)
        trainer = worker.training_worker(folder, lr=1e-4)
    # As if the tokens had moved by 0.2 nats: two half-widths of the band, so that some responses are clipped.
    batch["old_log_probs"] = worker.nested(x + 0.2 * torch.randn_like(x) for x in worker.log_probs(trainer, batch, cut))
    metrics = worker.update(trainer, batch, FSPOPolicyLossConfig(eps=0.1), cut, len(batch))
    norm, clipped = metrics["grad_norm"], metrics["actor/fspo/clip_fraction"]
    text = f"an optimiser step of verl's FSDP engine: gradient norm {norm:.4g}, {clipped:.1%} of the responses clipped"
    if not (0 < norm < float("inf") and 0 < clipped < 1):
        raise ArithmeticError(f"nothing is learnt by {text}")
    return {"text": text}


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
    text = f"an eps below {eps:g} is lost in rounding, which moves a token by sigma = {moves}"
    return {"text": text, "sigma": sigma, "eps": eps}
