# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Weights from trainer to rollout where they share no process (verl's asynchronous trainers), without a GPU.

It is what the test of an asynchronous training needs: all of verl's own backends need an accelerator or RDMA. A trainer
that loads it for DUMP_LOG_PROBS, a folder, also leaves there what each update is trained on.
"""

import functools
import io
import os
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import ray.util
import torch
from torch.distributed import TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator


@CheckpointEngineRegistry.register("tcp")
class TCPCheckpointEngine(CheckpointEngine):
    """The trainer's first rank serves the weights, one by one, from a ``TCPStore``; meant for small models."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.store: Any = None  # a TCPStore from prepare or init_process_group to finalize

    def prepare(self) -> tuple[str, int] | None:
        """Open the store on the trainer's first rank; returns its address there."""
        if not self.is_master:
            return None
        address = ray.util.get_node_ip_address()
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list):
        """Tell everybody the address of the first rank."""
        return {"address": metadata[:1] * actor_wg_world_size}, {"address": metadata[:1] * rollout_world_size}

    def init_process_group(self, address: tuple[str, int]) -> None:
        """Join the store."""
        if not self.is_master:
            self.store = TCPStore(*address, is_master=False)

    def finalize(self) -> None:
        """Leave the store; the first rank closes it."""
        self.store = None

    async def send_weights(self, weights, global_steps: int | None = None) -> None:
        """Every rank walks through all weights, as gathering a sharded one is a collective; the first one sends."""
        count = 0
        async for named_weight in ensure_async_iterator(weights):
            if self.is_master:
                payload = io.BytesIO()
                torch.save((named_weight[0], named_weight[1].detach().cpu()), payload)
                self.store.set(str(count), payload.getvalue())
            count += 1
        if self.is_master:
            self.store.set("count", str(count))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield name and weight, once all of them are there."""
        for number in range(int(self.store.get("count"))):
            yield torch.load(io.BytesIO(self.store.get(str(number))))


def dump_log_probs(folder: str) -> None:
    """Have every update of this process leave its prompts and log-probs, of trainer and engine, in the folder."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    train = TrainingWorker.train_mini_batch

    @functools.wraps(train)
    def train_mini_batch(self, data, *args, **kwargs):
        names = ("old_log_probs", "rollout_log_probs", "loss_mask")
        rows = zip(tu.get(data, "uid"), *(data[name].unbind() for name in names), strict=True)
        torch.save([(prompt, *map(torch.clone, parts)) for prompt, *parts in rows], f"{folder}/{uuid.uuid4()}.pt")
        return train(self, data, *args, **kwargs)

    TrainingWorker.train_mini_batch = train_mini_batch


if "DUMP_LOG_PROBS" in os.environ:
    dump_log_probs(os.environ["DUMP_LOG_PROBS"])
