# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's workers with the wraps of this package, around functions of a test's own, and the records of such a worker."""

import pytest
from verl.trainer.distillation import losses as distillation
from verl.utils import tracking
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss

from fspo_verl import verl_patches
from fspo_verl.observe import microbatch, observer


@pytest.fixture
def wrapped_anew(monkeypatch):
    """Wraps what is there, as a worker does before its first mini-batch; the test's end puts all back."""

    def wrap(ppo_loss):  # stands for that of verl in the modules that call it
        for module in (engine_workers, distillation):
            monkeypatch.setattr(module, "ppo_loss", ppo_loss)
        for owner, name, _ in verl_patches._wrapped:
            monkeypatch.setattr(owner, name, getattr(owner, name))
        monkeypatch.setattr(verl_patches, "_wrapped", [])
        monkeypatch.setattr(microbatch, "_POSITION", microbatch._Position())
        modules = {module.__name__: module for module in (engine_workers, distillation, tracking)}
        for wrap in verl_patches.WORKERS:
            verl_patches._wrap_in(wrap, modules[wrap.module])
        return engine_workers.ppo_loss

    return wrap


@pytest.fixture
def counted_ppo_loss(wrapped_anew):
    """verl's ``ppo_loss`` as its workers call it where records are on."""
    return wrapped_anew(ppo_loss)


@pytest.fixture
def recorded(monkeypatch):
    """Has the registered losses write what they have recorded until now."""
    monkeypatch.setattr(observer, "_WRITERS", {})
    return observer.flush_records
