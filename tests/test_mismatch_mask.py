# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The mask by trainer and rollout engine: whom it takes, and that it takes nothing but their advantages."""

import functools
import logging
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patched import wrapped_anew
from test_adaptive import a_process_group_of_one  # noqa: F401  a fixture
from test_mismatch import BROKEN, PADDING, REJECTED, Rollout
from test_policy_loss import CUTS, actor_config
from test_records import writers  # noqa: F401  a fixture
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from fspo_verl import live, mismatch_mask
from fspo_verl.analysis.mismatch import dropped
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.observe.columns import MASKED
from fspo_verl.observe.records import read_records

EPS = 0.3  # masks two of the seven responses of Rollout
LOSSES = {"fspo": FSPOPolicyLossConfig, "gspo": functools.partial(ObservedPolicyLossConfig, loss_mode="gspo")}


class Batch(Rollout):
    """With what entropy and KL losses need, another mismatch per seed, and one that is the same for all tokens."""

    def __init__(self, seed=1, scale=1.0, shift=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        if seed != 1:
            noise = [torch.randn(len(old), generator=generator) for old in self.old]
            self.engine = [old - 0.3 * scale * d - shift for old, d in zip(self.old, noise, strict=True)]
            self.engine[BROKEN][0] = -math.inf if seed % 2 else math.nan
        self.reference = [old + 0.1 * torch.randn(len(old), generator=generator) for old in self.old]

    def micro_batch(self, rows, dp_size=1):
        output, data = super().micro_batch(rows, dp_size)
        nest = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        data["ref_log_prob"] = nest([self.reference[i] for i in rows])
        # Any function of the log-probs stands for the entropy.
        output["entropy"] = nest([x.square() for x in output["log_probs"].unbind()])
        return output, data

    def masked_by_hand(self, eps):
        """Plain Python in float64, over all rows."""
        hand = {row: self.by_hand(row)[:2] for row in range(8) if row not in (BROKEN, PADDING)}
        c = statistics.median(s / length for length, s in hand.values())
        beyond = {row for row, (length, s) in hand.items() if abs(s - c * length) > eps * math.sqrt(length)}
        return [row in beyond | {BROKEN} for row in range(8)]


def masked_ranks(ranks, eps, sharing=1):
    """What each rank's worker trains on; of ``sharing`` ranks that hold the same responses one counts."""
    ranks = [data for data in ranks for _ in range(sharing)]

    def masked(rank, data, gather):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda: len(ranks))
            patch.setattr(torch.distributed, "get_rank", lambda: rank)
            patch.setattr(torch.distributed, "all_gather_object", gather)
            return mismatch_mask.masked_copy(data, eps, counts_here=rank % sharing == 0)

    handed = []
    for rank, data in enumerate(ranks):
        with pytest.raises(StopIteration):  # all that the rank tells the others

            def hand_in(every, own):
                handed.append(own)
                raise StopIteration

            masked(rank, data, hand_in)

    def give(every, own):
        every[:] = handed

    return [masked(rank, data, give) for rank, data in enumerate(ranks)][::sharing]


def step(batch, config, cut, eps=None, loss=ppo_loss):
    """(loss, gradient, every metric's values) of one optimiser step, masked first where there is an eps."""
    ranks = [[row for rows in micro_batches for row in rows] for micro_batches in CUTS[cut]]
    every = [batch.micro_batch(rows, len(ranks))[1] for rows in ranks]
    if eps is not None:
        every = masked_ranks(every, eps)
    total, values = 0.0, {}
    for data, of_rank, micro_batches in zip(every, ranks, CUTS[cut], strict=True):
        for rows in micro_batches:
            part = tu.index_select_tensor_dict(data, [of_rank.index(row) for row in rows])
            value, metrics = loss(config, batch.micro_batch(rows, len(ranks))[0], part)
            value.backward()
            total += value.item()
            for name, metric in metrics.items():
                values.setdefault(name, []).extend(getattr(metric, "values", [metric]))
    return total, batch.gradient, values


@pytest.fixture
def fresh_ppo_loss(monkeypatch):
    """Makes verl's ``ppo_loss`` as its workers call it, before the first mini-batch."""

    def fresh():
        wrapped_anew(monkeypatch, ppo_loss=ppo_loss)
        return engine_workers.ppo_loss

    return fresh


def config_of(kind, **fields):
    losses = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.2}
    return actor_config(policy_loss=LOSSES[kind](**fields), **losses)


@settings(max_examples=40)
@given(
    seed=st.integers(2, 10_000),
    scale=st.floats(0.01, 3.0),
    shift=st.floats(-1.0, 1.0),
    eps=st.floats(0.01, 1.0),
    cut=st.sampled_from(["one", "ragged", "two ranks"]),
    sharing=st.integers(1, 2),
)
def test_the_mask_is_that_of_float64_whatever_the_ranks(seed, scale, shift, eps, cut, sharing):
    batch = Batch(seed, scale, shift)
    ranks = [[row for rows in micro_batches for row in rows] for micro_batches in CUTS[cut]]
    datas = [batch.micro_batch(rows)[1] for rows in ranks]
    before = [[row.clone() for row in data["advantages"].unbind()] for data in datas]
    copies = masked_ranks(datas, eps, sharing)
    expected = batch.masked_by_hand(eps)
    for rows, data, copy, advantages in zip(ranks, datas, copies, before, strict=True):
        assert copy[MASKED].tolist() == [expected[row] for row in rows] and MASKED not in data
        for masked, old, kept, new in zip(
            copy[MASKED], advantages, data["advantages"].unbind(), copy["advantages"].unbind(), strict=True
        ):
            assert torch.equal(kept, old) and torch.equal(new, torch.zeros_like(old) if masked else old)
        for name in set(data.keys()) - {"advantages"}:
            assert copy.get(name) is data.get(name) or copy[name] == data[name], name


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("cut", ["one", "ragged", "two ranks"])
def test_a_masked_response_is_one_with_advantage_0_and_nothing_else_changes(fresh_ppo_loss, kind, cut):
    drop = torch.tensor(Batch().masked_by_hand(EPS))
    assert drop.tolist().count(True) == 2 and drop[REJECTED]

    def by_hand(kept):
        batch = Batch()
        batch.advantage = torch.where(kept, batch.advantage, 0.0)
        return step(batch, config_of(kind), cut, loss=fresh_ppo_loss())

    loss, gradient, values = step(Batch(), config_of(kind, mismatch_eps=EPS), cut, EPS, fresh_ppo_loss())
    expected_loss, expected_gradient, expected = by_hand(~drop)
    _, _, unmasked = by_hand(torch.ones(8, dtype=bool))
    _, _, others = by_hand(drop)
    assert loss == expected_loss and torch.equal(gradient, expected_gradient) and (gradient != 0).any()
    masked = values.pop(f"actor/fspo/{MASKED}_fraction")
    assert values == expected
    rows = [row for micro_batches in CUTS[cut] for rows in micro_batches for row in rows]
    assert masked == [float(drop[row] and row != REJECTED) for row in rows]
    for name in ("kl_loss", "actor/entropy_loss"):
        assert values[name] == unmasked[name] != 0, name
    parts = sum(sum(run["actor/pg_loss"]) for run in (values, others))  # denominators are those of all responses
    assert float(parts) == pytest.approx(float(sum(unmasked["actor/pg_loss"])), rel=1e-5)


def test_records_and_series_tell_who_is_masked(fresh_ppo_loss, writers, tmp_path):  # noqa: F811
    batch, folders = Batch(), {"masked": EPS, "plain": None}
    for name, eps in folders.items():
        config = config_of("fspo", mismatch_eps=eps, records_dir=str(tmp_path / name))
        _, _, values = step(Batch(), config, "ragged", eps, fresh_ppo_loss())
        series = live.series({key: np.mean(rows) for key, rows in values.items() if key.startswith("actor/fspo/")})
        assert series.get("fspo/mismatch_masked") == (None if eps is None else pytest.approx(1 / 6))
    for writer in writers:
        writer.flush()
    plain, records = (read_records(tmp_path / name, rejected=True).set_index("prompt") for name in ("plain", "masked"))
    assert MASKED not in plain and "this run's mask" not in dropped(plain).index
    expected = {f"prompt {row}": masked for row, masked in enumerate(batch.masked_by_hand(EPS)) if row != PADDING}
    assert records[MASKED].to_dict() == expected
    for prompt, masked in expected.items():
        assert records.advantage[prompt] == (0 if masked else plain.advantage[prompt])
    assert dropped(records).loc["this run's mask", "all"].item() == pytest.approx(2 / 7)


# --- broken responses ------------------------------------------------------------------------------------------------


def responses(broken, how, rows=512, sigma=0.06):
    """Rows whose tokens are off by independent noise, of which the first ``broken`` are off as ``how`` says."""
    generator = torch.Generator().manual_seed(broken)
    lengths = torch.rand(rows, generator=generator).mul(5).exp().mul(10).long().tolist()
    d = [sigma * torch.randn(length, generator=generator) - sigma**2 / 2 for length in lengths]
    for row in d[:broken]:
        BREAK[how](row)
    nest = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    trainer = [-torch.ones_like(row) for row in d]
    engine = [old - row for old, row in zip(trainer, d, strict=True)]
    ones = [torch.ones(length, dtype=torch.long) for length in lengths]
    rows = {"old_log_probs": trainer, "rollout_log_probs": engine, "loss_mask": ones, "advantages": d}
    return tu.get_tensordict({name: nest(values) for name, values in rows.items()}, {})


BREAK = {
    "5 nats a token": lambda d: d.add_(5.0),
    "-5 nats a token": lambda d: d.sub_(5.0),
    "one token": lambda d: d[:1].fill_(-1e4),
    "the other way": lambda d: d[-1:].fill_(1e4),
    "minus inf": lambda d: d[:1].fill_(-math.inf),
    "inf": lambda d: d[:1].fill_(math.inf),
    "nan": lambda d: d[:1].fill_(math.nan),
}


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.parametrize("broken", [1, 26, 102])
def test_broken_responses_are_masked_and_take_hardly_a_sound_one_along(broken, how):
    sound = mismatch_mask.masked_copy(responses(0, how), 0.1)[MASKED].double().mean()
    assert 0.06 < sound < 0.14  # 10% of normal sums
    masked = mismatch_mask.masked_copy(responses(broken, how), 0.1)[MASKED]
    assert masked[:broken].all()
    assert masked[broken:].double().mean() == pytest.approx(float(sound), abs=0.04)


def test_more_than_half_masked_is_said_once(caplog):
    eps = 0.1001  # of no other test
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        for broken, said in ((200, 0), (250, 1), (300, 1)):  # of 512, beside a tenth of the sound ones
            assert mismatch_mask.masked_copy(responses(broken, "nan"), eps)[MASKED][:broken].all()
            assert len(caplog.messages) == said
    assert "masks more than half" in caplog.messages[0]


# --- the worker ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """What verl's update is called with."""
    calls = []
    monkeypatch.setattr(
        engine_workers.TrainingWorker, "train_mini_batch", lambda self, data, **more: calls.append((data, more))
    )
    wrapped_anew(monkeypatch)
    return calls


def worker_of(policy_loss):
    loss_fn = functools.partial(ppo_loss, config=SimpleNamespace(policy_loss=policy_loss)) if policy_loss else None
    return SimpleNamespace(loss_fn=loss_fn, engine=SimpleNamespace(is_mp_src_rank_with_outputs=lambda: True))


@pytest.mark.parametrize("policy_loss", [None, PolicyLossConfig, *LOSSES.values()])
def test_off_an_update_gets_the_very_object_that_verl_passes_on(trained, policy_loss):
    data = Batch().micro_batch(range(8))[1]
    engine_workers.TrainingWorker.train_mini_batch(worker_of(policy_loss and policy_loss()), data=data)
    assert len(trained) == 1 and trained[0][0] is data


def test_on_an_update_gets_the_masked_rows(trained):
    batch = Batch()
    data = batch.micro_batch(range(8))[1]
    engine_workers.TrainingWorker.train_mini_batch(worker_of(FSPOPolicyLossConfig(mismatch_eps=EPS)), data, more=1)
    assert len(trained) == 1 and trained[0][1] == {"more": 1}
    assert trained[0][0][MASKED].tolist() == batch.masked_by_hand(EPS)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("eps", [0, -0.1, math.nan, "wide", True])
def test_a_half_width_that_is_none_is_refused(kind, eps):
    with pytest.raises(ValueError, match=r"policy_loss\.mismatch_eps="):
        LOSSES[kind](mismatch_eps=eps)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_trainer_whose_responses_nobody_masks_is_refused(fresh_ppo_loss, kind):
    for loss in (fresh_ppo_loss(), ppo_loss):
        with pytest.raises(RuntimeError, match="mismatch_eps"):
            step(Batch(), config_of(kind, mismatch_eps=EPS), "one", loss=loss)


def test_a_batch_without_the_engines_log_probs_is_refused():
    with pytest.raises(KeyError, match="rollout_log_probs"):
        mismatch_mask.masked_copy(Batch().micro_batch(range(8))[1].exclude("rollout_log_probs"), EPS)
