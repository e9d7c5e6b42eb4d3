# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What runs without a GPU (``VERL_PLATFORM=cpu``) need of verl. A change stops them at their start or first batch."""

import importlib
import inspect

import pytest
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

CLASSES = [
    "fspo_verl.cpu.platform.PlatformCPU",
    "fspo_verl.cpu.rollout.HFReplica",
    "fspo_verl.cpu.rollout.HFServerAdapter",
    "tcp_checkpoint_engine.TCPCheckpointEngine",
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_ours_implements_all_that_verls_base_asks_for(name):
    """Lost: verl does not start, finds no rollout, or stops at its first weight sync."""
    module, _, cls = name.rpartition(".")
    assert not inspect.isabstract(getattr(importlib.import_module(module), cls))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (EngineRegistry.register, {"model_type", "backend", "device"}),
        (FSDPEngineWithLMHead._build_fsdp_module, {"module"}),
    ],
)
def test_what_is_called_or_overridden_takes_these_arguments(function, names):
    """Lost: workers find no engine."""
    assert names <= set(inspect.signature(function).parameters)


def test_the_asynchronous_trainers_take_their_snapshots_by_the_wrapped_name(modules):
    """Lost: an asynchronous run never clips, as its old policy follows the new one (read)."""
    assert "fsdp2_sharded_save_to_cpu" in modules["verl.experimental.separation.engine_workers"]
