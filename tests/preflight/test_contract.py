# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What is taken for granted of verl: the installed verl keeps it, and no line stays green where one does not."""

import dataclasses
import functools
import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import verl_internals
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils.metric import Metric
from verl.workers.utils import losses

from fspo_verl import versions
from fspo_verl.band import Band
from fspo_verl.preflight import contract, doctor, hook, sources

LINES = {line.symbols[0]: line for line in contract.LINES}


def test_the_installed_verl_keeps_every_line():
    assert contract.broken() == []


@pytest.mark.parametrize("symbol", sorted({symbol for line in contract.LINES for symbol in line.symbols}))
def test_a_name_that_is_gone_turns_its_lines_red(symbol, monkeypatch):
    owner, name = symbol.rsplit(".", 1)
    if sources.source(symbol):
        monkeypatch.setattr(sources, "source", lambda module: "")
        monkeypatch.setitem(sys.modules, symbol, None)
    monkeypatch.delattr(contract._get(owner), name, raising=False)
    for line in (line for line in contract.LINES if symbol in line.symbols):
        assert f"{symbol} is not there" in "; ".join(line.problems())


# --- one fault at a time ---------------------------------------------------------------------------------------------


def replaced(name, make):
    """A fault: ``make`` of what the dotted name is now."""

    def plant(patch):
        owner, attribute = name.rsplit(".", 1)
        patch.setattr(contract._get(owner), attribute, make(contract._get(name)))

    return plant


def rewritten(module, old, new):
    """A fault: the source of a module reads otherwise."""

    def plant(patch):
        read = sources.source
        assert old in read(module)
        patch.setattr(sources, "source", lambda name: read(name).replace(old, new) if name == module else read(name))

    return plant


def another_module(name, text):
    """A fault: verl has one more module."""

    def plant(patch):
        modules = sources.modules
        more = [(name, text)]
        patch.setattr(sources, "modules", lambda held: [*modules(held), *(more if held in text else [])])

    return plant


def abstract(name):
    """A fault: verl's base asks for a method that this package's class does not have."""
    return replaced(f"fspo_verl.cpu.{name}.__abstractmethods__", lambda _: frozenset({"a_new_method"}))


def without_field(name):
    """A fault: a dataclass or model of verl without one of its fields."""
    owner, field = name.rsplit(".", 1)

    def make(cls):
        if dataclasses.is_dataclass(cls):
            return dataclasses.make_dataclass("Other", [f.name for f in dataclasses.fields(cls) if f.name != field])
        return type("Other", (), {"model_fields": {key: None for key in cls.model_fields if key != field}})

    return replaced(owner, make)


def without_key(key):
    """A fault: the config has lost a key."""

    def plant(patch):
        load, (section, last) = OmegaConf.load, key.rsplit(".", 1)

        def lossy(file):
            config = load(file)
            del OmegaConf.select(config, section)[last]
            return config

        patch.setattr(OmegaConf, "load", lossy)

    return plant


def with_another(name, make):
    """``ppo_loss`` with one function that it calls replaced."""

    def change(ppo_loss):
        def other(config, model_output, data, dp_group=None):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(losses, name, make(getattr(losses, name)))
                return ppo_loss(config, model_output, data, dp_group)

        return other

    return change


def one_argument_less(get_policy_loss_fn):
    def call(rollout_is_weights, **arguments):
        return get_policy_loss_fn(contract._PROBE)(**arguments)

    return lambda name: call


def forgetful(ppo_loss):
    """``ppo_loss`` that keeps the totals of the mini-batch to itself."""

    def other(config, model_output, data, dp_group=None):
        output = ppo_loss(config, model_output, data, dp_group)
        config.global_batch_info.clear()
        return output

    return other


def a_mode_of_single_tokens(agg_loss):
    """``agg_loss`` with one more mode, which no column per response can stand for."""

    def other(loss_mat, loss_mask, loss_agg_mode, **info):
        known = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
        if loss_agg_mode == "token-max":
            return (loss_mat * loss_mask).max()
        if loss_agg_mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
            return agg_loss(loss_mat, loss_mask, loss_agg_mode, **info)
        assert known[-1] == loss_agg_mode == "seq-mean-token-mean"
        return agg_loss(loss_mat, loss_mask, loss_agg_mode, **info)

    return other


def a_mode_less(agg_loss):
    def other(loss_mat, loss_mask, loss_agg_mode, **info):
        if loss_agg_mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
            return agg_loss(loss_mat, loss_mask, loss_agg_mode, **info)

    return other


def doubled(agg_loss):
    return functools.wraps(agg_loss)(lambda **arguments: 2 * agg_loss(**arguments))


class Median(Metric):
    def aggregate(self):
        return sorted(self.values)[len(self.values) // 2]


class SumOverRanks(Metric):
    @classmethod
    def aggregate_dp(cls, metrics):
        return sum(metric.aggregate() for metric in metrics)


PPO_LOSS, AGG_LOSS = "verl.workers.utils.losses.ppo_loss", "verl.trainer.ppo.core_algos.agg_loss"
SCHEMA, METRIC = "verl.workers.config.PolicyLossConfig", "verl.utils.metric.Metric"
DEVICE, VALIDATE = "verl.utils.device.auto_set_device", "verl.utils.config.validate_config"
WRAPPED, GET = "verl.workers.engine_workers.ppo_loss", "verl.utils.tensordict_utils.get"
TRACKING = "verl.utils.tracking.Tracking"
ENGINES, ROLLOUT = "verl.workers.engine.base.EngineRegistry", "verl.workers.rollout.base.BaseRollout"
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop.AgentLoopOutput"
NEW_MAIN = "@hydra.main(config_path='config')\ndef main(config):\n    run(config)\n"
MAIN_OF_ANOTHER_NAME = "from verl.other import auto_set_device\n" + NEW_MAIN.replace("run(", "auto_set_device(")

FAULTS = [  # a line's first symbol, and what turns that line red
    ("verl.trainer.ppo.core_algos.register_policy_loss",
     replaced("verl.trainer.ppo.core_algos.get_policy_loss_fn", lambda _: lambda name: print)),
    (PPO_LOSS, replaced(PPO_LOSS, with_another("get_policy_loss_fn", one_argument_less))),
    (PPO_LOSS, replaced(PPO_LOSS, with_another("no_padding_2_padding", lambda f: lambda *a: f(*a).reshape(-1)))),
    (PPO_LOSS, replaced(PPO_LOSS, with_another("no_padding_2_padding", lambda f: lambda *a: f(*a).roll(1)))),
    (PPO_LOSS, replaced(PPO_LOSS, forgetful)),
    (PPO_LOSS, replaced("verl.workers.utils.losses.Metric", lambda _: Median)),
    (AGG_LOSS, replaced(AGG_LOSS, a_mode_of_single_tokens)),
    (AGG_LOSS, replaced(AGG_LOSS, a_mode_less)),
    (AGG_LOSS, replaced(AGG_LOSS, doubled)),
    (SCHEMA, without_field(f"{SCHEMA}.loss_mode")),
    (SCHEMA, replaced(SCHEMA, lambda verls: dataclasses.make_dataclass("Other", ["eps_low"], bases=(Band, verls)))),
    (SCHEMA, replaced("verl.utils.config.omega_conf_to_dataclass", lambda _: lambda config: config)),
    ("verl.workers.config.FSDPActorConfig", without_field("verl.workers.config.FSDPActorConfig.loss_scale_factor")),
    (METRIC, replaced(METRIC, lambda _: Median)),
    (METRIC, replaced(METRIC, lambda _: SumOverRanks)),
    ("verl.__version__", lambda patch: patch.delitem(sys.modules, "fspo_verl.plugin")),
    (DEVICE, replaced(DEVICE, inspect.unwrap)),
    (DEVICE, another_module("verl.trainer.main_new", NEW_MAIN)),
    (DEVICE, another_module("verl.trainer.main_new", MAIN_OF_ANOTHER_NAME)),
    ("verl.trainer.config", without_key("actor_rollout_ref.actor.ppo_epochs")),
    ("verl.trainer.config", without_key("trainer.v1.separate_async.parameter_sync_step")),
    (VALIDATE, replaced(VALIDATE, lambda _: lambda config: None)),
    (VALIDATE, rewritten("verl.trainer.main_ppo", "validate_config", "check_config")),
    ("verl.utils.checkpoint.checkpoint_manager.find_latest_ckpt_path",
     replaced("verl.utils.checkpoint.checkpoint_manager.get_checkpoint_tracker_filename", lambda _: lambda path: path)),
    ("verl.trainer.ppo.v1.trainer_separate_async",
     rewritten("verl.trainer.ppo.v1.trainer_separate_async", "== parameter_sync_step", "== 2 * parameter_sync_step")),
    (WRAPPED, replaced(WRAPPED, lambda _: lambda config, model_output, data: None)),
    (WRAPPED, replaced("verl.trainer.distillation.losses.ppo_loss", lambda _: lambda config, data: None)),
    (WRAPPED, rewritten("verl.workers.engine_workers", "partial(ppo_loss, ", "partial(losses.ppo_loss, ")),
    (WRAPPED, another_module("verl.workers.new", "from verl.workers.utils.losses import sft_loss, ppo_loss")),
    *((GET, rewritten(module, key, "another")) for key, module in contract.BATCH_KEYS.items()),
    (GET, replaced(GET, lambda _: lambda data, key, default=None: default)),
    (TRACKING, replaced(f"{TRACKING}.log", inspect.unwrap)),
    (TRACKING, replaced(f"{TRACKING}.log", lambda _: lambda self, data, step: None)),
    (TRACKING, replaced(f"{TRACKING}.log", lambda log: lambda self, data, step: log(self, {}, step))),
    *((TRACKING, rewritten(module, "verl.utils.tracking", "verl.utils.other")) for module in contract._TRAINERS),
    *((TRACKING, rewritten(module, "ogger.log(", "ogger.write(")) for module in contract._TRAINERS),
    ("verl.plugin.platform.platform_manager.PlatformRegistry.register", abstract("platform.PlatformCPU")),
    (ENGINES, replaced(f"{ENGINES}.register", lambda _: lambda model_type: None)),
    (ENGINES, replaced("verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead._build_fsdp_module",
                       lambda _: lambda self: None)),
    (ENGINES, rewritten("verl.experimental.separation.engine_workers", "fsdp2_sharded_save_to_cpu", "snapshot")),
    (ROLLOUT, abstract("rollout.HFReplica")),
    (ROLLOUT, abstract("rollout.HFServerAdapter")),
    (ROLLOUT, without_field("verl.workers.rollout.replica.TokenOutput.log_probs")),
    (ROLLOUT, replaced("verl.workers.rollout.base._ROLLOUT_REGISTRY", lambda _: {"vllm": None})),
    (AGENT_LOOP, without_field(f"{AGENT_LOOP}.response_logprobs")),
    (AGENT_LOOP, replaced("verl.trainer.ppo.v1.replay_buffer.ReplayBuffer", lambda _: lambda size: None)),
    ("verl.checkpoint_engine.base.CheckpointEngine", abstract("checkpoint_engine.TCPCheckpointEngine")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[f"{symbol.rsplit('.')[-1]}" for symbol, _ in FAULTS])
def test_a_planted_fault_turns_its_line_red(number, monkeypatch):
    symbol, plant = FAULTS[number]
    assert LINES[symbol].problems() == []
    plant(monkeypatch)
    assert LINES[symbol].problems()


def test_every_line_with_a_check_of_its_own_has_its_fault():
    assert {symbol for symbol, line in LINES.items() if line.holds} == {symbol for symbol, _ in FAULTS}


# --- who is told -----------------------------------------------------------------------------------------------------

A_LINE = dataclasses.replace(contract.LINES[0], holds=lambda: iter(["planted"]))


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setitem(versions.TESTED, "verl", ("0.9.0",))
    monkeypatch.setattr(versions, "installed", lambda package: "0.99")


def launch(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        hook.check(compose("ppo_trainer", [*overrides, "actor_rollout_ref.rollout.name=vllm"]))


def test_an_untested_verl_that_keeps_the_contract_is_a_warning(untested, caplog):
    launch("+algorithm.policy_loss=fspo")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["verl 0.99 was not tested with fspo_verl: tested are 0.9.0"]
    found = {finding.check: finding for finding in doctor.installation()}
    assert found["untested_verl"].severity == "warning" and "holds here" in found["untested_verl"].why
    assert "contract" not in found and "verl_version" not in found


@pytest.mark.parametrize(("part", "refused"), [("loss", True), ("records", False)])
def test_an_untested_verl_that_breaks_the_contract_is_refused_where_another_loss_could_train(
    part, refused, untested, monkeypatch, caplog
):
    monkeypatch.setattr(contract, "LINES", [dataclasses.replace(A_LINE, part=part)])
    launch("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")  # not a launch of this package
    assert not caplog.records
    if refused:
        with pytest.raises(ValueError, match="(?s)planted.*the loss is not known.*pip install verl==0.9.0"):
            launch("+algorithm.policy_loss=fspo")
    else:
        launch("+algorithm.policy_loss=fspo")
        assert "planted" in caplog.text
    (finding,) = (finding for finding in doctor.installation() if finding.check == "contract")
    assert finding.severity == "error" and "planted" in finding.what and finding.why == A_LINE.lost


def test_a_tested_verl_is_not_examined_at_a_launch(monkeypatch, caplog):
    monkeypatch.setattr(contract, "LINES", [A_LINE])
    launch("+algorithm.policy_loss=fspo")
    assert not caplog.records


@pytest.mark.long
def test_the_doctor_examines_the_checkout_in_which_it_is_called(tmp_path):
    # A folder `verl` in the working directory goes before the installed one, as for `python -m verl.trainer.main_ppo`.
    (tmp_path / "verl").mkdir()
    for entry in Path(contract._get("verl").__file__).parent.iterdir():
        if entry.name not in ("version", "__pycache__"):
            (tmp_path / "verl" / entry.name).symlink_to(entry)
    (tmp_path / "verl" / "version").mkdir()
    (tmp_path / "verl" / "version" / "version").write_text("0.99.dev\n")
    command = [str(Path(sys.executable).with_name("fspo-verl")), "doctor", "--no-worker"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "verl 0.99.dev0 was not tested with fspo_verl" in run.stdout


# --- the page --------------------------------------------------------------------------------------------------------


def test_every_name_of_verl_that_the_code_uses_is_in_a_line():
    assert verl_internals.uses() and verl_internals.unlisted() == set()


def test_the_page_is_the_contracts():
    assert verl_internals.PAGE.read_text() == verl_internals.renewed(verl_internals.PAGE.read_text()), (
        "python scripts/verl_internals.py renews docs/verl_internals.md"
    )
