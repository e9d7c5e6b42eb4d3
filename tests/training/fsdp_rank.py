# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One data-parallel rank: verl's training worker with FSDP2 trains on eight sequences; rank 0 saves what came out.

Arguments: MODEL OUTPUT CUT [--loss gspo] [--observed] ...; the environment says which rank it is.

CUT is MICRO_BATCH_SIZE, packed:MICRO_BATCH_SIZE, fused:MICRO_BATCH_SIZE (packed, with verl's use_fused_kernels) or
dynamic:MAX_TOKENS. Records go to the folder OUTPUT.records.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verl.models.transformers.dense_common import forward_with_torch_backend
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig

from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.gpu import worker
from fspo_verl.gpu.step import RESPONSES, mini_batch
from fspo_verl.observe import observer


def policy_loss(loss: str, observed: bool, records_dir: str) -> PolicyLossConfig:
    if loss == "fspo":
        return FSPOPolicyLossConfig(eps=0.5, records_dir=records_dir)
    if observed:
        return ObservedPolicyLossConfig(loss_mode=loss, records_dir=records_dir)
    return PolicyLossConfig(loss_mode=loss)


class Collectives(TorchDispatchMode):
    """Counts the collective operations of a rank by name. (torch's CommDebugMode does not get on with FSDP2.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            self.counts[function.name()] += 1
        return function(*args, **kwargs or {})


def run(environment: dict[str, str], log: Path, arguments: list[str]) -> None:
    """Be a rank, in a process of its own."""
    os.environ |= environment
    file = log.open("w")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file.fileno(), stream.fileno())
    train(arguments)


def train(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "output", "cut"):
        parser.add_argument(name)
    parser.add_argument("--loss", default="fspo")
    parser.add_argument("--observed", action="store_true")
    parser.add_argument("--mini-batch-size", type=int, default=len(RESPONSES))
    parser.add_argument("--lr", type=float, default=0.0)
    args = parser.parse_args(arguments)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind, _, size = args.cut.rpartition(":")
    packed = kind in ("packed", "fused")
    cut = worker.Cut(tokens=int(size)) if kind == "dynamic" else worker.Cut(rows=int(size), packed=packed)
    worker.join()
    trainer = worker.training_worker(args.model, cut, lr=args.lr, fused=kind == "fused")
    batch = mini_batch(trainer.engine.module.config.vocab_size)
    share = torch.arange(rank, len(RESPONSES), world_size)  # every rank gets short and long ones
    data = tu.index_select_tensor_dict(batch, share)
    gradient, optimizer_step = {}, trainer.engine.optimizer_step

    def keep_gradient():  # verl drops it after the step
        for name, parameter in trainer.engine.module.named_parameters():
            gradient[name] = parameter.grad.full_tensor()
        return optimizer_step()

    trainer.engine.optimizer_step = keep_gradient
    loss = policy_loss(args.loss, args.observed, f"{args.output}.records")
    with Collectives() as collectives:
        metrics = worker.update(trainer, data, loss, args.mini_batch_size, scale=128)
    observer.settle_records()  # as the weight sync at the end of a step does
    weights = {name: parameter.full_tensor() for name, parameter in trainer.engine.module.named_parameters()}
    if rank == 0:
        saved = {"gradient": gradient, "weights": weights, "metrics": metrics, "collectives": dict(collectives.counts)}
        saved["fused"] = type(trainer.engine.module).forward is forward_with_torch_backend
        torch.save(saved, args.output)
