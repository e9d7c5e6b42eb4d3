# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor: planted misconfigurations and what mends them, and the arithmetic of the batches."""

import contextlib
import importlib.util
import json
import math
import re
import shlex
from unittest import mock

import pytest
import torch
import verl  # noqa: F401  loads the plugin, as a launch does
from composed import composed
from hydra.core.hydra_config import HydraConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

from fspo_verl import cli
from fspo_verl.launch import checks, doctor, hook
from fspo_verl.launch.doctor import with_config as of_a_started_main
from fspo_verl.launch.view import Launch
from fspo_verl.observe import attempts

ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
SELECT = "algorithm.policy_loss=fspo"


ASYNC_MAIN = "verl.experimental.fully_async_policy.fully_async_main"


def in_process(module: str, arguments: list[str], look):
    """``with_config`` without the second that it takes to start a main; others than these two are started."""
    if module == doctor.DEFAULT_MAIN:
        return composed(arguments, look)
    if module == ASYNC_MAIN:
        name = ["--config-name", "fully_async_ppo_trainer"]
        return composed([*name, *arguments], look, "experimental.fully_async_policy.config")
    return of_a_started_main(module, arguments, look)


def diagnose(*options_and_launch: str, capsys, with_config=in_process) -> tuple[int, dict]:
    """Exit code and JSON of ``fspo-verl doctor``."""
    arguments = cli.parsers()[0].parse_args(["doctor", "--json", *options_and_launch])
    with mock.patch.object(doctor, "with_config", with_config):
        code = doctor.main(arguments)
    assert not HydraConfig.initialized()
    return code, json.loads(capsys.readouterr().out)


def found(report: dict) -> dict[str, dict]:
    """Errors and warnings by the name of their check."""
    return {finding["id"]: finding for finding in report["findings"] if finding["severity"] != "note"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with these GPUs and rollout engines; its cluster is not named."""

    def has(gpus: int, *engines: str):
        find = importlib.util.find_spec
        modules = {name: find("math") if name in engines else None for name in doctor._ENGINES.values()}
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: modules[name] if name in modules else find(name))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    has(16, "vllm")
    return has


@pytest.fixture
def sound(tmp_path) -> list[str]:
    """A whole launch with which nothing is wrong."""
    return [
        *("python3", "-m", "verl.trainer.main_ppo", SELECT, "algorithm.adv_estimator=grpo"),
        *("actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=1024"),
        f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32}}",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
    ]


def test_a_sound_launch_is_left_in_peace(sound, capsys):
    code, report = diagnose("--", *sound, capsys=capsys)
    assert code == 0 and found(report) == {}
    assert any("log-ratio band 0 [-0.03, +0.03]*L^0.5" in finding["sentence"] for finding in report["findings"])


BF16 = f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:bf16}}"
REJECTS = "algorithm.rollout_correction.rollout_rs"
PLANTED = {  # overrides -> check, severity
    f"{ACTOR}.ppo_mini_batch_size=2048": ("one_step_per_rollout", "warning"),  # half of it padding
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean": ("mean_over_own_length", "warning"),
    f"{ACTOR}.loss_scale_factor=null": ("no_divisor", "warning"),
    f"{ACTOR}.clip_ratio_c=10": ("idle_clip_ratio", "warning"),
    f"{POLICY_LOSS}.eps_high=0.5": ("band_beyond_use", "warning"),
    f"{POLICY_LOSS}.length_power=1": ("band_beyond_use", "warning"),
    "algorithm.rollout_correction.bypass_mode=true": ("rollout_log_probs", "warning"),
    f"{REJECTS}=seq_sum_k1 {REJECTS}_threshold=0.6_1.4": ("rejected_ratios", "warning"),
    f"\"{REJECTS}='seq_sum_k2,token_k1'\" \"{REJECTS}_threshold='3,0.5_4'\"": ("rejected_ratios", "warning"),
    "trainer.n_gpus_per_node=32": ("gpus", "warning"),
    "actor_rollout_ref.rollout.top_p=0.95 actor_rollout_ref.rollout.top_k=50": ("mismatch_of_engines", "warning"),
    f"{POLICY_LOSS}.loss_mode=gspo": ("overridden_group", "error"),
    f"{POLICY_LOSS}.records_dir=RECORDS": ("used_records_dir", "error"),
    f"{ACTOR}.ppo_mini_batch_size=0": ("no_mini_batch", "error"),
    f"{BF16} {ACTOR}.use_dynamic_bsz=True": ("noise_of_half_precision", "warning"),
    f"{BF16} {ACTOR}.ppo_micro_batch_size_per_gpu=2 {ACTOR}.shuffle=True": ("noise_of_half_precision", "warning"),
    f"{BF16} {ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_mini_batch_size=8": ("noise_of_half_precision", "warning"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=6": ("uneven_micro_batches", "error"),
    "trainer.no_such_key=1": ("composition", "error"),
}
NAMES_NO_OVERRIDE = {"composition"}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found_and_its_remedy_mends_it(planted, sound, tmp_path, capsys):
    check, severity = PLANTED[planted]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "step-000001-rank-0000.parquet").touch()
    faulty = [*sound, *shlex.split(planted.replace("RECORDS", f"{tmp_path}/records"))]
    code, report = diagnose("--", *faulty, capsys=capsys)
    assert check in found(report) and found(report)[check]["severity"] == severity
    assert "\n" not in found(report)[check]["sentence"]
    assert code == (severity == "error")
    if check in NAMES_NO_OVERRIDE:
        return
    assert found(report)[check]["action"] == "fix"
    fix = found(report)[check]["advice"].split(", or ")[0]
    if fix.startswith("remove "):
        mended = [override for override in faulty if override not in fix.split()]
        assert len(mended) < len(faulty)
    else:
        mended = [*faulty, *shlex.split(fix)]
    assert found(diagnose("--", *mended, capsys=capsys)[1]) == {}, fix


@pytest.mark.parametrize(
    ("owner", "resumed", "words"),
    [
        ("run", None, None),
        ("run", "run", None),
        ("other", "run", "another run, with checkpoints in"),
        ("run", "other", "it holds records from step 1 on, and this run branches off after step 20"),
        (None, "run", "records that no run has claimed"),
    ],
    ids=["anew", "resumed", "another's", "resumed from another", "unclaimed"],
)
def test_a_launch_refuses_the_records_of_another_run(owner, resumed, words, tmp_path):
    """``owner``: whose records they are; ``resumed``: whose checkpoint is used, None for a start anew."""
    records = tmp_path / "run/records"
    records.mkdir(parents=True)
    if owner:
        attempts.claim(records, tmp_path / owner / "checkpoints")
    (records / "step-000001-rank-0000.parquet").touch()
    overrides = [SELECT, f"{POLICY_LOSS}.records_dir={records}", "actor_rollout_ref.rollout.name=vllm"]
    overrides += [f"trainer.default_local_dir={tmp_path}/run/checkpoints"]
    if resumed:
        checkpoint = tmp_path / resumed / "checkpoints/global_step_20"
        checkpoint.mkdir(parents=True)
        overrides += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    before = sorted(records.iterdir())
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext() as refused:
        composed(overrides, hook.check)
    assert sorted(records.iterdir()) == before  # a look claims nothing
    assert words is None or f"{POLICY_LOSS}.records_dir={records}-2" in str(refused.value)


@pytest.mark.parametrize("place", ["file/records", "loop/records", "/dev/full/records"])
def test_a_records_dir_that_cannot_be_written_here_is_a_warning(place, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    told = found(diagnose(SELECT, f"{POLICY_LOSS}.records_dir={tmp_path / place}", capsys=capsys)[1])
    assert told["used_records_dir"]["severity"] == "warning"
    assert "cannot be written on this machine" in told["used_records_dir"]["sentence"]


@pytest.mark.parametrize(("tracker", "warned"), [("20", False), ("30", True)])
def test_a_lost_checkpoint_is_a_warning(tracker, warned, tmp_path, capsys):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    (tmp_path / "global_step_20").mkdir()
    report = found(diagnose(SELECT, f"trainer.default_local_dir={tmp_path}", capsys=capsys)[1])
    assert ("lost_checkpoint" in report) == warned
    assert not warned or "names a checkpoint of step 30, which is gone" in report["lost_checkpoint"]["sentence"]


def test_a_launch_without_the_package_is_said_to_be_one(capsys):
    code, report = diagnose("data.train_batch_size=512", capsys=capsys)
    assert code == 0 and found(report)["not_selected"]["advice"] == SELECT
    assert diagnose("--strict", "data.train_batch_size=512", capsys=capsys)[0] == 1
    assert [*found(diagnose("data.train_batch_size=512", SELECT, capsys=capsys)[1])] == ["noise_of_half_precision"]


def what_verl_keeps(rule: str, threshold: str) -> tuple[float, float]:
    """The smallest and the largest ratio of a token, trainer to rollout engine, that verl's rejection keeps."""
    log_ratio = torch.linspace(-1.5, 1.5, 30001, dtype=torch.float64)[:, None]
    kept, _ = compute_rollout_rejection_mask(log_ratio, torch.ones_like(log_ratio), rule, threshold)
    ratios = log_ratio[kept.bool()].exp()
    return ratios.min().item(), ratios.max().item()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rule=st.sampled_from(["token_k1", "seq_sum_k1", "seq_mean_k1"]),
    bounds=st.tuples(st.floats(0.3, 0.95), st.floats(1.05, 3)).map(lambda of: tuple(float(f"{x:.2g}") for x in of)),
)
def test_the_ratios_that_a_rejection_keeps_are_those_that_verl_keeps(rule, bounds):
    """Where a range is not symmetric in logs verl keeps its inverse, and each fix keeps what it says."""
    low, high = bounds
    threshold = f"{low:g}_{high:g}"
    correction = {"rollout_rs": rule, "rollout_rs_threshold": threshold}
    launch = Launch(OmegaConf.create({"algorithm": {"rollout_correction": correction}}))
    said = [*checks.rejected_ratios(launch)]
    assert bool(said) == (abs(low * high - 1) > 0.02)
    for one in said:
        acts = [float(x) for x in re.search(r"keeps ratios of (\S+) to (\S+?)\.?:", one.sentence).groups()]
        assert acts == pytest.approx(what_verl_keeps(rule, threshold), rel=0.01)
        alike, typed = re.findall(r"_threshold='([^']+)'", one.advice)
        assert what_verl_keeps(rule, typed) == pytest.approx((low, high), rel=0.01)
        assert math.prod(what_verl_keeps(rule, alike)) == pytest.approx(1, abs=0.01)


CLUSTERS = {
    "none": ([], None, "warning"),
    "of several nodes": (["trainer.nnodes=2"], None, "note"),
    "in the variable": ([], "auto", "note"),
    "in the config": (["+ray_kwargs.ray_init.address=auto"], None, "note"),
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_this_machine_lacks_is_a_warning_and_beside_a_named_cluster_a_note(
    cluster, sound, machine, monkeypatch, capsys
):
    overrides, variable, severity = CLUSTERS[cluster]
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    machine(2)
    report = diagnose("--", *sound, *overrides, capsys=capsys)[1]
    lacks = {one["id"]: one for one in report["findings"] if one["id"] in ("engine", "gpus")}
    assert {one["severity"] for one in lacks.values()} == {severity} and len(lacks) == 2
    asked = 16 if "nodes" in cluster else 8
    assert f" {asked} GPUs" in lacks["gpus"]["sentence"] and " 2 are visible" in lacks["gpus"]["sentence"]
    assert lacks["gpus"]["advice"] == "trainer.n_gpus_per_node=2" and "vllm" in lacks["engine"]["advice"]


def test_the_gpus_of_every_pool_are_counted(machine, capsys):
    pools = ["trainer.n_gpus_per_node=4", "rollout.nnodes=1", "rollout.n_gpus_per_node=3"]
    for visible in (7, 6):
        machine(visible, "vllm")
        assert ("gpus" in found(diagnose("--", *FULLY_ASYNC, *pools, capsys=capsys)[1])) == (visible < 7)


FULLY_ASYNC = ["python", "-m", ASYNC_MAIN, SELECT]
FULLY_ASYNC += [f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=0"]
ON_POLICY_ANCHOR = "algorithm.rollout_correction.bypass_mode=false"  # the fully asynchronous main's default is true


def separate_async(sound: list[str], sync_steps: int, mini_batch: int = 64) -> list[str]:
    """The sound launch on verl's asynchronous trainer."""
    return [
        *sound,
        *("trainer.v1.trainer_mode=separate_async", f"trainer.v1.separate_async.parameter_sync_step={sync_steps}"),
        *(f"{ACTOR}.ppo_mini_batch_size={mini_batch}", f"data.train_batch_size={sync_steps * mini_batch}"),
    ]


@pytest.mark.parametrize(("steps", "warned"), [(4, False), (1, True)])
def test_a_fully_asynchronous_launch_counts_the_steps_between_syncs(steps, warned, capsys):
    launch = [*FULLY_ASYNC, f"async_training.trigger_parameter_sync_step={steps}"]
    assert ("one_step_per_rollout" in found(diagnose("--", *launch, ON_POLICY_ANCHOR, capsys=capsys)[1])) == warned
    assert "rollout_log_probs" in found(diagnose("--", *launch, capsys=capsys)[1])


def test_one_step_between_syncs_of_separate_async_is_mended_as_verl_wants_it(sound, capsys):
    once = separate_async(sound, 1)
    fix = found(diagnose("--", *once, capsys=capsys)[1])["one_step_per_rollout"]["advice"]
    # verl asserts data.train_batch_size == parameter_sync_step * ppo_mini_batch_size.
    assert fix == "trainer.v1.separate_async.parameter_sync_step=4 data.train_batch_size=256"
    assert found(diagnose("--", *once, *fix.split(), capsys=capsys)[1]) == {}
    # ppo_epochs are steps between syncs as well; and the old trainer does not read trainer.v1.
    assert found(diagnose("--", *once, f"{ACTOR}.ppo_epochs=2", capsys=capsys)[1]) == {}
    v0 = found(diagnose("--", *once, "trainer.use_v1=false", capsys=capsys)[1])
    assert v0["one_step_per_rollout"]["advice"] == f"{ACTOR}.ppo_mini_batch_size=16"


def test_of_several_jobs_the_first_is_examined_and_that_is_said(sound, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    launch = [*sound, f"{POLICY_LOSS}.eps_low=0.02,-1", "--multirun"]
    code, report = diagnose("--", *launch, capsys=capsys, with_config=of_a_started_main)
    assert code == 0 and list(found(report)) == ["multirun"]
    assert any("[-0.02, +0.03]" in finding["sentence"] for finding in report["findings"])
    assert not {"multirun", "outputs"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "launch", [["ls"], ["bash", "train.sh"], ["./train.sh", "a=1"], ["python3", "train.py"], ["foo"]]
)
def test_what_is_no_launch_is_refused_with_what_is(launch, capsys):
    assert cli.main(["doctor", "--", *launch]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fspo-verl doctor: {launch[0]} begins neither overrides (KEY=VALUE ...) nor a command with")
    assert len(said.splitlines()) == 1


def test_a_program_that_could_not_be_stopped_is_not_started(capsys):
    code, report = diagnose("--", "python", "-m", "timeit", capsys=capsys)
    assert code == 1 and "does not call auto_set_device" in found(report)["composition"]["sentence"]


@pytest.mark.parametrize("trainer", ["synchronous", "separate_async", "fully_async"])
def test_the_batches_of_a_launch(trainer, sound, capsys):
    launch = {
        "synchronous": [*sound, "data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64"],
        "separate_async": separate_async(sound, 4),
        "fully_async": [
            *(*FULLY_ASYNC, f"{ACTOR}.ppo_mini_batch_size=64"),
            *("async_training.require_batches=2", "async_training.trigger_parameter_sync_step=2"),
        ],
    }[trainer]
    launch += ["actor_rollout_ref.rollout.n=8", f"{ACTOR}.ppo_epochs=2"]
    findings = diagnose("--", *launch, capsys=capsys)[1]["findings"]
    (said,) = (finding["sentence"] for finding in findings if finding["id"] == "batches")
    # 256 prompts in 4 mini-batches, twice
    assert said.startswith("256 prompts x 8 = 2,048 responses per rollout, 8 optimiser steps")


QUIET = (SELECT, f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32}}", "data.train_batch_size=1024")


# --- what is printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "counts", "next_step"),
    [
        ([], (0, 0), "fspo-verl doctor -- python3 -m verl.trainer.main_ppo ..., the command of your launch"),
        ([*QUIET], (0, 0), f"python3 -m verl.trainer.main_ppo {shlex.join(QUIET)}"),
        (["--", "python3", "-m", "verl.trainer.main_ppo", *QUIET], (0, 0), "start the launch"),
        ([*QUIET, "data.train_batch_size=256"], (0, 1), f"{ACTOR}.ppo_mini_batch_size=64"),
        ([SELECT, "data.train_batch_size=256"], (0, 1), f"{ACTOR}.ppo_mini_batch_size=64"),  # in bfloat16
        (
            [*QUIET, f"{POLICY_LOSS}.eps_low=-1"],
            (1, 0),
            f"remove {POLICY_LOSS}.eps_low=-1, or give an allowed value",
        ),
    ],
)
def test_the_first_line_is_the_conclusion_and_the_last_what_to_do_next(launch, counts, next_step, capsys):
    """After a warning it is the warning's fix."""
    with mock.patch.object(doctor, "with_config", in_process):
        doctor.main(cli.parsers()[0].parse_args(["doctor", *launch]))
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("fspo-verl doctor: ") and [*map(int, re.findall(r"\d+", first))] == [*counts]
    assert last.split(maxsplit=1) == ["next:", next_step]
    assert second.split()[0] == ["note", "warning", "error"][counts[1] + 2 * counts[0]]


def test_of_one_optimiser_step_it_is_said_once_that_the_clip_takes_noise(capsys):
    report = diagnose(SELECT, "data.train_batch_size=256", capsys=capsys)[1]
    (said,) = found(report).values()
    assert said["id"] == "one_step_per_rollout" and "takes nothing but noise" in said["sentence"]


SAME_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], True),
        ([f"{POLICY_LOSS}.eps=0.4"], False),
        (["++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32}"], False),
        ([*SAME_MICRO_BATCHES], False),
        ([*SAME_MICRO_BATCHES, "actor_rollout_ref.actor.shuffle=True"], True),
        ([*SAME_MICRO_BATCHES, "actor_rollout_ref.actor.use_dynamic_bsz=True"], True),
        (SAME_MICRO_BATCHES[:1], True),
    ],
)
def test_a_band_that_noise_of_bfloat16_may_fill_is_warned_of(overrides, says, capsys):
    _, report = diagnose(SELECT, *overrides, capsys=capsys)
    assert ("noise_of_half_precision" in found(report)) == says


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], True),  # 4 prompts x 4 responses on 8 GPUs are 2 for each
        (["trainer.n_gpus_per_node=4"], False),
        (["trainer.n_gpus_per_node=4", "trainer.nnodes=2"], True),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], False),
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], False),
        (["model_engine=megatron"], True),
        (["model_engine=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"], False),
        (["model_engine=megatron", f"{ACTOR}.megatron.context_parallel_size=2"], False),
        ([f"{ACTOR}.use_dynamic_bsz=True"], False),
    ],
)
def test_micro_batches_must_divide_what_each_gpu_gets_of_a_mini_batch(overrides, says, capsys):
    sizes = [f"{ACTOR}.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4", *SAME_MICRO_BATCHES]
    code, report = diagnose(SELECT, "data.train_batch_size=16", *sizes, *overrides, capsys=capsys)
    assert ("uneven_micro_batches" in found(report)) == says == code
