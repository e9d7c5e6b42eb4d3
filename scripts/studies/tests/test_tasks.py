# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The laboratory of mixed tasks samples what its tables say, and its losses and clip rates are what they claim."""

import functools
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))

import analyse  # noqa: E402
import mixture  # noqa: E402
import policy  # noqa: E402
import transformer  # noqa: E402

import fspo_verl.register  # noqa: E402, F401  # the policy loss fspo
from fspo_verl.config import FSPOPolicyLossConfig  # noqa: E402

SMALL = policy.Tasks((4, 8, 16))
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def warm():
    return policy.Policies(SMALL, SEEDS)


def small(**changes) -> mixture.Regime:
    return mixture.Regime("small", **{"rate": 0.3, "learning_rate": 1e-3, "mini_batches": 4, "tasks": SMALL} | changes)


def test_alias_tables_have_the_distributions_they_are_made_of():
    wished = torch.rand(7, 12, generator=torch.Generator().manual_seed(0)).pow(6)
    kept, other = (table.view(7, 12) for table in policy.alias_tables(wished))
    given = kept + torch.zeros(7, 12).scatter_add(1, other.long(), 1 - kept)
    torch.testing.assert_close(given / 12, wished / wished.sum(1, keepdim=True))


def test_success_is_the_share_of_right_responses(warm):
    rollout = warm.copy().roll_out(2000)
    for task, advantages in enumerate(rollout.advantages):
        # Of groups with both outcomes alone advantages tell; they have one success of n of each share.
        mixed = advantages.abs().sum(-1) > 0
        assert mixed.float().mean() > 0.3
        right = (advantages > 0).float().mean(-1)
        all_right = (rollout_rewards(warm, rollout, task) == policy.RESPONSES) & ~mixed
        share = (right + all_right.float()).mean(1)
        torch.testing.assert_close(share, warm.success()[:, task], atol=0.03, rtol=0)


def rollout_rewards(warm, rollout, task):
    """Right responses of each group, from the tokens alone."""
    entries = rollout.tokens[task] % policy.ENTRIES
    digit = (entries[..., 1::2] - policy.DIGITS * policy.FREE) % policy.DIGITS
    before = entries[..., 0::2] // policy.FREE
    right = torch.stack([warm._next[seed, task][before[seed]] == digit[seed] for seed in range(len(SEEDS))])
    return right.all(-1).sum(-1)


def test_advantages_are_those_of_verl():
    rewards = (torch.rand(5, policy.RESPONSES, generator=torch.Generator().manual_seed(1)) < 0.5).float()
    rewards[0] = 1.0
    groups = np.repeat(np.arange(5), policy.RESPONSES)
    expected, _ = compute_grpo_outcome_advantage(rewards.view(-1, 1), torch.ones(rewards.numel(), 1), groups)
    torch.testing.assert_close(policy.grpo_advantages(rewards).view(-1, 1), expected)


def tokens_of(count: int, length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    old = -torch.rand(count, length, generator=generator)
    log_prob = (old + 0.2 * torch.randn(count, length, generator=generator)).requires_grad_()
    advantages = torch.randn(count, 1, generator=generator).expand(count, length)
    return log_prob, old, advantages, torch.ones(count, length, dtype=torch.bool)


@pytest.mark.parametrize(("arm", "loss_mode"), [("sqrt", "fspo"), ("grpo", "vanilla"), ("dppo", "dppo_tv")])
def test_seeds_with_eps_of_their_own_train_as_one_by_one(arm, loss_mode):
    regime, each, task = small(), mixture.PROMPTS * policy.RESPONSES, 2
    length, arm = SMALL.lengths[task], mixture.MATCHED[arm]
    eps = torch.tensor([[[0.1, 0.2]], [[0.4, 0.3]]])
    scale = torch.tensor([[0.5, 1.0, 2.0]]).repeat(2, 1)
    tokens = tokens_of(2 * each, length)
    loss, _ = mixture.Clip(arm, regime, scale, eps, regime.rate).loss(task, tokens)
    (gradient,) = torch.autograd.grad(loss, tokens[0])
    for seed, (low, high) in enumerate(eps[:, 0].tolist()):
        rows = slice(seed * each, (seed + 1) * each)
        own = [tokens[0][rows].detach().requires_grad_(), *(part[rows] for part in tokens[1:])]
        # The dual clip is at three times the wider side.
        band = {"eps_low": 2 * low, "eps_high": 2 * high, "eps_dual": 6 * max(low, high), "length_power": 0.0}
        settings = {"clip_ratio_low": low, "clip_ratio_high": high}
        if loss_mode == "fspo":
            settings = {"policy_loss": FSPOPolicyLossConfig(**band)}
        config = FSDPActorConfig(
            rollout_n=8, ppo_micro_batch_size_per_gpu=1, loss_agg_mode="seq-mean-token-sum-norm", **settings
        )
        rows_of_all = each * len(SMALL.lengths)
        totals = {"dp_size": 1, "batch_num_tokens": 1, "global_batch_size": rows_of_all}
        config.global_batch_info.update(totals, loss_scale_factor=max(SMALL.lengths))
        names = ("log_prob", "old_log_prob", "advantages", "response_mask")
        alone, _ = get_policy_loss_fn(loss_mode)(
            **dict(zip(names, own, strict=True)), loss_agg_mode="seq-mean-token-sum-norm", config=config
        )
        (expected,) = torch.autograd.grad(alone, own[0])
        assert (expected == 0).any(), "the clip has to act"
        torch.testing.assert_close(gradient[rows], expected)


def test_a_seed_trains_alike_whoever_is_beside_it():
    regime = small(rollouts=2)
    both, alone = (mixture.train(regime, "sqrt", seeds) for seeds in (SEEDS, SEEDS[1:]))
    both = both[both.seed == SEEDS[1]].reset_index(drop=True)
    columns = ["success", "clipped", "width_low", "width_high"]
    np.testing.assert_allclose(both[columns], alone[columns], rtol=1e-3)


@pytest.mark.parametrize("arm", ["fixed", "random", "measured"])
def test_arms_are_held_at_one_clip_rate(arm):
    regime = small(rollouts=25, mini_batches=8)
    found = mixture.train(regime, arm, SEEDS)
    assert found.clipped.sum() / found.live.sum() == pytest.approx(regime.rate, abs=0.02)


def cells_of(rates: dict[str, tuple[float, float]], slope: float, draw: int = 0) -> pd.DataFrame:
    """Two tasks under some arms, whose success falls by ``slope`` with what is clipped beyond the overall rate."""
    rng, rows, overall = np.random.default_rng(draw), [], 0.3
    for arm, by_task in rates.items():
        for seed in range(12):
            for task, rate in enumerate(by_task):
                success = 0.7 + 0.1 * task + slope * (rate - overall) + 0.002 * rng.standard_normal()
                ends = dict.fromkeys(("area", "end", "later"), success)
                clips = {"live": 1000, "clipped": 1000 * rate, "early_rate": rate, "early_rate_of_all": overall}
                rows.append({"regime": "many-30", "arm": arm, "seed": seed, "task": task, "length": 8} | ends | clips)
    return pd.DataFrame(rows)


def test_the_interval_of_the_meter_mostly_holds_the_slope_that_was_put_in():
    rates, held = {"sqrt": (0.4, 0.2), "fixed": (0.25, 0.35), "linear": (0.55, 0.05), "none": (0.0, 0.0)}, []
    for draw in range(40):
        row = analyse.meter(cells_of(rates, -0.5, draw=draw), ["many-30"], draws=400).iloc[0]
        held.append(row.lower < -0.5 < row.upper)
        assert row.points == 3 * 12 * 2  # what clips nothing says nothing
    # A bootstrap of 12 clusters holds the truth in some 91% and not 95% of cases.
    assert np.mean(held) > 0.8


def test_an_arm_that_misses_the_rate_is_not_compared():
    cells = cells_of({"sqrt": (0.4, 0.2), "fixed": (0.25, 0.35), "linear": (0.55, 0.09)}, -0.5)
    compared = analyse.rates(cells).compared
    assert compared["many-30", "fixed"] and not compared["many-30", "linear"]
    told = analyse.differences(cells, compared)
    assert set(told.arm) == {"fixed"}


@pytest.mark.parametrize(("slope", "verdict"), [(-0.5, "confirmed"), (0.5, "contradicted"), (0.0, "not shown")])
def test_the_order_is_told_from_its_reverse(slope, verdict):
    cells = cells_of({"sqrt": (0.4, 0.2), "fixed": (0.25, 0.35), "linear": (0.55, 0.05)}, slope)
    told = analyse.differences(cells, analyse.rates(cells).compared)
    assert analyse.order(told, "many-30") == verdict


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "_WARM_UP", 100)
        patch.setattr(mixture, "RECORDED", 2)
        patch.setattr(mixture, "warm", functools.cache(mixture.warm.__wrapped__))
        # Too few prompts for the measured width.
        patch.setattr(mixture.Run.measured, "__defaults__", (None, mixture.fitted_power))
        yield small(tasks=SMALL._replace(transformer=True), rollouts=4)


def test_a_transformer_samples_what_it_scores(transformers):
    """Each token is that of its draw in the distribution that log-probs are of, beyond the window as well."""
    own, length, rows = mixture.warm(transformers.tasks, SEEDS), 3 * transformer.WINDOW, 50
    first = torch.arange(rows).repeat(2, 1) % policy.DIGITS + policy.FREE
    task, draws = torch.ones_like(first), torch.rand(2, length, rows, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        parts = own._parts(own.weights)
        ids = own._walk(parts, first, task, draws)
        for start, scores in enumerate(own._log_probs(parts, ids[..., :-1], task)):
            below = scores.exp().cumsum(-1) < draws[:, start::2].transpose(1, 2)[..., None]
            chosen = below[..., :-1].sum(-1) + policy.FREE * start
            assert (chosen == ids[..., 1 + start :: 2]).float().mean() > 0.999  # rounding moves an edge


def test_arms_that_train_together_are_those_that_train_alone(transformers, monkeypatch):
    names = "none", "sqrt", "linear, then measured"
    key = ["arm", "seed", "rollout", "task"]
    alone = pd.concat([mixture.train(transformers, name, SEEDS) for name in names]).set_index(key).sort_index()
    monkeypatch.setattr(transformer, "_AT_ONCE", 500)  # so that a batch is scored in parts
    together = mixture.train_together(transformers, names, SEEDS).set_index(key).sort_index()
    pd.testing.assert_frame_equal(together[alone.columns], alone, check_exact=False, rtol=1e-4)
    assert alone.clipped.sum() > 0 and alone.width_high.nunique() > 4
