# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 training engines on a CPU."""

import dataclasses
import functools
import os

import torch
import torch.distributed
import verl.utils.fsdp_utils
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


def prepare_worker() -> None:
    """Join the gloo process group that verl's Ray worker environment describes, and share the cores among the ranks."""
    if torch.distributed.is_initialized():
        return
    world_size = int(os.environ["WORLD_SIZE"])
    # Ray starts an actor with as many threads as the logical CPUs it books, here one.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    torch.distributed.init_process_group("cpu:gloo", rank=int(os.environ["RANK"]), world_size=world_size)


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CPUEngineWithLMHead(FSDPEngineWithLMHead):
    """FSDP2 without parameter offloading, which would pin memory for an accelerator."""

    engine_config: FSDPEngineConfig

    def _build_fsdp_module(self, module):
        # verl offloads every forward-only model (the reference policy). Wrap it like the others, then restore.
        engine_config = self.engine_config
        self.engine_config = dataclasses.replace(engine_config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = engine_config


def _copy_snapshots() -> None:
    """Have verl's asynchronous trainer copy the weights of the last sync, to which it refers its log-probs.

    verl (0.9.1) takes this snapshot with ``tensor.cpu()``, which on a CPU is the tensor itself: the snapshot would
    follow the training, every ratio would stay 1 and no clip could act. There is no registration point.
    """
    save = verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu

    @functools.wraps(save)
    def save_copy(model):
        shards, spec = save(model)
        return {name: (shard.clone(), shard_spec) for name, (shard, shard_spec) in shards.items()}, spec

    verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu = save_copy


_copy_snapshots()
