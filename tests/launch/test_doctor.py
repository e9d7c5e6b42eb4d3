# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor: what it finds of a launch, what mends it, and what it prints."""

import json
import re
import shlex
from typing import NamedTuple
from unittest import mock

import pytest
import verl  # noqa: F401  loads the plugin, as a launch does
from composed import composed, mended
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException

from fspo_verl import cli, findings
from fspo_verl.findings import Finding
from fspo_verl.keys import ACTOR, OVERRIDES, POLICY_LOSS
from fspo_verl.launch import doctor
from fspo_verl.launch.starts import RECEIPT

SELECT = "algorithm.policy_loss=fspo"
ASYNC_MAIN = "verl.experimental.fully_async_policy.fully_async_main"


def in_process(module: str, arguments: list[str]) -> list[Finding]:
    """``doctor.judge`` without the seconds that it takes to start one of two mains."""
    try:
        if module == doctor.DEFAULT_MAIN:
            return composed(arguments, doctor.examine)
        assert module == ASYNC_MAIN
        name = ["--config-name", "fully_async_ppo_trainer"]
        return composed([*name, *arguments], doctor.examine, "experimental.fully_async_policy.config")
    except HydraException as problem:
        return [doctor.not_composed(problem)]


class Told(NamedTuple):
    """The answer of ``fspo-verl doctor --json``: its exit code, and findings by the name of their check."""

    code: int
    findings: dict[str, dict]
    wrong: dict[str, dict]  # errors and warnings


@pytest.fixture
def diagnose(capsys):
    def diagnosed(*options_and_launch: str, judge=in_process) -> Told:
        with mock.patch.object(doctor, "judge", judge):
            code = doctor.main(cli.parsers()[0].parse_args(["doctor", "--json", *options_and_launch]))
        assert not HydraConfig.initialized()
        findings = {one["id"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
        return Told(code, findings, {id: one for id, one in findings.items() if one["severity"] != "note"})

    return diagnosed


@pytest.fixture
def sound(tmp_path) -> list[str]:
    """A whole launch with which nothing is wrong."""
    return [
        *("python3", "-m", "verl.trainer.main_ppo", SELECT, "algorithm.adv_estimator=grpo"),
        *("actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=1024"),
        f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32}}",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
    ]


BF16 = f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:bf16}}"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
SAME = f"{MICRO}=4 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"
NOISE = "numerical_noise"
PLANTED = {  # overrides of the sound launch -> the check that finds something wrong; None where there is nothing
    "": None,
    f"{ACTOR}.ppo_mini_batch_size=2048": "one_step_per_rollout",  # half of it padding
    "actor_rollout_ref.rollout.top_p=0.95 actor_rollout_ref.rollout.top_k=50": "mismatch_of_engines",
    BF16: NOISE,
    f"{BF16} {POLICY_LOSS}.eps=0.4 {POLICY_LOSS}.target_clip_rate=0.1": NOISE,  # no eps removes it
    f"{BF16} {SAME}": None,
    f"{BF16} {SAME} {ACTOR}.shuffle=True": NOISE,
    f"{BF16} {SAME} {ACTOR}.use_dynamic_bsz=True": NOISE,
    f"{BF16} {MICRO}=4": NOISE,
    f"{BF16} {ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_mini_batch_size=8": NOISE,
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_and_no_other_is_found_and_its_remedy_mends_it(planted, sound, diagnose):
    faulty = [*sound, *shlex.split(planted)]
    told, check = diagnose("--", *faulty), PLANTED[planted]
    assert [*told.wrong] == ([check] if check else []) and told.code == 0
    if check:
        assert told.wrong[check]["action"] == "fix" and "\n" not in told.wrong[check]["sentence"]
        assert diagnose("--", *mended(Finding(**told.wrong[check]), faulty)).wrong == {}
    else:
        assert "log-ratio range 0 [-0." in told.findings["band_in_effect"]["sentence"]


@pytest.mark.parametrize("place", ["file/records", "loop/records", "/dev/full/records"])
def test_a_records_dir_that_cannot_be_written_here_is_a_warning(place, tmp_path, diagnose):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    wrong = diagnose(SELECT, f"{POLICY_LOSS}.records_dir={tmp_path / place}").wrong["used_records_dir"]
    assert wrong["severity"] == "warning" and "cannot be written on this machine" in wrong["sentence"]


def test_files_and_bytes_of_the_records_are_those_of_the_bench_at_full_size(diagnose, tmp_path):
    """512 ranks, 1,000 steps and 16 rows a rank and step; scripts/bench/records.py has written as many."""
    size = ["trainer.nnodes=64", "trainer.n_gpus_per_node=8", "trainer.total_training_steps=1000"]
    size += ["data.train_batch_size=1024", "actor_rollout_ref.rollout.n=8"]
    found = diagnose(SELECT, f"{POLICY_LOSS}.records_dir={tmp_path}/records", *size).findings["records_on_disk"]
    assert "64 nodes with 512 ranks" in found["sentence"] and "17,408 files and about 0.57 GB" in found["sentence"]


def test_a_launch_without_the_package_is_said_to_be_one(diagnose):
    told = diagnose("data.train_batch_size=512")
    assert told.code == 0 and told.wrong["not_selected"]["advice"] == SELECT
    assert diagnose("--strict", "data.train_batch_size=512").code == 1


FULLY_ASYNC = ["python", "-m", ASYNC_MAIN, SELECT]
FULLY_ASYNC += [f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=0"]
ON_POLICY_ANCHOR = "algorithm.rollout_correction.bypass_mode=false"  # the fully asynchronous main's default is true


def separate_async(sound: list[str], sync_steps: int) -> list[str]:
    """The sound launch on verl's asynchronous trainer, with mini-batches of 64."""
    return [
        *sound,
        *("trainer.v1.trainer_mode=separate_async", f"trainer.v1.separate_async.parameter_sync_step={sync_steps}"),
        *(f"{ACTOR}.ppo_mini_batch_size=64", f"data.train_batch_size={sync_steps * 64}"),
    ]


@pytest.mark.parametrize(("steps", "warned"), [(4, False), (1, True)])
def test_a_fully_asynchronous_launch_counts_the_steps_between_syncs(steps, warned, diagnose):
    launch = [*FULLY_ASYNC, f"async_training.trigger_parameter_sync_step={steps}"]
    assert ("one_step_per_rollout" in diagnose("--", *launch, ON_POLICY_ANCHOR).wrong) == warned
    assert "mismatch_of_engines" in diagnose("--", *launch).wrong


def test_one_step_between_syncs_of_separate_async_is_mended_as_verl_wants_it(sound, diagnose):
    once = separate_async(sound, 1)
    fix = diagnose("--", *once).wrong["one_step_per_rollout"]["advice"]
    # verl asserts data.train_batch_size == parameter_sync_step * ppo_mini_batch_size.
    assert fix == "trainer.v1.separate_async.parameter_sync_step=4 data.train_batch_size=256"
    assert diagnose("--", *once, *fix.split()).wrong == {}
    # ppo_epochs are steps between syncs as well; and the old trainer does not read trainer.v1.
    assert diagnose("--", *once, f"{ACTOR}.ppo_epochs=2").wrong == {}
    v0 = diagnose("--", *once, "trainer.use_v1=false").wrong
    assert v0["one_step_per_rollout"]["advice"] == f"{ACTOR}.ppo_mini_batch_size=16"


@pytest.mark.parametrize("launch", [["bash", "train.sh"], ["./train.sh", "a=1"], ["python3", "train.py"], ["foo"]])
def test_what_is_no_launch_is_refused_with_what_is(launch, capsys):
    assert cli.main(["doctor", "--", *launch]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fspo-verl doctor: {launch[0]} begins neither overrides") and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("launch", "id", "words"),
    [
        (["trainer.no_such_key=1"], "composition", "no_such_key"),
        ([SELECT, "~algorithm.policy_loss"], "composition", "Could not delete"),
        ([SELECT, f"{POLICY_LOSS}.loss_mode=gspo"], "overridden_group", f"remove {POLICY_LOSS}.loss_mode=gspo"),
    ],
)
def test_what_composes_no_config_is_an_error(launch, id, words, diagnose):
    told = diagnose("--", *launch)
    assert told.code == 1 and words in str(told.wrong[id])


@pytest.mark.parametrize("trainer", ["synchronous", "separate_async", "fully_async"])
def test_the_batches_of_a_launch(trainer, sound, diagnose):
    launch = {
        "synchronous": [*sound, "data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64"],
        "separate_async": separate_async(sound, 4),
        "fully_async": [
            *(*FULLY_ASYNC, f"{ACTOR}.ppo_mini_batch_size=64"),
            *("async_training.require_batches=2", "async_training.trigger_parameter_sync_step=2"),
        ],
    }[trainer]
    told = diagnose("--", *launch, "actor_rollout_ref.rollout.n=8", f"{ACTOR}.ppo_epochs=2")
    # 256 prompts in 4 mini-batches, twice
    said = "256 prompts x 8 = 2,048 responses per rollout, 8 optimiser steps"
    assert told.findings["batches"]["sentence"].startswith(said)


# --- a launch that is started ----------------------------------------------------------------------------------------

BEGINS = """
import pathlib, sys
{imports}

def main(config=None):
    {starts}
    pathlib.Path("trained").touch()

if __name__ == "__main__":
    {calls}
"""
COMPOSES = """import hydra
    hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)(main)()"""
MAINS = {  # of a user's own, which call none of verl's functions: what they import, and how they start
    "Ray under another name": ("from ray import init as begin", "begin()", COMPOSES),
    "Ray by a remote function": ("import ray", "ray.get(ray.remote(lambda: 1).remote())", COMPOSES),
    "the trainer's logger": (
        "from omegaconf import OmegaConf",
        "from verl.utils.tracking import Tracking; Tracking('p', 'e', [], config=OmegaConf.to_container(config))",
        COMPOSES,
    ),
    "Ray without a config": ("import ray", "ray.init()", "main()"),
}


@pytest.fixture
def started(tmp_path, tmp_path_factory, monkeypatch):
    """``doctor.judge`` of a main in this folder, which stays as it is; below a ``run``, which is told of no launch."""
    monkeypatch.chdir(tmp_path)
    (receipt := tmp_path_factory.mktemp("run") / "receipt").touch()
    monkeypatch.setenv(RECEIPT, str(receipt))
    monkeypatch.setenv(OVERRIDES, SELECT)

    def judged(text: str, *arguments: str) -> dict[str, Finding]:
        (tmp_path / "own_main.py").write_text(text)
        found = doctor.judge("own_main", [*arguments])
        assert [path.name for path in tmp_path.iterdir()] == ["own_main.py"] and receipt.read_text() == ""
        return {one.id: one for one in found}

    return judged


@pytest.mark.parametrize("name", MAINS)
def test_nothing_trains_under_the_doctor_whatever_a_main_calls(name, started):
    imports, starts, calls = MAINS[name]
    found = started(BEGINS.format(imports=imports, starts=starts, calls=calls), SELECT, f"{POLICY_LOSS}.eps_low=-1")
    assert ("bad_values" in found) == (calls == COMPOSES) and findings.exit_code(found.values()) == 1


def test_of_several_jobs_of_verls_main_the_first_is_examined_and_that_is_said(sound, started):
    *_, main = sound[:3]
    text = f"import runpy; runpy.run_module({main!r}, run_name='__main__', alter_sys=True)"
    found = started(text, *sound[3:], f"{POLICY_LOSS}.eps_low=0.02,-1", "--multirun")
    assert not findings.exit_code(found.values()) and "multirun" in found
    assert "[-0.02, +0.03]" in found["band_in_effect"].sentence


@pytest.mark.parametrize(("text", "words"), [("", "it said nothing"), ("raise TypeError('of its own')", "of its own")])
def test_a_main_that_ends_without_findings_is_an_error(text, words, started):
    found = started(text)
    assert findings.exit_code(found.values()) == 1 and words in found["composition"].sentence


def test_where_the_package_is_left_out_nothing_is_started(monkeypatch, diagnose):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "left_out" in diagnose("--", "python", "-m", "no_such_main", SELECT, judge=None).wrong


# --- what is printed -------------------------------------------------------------------------------------------------

QUIET = (SELECT, f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32}}", "data.train_batch_size=1024")


@pytest.mark.parametrize(
    ("launch", "counts", "next_step"),
    [
        ([], (0, 0), "fspo-verl doctor -- python3 -m verl.trainer.main_ppo ..., the command of your launch"),
        ([*QUIET], (0, 0), f"python3 -m verl.trainer.main_ppo {shlex.join(QUIET)}"),
        (["--", "python3", "-m", "verl.trainer.main_ppo", *QUIET], (0, 0), "start the launch"),
        # In bfloat16 it is said once that nothing but noise is clipped.
        ([SELECT, "data.train_batch_size=256"], (0, 1), f"{ACTOR}.ppo_mini_batch_size=64"),
        ([*QUIET, f"{POLICY_LOSS}.eps_low=-1"], (1, 0), f"remove {POLICY_LOSS}.eps_low=-1, or give an allowed value"),
    ],
)
def test_the_first_line_is_the_conclusion_and_the_last_what_to_do_next(launch, counts, next_step, capsys):
    """The last line after a warning is the warning's fix."""
    with mock.patch.object(doctor, "judge", in_process):
        doctor.main(cli.parsers()[0].parse_args(["doctor", *launch]))
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("fspo-verl doctor: ") and [*map(int, re.findall(r"\d+", first))] == [*counts]
    assert last.split(maxsplit=1) == ["next:", next_step]
    assert second.split()[0] == ["note", "warning", "error"][counts[1] + 2 * counts[0]]
