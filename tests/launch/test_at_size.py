# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Launches of the size of a real run: what they are warned of, and that no advice goes against another."""

import itertools
import logging
import math

import pytest
from composed import composed
from omegaconf import OmegaConf

from fspo_verl.keys import ACTOR, POLICY_LOSS
from fspo_verl.launch import checks, hook
from fspo_verl.launch.view import Launch
from fspo_verl.observe.noise import PRICE, SAME

CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"
MICRO = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")
EQUAL = [f"{ACTOR}.use_dynamic_bsz=False", *(f"{key}=4" for key in MICRO)]
CUTS = {
    "dynamic": [f"{ACTOR}.use_dynamic_bsz=True"],
    "equal": EQUAL,
    "other sizes": [*EQUAL, f"{MICRO[1]}=8"],
    "shuffled": [*EQUAL, f"{ACTOR}.shuffle=True"],
}
BF16, FP32 = (f"{ACTOR}.fsdp_config.mixed_precision={{param_dtype:{name}}}" for name in ("bf16", "fp32"))
SOUND = ["algorithm.policy_loss=fspo", "data.train_batch_size=1024", f"{ROLLOUT}.name=vllm"]


@pytest.fixture(scope="module")
def base():
    """Plain values of a launch's config that the checks read, without any of the settings in question."""
    config = composed(SOUND, OmegaConf.to_container)
    config["actor_rollout_ref"] = {key: config["actor_rollout_ref"][key] for key in ("actor", "rollout", "ref")}
    sections = ("actor_rollout_ref", "algorithm", "critic", "data", "trainer")
    return {name: config[name] for name in sections}


def launched(base, *overrides):
    """The config with more overrides."""
    config = OmegaConf.create(base)
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        value = value.replace(":", ": ") if value.startswith("{") else value
        OmegaConf.update(config, key, OmegaConf.create(f"x: {value}").x, force_add=True)
    return config


def warned(config) -> dict:
    found = checks.findings(config)
    assert not [one for one in found if one.severity == "error"]
    return {one.id: one for one in found if one.severity == "warning"}


@pytest.mark.parametrize("longest", [512, 2048, 8192, 32768])
@pytest.mark.parametrize("eps", [0.03, 0.08, 0.13, 0.36])
def test_no_advice_goes_against_another_and_after_all_of_it_nothing_is_left(base, eps, longest):
    length = [f"data.max_response_length={longest}", f"{ROLLOUT}.response_length={longest}"]
    for cut, precision, rollout in itertools.product(("dynamic", "equal"), (BF16, FP32), (None, "sequence", "bypass")):
        more = {"sequence": [f"{CORRECTION}.rollout_is=sequence"], "bypass": [f"{CORRECTION}.bypass_mode=True"]}
        given = [*length, f"{POLICY_LOSS}.eps={eps}", *CUTS[cut], precision, *more.get(rollout, [])]
        config, advised, found = launched(base, *given), {}, None
        first = warned(config)
        assert ("numerical_noise" in first) == (precision == BF16 and cut != "equal" and rollout != "bypass")
        assert ("band_beyond_use" in first) == (eps >= 0.19 or eps * math.sqrt(longest) > math.log(100))
        assert ("weights_of_whole_responses" in first) == (rollout == "sequence" and longest > 512)
        for _ in range(3):
            if not (found := warned(config)):
                break
            for text in itertools.chain.from_iterable(one.add for one in found.values()):
                key, value = text.split("=", 1)
                assert advised.setdefault(key, value) == value, given
            config = launched(
                OmegaConf.to_container(config), *itertools.chain.from_iterable(one.add for one in found.values())
            )
        assert not found, given


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ([f"{ACTOR}.use_kl_loss=True"], "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2"),
        (["algorithm.adv_estimator=gae", "critic.model.path=MODEL"], "critic.ppo_micro_batch_size_per_gpu=2"),
        ([], None),
    ],
)
def test_the_overrides_for_the_same_micro_batches_are_a_launch_that_verl_takes(overrides, more, untrained_model):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    given = [*SOUND, *CUTS["dynamic"], *overrides, "actor_rollout_ref.model.path=MODEL"]
    given += ["algorithm.adv_estimator=grpo"] * ("algorithm.adv_estimator=gae" not in overrides)
    given = [text.replace("MODEL", str(untrained_model)) for text in given]
    add = composed(given, warned)["numerical_noise"].add
    assert more is None or more in add

    def taken(config):
        validate_config(config, need_reference_policy(config), need_critic(config))
        return warned(config)

    assert composed([*given, *add], taken) == {}


@pytest.mark.parametrize("cut", CUTS)
def test_only_micro_batches_of_the_same_rows_are_without_noise(base, cut):
    assert ("numerical_noise" in warned(launched(base, *CUTS[cut]))) == (cut != "equal")


def test_a_launch_in_dynamic_batches_is_warned_once_before_ray_and_one_in_equal_ones_is_not(base, caplog):
    def said(*overrides):
        caplog.clear()
        config = launched(base, *overrides, "data.max_response_length=8192")
        with caplog.at_level(logging.WARNING, logger="fspo_verl"):
            for place in (hook.FIRST, "another function that a main calls before Ray starts"):
                hook.begin(place, config)
        return [record.getMessage() for record in caplog.records]

    (warning,) = said(*CUTS["dynamic"])
    assert SAME in warning and PRICE in warning and "less than 0.1% to 90% at 8,192 tokens" in warning
    assert said(*CUTS["equal"]) == said(*CUTS["dynamic"], FP32) == []


def test_the_launch_tells_the_ratios_of_all_three_edges(base):
    config = launched(base, *CUTS["equal"], "data.max_response_length=8192", f"{ROLLOUT}.response_length=8192")
    (note,) = (one for one in checks.run(Launch(config), checks.band_in_effect) if one.id == "band_in_effect")
    assert note.sentence.endswith("0.0662 to 15.1, dual clip 15.1 at L=8192.")


@pytest.mark.parametrize(("loss", "aggregation"), [("sapo", "seq-mean-token-mean"), ("geo_mean", "the mean over the")])
def test_an_observed_loss_that_ignores_the_aggregation_mode_is_told_so(loss, aggregation):
    given = ["algorithm.policy_loss=observed", f"{POLICY_LOSS}.loss_mode={loss}", "data.train_batch_size=1024"]
    (note,) = (one for one in composed(given, checks.findings) if one.id == "loss_in_effect")
    assert f"aggregation {aggregation}" in note.sentence and "ignores loss_agg_mode=token-mean" in note.sentence
