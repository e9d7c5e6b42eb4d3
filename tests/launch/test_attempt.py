# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One launch, one folder of records: what the driver names is where workers write."""

import copy
from pathlib import Path

import pytest
from composed import composed
from omegaconf import OmegaConf

from fspo_verl.keys import GROUP, OVERRIDES, RECORDS_DIR
from fspo_verl.launch import checks, hook
from fspo_verl.launch.asked import problem as request_problem
from fspo_verl.launch.view import Launch

CHECKPOINTS = "trainer.default_local_dir"


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """The config of a launch after verl's main has handed it over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hook, "_start", hook.Start())

    def launch(*overrides):
        return composed([f"{GROUP}=fspo", f"{RECORDS_DIR}={tmp_path}/records", *overrides], keep)

    def keep(config):
        config = copy.deepcopy(config)
        hook.begin(hook.FIRST, config)
        return config

    return launch


def records_dir(config) -> Path:
    return Path(OmegaConf.select(config, RECORDS_DIR))


def test_launches_with_one_folder_of_checkpoints_are_attempts_of_one_run_and_others_lie_apart(launched, tmp_path):
    first, again = (records_dir(launched(f"{CHECKPOINTS}=ckpt")) for _ in range(2))
    absolute, other = (records_dir(launched(f"{CHECKPOINTS}={path}")) for path in (tmp_path / "ckpt", "branch"))
    assert len({first, again, absolute, other}) == 4
    assert first.parent == again.parent == absolute.parent != other.parent
    assert {folder.parent.parent for folder in (first, other)} == {tmp_path / "records"}
    assert not (tmp_path / "records").exists()  # workers make it


def test_a_config_is_named_once_and_anew_where_it_has_trained(launched):
    """verl's mains hand a config over at several places, others a copy of it; a notebook may train twice."""
    config = launched()
    named = records_dir(config)
    for same in (config, copy.deepcopy(config)):
        hook.begin("another place", same)
        assert records_dir(same) == named
    named.mkdir(parents=True)
    hook.begin(hook.FIRST, same)
    assert records_dir(same).parent == named.parent and records_dir(same) > named
    assert records_dir(same).name.startswith("attempt-")


def test_a_launch_without_records_or_without_a_loss_of_this_package_is_left_alone():
    for config in ({}, {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gspo", "records_dir": "mine"}}}}):
        config = OmegaConf.create(config)
        before = copy.deepcopy(config)
        hook._name_attempt(config)
        assert config == before


def test_a_second_run_into_the_folder_of_a_main_that_nobody_sees_is_told_at_the_logger(tmp_path, caplog):
    loss = {"_target_": "fspo_verl.config.FSPOPolicyLossConfig", "loss_mode": "fspo", "records_dir": str(tmp_path)}
    launch = Launch(OmegaConf.create({"actor_rollout_ref": {"actor": {"policy_loss": loss}}}))
    assert not [*checks.shared_folder(launch)]
    (tmp_path / "step-000001-rank-0000.parquet").touch()
    (found,) = checks.shared_folder(launch)
    assert found.severity == "warning" and f"{tmp_path} holds records already" in found.sentence
    hook.at_the_logger(OmegaConf.to_container(launch.config))
    assert "holds records already" in caplog.text


def test_a_second_training_that_the_logger_alone_sees_is_told_of_the_records_of_the_first(launched, caplog):
    """A main that trains again while Ray is up hands its config to no function that is wrapped."""
    config = launched()
    for _ in range(2):
        assert "holds records already" not in caplog.text
        hook.at_the_logger(OmegaConf.to_container(config))
        records_dir(config).mkdir(parents=True, exist_ok=True)
        (records_dir(config) / "step-000001-rank-0000.parquet").touch()
    assert f"{records_dir(config)} holds records already" in caplog.text


@pytest.mark.parametrize("asked", ["records", "elsewhere"])
def test_a_folder_that_the_environment_asks_for_holds_the_attempts(launched, tmp_path, monkeypatch, asked):
    """A launch whose config the trainer's logger sees is what was asked for, or is refused there."""
    config = launched()
    monkeypatch.setenv(OVERRIDES, f"{GROUP}=fspo {RECORDS_DIR}={tmp_path}/{asked}")
    problem = request_problem(config)
    assert (problem is None) == (asked == "records")
