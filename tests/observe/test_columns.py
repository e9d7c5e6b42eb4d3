# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Observing any policy loss: the training is untouched, and what is reported is what the gradient says."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_policy_loss import CUTS, MiniBatch, actor_config, padded_batch
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
        assert {"actor/fspo/clip_fraction", "actor/fspo/length_16_to_63/clipped"} <= got.keys() - expected.keys()


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
    for name, part in {"clip_fraction": dropped, "clip_fraction_upper": dropped & (advantages > 0)}.items():
        share = (part.sum(-1) / mask.sum(-1).clamp(min=1)).numpy()
        assert metrics[f"actor/fspo/{name}"].values == pytest.approx(share, rel=1e-6)
    assert metrics["actor/fspo/clip_fraction"].values[1] == 0


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
    """The probe through the gradient against the decisions of the loss, token by token, whatever the advantages."""
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
    outside = columns.observed_columns(
        lambda log_prob: fspo_loss(log_prob, *rest, band).loss.sum(), batch["log_prob"], *rest
    )
    for name, values in columns.to_numpy(outside).items():
        assert inside[name].tolist() == values.tolist(), name
    sequences.loss.sum().backward()
    lost = (batch["log_prob"].grad == 0) & (advantages != 0) & batch["response_mask"] & sequences.finite.unsqueeze(-1)
    share = lost.sum(-1) / batch["response_mask"].sum(-1).clamp(min=1)
    assert sum(inside[name] for name in columns.CLIPPED) == pytest.approx(share.numpy())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loss_mode": "fspo"}, "fspo measures itself"),
        ({"loss_mode": "observed"}, "name the loss that trains"),
        ({"loss_mode": "gspo", "records_dir": "records"}, "absolute path"),
        ({"loss_mode": "gspo", "records_fraction": 0.0}, "records_fraction=0.0"),
        ({"loss_mode": "gspo", "records_freq": 0}, "records_freq=0"),
        ({"loss_mode": "gspo", "records_limit_mb": 0}, "records_limit_mb=0"),
        ({"loss_mode": "gspo", "length_bins": [8, 8]}, "rising whole numbers"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ObservedPolicyLossConfig(**settings)


def test_the_built_config_names_the_wrapper_and_the_loss():
    for settings in ({"loss_mode": "gspo"}, {"loss_mode": "observed", "inner": "gspo"}):
        config = ObservedPolicyLossConfig(**settings)
        assert (config.loss_mode, config.inner) == ("observed", "gspo")
        rebuilt = ObservedPolicyLossConfig(**{f.name: config[f.name] for f in dataclasses.fields(config)})
        assert (rebuilt.loss_mode, rebuilt.inner) == ("observed", "gspo")


def test_length_bins_cover_every_length_once():
    from fspo_verl.observe.metrics import row_values

    columns = {name: np.zeros(300) for name in ("log_ratio", "quadratic_variation", "finite")}
    columns |= {f"clipped_{side}": np.zeros(300) for side in ("upper", "lower", "dual")}
    columns |= {"length": np.arange(300.0), "advantage": np.ones(300)}
    values = row_values(columns, [3, 64, 256], 300, mini_batch=0, on_policy=False)
    responses = sum(value for name, value in values.items() if name.endswith("/responses"))
    assert (responses == (np.arange(300) > 0)).all()
    assert [name for name in values if name.endswith("/responses")][-1] == "length_256_up/responses"
