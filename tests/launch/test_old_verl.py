# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A folder with an old verl of its own, as most public repositories have one: it comes before the installed one.

The old verl here is a stand-in with what matters: a version (or none), no plugins, and a main of Hydra.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

import hydra_plugins.fspo_verl_searchpath as search_path

MAIN = """
import hydra
import verl

@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def main(config):
    print("trains", config.actor_rollout_ref.actor.clip_ratio)

if __name__ == "__main__":
    main()
"""
CONFIG = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {clip_ratio: 0.2}}\ntrainer: {project_name: x}\n"
MINE = "defaults: [ppo_trainer, algorithm.policy_loss: fspo, _self_]\n"
VERSIONS = ["0.2.0.dev", "0.8.0", None]
SELECTIONS = [["algorithm.policy_loss=fspo"], ["+algorithm.policy_loss=gspo"], ["--config-name", "mine"]]


@pytest.fixture
def repository(tmp_path):
    """A function that makes a folder with a verl of a version."""

    def with_verl(version: str | None) -> Path:
        config = tmp_path / "verl" / "trainer" / "config"
        config.mkdir(parents=True)
        (tmp_path / "verl" / "__init__.py").touch()
        (tmp_path / "verl" / "trainer" / "__init__.py").touch()
        (tmp_path / "verl" / "trainer" / "main_ppo.py").write_text(MAIN)
        (config / "ppo_trainer.yaml").write_text(CONFIG)
        (config / "mine.yaml").write_text(MINE)
        if version:
            (tmp_path / "verl" / "version").mkdir()
            (tmp_path / "verl" / "version" / "version").write_text(f"{version}\n")
        return tmp_path

    return with_verl


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("version", VERSIONS)
def test_its_own_launches_run_without_a_word(version, repository):
    run = python(repository(version), "-m", "verl.trainer.main_ppo", "+algorithm.policy_loss_fn=gspo")
    assert (run.returncode, run.stdout, run.stderr) == (0, "trains 0.2\n", "")


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("version", ["0.4.1", None])
def test_a_loss_of_ours_is_refused_there_and_both_versions_are_named(version, selection, repository):
    folder = repository(version)
    run = python(folder, "-m", "verl.trainer.main_ppo", *selection)
    assert run.returncode != 0 and "trains" not in run.stdout and "Traceback" not in run.stderr
    assert f"verl {version or 0} from {folder / 'verl'}" in run.stderr and ">=0.9" in run.stderr


def test_the_doctor_says_which_verl_it_found(repository):
    folder = repository("0.4.1")
    run = python(folder, "-m", "fspo_verl.cli", "doctor", "--json", "algorithm.policy_loss=fspo")
    found = {finding["id"]: finding for finding in json.loads(run.stdout)["findings"]}
    assert run.returncode == 1 and str(folder / "verl") in found["verl_version"]["sentence"], run.stderr


def test_what_is_left_of_an_uninstalled_package_says_so_in_a_line(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "fspo_verl.launch", None)
    path = ConfigSearchPathImpl()
    path.append("main", "pkg://verl.trainer.config")
    search_path.FSPOVerlSearchPathPlugin().manipulate_search_path(path)
    assert len(path.get_path()) == 1 and len(caplog.records) == 1 and caplog.records[0].exc_info is None
