# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Assumptions on verl of the policy loss and its metrics, in every worker."""

import ast
import dataclasses
import inspect

import pytest
import torch
from reference import AGG_MODES
from verl.trainer.ppo import core_algos
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from fspo_verl import config, versions
from fspo_verl.launch import installation
from fspo_verl.observe.settings import own_aggregation


def test_a_loss_is_called_with_whole_padded_responses_and_the_totals_of_the_mini_batch(monkeypatch):
    """Lost: the loss fails, or is scaled by the micro-batch, or sees parts of responses."""
    seen = {}

    def note(**arguments):
        seen.update(arguments)
        return arguments["log_prob"].sum() * 1.0, {}

    def nest(row):
        return torch.nested.as_nested_tensor([torch.tensor(row)], layout=torch.jagged)

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "noted", note)
    actor = FSDPActorConfig(
        rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode="noted")
    )
    tokens = {"prompts": [0, 0], "responses": [0, 0], "response_mask": [1, 1]}
    tokens |= {"old_log_probs": [-1.0, -2.0], "advantages": [1.0, 1.0]}
    totals = {"dp_size": 1, "batch_num_tokens": 2, "global_batch_size": 1}
    data = get_tensordict({key: nest(row) for key, row in tokens.items()}, totals)
    ppo_loss(actor, {"log_probs": nest([0.0, -1.0, -2.0, 0.0])}, data)
    assert seen.keys() == {
        *("old_log_prob", "log_prob", "advantages", "response_mask"),
        *("loss_agg_mode", "config", "rollout_is_weights"),
    }
    assert seen["config"] is actor and actor.global_batch_info.keys() >= totals.keys() | {"loss_scale_factor"}
    assert seen["log_prob"].tolist() == [[-1.0, -2.0]] and seen["response_mask"].shape == (1, 2)


def test_agg_loss_has_no_mode_that_was_not_looked_at():
    """Lost: a new mode may read single tokens, which one column per response does not hold (read)."""
    comparisons = [node for node in ast.walk(ast.parse(inspect.getsource(core_algos.agg_loss)))
                   if isinstance(node, ast.Compare)]  # fmt: skip
    constants = [node.value for each in comparisons for node in ast.walk(each) if isinstance(node, ast.Constant)]
    assert {constant for constant in constants if isinstance(constant, str)} == set(AGG_MODES)


def gradient(loss: str, mode: str) -> torch.Tensor:
    """Return the gradient of a loss of verl at responses of 1, 2 and 4 tokens, which two updates moved."""
    length = torch.tensor([[1], [2], [4]])
    mask = (torch.arange(4) < length).float()
    old, move = -torch.ones(3, 4), 1e-4 * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    log_prob = (old + move).requires_grad_()
    policy_loss = PolicyLossConfig(loss_mode=loss, dro_beta=1.0)
    actor = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=3)
    advantages = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4)
    value, _ = core_algos.get_policy_loss_fn(loss)(
        old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=mask, loss_agg_mode=mode, config=actor
    )
    return torch.autograd.grad(value, log_prob)[0]


OURS_OR_OTHERS = {"fspo", "observed", "bypass_mode"}  # the last one calls the others


@pytest.mark.parametrize("loss", sorted(core_algos.POLICY_LOSS_REGISTRY.keys() - OURS_OR_OTHERS))
def test_a_loss_obeys_the_aggregation_mode_unless_it_is_known_to_have_its_own(loss):
    """Lost: a launch is told another aggregation than the one that trains."""
    modes = ("token-mean", "seq-mean-token-mean")
    tokens, responses = (gradient(loss, mode) for mode in modes)
    own = own_aggregation(loss, versions.installed("verl"))
    assert torch.allclose(tokens, responses) == (own is not None)
    # A mean over the tokens of a response, and then over responses, has the weight 1 / (n L) on each token.
    if own is not None:
        per_token = tokens.abs()[:, 0] * torch.tensor([1.0, 2.0, 4.0])
        assert per_token / torch.tensor([1.0, 1.0, 0.5]) == pytest.approx(torch.full((3,), 1 / 3), rel=2e-3)


def test_verl_trains_the_loss_as_the_probe_expects():
    """Lost: the loss or its gradient."""
    assert installation.problem() is None


def test_a_sum_is_added_over_micro_batches_and_averaged_over_ranks_and_mini_batches():
    """Lost: the rates are not those of all responses, or a step has another number of them."""

    def gathered(kind: str, *values: float) -> Metric:
        metric = Metric.from_dict({"x": values[0]}, AggregationType.MEAN)["x"]  # as ppo_loss makes them
        metric.aggregation = AggregationType(kind)  # as fspo_verl.observe.metrics marks them
        kept = {}
        for value in (metric, *(Metric(kind, value) for value in values[1:])):
            append_to_dict(kept, {"x": value})
        return kept["x"]

    assert Metric.aggregate_dp([gathered("sum", 1.0, 2.0), gathered("sum", 3.0, 6.0)]) == 2 + 4
    assert Metric.aggregate_dp([gathered("max", 1.0, 2.0), gathered("max", 3.0, 6.0)]) == 6
    assert reduce_metrics({"x": [1.0, 3.0], "x_max": [1.0, 3.0]}) == {"x": 2, "x_max": 3}


@pytest.mark.parametrize("schema", [config.Band, config.Observation, config.ObservedPolicyLossConfig])
def test_no_field_is_verls_and_ours_at_once(schema):
    """Lost: one value would set two things."""
    verls = {field.name for field in dataclasses.fields(PolicyLossConfig)}
    ours = set(schema.__annotations__) - {"loss_mode"}  # verl's own, with another default
    assert "loss_mode" in verls and not verls & ours
