# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the installed package does to processes that import verl, and the ways by which a launch reaches its checks."""

import json
import logging
import subprocess
import sys
import textwrap

import pytest

MODULES = "import json, sys, verl; print(json.dumps(sorted(sys.modules)))"
OWN_MAIN = """
import hydra
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config):
    run_ppo(config, TaskRunnerV1)

main()
"""


def python(*args, cwd="/", **env):
    import os

    command = [sys.executable, *args]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=600)


def test_an_import_of_verl_brings_in_nothing_but_the_plugin_and_wrapt():
    sees, without = (
        set(json.loads(python("-c", MODULES, VERL_USE_EXTERNAL_PLUGINS=plugins).stdout)) for plugins in ("auto", "none")
    )
    own = {"fspo_verl", "fspo_verl.plugin", "fspo_verl.launch", "fspo_verl.launch.hook"}
    own |= {"fspo_verl.launch.view"}
    others = ("wrapt", "difflib", "_wrapt", "fspo_verl_cpu")
    assert {name for name in sees - without if name.split(".")[0] not in others} == own


def test_every_addition_takes_effect_without_a_word(tmp_path):
    program = """
        import verl.trainer.main_ppo as main
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
        from verl.utils import device, tracking
        wrapped = main.run_ppo, device.auto_set_device, tracking.Tracking.__init__, tracking.Tracking.log
        print({"fspo", "observed"} <= set(POLICY_LOSS_REGISTRY), *(hasattr(each, "__wrapped__") for each in wrapped))
    """
    run = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert run.stdout.split()[-5:] == ["True"] * 5 and "fspo" not in run.stderr, run.stderr


def test_the_losses_are_registered_whatever_else_fails(tmp_path):
    program = """
        import sys
        sys.modules["fspo_verl.launch.hook"] = sys.modules["fspo_verl.live"] = None  # an import of either fails
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
        import verl.utils.tracking
        print({"fspo", "observed"} <= set(POLICY_LOSS_REGISTRY))
    """
    run = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert run.stdout.strip() == "True", run.stderr
    assert "launches are not checked" in run.stderr and "no live series" in run.stderr


def test_a_loss_that_cannot_be_registered_is_named_and_does_not_end_the_import(tmp_path):
    program = """
        import sys
        sys.modules["fspo_verl.register"] = None
        import verl.trainer.ppo.core_algos
        print("goes on")
    """
    run = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert run.stdout.strip() == "goes on" and "the losses fspo and observed are not registered" in run.stderr


@pytest.mark.parametrize("dead", ["+algorithm.policy_lost=fspo", "+policy_loss=gspo"])
def test_an_own_main_that_calls_run_ppo_is_checked_before_ray_starts(dead, tmp_path):
    (tmp_path / "own_main.py").write_text(OWN_MAIN)
    run = python("own_main.py", dead, cwd=tmp_path)
    assert run.returncode != 0 and "selects nothing" in run.stderr
    assert "ray init kwargs" not in run.stdout  # what run_ppo prints right before ray.init


@pytest.mark.parametrize("plugins", ["another", pytest.param("none", marks=pytest.mark.long)])
def test_a_launch_is_checked_where_verl_loads_no_plugins(plugins, tmp_path):
    arguments = ["+algorithm.policy_loss=gspo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"]
    run = python("-m", "verl.trainer.main_ppo", *arguments, cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS=plugins)
    assert run.returncode != 0 and "loss_mode='vanilla' overrides algorithm.policy_loss=gspo" in run.stderr
    assert "ray init kwargs" not in run.stdout


ACTOR = {"policy_loss": {"loss_mode": "vanilla"}}
LATE = [
    {"algorithm": {"policy_lost": "fspo"}, "actor_rollout_ref": {"actor": ACTOR}},
    {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "fspo", "eps": -1}, "loss_agg_mode": "x"}}},
]


@pytest.mark.parametrize("config", LATE)
def test_the_logger_of_a_trainer_refuses_what_no_main_has_checked(config):
    from verl.utils.tracking import Tracking

    with pytest.raises(ValueError, match="selects nothing|eps=-1"):
        Tracking("project", "experiment", "console", config)


@pytest.mark.parametrize("config", [None, {}, {"trainer": 1}, {"actor_rollout_ref": {"actor": ACTOR}}])
def test_the_logger_of_other_programs_is_left_alone(config, caplog):
    from verl.utils.tracking import Tracking

    with caplog.at_level(logging.DEBUG, logger="fspo_verl"):
        Tracking("project", "experiment", "console", config=config)
    assert caplog.records == []
