# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a band that follows a clip rate needs of verl."""

import inspect

import pytest
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.workers import engine_workers

from fspo_verl import adaptive

METHODS = {"train_mini_batch": "data", "save_checkpoint": "local_path", "load_checkpoint": "local_path"}


@pytest.mark.parametrize("name", METHODS)
def test_the_actor_updates_saves_and_loads_through_one_worker(name):
    """Lost: eps does not move, or a resumed run starts from the eps of its config (read)."""
    method = getattr(engine_workers.TrainingWorker, name)
    assert list(inspect.signature(method).parameters)[:2] == ["self", METHODS[name]]
    outer = {"train_mini_batch": "update_actor"}.get(name, name)
    assert f"self.actor.{name}(" in inspect.getsource(getattr(engine_workers.ActorRolloutRefWorker, outer))
    assert "self.loss_fn" in inspect.getsource(engine_workers.TrainingWorker.set_loss_fn)


def test_wrapping_keeps_how_verl_dispatches_a_method(monkeypatch):
    """Lost: the driver finds no such method of its workers."""
    worker = engine_workers.TrainingWorker
    stock = {name: getattr(worker, name) for name in METHODS}
    for name, method in stock.items():
        monkeypatch.setattr(worker, name, inspect.unwrap(method))
        getattr(worker, name).__dict__.update(vars(method))
    vars(worker.train_mini_batch).pop("moves_eps", None)
    adaptive.install()
    for name, method in stock.items():
        wrapped = getattr(worker, name)
        assert wrapped is not method and getattr(wrapped, MAGIC_ATTR) == getattr(method, MAGIC_ATTR)
    before = worker.train_mini_batch
    adaptive.install()
    assert worker.train_mini_batch is before
