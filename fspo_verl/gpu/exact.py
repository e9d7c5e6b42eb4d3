# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Is the loss on this device the loss? Values and gradients against float64, computed from the formulas in NumPy.

The responses are made so that their S lie where each part of the loss acts, and clear of its edges, so that no rounding
of the inputs can move one over an edge: a decision that differs is wrong.
"""

import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fspo_verl.band import Band
from fspo_verl.gpu.lines import Line, judged
from fspo_verl.loss import MAX_LOG_RATIO, SequenceLoss

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Band], SequenceLoss]

_WHY = "sums in too low a precision, a wrong mask or a broken kernel silently train another loss"
_FIX = "report it with the line above and `pip freeze`; until then train with another version of torch or driver"
# Where S lies, in half-widths of the band: below, inside and above it, and beyond the dual clip at 3 of them.
_PLACES = (-2.5, -1.25, -0.75, -0.1, 0.1, 0.75, 1.25, 2.5, 3.75)
# eps, and the spread of a token's log-ratio. Rounding to bfloat16 moves S/sqrt(L) by some thousandths.
_SCALES = {torch.float32: (0.03, 0.02), torch.bfloat16: (0.3, 0.2)}
# Relative errors. Sums of 32,768 float32 numbers are right to some 1e-5; of bfloat16 numbers, to 1e-1 at best.
_VALUE_TOLERANCE = 1e-3
_GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-3 + 2**-8}  # rounded to the dtype once
LAYOUTS = ("contiguous", "strided", "packed")


@dataclass(frozen=True)
class Batch:
    """Inputs of a loss, ``[rows, tokens]`` float32 on the CPU (log-probs hold values of ``dtype``)."""

    log_prob: np.ndarray
    old_log_prob: np.ndarray
    advantage: np.ndarray  # [rows]
    mask: np.ndarray
    dtype: torch.dtype
    band: Band

    def rows(self, chosen: slice) -> "Batch":
        parts = (self.log_prob, self.old_log_prob, self.advantage, self.mask)
        return Batch(*(part[chosen] for part in parts), self.dtype, self.band)


def batch_of_all_places(rows: int, width: int, dtype: torch.dtype) -> Batch:
    """Responses of 1 to ``width`` tokens with holes in their masks, one without any token, and NaN in the padding."""
    rng = np.random.default_rng(0)
    eps, spread = _SCALES[dtype]
    length = np.rint(np.geomspace(1, width, rows)).astype(int)
    mask = np.arange(width) < length[:, None]
    mask &= (rng.random((rows, width)) < 0.9) | (np.arange(width) == 0)  # holes, as tool calls leave them
    mask[rows // 2] = False
    count = np.maximum(mask.sum(-1), 1)
    place = np.resize(_PLACES, rows) * eps * np.sqrt(count)
    log_ratio = spread * rng.standard_normal((rows, width)) * mask
    log_ratio += mask * ((place - log_ratio.sum(-1)) / count)[:, None]
    old = -rng.exponential(size=(rows, width))
    new, old = (torch.tensor(x, dtype=torch.float32).to(dtype).float().numpy() for x in (old + log_ratio, old))
    new[~mask] = np.nan
    # Alternately in runs of as many rows as there are places, so that each place is met with both signs.
    advantage = np.where(np.arange(rows) // len(_PLACES) % 2, 1.0, -1.0) * rng.uniform(0.5, 2.0, rows)
    band = Band(eps)
    return Batch(new, old, advantage.astype(np.float32), mask, dtype, band)


def reference(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Loss ``[rows]`` and gradient ``[rows, tokens]`` in float64: J = min(w A, clip(w) A), the dual clip, ∇J = w A."""
    new, old = (x.astype(np.float64) for x in (batch.log_prob, batch.old_log_prob))
    s = np.where(batch.mask, new - old, 0.0).sum(-1)
    length, a = batch.mask.sum(-1), batch.advantage.astype(np.float64)
    scale = np.sqrt(np.maximum(length, 1))
    low, high, dual = -batch.band.low * scale, batch.band.high * scale, batch.band.dual * scale
    used = np.where(a > 0, np.minimum(s, high), np.minimum(np.maximum(s, low), dual))
    clipped = used != s
    ratio = np.exp(np.minimum(used, MAX_LOG_RATIO))
    gradient = np.where(batch.mask & ~clipped[:, None], -(a * ratio)[:, None], 0.0)
    return -a * ratio * length, gradient


def run(batch: Batch, loss: Loss, device: str, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Loss and gradient as :func:`reference` gives them, from the loss on a device, with tensors in a layout."""
    mask = torch.tensor(batch.mask, device=device)
    log_prob = leaf = torch.tensor(batch.log_prob, device=device).to(batch.dtype).requires_grad_()
    old = torch.tensor(batch.old_log_prob, device=device).to(batch.dtype)
    advantages = torch.tensor(batch.advantage, device=device).unsqueeze(-1).expand(mask.shape)
    if layout == "contiguous":
        advantages = advantages.contiguous()
    elif layout == "strided":  # transposed, every second of the columns, and one column for all
        old, mask = (torch.stack([x, x], -1).flatten(1)[:, ::2] for x in (old, mask))
        log_prob = leaf.t().contiguous().t()
    else:  # packed: the tokens of all responses one after the other, scattered into rows as verl does
        log_prob = torch.full_like(leaf, torch.nan).masked_scatter(mask, leaf[mask])
    value = loss(log_prob, old, advantages, mask, batch.band).loss
    value.sum().backward()
    return value.detach().double().cpu().numpy(), leaf.grad.double().cpu().numpy()


def errors(batch: Batch, found: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Largest errors over the rows, relative to the row; and rows whose clip was decided wrongly."""
    (value, gradient), (true_value, true_gradient) = found, reference(batch)
    largest = np.abs(true_gradient).max(-1)
    wrong = (np.abs(gradient).max(-1) > 0) != (largest > 0)
    return {
        "value": _largest(np.abs(value - true_value), np.abs(true_value)),
        "gradient": _largest(np.abs(gradient - true_gradient).max(-1), largest),
        "wrong_decisions": int(wrong.sum()),
    }


def _largest(error: np.ndarray, scale: np.ndarray) -> float:
    """Error ``[rows]`` relative to a scale, absolute where that is 0; inf if any is not finite."""
    error = error / np.where(scale > 0, scale, 1.0)
    return float(error.max()) if np.isfinite(error).all() else math.inf


def lines(loss: Loss, device: str, longest: int) -> Iterator[Line]:
    """The loss in float32 and bfloat16, in each layout, with short and with long responses."""
    for dtype in _SCALES:
        name = str(dtype).removeprefix("torch.")
        batches = [batch_of_all_places(*size, dtype) for size in ((72, max(2, longest // 16)), (18, longest))]
        found = [errors(batch, run(batch, loss, device, layout)) for batch in batches for layout in LAYOUTS]
        worst = {key: max(part[key] for part in found) for key in found[0]}
        good = (
            worst["value"] <= _VALUE_TOLERANCE
            and worst["gradient"] <= _GRADIENT_TOLERANCE[dtype]
            and worst["wrong_decisions"] == 0
        )
        what = (
            f"{name}: largest relative error {worst['value']:.1e} of a value, {worst['gradient']:.1e} of a gradient, "
            f"{worst['wrong_decisions']} wrong clips; {', '.join(LAYOUTS)}, up to {longest:,} tokens"
        )
        yield judged(good, f"loss_{name}", what, _WHY, _FIX, worst)


# --- several devices -------------------------------------------------------------------------------------------------


def ranks_line(loss: Loss, device: str, longest: int) -> Line:
    """The same loss cut over the GPUs of this machine, its sum over NCCL; over two processes and gloo on a CPU."""
    count = torch.cuda.device_count() if device == "cuda" else 2
    if count < 2:
        return Line("skipped", "loss_ranks", f"{count} GPU: nothing to sum over NCCL")
    backend = "nccl" if device == "cuda" else "gloo"
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    try:
        torch.multiprocessing.spawn(_rank, (count, backend, free_port(), loss, device, longest, answers), nprocs=count)
        error, collective = answers.get()
    except Exception as failure:  # whatever a rank raises
        text = str(failure).strip().splitlines()[-1]
        return Line("error", "loss_ranks", f"{count} ranks over {backend}: {text}", "training needs it", _FIX)
    what = f"{count} ranks over {backend}: largest relative error {error:.1e} on a rank, {collective:.1e} of their sum"
    figures = {"ranks": count, "error": error, "sum": collective}
    good = max(error, collective) <= _VALUE_TOLERANCE
    return judged(good, "loss_ranks", what, "ranks that disagree train on different losses", _FIX, figures)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank(rank: int, ranks: int, backend: str, port: int, loss: Loss, kind: str, longest: int, answers) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    torch.distributed.init_process_group(backend, rank=rank, world_size=ranks)
    whole = batch_of_all_places(36, longest, torch.float32)
    share = whole.rows(slice(rank, None, ranks))
    value, gradient = run(share, loss, device, "contiguous")
    found = errors(share, (value, gradient))
    error = math.inf if found["wrong_decisions"] else max(found["value"], found["gradient"])
    # In float64, so that a sum over ranks is as exact as what it is compared with.
    total = torch.tensor([value.sum()], dtype=torch.float64, device=device)
    worst = torch.tensor([error], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        expected = reference(whole)[0]
        answers.put((worst.item(), abs(total.item() - expected.sum()) / np.abs(expected).sum()))
    torch.distributed.destroy_process_group()
