# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Observing any policy loss: the training is untouched, and what is reported is what the gradient says."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_policy_loss import CUTS, MiniBatch, actor_config, padded_batch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import PolicyLossConfig

from fspo_verl.band import Band
from fspo_verl.config import ObservedPolicyLossConfig
from fspo_verl.loss import fspo_loss
from fspo_verl.observe import columns
from fspo_verl.observe.settings import clip_ratios

INNER = ["vanilla", "gspo", "dppo_tv", "dppo_kl", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo"]
MANY_COVARIANCES = {"clip_cov_lb": 0.0, "clip_cov_ratio": 0.1}  # clip_cov then draws tokens in every call
TIGHT = {"clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3, "clip_ratio_c": 1.05}


def configs(inner):
    schemas = [schema(loss_mode=inner, **MANY_COVARIANCES) for schema in (PolicyLossConfig, ObservedPolicyLossConfig)]
    return [actor_config("token-mean", schema, **TIGHT) for schema in schemas]


@pytest.mark.parametrize("inner", INNER)
def test_an_observed_loss_is_bit_for_bit_the_loss(inner):
    stock, observed = configs(inner)
    plain, watched = MiniBatch(), MiniBatch()
    for cut in ("one", "ragged"):
        torch.manual_seed(0)
        expected = plain.step(CUTS[cut], stock)
        torch.manual_seed(0)
        got = watched.step(CUTS[cut], observed)
        assert torch.equal(watched.gradient, plain.gradient) and (plain.gradient != 0).any()
        assert {name: got[name] for name in expected} == expected
        assert {"actor/fspo/better/clipped", "actor/fspo/length_16_to_63/clipped"} <= got.keys() - expected.keys()


calls = 0


def _ratio(log_prob, old_log_prob):
    return (log_prob - old_log_prob).exp()


def _mean(token_losses, response_mask):
    return (token_losses * response_mask).sum() / response_mask.sum().clamp(min=1), {"actor/own": 1.0}


def in_place_of(name):
    """A loss that changes one of its arguments in place."""

    def loss(old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights, loss_agg_mode):
        given = locals()[name]
        given.clamp_(max=-0.3) if given.is_floating_point() else given.logical_and_(advantages > 0)
        ratio = _ratio(log_prob, old_log_prob)
        return _mean(-advantages * ratio.clamp(0.99, 1.01) * rollout_is_weights, response_mask)

    return loss


def counting(old_log_prob, log_prob, advantages, response_mask, config, **_):
    """Its range and weight follow how often it was called, its weight what it keeps in the config."""
    global calls
    calls += 1
    config.global_batch_info["calls"] = config.global_batch_info.get("calls", 0) + 1
    ratio = _ratio(log_prob, old_log_prob).clamp(max=1 + 0.01 * calls)
    return _mean(-advantages * ratio / config.global_batch_info["calls"], response_mask)


def random(old_log_prob, log_prob, advantages, response_mask, **_):
    return _mean(-advantages * _ratio(log_prob, old_log_prob) * torch.rand_like(advantages), response_mask)


def no_gradient(old_log_prob, log_prob, advantages, response_mask, **_):
    return _mean(-advantages * _ratio(log_prob.detach(), old_log_prob), response_mask)


def not_of_the_log_prob(old_log_prob, log_prob, advantages, response_mask, **_):
    return _mean(torch.zeros(log_prob.shape, requires_grad=True) * 1.0, response_mask)


ARGUMENTS = ("log_prob", "old_log_prob", "advantages", "response_mask", "rollout_is_weights")
STATEFUL = {f"in place of {name}": in_place_of(name) for name in ARGUMENTS}
STATEFUL |= {"counting": counting, "random": random, "detached": no_gradient, "unconnected": not_of_the_log_prob}


def clipped(metrics):
    """The mean share of a response's tokens that are clipped, of rows with an advantage."""
    return sum(value for name, value in metrics.items() if name.startswith("actor/fspo/length_") and "/clipped" in name)


def three_calls(monkeypatch, inner, observed, grad=True, autocast=False):
    """Losses, gradient, what has become of the arguments, and metrics, of three calls on tensors of a graph."""
    global calls
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "inner", inner)
    calls, values = 0, padded_batch(rows=8)
    leaf, config = values.pop("log_prob"), configs("inner")[observed]
    values["rollout_is_weights"] = torch.rand(8, 40, generator=torch.Generator().manual_seed(1))
    name, found, metrics = "observed" if observed else "inner", [], []
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for _ in range(3):
            given = {"log_prob": leaf * 1.0} | {key: value.clone() for key, value in values.items()}
            loss, told = get_policy_loss_fn(name)(**given, loss_agg_mode="token-mean", config=config)
            found += [loss, *given.values(), torch.rand(1)]
            metrics.append(told)
            if loss.requires_grad:
                loss.backward()
    return [*found, torch.zeros(1) if leaf.grad is None else leaf.grad], calls, metrics


@pytest.mark.parametrize("grad, autocast", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("inner", STATEFUL)
def test_a_loss_with_state_trains_as_without_observation(monkeypatch, inner, grad, autocast):
    alone, calls_alone, told_alone = three_calls(monkeypatch, STATEFUL[inner], False, grad, autocast)
    watched, calls_watched, told = three_calls(monkeypatch, STATEFUL[inner], True, grad, autocast)
    assert all(map(torch.equal, watched, alone)) and calls_watched == calls_alone
    assert [{name: metrics[name] for name in own} for metrics, own in zip(told, told_alone, strict=True)] == told_alone
    # What is measured is what was handed over, not what the loss has made of it.
    expected = padded_batch(rows=8)
    mask = expected["response_mask"]
    moved = torch.where(mask, expected["log_prob"] - expected["old_log_prob"], 0.0).square().sum(-1)
    variance, has_tokens = moved / mask.sum(-1).clamp(min=1), mask.any(-1)
    assert told[0]["actor/fspo/moved_sigma_squared"] == pytest.approx(variance.mean().item(), rel=1e-5)
    assert told[0]["actor/fspo/sequence_fraction"] == has_tokens.float().mean()


def test_a_gradient_that_a_loss_takes_in_place_is_that_of_the_log_prob_it_was_handed(monkeypatch):
    _, _, metrics = three_calls(monkeypatch, in_place_of("log_prob"), True)
    batch = padded_batch(rows=8)
    mask, old, new = batch["response_mask"], batch["old_log_prob"], batch["log_prob"].detach()
    ratio = (new.clamp(max=-0.3) - old).exp()
    dropped = mask & ((new > -0.3) | (ratio < 0.99) | (ratio > 1.01))
    assert clipped(metrics[0]) == pytest.approx((dropped.sum(-1) / mask.sum(-1).clamp(min=1)).mean().item())


@pytest.mark.parametrize(
    "inner, grad, warned", [("detached", True, True), ("unconnected", True, True), ("counting", False, True),
                            ("counting", True, False)],
)  # fmt: skip
def test_a_loss_without_a_gradient_is_named_once(monkeypatch, caplog, inner, grad, warned):
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        _, _, metrics = three_calls(monkeypatch, STATEFUL[inner], True, grad)
    assert len(caplog.records) == warned
    assert ("loss_mode=inner" in caplog.text) == warned
    has_tokens = padded_batch(rows=8)["response_mask"].any(-1)
    assert (clipped(metrics[-1]) == pytest.approx(has_tokens.float().mean())) == warned  # no token has a gradient


def test_a_loss_whose_gradient_cannot_be_taken_twice_is_refused(monkeypatch):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = [x]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("only in training")

    def inner(log_prob, response_mask, **_):
        return _mean(Once.apply(log_prob), response_mask)

    with pytest.raises(RuntimeError, match=r"cannot measure loss_mode=inner.*only in training.*without observation"):
        three_calls(monkeypatch, inner, True)


@pytest.mark.parametrize("inner", ["vanilla", "gspo"])
@given(seed=st.integers(0, 10_000), weighted=st.booleans())
def test_clipped_shares_are_the_tokens_without_gradient(inner, seed, weighted):
    """A token to which verl's rollout correction gives the weight 0 (IcePop) has none either, and was not clipped."""
    call, config = get_policy_loss_fn("observed"), configs(inner)[1]
    batch = padded_batch(seed=seed)
    batch["advantages"][1] = 0.0
    weights = (torch.rand(6, 40, generator=torch.Generator().manual_seed(seed)) > 0.4).float() if weighted else None
    _, metrics = call(**batch, loss_agg_mode="token-mean", config=config, rollout_is_weights=weights)
    loss, _ = call(**batch, loss_agg_mode="token-mean", config=config)
    loss.backward()
    mask, advantages = batch["response_mask"], batch["advantages"]
    dropped = mask & (advantages != 0) & (batch["log_prob"].grad == 0) & (weights is None or weights > 0)
    shares = dropped.sum(-1) / mask.sum(-1).clamp(min=1)
    assert clipped(metrics) == pytest.approx(shares.mean().item(), rel=1e-5)
    # The mean advantage of a response says on which side it is.
    better = (advantages * (1 if weights is None else weights) * mask).sum(-1) > 0
    assert metrics["actor/fspo/better/clipped"] == pytest.approx((shares * better).mean().item(), rel=1e-5)


@pytest.mark.parametrize("inner", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("null", ["clip_ratio_low", "clip_ratio_high"])
def test_the_clip_range_is_read_as_verls_losses_read_it(inner, null):
    """clip_ratio stands for a side that is null, and for no other."""
    batch = padded_batch(rows=60)
    given = actor_config("token-mean", clip_ratio=1e-4, **TIGHT | {null: None})
    read = clip_ratios(given.get)
    losses = [
        get_policy_loss_fn(inner)(**batch, loss_agg_mode="token-mean", config=config)[0]
        for config in (given, actor_config("token-mean", clip_ratio=0.5, **read), actor_config("token-mean", **TIGHT))
    ]
    assert read[null] == 1e-4 and losses[0] == losses[1] != losses[2]


BANDS = [
    Band(eps_low=0.04, eps_high=0.03, eps_dual=0.05),
    Band(eps_low=0.2, eps_high=0.1, eps_dual=math.inf, length_power=0.0),
    Band(0.1, eps_dual=0.2, normalization="drift_corrected"),
]


@given(
    seed=st.integers(0, 10_000),
    band=st.sampled_from(BANDS),
    constant=st.booleans(),
    one_sign=st.booleans(),
    zeros=st.floats(0, 1),
    poisoned=st.booleans(),
)
def test_observing_fspo_from_outside_finds_what_the_loss_itself_says(seed, band, constant, one_sign, zeros, poisoned):
    """The zeros of the gradient against the decisions of the loss, token by token, whatever the advantages."""
    batch = padded_batch(rows=40, width=30, seed=seed)  # masks with holes
    generator = torch.Generator().manual_seed(seed)
    advantages = batch["advantages"][:, :1].expand(40, 30).clone() if constant else batch["advantages"]
    advantages = advantages.abs() * batch["advantages"][:, :1].sign() if one_sign else advantages
    advantages = torch.where(torch.rand(40, 30, generator=generator) < zeros, 0.0, advantages)
    if poisoned:
        advantages[35, 3], batch["old_log_prob"][37, 4] = float("inf"), float("nan")
    rest = (batch["old_log_prob"], advantages, batch["response_mask"])
    sequences = fspo_loss(batch["log_prob"], *rest, band)
    inside = columns.to_numpy(columns.loss_columns(sequences))
    sequences.loss.sum().backward()
    outside = columns.observed_columns(batch["log_prob"].grad, batch["log_prob"].detach(), *rest)
    for name, values in columns.to_numpy(outside).items():
        assert inside[name].tolist() == values.tolist(), name
    lost = (batch["log_prob"].grad == 0) & (advantages != 0) & batch["response_mask"] & sequences.finite.unsqueeze(-1)
    share = lost.sum(-1) / batch["response_mask"].sum(-1).clamp(min=1)
    assert sum(inside[name] for name in columns.CLIPPED) == pytest.approx(share.numpy())
