# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the installed package does to processes that import verl, and the ways by which a launch reaches its checks."""

import ast
import json
import logging
import os
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
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=600)


def test_an_import_of_verl_brings_in_nothing_but_the_plugin_and_wrapt():
    sees, without = (
        set(json.loads(python("-c", MODULES, VERL_USE_EXTERNAL_PLUGINS=plugins).stdout)) for plugins in ("auto", "none")
    )
    own = {"fspo_verl", "fspo_verl.plugin", "fspo_verl.verl_patches"}
    others = ("wrapt", "_wrapt", "fspo_verl_cpu")
    assert {name for name in sees - without if name.split(".")[0] not in others} == own


WRAPPED = """
    import verl.trainer.distillation.losses
    import verl.trainer.main_ppo
    import verl.utils.tracking
    import verl.workers.engine_workers
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from fspo_verl import verl_patches
    assert all(hasattr(getattr(owner, name), "__wrapped__") for owner, name in verl_patches._wrapped)
    assert verl.utils.tracking.Tracking in verl_patches._looked_at
    print(sorted({"fspo", "observed"} & set(POLICY_LOSS_REGISTRY)), [name for _, name in verl_patches._wrapped])
"""
OF_LAUNCHES = ["auto_set_device", "get_ppo_ray_runtime_env"]
OF_WORKERS = ["ppo_loss", "ppo_loss", "update_weights", "train_mini_batch", "save_checkpoint", "load_checkpoint", "log"]


@pytest.mark.parametrize(
    ("plugins", "before", "wrapped"),
    [
        ("auto", "import verl", OF_LAUNCHES),
        ("auto", "import fspo_verl.config", OF_LAUNCHES + OF_WORKERS),
        ("none", "import fspo_verl.config", OF_WORKERS),
    ],
)
def test_what_a_process_has_wrapped_and_registered(plugins, before, wrapped, tmp_path):
    """Workers build a config of this package, and have its losses and wraps also where verl loads no plugins."""
    program = f"{before}\n{textwrap.dedent(WRAPPED)}"
    run = python("-c", program, cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS=plugins)
    losses, names = (ast.literal_eval(f"{text}]") for text in run.stdout.splitlines()[-1].split("]")[:2])
    assert losses == ["fspo", "observed"] and sorted(names) == sorted(wrapped) and "fspo" not in run.stderr, run


def test_an_addition_that_fails_is_named_and_takes_nothing_else_away(tmp_path):
    program = """
        import sys
        import fspo_verl.verl_patches as patches
        sys.modules["fspo_verl.register"] = None
        for add in (lambda module: module.gone, lambda module: print("added")):
            patches.arm([patches.Addition("verl.trainer.ppo.core_algos", add, "X is lost")])
        import verl.trainer.ppo.core_algos
        print("goes on")
    """
    run = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert run.stdout.split("\n")[-3:] == ["added", "goes on", ""] and "Traceback" not in run.stderr, run.stderr
    assert "X is lost" in run.stderr and "the losses fspo and observed are not registered" in run.stderr


def test_an_own_main_that_calls_run_ppo_is_checked_before_ray_starts(tmp_path):
    (tmp_path / "own_main.py").write_text(OWN_MAIN)
    run = python("own_main.py", "+algorithm.policy_lost=fspo", cwd=tmp_path)
    assert run.returncode != 0 and "selects nothing" in run.stderr
    assert "ray init kwargs" not in run.stdout  # what run_ppo prints right before ray.init


COMPOSES = """
import sys
import verl
from hydra import compose, initialize_config_module
from verl.utils.device import auto_set_device

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", sys.argv[1:])
auto_set_device(config)
print("goes on")
"""


@pytest.mark.parametrize("word", [None, "actor_rollout_ref.actor.policy_loss.eps=-1"])
def test_a_main_that_composes_without_an_application_of_hydra_is_checked(word, tmp_path):
    (tmp_path / "own_main.py").write_text(COMPOSES)
    run = python("own_main.py", "algorithm.policy_loss=fspo", *filter(None, [word]), cwd=tmp_path)
    assert ("goes on" in run.stdout) == (word is None) and "did not look" not in run.stderr, run.stderr
    assert word is None or "eps=-1" in run.stderr


@pytest.mark.parametrize("plugins", ["another", pytest.param("none", marks=pytest.mark.long)])
def test_a_launch_is_checked_where_verl_loads_no_plugins(plugins, tmp_path):
    arguments = ["+algorithm.policy_loss=gspo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"]
    run = python("-m", "verl.trainer.main_ppo", *arguments, cwd=tmp_path, VERL_USE_EXTERNAL_PLUGINS=plugins)
    assert run.returncode != 0 and f"remove {arguments[1]}" in run.stderr
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
