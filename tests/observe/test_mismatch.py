# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The trainer's log-probs against the rollout engine's: columns by hand, the same however a batch is cut."""

import math
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from test_policy_loss import CUTS, MiniBatch, actor_config
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
)
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict

from fspo_verl.analysis import live
from fspo_verl.analysis.judgement import evidence_of_records
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.observe import microbatch
from fspo_verl.observe.columns import MISMATCH, mismatch_columns
from fspo_verl.observe.records import read

REJECTED, BROKEN, PADDING = 3, 6, 4  # rows of a batch


class Rollout(MiniBatch):
    """A mini-batch whose engine was 0.3 nats off per token; of one response all tokens were rejected."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.loss_masks = [mask.clone() for mask in self.masks]
        self.masks[REJECTED][:] = 0
        off = [0.3 * torch.randn(len(old), generator=generator) for old in self.old]
        off[5][:2], self.loss_masks[5][:2] = torch.tensor([2.0, -3.0]), 1
        self.engine = [old - d for old, d in zip(self.old, off, strict=True)]
        self.engine[BROKEN][0], self.loss_masks[BROKEN][0] = math.nan, 1
        self.engine[2][self.loss_masks[2] == 0] = math.nan  # tokens that nobody samples, of a tool

    def micro_batch(self, rows, dp_size=1):
        output, data = super().micro_batch(rows, dp_size)
        nest = lambda xs: torch.nested.as_nested_tensor(list(xs), layout=torch.jagged)  # noqa: E731
        data["rollout_log_probs"] = nest(self.engine[i] for i in rows)
        data["loss_mask"] = nest(self.loss_masks[i] for i in rows)
        tu.assign_non_tensor_stack(data, "uid", [f"prompt {row}" for row in rows])
        fields = [{"min_global_steps": 6 - row % 3} if row else {} for row in rows]
        tu.assign_non_tensor_stack(data, "extra_fields", fields)
        tu.assign_non_tensor_stack(data, "global_steps", [7] * len(rows))
        return output, data

    def by_hand(self, row):
        """Compute the columns of a row in plain Python."""
        pairs = zip(self.old[row].tolist(), self.engine[row].tolist(), strict=True)
        d = [old - new for (old, new), kept in zip(pairs, self.loss_masks[row].tolist(), strict=True) if kept]
        icepop = sum(not 0.5 <= math.exp(x) <= 5 for x in d)
        return [len(d), sum(d), sum(x * x for x in d), sum(math.exp(x) - 1 - x for x in d), icepop]


def run(ppo_loss, config, cut, batch=None):
    """The metrics of one optimiser step, as verl reduces them."""
    ranks, batch = [], batch or Rollout()
    for micro_batches in CUTS[cut]:
        gathered = {}
        for rows in micro_batches:
            append_to_dict(gathered, ppo_loss(config, *batch.micro_batch(rows, dp_size=len(CUTS[cut])))[1])
        ranks.append(gathered)
    return {name: Metric.aggregate_dp([rank[name] for rank in ranks]) for name in ranks[0]}


def assert_those_by_hand(batch, logged, series):
    """The sums that one optimiser step logs, and their quotients; returns the columns of each row."""
    hand = {row: batch.by_hand(row) for row in range(8) if row not in (BROKEN, PADDING)}
    totals = dict(zip(MISMATCH, np.sum(list(hand.values()), axis=0), strict=True))
    for name in ("rollout_length", "rollout_quadratic_variation"):
        assert 8 * logged[f"actor/fspo/{name}"] == pytest.approx(totals[name], rel=1e-5), name
    sigma = math.sqrt(totals["rollout_quadratic_variation"] / totals["rollout_length"])
    assert series["fspo/mismatch_sigma"] == pytest.approx(sigma, rel=1e-5)
    assert totals["tokens_masked_icepop"] >= 2
    return hand


def config_of(tmp_path, loss="fspo"):
    schema = {"fspo": FSPOPolicyLossConfig}.get(loss, ObservedPolicyLossConfig)
    return actor_config(policy_loss=schema(loss_mode=loss, records_dir=str(tmp_path)))


@pytest.mark.parametrize("cut", ["one", "ragged", "single rows", "two ranks"])
@pytest.mark.parametrize("loss", ["fspo", "gspo"])
def test_columns_and_series_equal_those_by_hand_whatever_the_cut(counted_ppo_loss, recorded, tmp_path, loss, cut):
    logged = run(counted_ppo_loss, config_of(tmp_path, loss), cut)
    hand = assert_those_by_hand(Rollout(), logged, live.series(logged))
    assert logged["actor/fspo/rollout_rejected_fraction"] == 1 / 8
    recorded()
    if cut == "two ranks":  # of which this one process can only be the first
        return
    recorded = read(tmp_path, rejected=True)
    records = recorded.table.set_index("prompt")
    assert len(records) == 7
    for row, expected in hand.items():
        got = records.loc[f"prompt {row}"]
        assert got[list(MISMATCH)].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6), row
        assert got.decision == "rejected" if row == REJECTED else got.length == expected[0]
        assert got.staleness == row % 3 if row else math.isnan(got.staleness)
    broken = records.loc[f"prompt {BROKEN}"]
    assert broken.rollout_length == 0 and broken[list(MISMATCH[1:])].isna().all() and broken.length > 0
    trained = read(tmp_path)
    assert sorted(trained.table.prompt) == sorted(set(records.index) - {f"prompt {REJECTED}"})
    assert trained.rows == recorded.rows == 6


class Bypass(Rollout):
    """Rollouts whose old log-probs are the engine's, as verl's bypass mode makes them."""

    def __init__(self):
        super().__init__()
        self.trainer = [x.detach().clone() for x in self.log_prob]
        self.old = self.engine

    def by_hand(self, row):
        self.old = self.trainer  # what the columns measure: the trainer before the update
        expected = super().by_hand(row)
        self.old = self.engine
        return expected


def worker_of(bypass_mode):
    """A worker's part of the config, as it arrives there from the driver."""
    config = {"algorithm": {"rollout_correction": {"bypass_mode": bypass_mode}}, "actor_rollout_ref": {"rollout": {}}}
    if bypass_mode is None:
        config["algorithm"]["rollout_correction"] = None
    return SimpleNamespace(config=cloudpickle.loads(cloudpickle.dumps(OmegaConf.create(config).actor_rollout_ref)))


@pytest.mark.parametrize("cut", ["one", "ragged", "single rows"])
def test_in_bypass_mode_the_first_mini_batch_is_the_mismatch_and_no_noise(counted_ppo_loss, recorded, tmp_path, cut):
    """The second of two optimiser steps sees a policy that has moved."""
    microbatch.synced(6, worker_of(True))
    first, second = (run(counted_ppo_loss, config_of(tmp_path), cut, Bypass()) for _ in range(2))
    series = live.series({name: (first[name] + second[name]) / 2 for name in first})
    hand = assert_those_by_hand(Bypass(), first, series)
    assert second["actor/fspo/rollout_length"] == second["actor/fspo/rollout_quadratic_variation"] == 0
    assert "fspo/noise_sigma" not in series
    recorded()
    recorded = read(tmp_path, rejected=True)
    records = recorded.table
    assert recorded.settings.old_log_probs_from_rollout
    of_first = records[records.mini_batch == 0].set_index("prompt")
    for row, expected in hand.items():
        got = of_first.loc[f"prompt {row}", list(MISMATCH)].tolist()
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6), row
    later = records[records.mini_batch == 1]
    assert len(later) == 6 and (later[list(MISMATCH)] == 0).to_numpy().all()
    trained = read(tmp_path)
    assert evidence_of_records(trained.table, trained.settings).noise.sigma is None


@pytest.mark.parametrize("told", [worker_of(False), worker_of(None), None])
def test_engines_that_agree_to_the_bit_are_no_bypass_mode(counted_ppo_loss, recorded, tmp_path, told):
    batch = Rollout()
    batch.engine = batch.old
    microbatch.synced(6, told)
    values = run(counted_ppo_loss, config_of(tmp_path), "one", batch)
    assert values["actor/fspo/on_policy_fraction"] == 6 / 8
    assert values["actor/fspo/rollout_length"] > 0 == values["actor/fspo/rollout_quadratic_variation"]
    recorded()
    assert not read(tmp_path).settings.old_log_probs_from_rollout


def test_noise_is_measured_in_the_first_mini_batch_of_each_training_step_alone(counted_ppo_loss):
    """The weights of a later one are no longer those of the old log-probs."""
    steps = []
    for step in (6, 7):
        microbatch.synced(step, worker_of(False))
        values = [run(counted_ppo_loss, actor_config(policy_loss=FSPOPolicyLossConfig()), "one") for _ in range(3)]
        steps.append([value["actor/fspo/on_policy_fraction"] for value in values])
    assert steps == 2 * [[6 / 8, 0, 0]]


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-3, 0.03, 0.5]))
def test_sums_are_those_of_verls_own_metrics_and_decisions(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(12, 30, generator=generator)
    engine = old - scale * torch.randn(12, 30, generator=generator)
    mask = torch.rand(12, 30, generator=generator) < 0.7
    got = {name: column.double() for name, column in mismatch_columns(old, engine, mask).items()}
    verls = compute_offpolicy_metrics(old.double(), engine.double(), mask)
    tokens = got["rollout_length"].sum()
    assert (-got["rollout_log_ratio"].sum() / tokens).item() == pytest.approx(verls["kl"], rel=1e-4, abs=1e-8)
    assert (got["rollout_k3"].sum() / tokens).item() == pytest.approx(verls["k3_kl"], rel=2e-3)
    weights, _, _ = compute_rollout_correction_and_rejection_mask(
        old, engine, mask, rollout_is="token", rollout_is_threshold="0.5_5.0"
    )
    masked = ((weights.batch["rollout_is_weights"] == 0) & mask).sum(-1)
    assert got["tokens_masked_icepop"].tolist() == masked.tolist()
