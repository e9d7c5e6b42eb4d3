# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Is the loss on this device the loss? Values and gradients against float64, computed here from the formulas."""

import tempfile

import torch
from torch import Tensor

from fspo_verl.band import Band
from fspo_verl.loss import MAX_LOG_RATIO
from fspo_verl.observe import columns

EPS = {torch.float32: 0.03, torch.bfloat16: 0.3}  # rounding to bfloat16 moves S/sqrt(L) by some thousandths
# Relative errors. Sums of 32,768 float32 numbers are right to some 1e-5; of bfloat16 numbers, to 1e-1 at best. A
# gradient in bfloat16 is rounded once.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-3 + 2**-8}
# Where S lies, in half-widths of the band: on every side of every edge (the dual clip is at 3), and clear of it, so
# that rounding cannot move it to the other side.
_PLACES = torch.tensor([-2.5, -1.25, -0.75, -0.1, 0.1, 0.75, 1.25, 2.5, 3.75])


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
    """Compare a loss on a device with :func:`reference`; returns its values ``[rows]``.

    Raises:
        AssertionError: a relative error is above the tolerance, a gradient is there that should not be, or the reverse.
    """
    new, old, advantages, mask = (x.to(device, copy=True) for x in batch)
    eps = EPS[new.dtype]
    values = loss(new.requires_grad_(), old, advantages, mask, Band(eps)).loss
    values.sum().backward()
    for found, true in zip((values.detach(), new.grad), reference(*batch), strict=True):
        torch.testing.assert_close(found.double().cpu(), true, rtol=TOLERANCE[new.dtype], atol=0)
    return values.detach().double()


def check_loss(loss, dtype: torch.dtype, device: str) -> dict:
    """Short and long responses against float64; returns what was found."""
    width = 32768 if device == "cuda" else 4096
    compare(loss, make_batch(72, width, dtype), device)
    text = f"values and gradients are those of float64 within {TOLERANCE[dtype]:.1%}, up to {width:,} tokens"
    return {"text": text}


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
    atol = TOLERANCE[torch.float32] * true.abs().sum().item()
    torch.testing.assert_close(total.cpu(), true.sum(), rtol=0, atol=atol)
    torch.distributed.destroy_process_group()


def check_waits(loss, device: str) -> dict:
    """The host waits for no value of the loss, forward and backward; a wait stalls the kernels of a GPU.

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
