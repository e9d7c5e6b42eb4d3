# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One data-parallel rank: verl's training worker with FSDP2 trains on eight sequences; rank 0 saves what came out.

The environment says which rank it is.
"""

import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from bench import worker
from bench.worker import update, with_advantages
from torch.utils._python_dispatch import TorchDispatchMode
from verl.models.transformers.dense_common import forward_with_torch_backend
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_functional import allgather_dict_into_dict
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.observe import observer
from fspo_verl.observe.metrics import as_sums, metrics

PROMPT, RESPONSES, STEP = 5, [1, 3, 60, 17, 30, 90, 8, 2], 12


def mini_batch(vocabulary: int, step: int = STEP):
    """Eight sequences of 1 to 90 response tokens, one fully masked and one with a hole, and made-up old log-probs."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, vocabulary, (PROMPT + n,), generator=generator) for n in RESPONSES]
    mask = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    mask[1][:] = 0
    mask[2][10:20] = 0
    old = [-3 + 0.2 * torch.randn(n, generator=generator) for n in RESPONSES]
    advantages = torch.randn(len(RESPONSES), generator=generator).tolist()
    batch = worker.batch_of([x[:PROMPT] for x in ids], [x[PROMPT:] for x in ids])
    batch = with_advantages(batch, advantages, step)
    batch["response_mask"] = batch["loss_mask"] = worker.nested(mask)
    batch["old_log_probs"] = worker.nested(old)
    # A rollout engine that is 0.1 nats off.
    batch["rollout_log_probs"] = worker.nested(x - 0.1 * torch.randn(len(x), generator=generator) for x in old)
    return batch


def policy_loss(loss: str, observed: bool, records_dir: str, target: float | None = None) -> PolicyLossConfig:
    if loss == "fspo":
        return FSPOPolicyLossConfig(eps=0.5, target_clip_rate=target, records_dir=records_dir)
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


def run(environment: dict[str, str], log: Path, arguments: dict) -> None:
    """Be a rank, in a process of its own."""
    os.environ |= environment
    file = log.open("w")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file.fileno(), stream.fileno())
    {"train": train, "gather": gather, "go_on": go_on}[arguments.pop("what", "train")](**arguments)


def go_on(output: Path, model: Path, records: str, first: int, last: int, is_killed: bool) -> None:
    """Train steps, and save a checkpoint after every second one; go on from that before the first step.

    Args:
        output: folder of the checkpoints.
        is_killed: wait after the last step for the end; a file says that it has come.
    """
    trainer = worker.training_worker(model, lr=1e-3)
    config, rank = policy_loss("fspo", False, records), int(os.environ["RANK"])
    if first > 1:
        trainer.load_checkpoint(f"{output}/{first - 1}")
    for step in range(first, last + 1):
        batch = mini_batch(trainer.engine.module.config.vocab_size, step)
        share = tu.index_select_tensor_dict(batch, torch.arange(rank, len(RESPONSES), int(os.environ["WORLD_SIZE"])))
        update(trainer, share, config, worker.micro_batches(2), 4, scale=128)
        if step % 2 == 0:
            trainer.save_checkpoint(f"{output}/{step}", global_step=step)
    if is_killed:
        Path(f"{output}.{rank}.is_there").touch()
        time.sleep(600)


def gather(output: Path, step: dict[str, torch.Tensor], cut: list[list[list[int]]]) -> None:
    """Reduce the metrics of the responses of a step as verl's workers do; rank 0 saves them.

    Args:
        step: columns ``[B]`` of all ranks.
        cut: rows of each micro-batch, by mini-batch and rank.
    """
    torch.distributed.init_process_group("gloo")
    rank, ranks, reduced = torch.distributed.get_rank(), torch.distributed.get_world_size(), {}
    step_rows = 0
    for number, mini_batch in enumerate(cut):
        rows = sum(len(micro_batch) for of_rank in mini_batch for micro_batch in of_rank)
        step_rows, gathered = step_rows + rows, {}
        for micro_batch in mini_batch[rank]:
            columns = {name: column[micro_batch].numpy() for name, column in step.items()}
            values = metrics(columns, [16, 64, 256], number == 0, rows, ranks, step_rows)
            append_to_dict(gathered, as_sums(Metric.from_dict(values, "mean")))
        for name, of_ranks in allgather_dict_into_dict(gathered).items():
            reduced.setdefault(name, []).append(Metric.aggregate_dp(of_ranks))
    if rank == 0:
        torch.save(reduce_metrics(reduced), output)


def train(
    model: Path,
    output: Path,
    cut: str,
    loss: str = "fspo",
    observed: bool = False,
    mini_batch_size: int = len(RESPONSES),
    lr: float = 0.0,
    target_clip_rate: float | None = None,
    steps: int = 1,
    save: Path | None = None,
    load: Path | None = None,
) -> None:
    """Train on the same batch for some steps; records go to the folder OUTPUT.records.

    Args:
        cut: MICRO_BATCH_SIZE, packed:MICRO_BATCH_SIZE, fused:MICRO_BATCH_SIZE (packed, with verl's use_fused_kernels)
            or dynamic:MAX_TOKENS.
        save: folder of a checkpoint to write before the last step.
        load: folder of a checkpoint to go on from.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind, _, size = cut.rpartition(":")
    packed = kind in ("packed", "fused")
    fused = {"use_fused_kernels": kind == "fused", "fused_kernel_options": {"impl_backend": "torch"}}
    trainer = worker.training_worker(model, lr=lr, use_remove_padding=packed, **fused)
    micro_batches = worker.micro_batches(int(size), packed)
    if kind == "dynamic":
        micro_batches |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": int(size)}
    batch = mini_batch(trainer.engine.module.config.vocab_size)
    share = torch.arange(rank, len(RESPONSES), world_size)  # every rank gets short and long ones
    data = tu.index_select_tensor_dict(batch, share)
    gradient, optimizer_step = {}, trainer.engine.optimizer_step

    def keep_gradient():  # verl drops it after the step
        for name, parameter in trainer.engine.module.named_parameters():
            gradient[name] = parameter.grad.full_tensor()
        return optimizer_step()

    trainer.engine.optimizer_step = keep_gradient
    config = policy_loss(loss, observed, f"{output}.records", target_clip_rate)
    if load:
        trainer.set_loss_fn(partial(ppo_loss, config=SimpleNamespace(policy_loss=config)))
        trainer.load_checkpoint(str(load))
    eps = []
    for step in range(steps):
        if save and step == steps - 1:
            trainer.save_checkpoint(str(save), global_step=step)
        with Collectives() as collectives:
            logged = update(trainer, data, config, micro_batches, mini_batch_size, scale=128)
        if target_clip_rate:
            config.controller.end_step()  # as the weight sync does
            eps.append(dict(config.controller.eps))
    Path(f"{output}.eps.{rank}").write_text(json.dumps(eps))
    observer.flush_records()  # as the weight sync at the end of a step does
    weights = {name: parameter.full_tensor() for name, parameter in trainer.engine.module.named_parameters()}
    if rank == 0:
        saved = {"gradient": gradient, "weights": weights, "metrics": logged, "collectives": dict(collectives.counts)}
        saved["fused"] = type(trainer.engine.module).forward is forward_with_torch_backend
        torch.save(saved, output)
