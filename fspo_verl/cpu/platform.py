# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A CPU as a verl platform: no device memory, gloo collectives, Ray's logical GPUs as slots for workers."""

import os
import types
from contextlib import contextmanager, nullcontext

import torch
import verl.plugin.platform.platform_base
import verl.plugin.platform.platform_manager
from torch import cpu


def _nothing(*_args, **_kwargs) -> None:
    """Stands in for device calls that mean nothing on a CPU."""


def _device_module() -> types.ModuleType:
    """The part of ``torch.cuda``'s interface that verl uses, for a CPU; some of it is in ``torch.cpu``."""
    module = types.ModuleType("fspo_verl.cpu.device")
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
            import fspo_verl.cpu.engine

            fspo_verl.cpu.engine.prepare_worker()
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
