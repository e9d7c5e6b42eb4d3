# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The wraps of verl's workers around functions of a test's own."""

from verl.trainer.distillation import losses as distillation
from verl.utils import tracking
from verl.workers import engine_workers

from fspo_verl import verl_patches
from fspo_verl.observe import microbatch


def wrapped_anew(monkeypatch, ppo_loss=None) -> None:
    """Wrap what is there now, as a worker does before its first mini-batch; the test's end puts all back.

    Args:
        ppo_loss: stands for that of verl in the modules that call it.
    """
    if ppo_loss is not None:
        for module in (engine_workers, distillation):
            monkeypatch.setattr(module, "ppo_loss", ppo_loss)
    for owner, name in verl_patches._wrapped:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(verl_patches, "_wrapped", [])
    monkeypatch.setattr(microbatch, "_POSITION", microbatch._Position())
    for addition in verl_patches.WORKERS:
        addition.add({module.__name__: module for module in (engine_workers, distillation, tracking)}[addition.module])
