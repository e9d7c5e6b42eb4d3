# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The laboratory samples what its tables say, and its losses, clip rates and fits are what they claim."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

STUDIES = Path(__file__).parents[1]
sys.path[:0] = [str(STUDIES), *(str(STUDIES / name) for name in ("lab", "gradients", "through_verl"))]

import chosen  # noqa: E402
import gradients  # noqa: E402
import task as walks_of_verl  # noqa: E402
import training  # noqa: E402
import transformer  # noqa: E402
import walks  # noqa: E402
from fitted import fitted_power  # noqa: E402
from training import Arm, Clip, Regime  # noqa: E402

import fspo_verl.register  # noqa: E402, F401  # the policy loss fspo
from fspo_verl.config import FSPOPolicyLossConfig  # noqa: E402

LENGTHS, SEEDS = (4, 8, 16), (0, 1)
SMALL = Regime(LENGTHS, 4, rollouts=4)


@pytest.fixture(scope="module")
def warm():
    return training.warm(LENGTHS, False, SEEDS)


def test_success_is_the_share_of_right_responses(warm):
    rollout = warm.copy().roll_out(2000)
    for task, tokens in enumerate(rollout.tokens):
        entries = tokens % walks.ENTRIES
        digit = (entries[..., 1::2] - walks.DIGITS * walks.FREE) % walks.DIGITS
        before = entries[..., 0::2] // walks.FREE
        right = torch.stack([warm._next[seed, task][before[seed]] == digit[seed] for seed in range(len(SEEDS))]).all(-1)
        torch.testing.assert_close(right.float().mean((1, 2)), warm.success()[:, task], atol=0.03, rtol=0)
        groups = np.repeat(np.arange(right[0].shape[0]), walks.RESPONSES)
        expected, _ = compute_grpo_outcome_advantage(
            right[0].float().view(-1, 1), torch.ones(right[0].numel(), 1), groups
        )
        torch.testing.assert_close(rollout.advantages[task][0].reshape(-1, 1), expected)


@pytest.mark.parametrize("dual", [None, 1.0, 1.5])
@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss_mode", [None, "vanilla", "gspo"])
def test_seeds_with_eps_of_their_own_train_as_one_by_one(loss_mode, mode, dual):
    each, task = training.PROMPTS * walks.RESPONSES, 2
    eps, scale = torch.tensor([[0.01, 0.02], [0.04, 0.03]]), torch.tensor([[0.5, 1.0, 2.0]]).repeat(2, 1)
    generator = torch.Generator().manual_seed(2)
    old = -torch.rand(2 * each, LENGTHS[task], generator=generator)
    log_prob = (old + 0.2 * torch.randn(old.shape, generator=generator)).requires_grad_()
    advantages = torch.randn(2 * each, generator=generator)
    arm = Arm(0.5, loss=loss_mode, aggregation=mode, dual=dual)
    loss, taken = Clip(arm, SMALL, scale, eps).loss(task, log_prob, old, advantages)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    lost = ((gradient == 0) & (advantages != 0)[:, None]).float().mean(1)
    torch.testing.assert_close(taken.clipped.flatten(), lost)
    for seed, (low, high) in enumerate(eps.tolist()):
        rows = slice(seed * each, (seed + 1) * each)
        leaf = log_prob[rows].detach().requires_grad_()
        settings = {"clip_ratio_low": low, "clip_ratio_high": high}
        if loss_mode is None:  # the width at 16 tokens is 2; without a dual it is at three times the wider side
            edge = 2 * dual * high if dual else 6 * max(low, high)
            band = {"eps_low": 2 * low, "eps_high": 2 * high, "eps_dual": edge, "length_power": 0.0}
            settings = {"policy_loss": FSPOPolicyLossConfig(**band)}
        config = FSDPActorConfig(rollout_n=8, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, **settings)
        totals = {"dp_size": 1, "batch_num_tokens": 1, "global_batch_size": each * len(LENGTHS)}
        config.global_batch_info.update(totals, loss_scale_factor=max(LENGTHS))
        alone, _ = get_policy_loss_fn(loss_mode or "fspo")(
            old_log_prob=old[rows],
            log_prob=leaf,
            advantages=advantages[rows, None].expand_as(leaf),
            response_mask=torch.ones_like(leaf),
            loss_agg_mode=mode,
            config=config,
        )
        (expected,) = torch.autograd.grad(alone, leaf)
        assert (expected == 0).any(), "the clip has to act"
        torch.testing.assert_close(gradient[rows], expected)


def test_a_seed_trains_alike_whoever_is_beside_it():
    both, alone = (training.train(SMALL, Arm(0.5, 0.3), 1e-3, seeds) for seeds in (SEEDS, SEEDS[1:]))
    both = both[both.seed == SEEDS[1]].reset_index(drop=True)
    np.testing.assert_allclose(both[["success", "clipped"]], alone[["success", "clipped"]], rtol=1e-3)


@pytest.mark.parametrize("tries", [True, False])
@pytest.mark.parametrize("arm", [Arm(0.0, 0.3), Arm("fitted", 0.3), Arm(loss="vanilla", rate=0.3)])
def test_arms_are_held_at_one_clip_rate(arm, tries, monkeypatch):
    monkeypatch.setattr(training, "RECORDED", 2)
    found = training.train(SMALL._replace(rollouts=25, tries=tries), arm, 1e-3, SEEDS)
    assert found.clipped.sum() / found.live.sum() == pytest.approx(0.3, abs=0.02)


def test_stale_rollouts_are_those_of_an_older_policy():
    run = training.begun(SMALL._replace(stale=2), Arm(), 1e-2, SEEDS)
    moved = []
    for _ in range(3):
        run.rollout(recorded=True)
        # In the first update on a rollout S is how far the policy is from the one that sampled.
        moved.append(float(run.found[-1][0].log_ratio.abs().mean()))
    assert moved[0] == pytest.approx(0, abs=1e-5) and moved[0] < moved[1] < moved[2]


@pytest.mark.parametrize("power", [0.2, 0.8])
def test_a_fitted_power_is_that_of_the_spread(power):
    rng = np.random.default_rng(0)
    length = np.exp(rng.uniform(1, 6, 20_000)).round() + 1
    log_ratio = length**power * rng.standard_normal(len(length))
    columns = {"length": length, "log_ratio": log_ratio, "quadratic_variation": 1.0}
    records = pd.DataFrame(columns | {"advantage": rng.choice([-1.0, 0.0, 1.0], len(length))})
    assert fitted_power(records, 0.1) == pytest.approx(power, abs=0.04)


def test_the_choice_of_a_learning_rate_is_in_the_interval():
    """Two rates that choosing seeds cannot tell apart; the seeds that are compared can."""
    rng = np.random.default_rng(0)
    index = pd.MultiIndex.from_product([["one", "other"], range(8)])
    torn = np.tile(np.eye(2), (4, 1))  # the arms' seeds are torn in opposite ways
    choosing = pd.DataFrame(np.vstack([torn, 1 - torn]), index, columns=[1e-3, 2e-3])
    compared = pd.DataFrame(0.01 * rng.standard_normal((16, 2)) + [0.0, 5.0], index, columns=[1e-3, 2e-3])
    unsure = chosen.at_best(compared, choosing, "one").loc["other"]
    assert unsure.lower < -4 < 4 < unsure.upper
    sure = chosen.at_best(compared, choosing - [0.0, 100.0], "one")
    assert (sure.rate == 1e-3).all() and sure.loc["other", ["lower", "upper"]].abs().max() < 0.02


# --- transformers -----------------------------------------------------------------------------------------------------


def test_a_transformer_samples_what_it_scores(monkeypatch):
    """Each token is that of its draw in the distribution that log-probs are of, beyond the window as well."""
    monkeypatch.setattr(transformer, "_WARM_UP", 100)
    own, length, rows = transformer.Transformers(LENGTHS, SEEDS), 3 * transformer.WINDOW, 50
    first = torch.arange(rows).repeat(2, 1) % walks.DIGITS + walks.FREE
    task, draws = torch.ones_like(first), torch.rand(2, length, rows, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        parts = own._parts(own.weights)
        ids = own._walk(parts, first, task, draws)
        for start, scores in enumerate(own._log_probs(parts, ids[..., :-1], task)):
            below = scores.exp().cumsum(-1) < draws[:, start::2].transpose(1, 2)[..., None]
            chosen = below[..., :-1].sum(-1) + walks.FREE * start
            assert (chosen == ids[..., 1 + start :: 2]).float().mean() > 0.999  # rounding moves an edge


# --- gradients --------------------------------------------------------------------------------------------------------


def test_cosine_and_lre_are_those_of_their_definitions(warm, monkeypatch):
    monkeypatch.setattr(gradients, "LENGTHS", LENGTHS)
    monkeypatch.setattr(gradients, "SEEDS", SEEDS)
    policies = warm.copy()
    fresh = warm.copy().roll_out(20)
    policies.weights = (policies.weights + 0.05 * torch.randn(policies.weights.shape)).detach().requires_grad_()
    responses = gradients.scored(policies, fresh)
    found = gradients.judged(responses).set_index(["seed", "rate", "clip"])
    for seed, clip in ((0, "linear"), (1, "fixed")):
        s, a = responses.s[seed], responses.advantages[seed]
        score = (s * a.sign() / torch.tensor(LENGTHS)[:, None] ** gradients.POWERS[clip]).detach()
        live, kept = a != 0, torch.ones_like(a, dtype=torch.bool)
        for side in (a < 0, a > 0):
            kept &= ~(side & (score > score[side].quantile(0.7)))
        terms = s.exp() * a
        sums = terms.sum(), terms[kept].sum()
        true, left = (torch.autograd.grad(one, policies.weights, retain_graph=True)[0][seed] for one in sums)
        row, accepted = found.loc[(seed, 0.3, clip)], (kept & live).sum(1) / live.sum(1)
        assert row.cosine == pytest.approx(torch.cosine_similarity(true, left, dim=0).item(), abs=1e-4)
        overall = (kept & live).sum() / live.sum()
        assert row.lre == pytest.approx(float((accepted / overall - 1).abs().max()), abs=1e-4)


# --- walks through verl -----------------------------------------------------------------------------------------------


def test_a_walk_is_right_with_any_free_symbols_and_in_no_other_case():
    following = walks_of_verl.permutations(0)
    truth = walks_of_verl.walk("a", "3", following)
    assert len(truth) == 4 and truth[0] == following["a"][3]
    score = lambda text: walks_of_verl.compute_score("", text, truth)  # noqa: E731
    right = "".join(f"{free}{digit}" for free, digit in zip("wzxy", truth, strict=True))
    assert score(right) == 1.0
    wrong_digit = right[:5] + str((int(truth[2]) + 1) % 10) + right[6:]
    for text in (right[:-2], right + "w" + truth[0], wrong_digit, right.replace("w", truth[0]), "", right[1:]):
        assert score(text) == 0.0, text


def test_every_batch_has_as_many_problems_of_each_task():
    table = walks_of_verl.data_set(0, 3, 4)
    for start in range(0, len(table), 12):
        assert table.data_source[start : start + 12].value_counts().tolist() == [4, 4, 4]
    assert len({one["ground_truth"] for one in table.reward_model}) > 12
    words = walks_of_verl.tokenizer()
    ids = words.apply_chat_template(list(table.prompt[0]), add_generation_prompt=True, return_dict=False)
    assert len(ids) == walks_of_verl.PROMPT_TOKENS


def test_demonstrations_err_as_often_as_they_are_to():
    errors = torch.full((10,), 0.1)
    ids, wished = walks_of_verl.demonstrations("a", walks_of_verl.permutations(0)["a"], errors, 5, torch.Generator())
    assert ids.shape == (5, 4 + 8) and wished.shape == (5, 9, len(walks_of_verl.VOCABULARY))
    torch.testing.assert_close(wished.sum(-1), torch.ones(5, 9))
    digits = wished[:, 1:8:2].max(-1).values
    torch.testing.assert_close(digits, torch.full_like(digits, 0.9))
    assert (wished[:, 8, walks_of_verl.EOS] == 1).all()
