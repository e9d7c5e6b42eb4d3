# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Responses that fill what they were allowed: in records, metrics and live, by the limits that a worker was given."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_mismatch import PADDING, REJECTED, Rollout, run
from test_policy_loss import actor_config
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from fspo_verl.analysis import live
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.observe import microbatch
from fspo_verl.observe.records import read_records


def worker(response=60, model=None, name="vllm", positions=1000, nested=False):
    """The part of verl's worker that tells its limits."""
    hf_config = SimpleNamespace(max_position_embeddings=positions)
    return SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(response_length=response, max_model_len=model, name=name)),
        actor=SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(text_config=hf_config) if nested else hf_config)
        ),
    )


@pytest.fixture
def synced_ppo_loss(monkeypatch, wrapped_anew):
    """verl's ``ppo_loss`` in a worker that has sent its weights to a rollout engine."""

    async def update_weights(self, global_steps=None):
        pass

    def synced(of):
        monkeypatch.setattr(engine_workers.ActorRolloutRefWorker, "update_weights", update_weights)
        wrapped = wrapped_anew(ppo_loss)
        asyncio.run(engine_workers.ActorRolloutRefWorker.update_weights(of, 6))
        return wrapped

    return synced


WORKERS = {  # whose prompts have 4 tokens -> the least tokens of a response that fills them
    "response_length": (worker(60), 60),
    "max_model_len": (worker(60, model=21), 17),
    "max_model_len of sglang": (worker(60, model=22, name="sglang"), 17),
    "the model's positions": (worker(60, positions=21), 17),
    "positions of a model with images": (worker(60, positions=21, nested=True), 17),
    "nothing in reach": (worker(2000), math.inf),
}


@pytest.mark.parametrize("cut", ["one", "ragged", "single rows"])
@pytest.mark.parametrize("case", WORKERS)
def test_records_and_series_say_who_fills_what_it_was_allowed(synced_ppo_loss, recorded, tmp_path, case, cut):
    of, least = WORKERS[case]
    schema = ObservedPolicyLossConfig(loss_mode="gspo", records_dir=str(tmp_path))
    values = run(synced_ppo_loss(of), actor_config(policy_loss=schema), cut)
    tokens = Rollout().tokens  # those that no loss sees included, which some of the responses have
    expected = {row: float(tokens[row] >= least) for row in range(8) if row != PADDING}
    of_loss = [truncated for row, truncated in expected.items() if row != REJECTED]
    assert live.series(values)["fspo/truncated"] == pytest.approx(sum(of_loss) / 6)
    recorded()
    records = read_records(tmp_path, rejected=True).set_index("prompt")
    assert records.truncated.to_dict() == {f"prompt {row}": truncated for row, truncated in expected.items()}
    assert records.length["prompt 2"] < tokens[2] == 60


@pytest.mark.parametrize("of", [None, SimpleNamespace(), worker(response=None), worker(model="wide")])
def test_a_worker_that_does_not_tell_leaves_the_column_out(synced_ppo_loss, of):
    values = run(synced_ppo_loss(of), actor_config(policy_loss=FSPOPolicyLossConfig()), "one")
    assert "actor/fspo/ratio" in values and not any("truncated" in name for name in values)
    assert "fspo/truncated" not in live.series(values)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6),
    response=st.integers(1, 10),
    sequence=st.integers(2, 16),
)
def test_padded_batches_of_older_trainers_tell_the_same(lengths, response, sequence):
    ids = torch.ones(len(lengths), 15, dtype=torch.long)
    attention = torch.tensor([[0] * (6 - p) + [1] * p + [1] * r + [0] * (9 - r) for p, r in lengths])
    rows = {"input_ids": ids, "position_ids": ids.cumsum(-1), "attention_mask": attention, "prompts": ids[:, :6]}
    rows |= {"responses": ids[:, 6:], "response_mask": attention[:, 6:]}
    padded = left_right_2_no_padding(tu.get_tensordict(rows, {}))
    nested = {
        name: torch.nested.as_nested_tensor([torch.ones(of) for of in column], layout=torch.jagged)
        for name, column in zip(("prompts", "responses"), zip(*lengths, strict=True), strict=True)
    }
    limits = microbatch.Limits(response, sequence)
    for data in (padded, nested):
        got = microbatch._truncated(data, limits)["truncated"].tolist()
        assert got == [r >= response or p + r >= sequence for p, r in lengths]
