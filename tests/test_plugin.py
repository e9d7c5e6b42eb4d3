# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The installed package in processes that import verl, and the ways by which a launch reaches its checks."""

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

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
    own = {"fspo_verl", "fspo_verl.keys", "fspo_verl.plugin", "fspo_verl.verl_patches"}
    others = ("wrapt", "_wrapt", "fspo_verl_cpu")
    assert {name for name in sees - without if name.split(".")[0] not in others} == own


WRAPPED = """
    import json
    import verl.trainer.distillation.losses
    import verl.trainer.main_ppo
    import verl.utils.tracking
    import verl.workers.engine_workers
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from fspo_verl import verl_patches
    from hydra import compose, initialize_config_module
    with initialize_config_module("verl.trainer.config", version_base=None):
        compose("ppo_trainer")
    assert all(hasattr(getattr(owner, name), "__wrapped__") for owner, name, _ in verl_patches._wrapped)
    names = [f"{owner.__name__}.{name}" for owner, name, _ in verl_patches._wrapped]
    print(json.dumps([sorted({"fspo", "observed"} & set(POLICY_LOSS_REGISTRY)), names]))
"""
OF_LAUNCHES = [
    *("verl.utils.device.auto_set_device", "verl.trainer.constants_ppo.get_ppo_ray_runtime_env", "Tracking.__init__"),
    *("ConfigLoaderImpl.load_configuration", "ConfigLoaderImpl.compute_defaults_list"),
]
OF_WORKERS = [
    *("verl.workers.engine_workers.ppo_loss", "verl.trainer.distillation.losses.ppo_loss"),
    *("ActorRolloutRefWorker.update_weights", "TrainingWorker.train_mini_batch"),
    *("TrainingWorker.save_checkpoint", "TrainingWorker.load_checkpoint", "Tracking.__init__", "Tracking.log"),
]
OFF = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
BY_HAND = {"VERL_USE_EXTERNAL_PLUGINS": "another", "VERL_USE_EXTERNAL_MODULES": "fspo_verl.plugin"}


@pytest.mark.parametrize(
    ("env", "before", "losses", "wrapped"),
    [
        ({}, "import verl", ["fspo", "observed"], OF_LAUNCHES),
        ({}, "import fspo_verl.config", ["fspo", "observed"], OF_LAUNCHES + OF_WORKERS),
        (OFF, "import verl", [], []),
        (OFF, "import fspo_verl.config", ["fspo", "observed"], OF_WORKERS),
        (BY_HAND, "import verl", ["fspo", "observed"], OF_LAUNCHES),
    ],
)
def test_what_a_process_has_wrapped_and_registered(env, before, losses, wrapped, tmp_path):
    """Workers build a config of this package, and have its losses and wraps also where verl loads no plugins."""
    run = python("-c", f"{before}\n{textwrap.dedent(WRAPPED)}", cwd=tmp_path, **env)
    registered, names = json.loads(run.stdout.splitlines()[-1])
    assert registered == losses and sorted(names) == sorted(wrapped) and "fspo" not in run.stderr, run


def test_the_page_for_developers_lists_every_wrap():
    page = (Path(__file__).parents[1] / "docs/developing.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    listed = {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    for name in (*OF_LAUNCHES, *OF_WORKERS, "ray.init"):
        assert name.rpartition(".")[2] in listed, name


def test_an_addition_that_fails_is_named_and_takes_nothing_else_away(tmp_path):
    program = """
        import sys
        import fspo_verl.verl_patches as patches
        sys.modules["fspo_verl.register"] = None
        for act in (lambda module: module.gone, lambda module: print("added")):
            patches.when_imported("verl.trainer.ppo.core_algos", act, "X is lost")
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


AGAIN = """
import pathlib
import ray, verl.trainer.main_ppo
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from verl.utils.tracking import Tracking

ray.is_initialized, ray.init, ray.get = lambda: False, lambda **_: None, lambda *_: None

def train(config):
    Tracking("project", "experiment", [], config=OmegaConf.to_container(config, resolve=True))
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    print("trains", policy_loss.loss_mode)
    pathlib.Path(policy_loss.records_dir).mkdir(parents=True, exist_ok=True)
    pathlib.Path(policy_loss.records_dir, "step-000001-rank-0000.parquet").touch()

class Runner:  # in place of a worker of Ray, in which a trainer builds its logger
    remote = classmethod(lambda cls: cls)
    class run:
        remote = staticmethod(train)

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["trainer.default_local_dir=checkpoints"])
for loss_mode in ("fspo", "fspo", "gspo"):
    with open_dict(config):
        config.actor_rollout_ref.actor.policy_loss.loss_mode = loss_mode
    verl.trainer.main_ppo.run_ppo(config, Runner)
    ray.is_initialized = lambda: True
"""


def test_a_training_while_ray_is_up_is_told_of_the_records_before_it_or_refused_at_its_logger(tmp_path):
    """The second and third ``run_ppo`` of a process hand their config to no function that is wrapped."""
    run = python("-c", AGAIN, cwd=tmp_path, FSPO_VERL_OVERRIDES="algorithm.policy_loss=fspo")
    assert run.stdout.count("trains fspo") == 2 and run.returncode != 0, run.stderr
    assert run.stderr.count("holds records already") == 1
    assert "asks for algorithm.policy_loss=fspo, and this launch would not train it" in run.stderr


def test_where_the_package_is_left_out_hydra_knows_no_group(tmp_path):
    run = python("-m", "verl.trainer.main_ppo", "algorithm.policy_loss=fspo", cwd=tmp_path, **OFF)
    assert run.returncode != 0 and "Could not override" in run.stderr and "fspo_verl" not in run.stdout + run.stderr


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
