# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A CPU as a verl platform: no device memory, gloo collectives, Ray's logical GPUs as slots for workers, FSDP2."""

import dataclasses
import functools
import os
import types
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed
import verl.plugin.platform.platform_base
import verl.plugin.platform.platform_manager
from torch import cpu


def _nothing(*_args, **_kwargs) -> None:
    """Stands in for device calls that mean nothing on a CPU."""


def _device_module() -> types.ModuleType:
    """The part of ``torch.cuda``'s interface that verl uses, for a CPU; some of it is in ``torch.cpu``."""
    module = types.ModuleType("fspo_verl_cpu.device")
    vars(module).update(
        {name: getattr(cpu, name) for name in cpu.__all__},
        get_device_name=lambda *_: "cpu",
        device=nullcontext,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        mem_get_info=_memory_info,
        **dict.fromkeys(("empty_cache", "ipc_collect", "reset_peak_memory_stats"), _nothing),
        **dict.fromkeys(
            ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda *_: 0
        ),
    )
    return module


def _memory_info(*_args) -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _join_process_group() -> None:
    """Join the gloo process group that verl's Ray worker environment describes, and share the cores among the ranks."""
    if torch.distributed.is_initialized():
        return
    world_size = int(os.environ["WORLD_SIZE"])
    # Ray starts an actor with as many threads as the logical CPUs it books, here one.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    torch.distributed.init_process_group("cpu:gloo", rank=int(os.environ["RANK"]), world_size=world_size)


@functools.cache
def _prepare_engines() -> None:
    """Register verl's FSDP2 engine for a CPU, in a worker: the driver does without its imports."""
    import verl.utils.fsdp_utils
    from verl.workers.config import FSDPEngineConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

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

    # verl's asynchronous trainer refers its log-probs to the weights of the last sync. verl (0.9.1) takes this
    # snapshot with `tensor.cpu()`, which on a CPU is the tensor itself: the snapshot would follow the training, every
    # ratio would stay 1 and no clip could act. There is no registration point.
    save = verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu

    @functools.wraps(save)
    def save_copy(model):
        shards, spec = save(model)
        return {name: (shard.clone(), shard_spec) for name, (shard, shard_spec) in shards.items()}, spec

    verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu = save_copy


@verl.plugin.platform.platform_manager.PlatformRegistry.register(platform="cpu")
class PlatformCPU(verl.plugin.platform.platform_base.PlatformBase):
    """Chosen by ``VERL_PLATFORM=cpu`` and by nothing else."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never auto-detected: a head node without a GPU would switch to it silently

    def current_device(self) -> str:
        return "cpu"  # verl hands this to tensor.to(...), where an index would mean a CUDA device

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        # verl asks for this right before a worker joins its process group, with a backend string that torch rejects
        # for a CPU ("cpu:gloo,cpu:gloo"); it skips its own group when one exists.
        if "WG_BACKEND" in os.environ:
            _prepare_engines()
            _join_process_group()
        return "gloo"

    def ray_resource_name(self) -> str:
        return "GPU"  # verl counts only GPUs and NPUs: start Ray with `num_gpus` set to the number of workers

    def ray_noset_envvars(self) -> list[str]:
        return []

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def is_ipc_supported(self) -> bool:
        return False  # vLLM then receives weights through shared memory

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
