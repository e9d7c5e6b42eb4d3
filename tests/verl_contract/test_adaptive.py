# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Assumptions on verl of a range that follows a clip rate."""

import functools
import inspect

import pytest
from verl.workers import engine_workers

from fspo_verl import verl_patches

METHODS = {"train_mini_batch": "data", "save_checkpoint": "local_path", "load_checkpoint": "local_path"}


@pytest.mark.parametrize("name", METHODS)
def test_the_actor_updates_saves_and_loads_through_one_worker(name):
    """Lost: eps does not move, or a resumed run starts from the eps of its config (read)."""
    method = getattr(engine_workers.TrainingWorker, name)
    assert list(inspect.signature(method).parameters)[:2] == ["self", METHODS[name]]
    outer = {"train_mini_batch": "update_actor"}.get(name, name)
    assert f"self.actor.{name}(" in inspect.getsource(getattr(engine_workers.ActorRolloutRefWorker, outer))
    assert "self.loss_fn" in inspect.getsource(engine_workers.TrainingWorker.set_loss_fn)


@pytest.mark.parametrize("keeps_marks", [True, False])
def test_a_method_is_wrapped_once_whatever_another_plugin_makes_of_it(keeps_marks, monkeypatch):
    """Lost: a response is counted twice."""
    worker, calls = engine_workers.TrainingWorker, []
    monkeypatch.setattr(verl_patches, "_wrapped", [])
    monkeypatch.setattr(worker, "train_mini_batch", lambda self: calls.append("verl"))

    def around(function, *args):
        calls.append("ours")
        return function(*args)

    def of_another(self):
        return wrapped(self)

    verl_patches.wrap_once(worker, "train_mini_batch", around)
    wrapped = worker.train_mini_batch
    monkeypatch.setattr(worker, "train_mini_batch", functools.wraps(wrapped)(of_another) if keeps_marks else of_another)
    verl_patches.wrap_once(worker, "train_mini_batch", around)
    worker.train_mini_batch(None)
    assert calls == ["ours", "verl"]
