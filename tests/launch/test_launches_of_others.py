# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Launches that select no loss of this package run as if it were not installed: not refused, and without a word."""

import logging
import pickle
from pathlib import Path

import pytest
import verl
from composed import composed
from omegaconf import OmegaConf

from fspo_verl.keys import ACTOR
from fspo_verl.keys import POLICY_LOSS as LOSS
from fspo_verl.launch import hook

ROLLOUT = "actor_rollout_ref.rollout"
GRPO = "algorithm.adv_estimator=grpo data.train_batch_size=1024 actor_rollout_ref.model.path=Qwen/Qwen3-8B"
GSPO = f"{GRPO} {LOSS}.loss_mode=gspo {ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4 {ACTOR}.clip_ratio_c=10"
ASYNC, ONE_STEP = "experimental.fully_async_policy.config", "experimental.one_step_off_policy.config"

OTHERS = {  # overrides, or (overrides, config name, folder of configs below verl)
    # verl's examples, by what their scripts set
    "defaults": "",
    "grpo": f"{GRPO} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 {ACTOR}.entropy_coeff=0",
    "grpo with LoRA": f"{GRPO} actor_rollout_ref.model.lora_rank=32 {ROLLOUT}.load_format=safetensors",
    "grpo on megatron": (GRPO, "ppo_megatron_trainer", "trainer.config"),
    "grpo on veomni": f"model_engine=veomni {GRPO}",
    "gspo": f"{GSPO} {ACTOR}.loss_agg_mode=seq-mean-token-mean",
    "cispo": f"{GRPO} {LOSS}.loss_mode=cispo {ACTOR}.clip_ratio_low=10 {ACTOR}.clip_ratio_high=0.2",
    "kl_cov": f"{GRPO} {LOSS}.loss_mode=kl_cov {LOSS}.ppo_kl_coef=1",
    "dr grpo": f"{GRPO} {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=False",
    "rloo": "algorithm.adv_estimator=rloo",
    "ppo with a critic": "algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen3-8B critic.optim.lr=1e-5",
    "one optimiser step per rollout": f"{GRPO} {ACTOR}.ppo_mini_batch_size=1024",
    "bypass mode": f"{GRPO} algorithm.rollout_correction.bypass_mode=True",
    "remote code": f"{GRPO} actor_rollout_ref.model.trust_remote_code=True",
    "distillation": "distillation.enabled=true distillation.n_gpus_per_node=1 distillation.nnodes=1",
    "sglang, several turns": f"{GRPO} {ROLLOUT}.name=sglang {ROLLOUT}.multi_turn.enable=True",
    "fully asynchronous": (GRPO, "fully_async_ppo_trainer", ASYNC),
    "one step off": (GRPO, "one_step_off_ppo_trainer", ONE_STEP),
    # recipes, with keys of their own
    "dapo": f"{GRPO} {ACTOR}.clip_ratio_high=0.28 algorithm.filter_groups.enable=True "
    "algorithm.filter_groups.metric=acc reward.reward_manager.name=dapo "
    "+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.max_resp_len=8192",
    "prime": "+algorithm.reward_gt_coef=5 +reward_model.model.loss_type=ce +reward_model.model.beta_train=0.05",
    "a recipe with a loss type": "+my_recipe.loss_type=grpo",
    "a recipe with records": "+my_recipe.records_dir=records +my_recipe.length_bins=[1,2]",
    "a recipe with a policy loss": "+my_recipe.policy_loss=grpo",
    "a loss of a recipe, below algorithm": "+algorithm.policy_loss.kind=clipped +algorithm.aux_loss=mse",
    "eps, below algorithm": "+algorithm.eps_low=0.1 +algorithm.eps_high=0.28",
    "a loss of another plugin": f"{LOSS}.loss_mode=my_clip",
    "another plugin's schema": f"{LOSS}._target_=my_plugin.MyLossConfig {LOSS}.loss_mode=my_clip",
    "an estimator of another plugin": "algorithm.adv_estimator=my_advantages",
    # free-form values
    "arguments of a reward function": "+reward.custom_reward_function.reward_kwargs.length_bins=[10,20]",
    "an eps of a reward function": "+reward.custom_reward_function.reward_kwargs.eps_low=0.1 "
    "+reward.custom_reward_function.reward_kwargs.loss=fspo",
    "a name of the trainer": "+trainer.loss_name=grpo +trainer.policy_lost=fspo",
    "arguments of a logger": "+trainer.wandb_kwargs.loss=fspo +trainer.wandb_kwargs.policy_loss=fspo",
    "notes": "+notes={loss_baseline: grpo, eps_low: 3}",
    "a field of another loss": f"+{LOSS}.kind=fspo {LOSS}.loss_mode=my_clip",
    "keys like ours": "+algorithm.policy_loss_type=gspo +policy_loss=observed +algorithm.my.policy_loss=gspo "
    "+algorithm.policy_losses=[gspo,grpo] +algorithm.loss_mode=gspo +actor_rollout_ref.policy_loss=grpo",
    "names of the experiment": "trainer.experiment_name=fspo trainer.project_name=policy_loss",
    # other programs of verl
    "sft": ("", "sft_trainer_engine", "trainer.config"),
    "an evaluation": ("", "evaluation", "trainer.config"),
}


def _split(overrides: str) -> list[str]:
    """Words between blanks; blanks within braces part none."""
    words = []
    for word in overrides.split():
        if words and words[-1].count("{") > words[-1].count("}"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


@pytest.mark.parametrize("name", OTHERS)
def test_a_launch_of_others_is_neither_refused_nor_commented_on(name, caplog, monkeypatch, tmp_path):
    given = OTHERS[name]
    overrides, config_name, folder = (given, "ppo_trainer", "trainer.config") if isinstance(given, str) else given

    def look(config):
        before = config.copy()
        hook.begin(hook.FIRST, config)
        assert config == before

    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.DEBUG, logger="fspo_verl"):
        composed(["--config-name", config_name, *_split(overrides)], look, folder)
    assert [record.message for record in caplog.records if record.name.startswith("fspo_verl")] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("problem", [ValueError, RecursionError, ImportError])
def test_what_goes_wrong_in_a_check_does_not_end_a_launch_of_others(problem, caplog, monkeypatch):
    def fails(_self):
        raise problem("on purpose")

    monkeypatch.setattr(hook.selection, "lost_selections", fails)
    config = OmegaConf.create({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanilla"}}}})
    hook.check(config)
    assert "did not look at this launch" in caplog.text


@pytest.mark.parametrize("config", [None, 3, "text", [], {}, {"actor_rollout_ref": None}, {"actor_rollout_ref": 1}])
def test_configs_that_are_none_of_verls_are_left_alone(config):
    for given in (config, OmegaConf.create(config) if isinstance(config, dict) else config):
        hook.begin(hook.FIRST, given)


STOCK = pickle.dumps(OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml"))
# What a launch of others may have in place of a section or value of verl's.
ODD = [None, "", -1, "auto", [], {}, "???", "${oc.env:NOT_SET}"]
READ = [  # sections and keys that a look at a launch may come to
    *("trainer", "data", "algorithm", "actor_rollout_ref", ACTOR, LOSS, ROLLOUT, "trainer.save_freq"),
    *("trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path", f"{LOSS}.loss_mode"),
]


@pytest.mark.parametrize("key", READ)
def test_a_config_of_others_in_which_something_is_missing_or_odd_is_not_commented_on(key, caplog):
    section, _, name = key.rpartition(".")
    for value in ["missing", *ODD]:
        config = pickle.loads(STOCK)
        holder = OmegaConf.select(config, section) if section else config
        if value == "missing":
            del holder[name]
        else:
            holder[name] = value
        with caplog.at_level(logging.DEBUG, logger="fspo_verl"):
            hook.begin(hook.FIRST, config)
            hook.at_the_logger(config)
        assert [record.message for record in caplog.records if record.name.startswith("fspo_verl")] == [], value
