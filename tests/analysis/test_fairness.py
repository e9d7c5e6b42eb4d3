# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Intervals cover what they claim to, the LRE behaves, and counterfactual clips are those of the losses."""

import math
from importlib import resources

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats
from simulated_records import assert_covered, frame, group_lengths, holds
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from fspo_verl.analysis import clip_rates
from fspo_verl.analysis.clip_rates import clusters, length_edges
from fspo_verl.analysis.length_effect import length_effect
from fspo_verl.band import Band
from fspo_verl.clips import CLIPS, MATCHED_RATE, BandClip, TokenClip, upper_quantile
from fspo_verl.loss import fspo_loss
from fspo_verl.observe.columns import token_columns
from fspo_verl.report.numbers import at_one_rate, counterfactuals

SEEDS = 200
EDGES = np.array([1, 30, 100, 1000])


# --- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correlated", [False, True])
def test_rate_intervals_cover(correlated):
    """Clustered Wilson intervals, where the responses to a prompt are clipped together and where they are not."""
    truth = np.array([0.05, 0.1, 0.3])
    hits = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        length, prompt = group_lengths(rng, 150, 8, high=200)
        rate = truth[np.searchsorted(EDGES, length, "right") - 1]
        own, shared = rng.random(len(length)), rng.random(150)[prompt]
        clipped = np.where(correlated & (rng.random(len(length)) < 0.5), shared, own) < rate
        table = clip_rates.rate_by_length(length, clipped, EDGES, clusters=prompt)
        hits.append([holds(row, value) for row, value in zip(table.itertuples(), truth, strict=True)])
    for covered in zip(*hits, strict=True):
        assert_covered(covered)


@given(st.integers(2, 400), st.integers(1, 399), st.sampled_from([0.8, 0.95, 0.999]))
def test_the_rate_interval_is_wilsons_with_students_t(n, k, confidence):
    k = min(k, n - 1)
    row = clip_rates.rate_by_length(np.full(n, 7), np.arange(n) < k, [7, 8], np.arange(n), confidence).loc[0]
    ends, quantile = np.array([row.lower, row.upper]), stats.t.ppf((1 + confidence) / 2, n - 1)
    assert (row.n, row.rate) == (n, pytest.approx(k / n))
    assert np.square(ends - k / n) == pytest.approx(quantile**2 * ends * (1 - ends) / (n - 1))


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_a_response_repeated_in_its_prompt_tells_nothing_more(rate):
    clipped = np.random.default_rng(0).random(80) < rate
    once = clip_rates.rate_by_length(np.full(80, 5), clipped, [5, 6], clusters=np.arange(80))
    copies = clip_rates.rate_by_length(np.full(800, 5), np.repeat(clipped, 10), [5, 6], clusters=np.arange(800) // 10)
    assert copies.loc[0, ["lower", "upper"]].tolist() == pytest.approx(once.loc[0, ["lower", "upper"]].tolist())


def test_prompts_that_differ_less_than_chance_do_not_narrow_the_interval():
    clipped = np.tile([True, False], 400)  # one of two responses of every prompt
    clustered = clip_rates.rate_by_length(np.full(800, 5), clipped, [5, 6], clusters=np.arange(800) // 2).loc[0]
    independent = stats.binomtest(400, 800).proportion_ci(method="wilson")
    assert clustered.lower <= independent.low < 0.5 < independent.high <= clustered.upper


# --- bins, rates, LRE ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=50), st.integers(1, 12))
def test_edges_cover_all_lengths(lengths, bins):
    edges = length_edges(lengths, bins)
    assert 1 <= len(edges) - 1 <= bins and (np.diff(edges) > 0).all() and np.issubdtype(edges.dtype, np.integer)
    assert edges[0] == min(lengths) and edges[-1] == max(lengths) + 1
    table = clip_rates.rate_by_length(lengths, np.zeros(len(lengths)), edges, np.arange(len(lengths)))
    for row in table.itertuples():
        assert row.n == sum(row.low <= length <= row.high for length in lengths)
    assert table.n.sum() == len(lengths)


def test_bad_lengths_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        length_edges([3, 0])
    with pytest.raises(ValueError, match="lengths 3 to 9 are not covered by the edges"):
        clip_rates.rate_by_length([3, 9], [0, 0], [3, 9], [0, 1])


def test_clusters_are_prompts_within_a_step():
    records = frame([1] * 6, prompt=["a", "b", "a", "a", "b", "a"], step=[1, 1, 1, 2, 2, 2])
    code = clusters(records)
    assert sorted(set(code)) == [0, 1, 2, 3]
    assert code[0] == code[2] and code[3] == code[5] and len({code[0], code[1], code[3], code[4]}) == 4


def table_of(counts, rates):
    return pd.DataFrame({"n": counts, "rate": rates})


def test_lre_by_hand():
    # Acceptance 1, .8, .5 and over all (100 + 160 + 50) / 400 = .775.
    lre = clip_rates.length_reweighting_error(table_of([100, 200, 100, 10, 0], [0, 0.2, 0.5, 1.0, math.nan]), 50)
    accepted = 310 / 410
    worst = 1 - 0.5 / accepted
    assert lre == pytest.approx(worst) and worst > max(1 / accepted - 1, abs(0.8 / accepted - 1))


counts_and_clips = st.lists(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=2)


@given(counts_and_clips, st.integers(1, 5))
def test_lre_is_zero_for_equal_rates_and_blind_to_order_and_sample_size(bins, factor):
    counts, clips = np.array(bins).T
    lre = clip_rates.length_reweighting_error(table_of(counts, clips / counts), 1)
    assert clip_rates.length_reweighting_error(table_of(counts[::-1], (clips / counts)[::-1]), 1) == pytest.approx(
        lre, nan_ok=True
    )
    assert clip_rates.length_reweighting_error(table_of(counts * factor, clips / counts), 1) == pytest.approx(
        lre, nan_ok=True
    )
    if clips.sum() < counts.sum():
        assert lre >= 0
        equal = clip_rates.length_reweighting_error(table_of(counts, np.full(len(counts), 0.3)), 1)
        assert equal == pytest.approx(0, abs=1e-12)
    else:
        assert math.isnan(lre)


@given(counts_and_clips)
def test_an_lre_without_clips_in_a_bin_is_the_rate_over_the_rest(bins):
    counts, clips = np.array(bins).T
    clips[counts.argmax()] = 0
    rate = clips.sum() / counts.sum()
    spared = clip_rates.lre_of_an_unclipped_bin(rate)
    assert clip_rates.length_reweighting_error(table_of(counts, clips / counts), 1) >= spared - 1e-12
    if len(counts) == 2:
        assert clip_rates.length_reweighting_error(table_of(counts, clips / counts), 1) <= max(spared, 1) + 1e-12


def test_a_bin_of_few_prompts_takes_no_part_however_many_responses_it_has():
    length = np.r_[np.full(100, 10), np.full(100, 50), np.full(900, 200)]
    prompt = np.r_[np.arange(100), 100 + np.arange(100) // 10, 200 + np.arange(900) // 100]  # 100, 10 and 9 prompts
    table = clip_rates.rate_by_length(length, np.arange(1100) % 2, EDGES, clusters=prompt)
    assert table.clusters.tolist() == [100, 10, 9] and clip_rates.takes_part(table).tolist() == [True, True, False]


# --- counterfactual clips --------------------------------------------------------------------------------------------


def token_batch(seed, rows=400, width=300, dtype=torch.float32):
    """Token tensors with sequences on every side of every method's range: log_prob, old_log_prob, advantages, mask."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.exp(torch.rand(rows, 1, generator=generator) * math.log(width)).long().clamp(1, width)
    mask = torch.arange(width) < length
    noise = torch.randn(rows, width, generator=generator, dtype=dtype)
    scale = 10 ** (-3 + 2 * torch.rand(rows, 1, generator=generator, dtype=dtype))
    shift = 8 * (torch.rand(rows, 1, generator=generator, dtype=dtype) - 0.5) / length.sqrt()
    old = -torch.rand(rows, width, generator=generator, dtype=dtype)
    sign = torch.randint(-1, 2, (rows, 1), generator=generator)
    advantages = (sign * torch.rand(rows, 1, generator=generator, dtype=dtype)).expand(rows, width).contiguous()
    return old + scale * (noise + shift), old, advantages, mask


def records_of(batch):
    """The columns that a run would record of a batch."""
    sequences = fspo_loss(*batch, Band())
    return frame(
        sequences.length.numpy(),
        sequences.log_ratio.numpy(),
        sequences.quadratic_variation.numpy(),
        sequences.advantage.numpy(),
        **{name: column.numpy().astype(np.int32) for name, column in token_columns(*batch).items()},
    )


# Bands that clip by the sign of the advantage, as a loss does.
BANDS = [name for name, clip in CLIPS.items() if isinstance(clip, BandClip) and not clip.rejects]


@pytest.mark.parametrize("name", BANDS)
def test_clips_are_the_decisions_of_the_loss(name):
    seen = []
    for seed in range(5):
        batch = token_batch(seed)
        records = records_of(batch)
        sequences = fspo_loss(*batch, CLIPS[name].band)
        np.testing.assert_array_equal(CLIPS[name].clipped(records), sequences.clipped.numpy())
        np.testing.assert_array_equal(CLIPS[name].outside(records), sequences.outside.numpy())
        seen.append([x.sum() for x in (sequences.clipped_upper, sequences.clipped_lower, sequences.clipped_dual)])
    upper, lower, dual = np.sum(seen, axis=0)
    assert upper and lower and bool(dual) == math.isfinite(CLIPS[name].band.dual)


@pytest.mark.parametrize("name", BANDS)
def test_an_edge_is_inside_in_the_precision_of_the_loss(name):
    length, q = torch.arange(1.0, 1001), torch.linspace(0.01, 2, 1000)
    low, high, dual = (edge.numpy() for edge in CLIPS[name].band.edges(length, q))
    for s, advantage, beyond in ((high, 1, np.inf), (low, -1, -np.inf), (dual, -1, np.inf)):
        if np.isfinite(s).all():
            on_edge = frame(length.numpy(), s, q.numpy(), advantage)
            assert not CLIPS[name].clipped(on_edge).any()
            assert CLIPS[name].clipped(on_edge.assign(log_ratio=np.nextafter(s, np.float32(beyond)))).all()


def actor_config(**clip):
    return FSDPActorConfig(rollout_n=4, ppo_micro_batch_size_per_gpu=1, loss_agg_mode="token-sum", **clip)


def tokens_without_gradient(loss_name, batch, **clip):
    log_prob, old, advantages, mask = batch
    log_prob = log_prob.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(loss_name)(old, log_prob, advantages, mask, "token-sum", actor_config(**clip))
    loss.backward()
    return (log_prob.grad == 0) & mask


def test_gspo_clips_what_verls_gspo_gives_no_gradient():
    method = CLIPS["gspo"]
    for seed in range(5):
        batch = token_batch(seed, dtype=torch.float64)
        records = records_of(batch)
        dropped = tokens_without_gradient("gspo", batch, clip_ratio_low=3e-4, clip_ratio_high=4e-4)
        clipped = (dropped.sum(-1) == batch[3].sum(-1)).numpy() & (records.advantage != 0).to_numpy()
        per_token = records.log_ratio.astype(float) / records.length
        edges = np.array([[-method.band.low], [method.band.high]])
        decided = np.abs(per_token.to_numpy() - edges).min(0) > 1e-9  # records are rounded to float32
        assert decided.mean() > 0.99 and clipped.any() and not clipped.all()
        np.testing.assert_array_equal(method.clipped(records)[decided], clipped[decided])


def test_grpo_clips_what_verls_vanilla_loss_gives_no_gradient():
    for seed in range(5):
        batch = token_batch(seed)
        records = records_of(batch)
        dropped = tokens_without_gradient("vanilla", batch, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
        share = (dropped.sum(-1) / batch[3].sum(-1)).numpy() * (records.advantage != 0)
        assert 0 < share.mean() < 1
        np.testing.assert_allclose(CLIPS["grpo"].clipped(records), share, rtol=1e-6)


@pytest.mark.parametrize("name", ["fspo", "fixed_band", "gspo"])
def test_stock_constants_are_those_of_the_packaged_configs(name):
    group = resources.files("fspo_verl.configs") / "algorithm.policy_loss"
    actor = OmegaConf.create((group / f"{name}.yaml").read_text()).actor_rollout_ref.actor
    band = CLIPS[name].band
    if name == "gspo":
        expected = {
            "eps_low": -math.log(1 - actor.clip_ratio_low),
            "eps_high": math.log(1 + actor.clip_ratio_high),
            "eps_dual": math.inf,
            "length_power": 1.0,
        }
    else:
        expected = Band.fields_in(actor.policy_loss)
    for field, value in expected.items():
        assert getattr(band, field) == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)
    assert band.normalization == "plain"


@pytest.mark.parametrize("name, rate", [(name, rate) for name in BANDS for rate in (0.02, 0.1, 0.4)])
def test_matching_gives_the_rate_and_keeps_the_shape(name, rate):
    records = records_of(token_batch(0, rows=2000))
    records = records[records.length > 1]  # S/sqrt(Q) of a single token is 1 or -1: ties, which cannot be parted
    method = CLIPS[name].matched(records, rate)
    counted = (records.advantage != 0).sum()
    assert method.clipped(records).sum() == pytest.approx(math.floor(rate * counted), abs=2)
    before, after = CLIPS[name].band, method.band
    factor = after.low / before.low
    assert (after.high, after.dual) == pytest.approx((factor * before.high, factor * before.dual))
    assert (after.length_power, after.normalization) == (before.length_power, before.normalization)


def test_a_rate_that_too_few_responses_can_reach_is_refused():
    records = frame([10] * 8, [0.4, 0.5, 0.6] + [0.0] * 5, [0.1] * 3 + [0.0] * 5)
    assert CLIPS["fixed_band"].matched(records, 0.25).clipped(records).sum() == 2
    with pytest.raises(ValueError, match="fixed_band cannot clip 0.5 of these responses, as only 0.375 of them"):
        CLIPS["fixed_band"].matched(records, 0.5)
    with pytest.raises(ValueError, match="no response has an advantage"):
        CLIPS["fixed_band"].matched(records.assign(advantage=0.0), 0.1)


@given(st.lists(st.integers(-9, 9).map(float), min_size=1), st.floats(0, 0.999))
def test_upper_quantile_is_the_smallest_value_with_at_most_the_share_beyond(values, share):
    found = upper_quantile(values, share)
    values = np.array(values)
    assert found in values and (values > found).sum() <= share * len(values) + 1e-9
    for smaller in values[values < found]:
        assert (values > smaller).sum() > share * len(values) + 1e-9


def test_counterfactual_tables_add_up():
    records = records_of(token_batch(0, rows=2000))
    counted, edges = (records.advantage != 0).to_numpy(), length_edges(records.length, 4)
    result = counterfactuals(records, edges, CLIPS)
    for row in result.summary.itertuples():
        part, clipped = result.by_length.loc[row.Index], CLIPS[row.Index].clipped(records)
        assert row.n == part.n.sum() == counted.sum()
        assert row.rate == pytest.approx(clipped[counted].mean()) == pytest.approx((part.n * part.rate).sum() / row.n)
        assert row.lower <= row.rate <= row.upper
        assert (row.exponent, row.exponent_lower, row.exponent_upper, row.p) == (*length_effect(records, clipped)[:4],)


def test_clips_at_one_rate_take_it_and_those_that_cannot_are_left_out():
    records = records_of(token_batch(0, rows=2000))
    scaled = at_one_rate(records)
    assert list(scaled) == list(CLIPS)
    for name, clip in scaled.items():
        if isinstance(clip, TokenClip):
            assert clip is CLIPS[name]
        else:
            rate = clip.clipped(records)[records.advantage != 0].mean()
            assert rate == pytest.approx(MATCHED_RATE, abs=2 / len(records))
    still = records.assign(log_ratio=np.float32(0), quadratic_variation=np.float32(0))
    assert all(isinstance(clip, TokenClip) for clip in at_one_rate(still).values())


@pytest.mark.parametrize(
    "sigma, kappa, fair", [(0.02, 0, {"fspo"}), (0.15, 1, {"fspo_drift_corrected", "fspo_studentized"})]
)
def test_at_one_clip_rate_the_shapes_rank_as_the_law_says(sigma, kappa, fair):
    """Where S has variance sigma²·L, a band of sqrt(L) treats lengths alike; with drift it must follow the drift."""
    rng = np.random.default_rng(0)
    length, prompt = group_lengths(rng, 5000, 4)
    q = sigma**2 * length
    s = np.sqrt(q) * rng.standard_normal(len(q)) - kappa * q / 2
    records = frame(length, s, q, rng.choice([-1, 1], len(q)), prompt)
    edges = length_edges(length, 6)
    bands = {name: CLIPS[name] for name in BANDS}
    rows = counterfactuals(records, edges, at_one_rate(records, bands)).summary
    for name in fair:
        assert rows.p[name] > 0.01
        for unfair in {"gspo", "fixed_band"} if kappa == 0 else {"gspo", "fixed_band", "fspo"}:
            assert rows.p[unfair] < 1e-6 and abs(rows.exponent[unfair]) > 3 * abs(rows.exponent[name])
    assert rows.exponent["gspo"] < 0 < rows.exponent["fixed_band"]
