# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that depend on what the installed verl does, as its sources read; faults are planted in the sources."""

import pytest
from hydra import compose, initialize_config_module

from fspo_verl.preflight import checks, sources

ACTOR = "actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"


def found(*overrides, config_name="ppo_trainer") -> dict:
    """Findings by the name of their check, notes aside."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(config_name, [*overrides, "actor_rollout_ref.rollout.name=vllm"])
    return {finding.check: finding for finding in checks.findings(config) if finding.severity != "note"}


@pytest.fixture
def reads(monkeypatch):
    """Let verl have one more module, or have a text replaced in all of them."""

    def change(module="", text="", old="", new=""):
        modules, source = sources.modules, sources.source
        more = [(module, text)] if module else []
        monkeypatch.setattr(
            sources,
            "modules",
            lambda held: [(m, t.replace(old, new)) for m, t in [*modules(held), *more] if held in t.replace(old, new)],
        )
        monkeypatch.setattr(sources, "source", lambda name: source(name).replace(old, new))

    return change


def test_bypass_mode_is_a_warning_where_workers_never_learn_of_it():
    assert not sources.bypass_replaces_the_loss()
    assert found("+algorithm.policy_loss=fspo", BYPASS)["rollout_log_probs"].severity == "warning"


TRAINER = "verl.trainer.ppo.v1.trainer_base"
REACHES_WORKERS = [
    (TRAINER, 'def init(self):\n    self.config.policy_loss.loss_mode = "bypass_mode"\n'),
    (TRAINER, 'def init(self):\n    actor.update(loss_mode="bypass_mode")\n'),
    (TRAINER, "def init_workers(self):\n    # bypass_mode\n    apply_bypass_mode(None, a, b)\n"),
    ("verl.workers.engine_workers", 'def update_actor(self, data):\n    self.loss.loss_mode = data["loss_mode"]\n'),
]  # fmt: skip


@pytest.mark.parametrize(("module", "text"), REACHES_WORKERS)
@pytest.mark.parametrize("loss", ["fspo", "gspo"])
def test_bypass_mode_is_refused_where_it_reaches_workers(loss, module, text, reads):
    reads(module, text)
    refused = found(f"+algorithm.policy_loss={loss}", BYPASS)
    assert refused["replaced_by_bypass"].severity == "error" and "rollout_log_probs" not in refused
    assert "algorithm.rollout_correction.bypass_mode=False" in refused["replaced_by_bypass"].fix
    assert "replaced_by_bypass" not in found(f"+algorithm.policy_loss={loss}")
    assert "replaced_by_bypass" not in found(f"{ACTOR}.policy_loss.loss_mode={loss}x", BYPASS)  # not this package's


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('config.policy_loss.get("loss_mode", "vanilla")', 'data["loss_mode"]'),
        ("apply_bypass_mode", "set_up_bypass_mode"),
        ('"bypass_mode"', "BYPASS"),
    ],
)
def test_bypass_mode_is_refused_where_verl_does_not_read_as_it_did(old, new, reads):
    reads(old=old, new=new)
    assert "replaced_by_bypass" in found("+algorithm.policy_loss=fspo", BYPASS)


GUARD = "raise ValueError(\"loss_agg_mode='seq-mean-token-mean' is incompatible with\")"


@pytest.mark.parametrize(
    ("refuses", "overrides", "warned"),
    [
        (True, ["+algorithm.policy_loss=gspo", f"{ACTOR}.megatron.context_parallel_size=2"], True),
        (True, ["+algorithm.policy_loss=gspo"], False),
        (True, ["+algorithm.policy_loss=fspo", f"{ACTOR}.megatron.context_parallel_size=2"], False),
        (False, ["+algorithm.policy_loss=gspo", f"{ACTOR}.megatron.context_parallel_size=2"], False),
    ],
)
def test_gspo_on_megatron_under_context_parallelism(refuses, overrides, warned, monkeypatch):
    source = sources.source("verl.workers.engine.megatron.transformer_impl").replace("seq-mean-token-mean", "")
    monkeypatch.setattr(sources, "source", lambda _: source + refuses * GUARD)
    report = found(*overrides, config_name="ppo_megatron_trainer")
    assert ("refused_by_megatron" in report) == warned
    if warned:
        fix = report["refused_by_megatron"].fix.split(",")[0]
        assert "refused_by_megatron" not in found(*overrides, fix, config_name="ppo_megatron_trainer")
    assert "refused_by_megatron" not in found("+algorithm.policy_loss=gspo")


FUSED = ("+algorithm.policy_loss=fspo", "actor_rollout_ref.model.use_fused_kernels=true")


@pytest.mark.parametrize(
    ("overrides", "reads", "warned"),
    [
        (["actor_rollout_ref.actor.strategy=fsdp2"], '{"embed_tokens", "lm_head"}', True),
        (["actor_rollout_ref.actor.strategy=fsdp2"], '{"embed_tokens"}', False),
        ([], '{"embed_tokens", "lm_head"}', False),
    ],
)
def test_fused_kernels_beside_a_head_of_its_own_are_warned_of(overrides, reads, warned, monkeypatch):
    monkeypatch.setattr(sources, "source", lambda module: reads)
    assert ("fused_untied_head" in found(*FUSED, *overrides)) == warned
