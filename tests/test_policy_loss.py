# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The registered loss inside verl: its contract, verl's ``ppo_loss``, aggregation, and the metrics after reduction."""

import logging
import math
import pickle
import runpy
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from bench.loss import Operations, call, make_batch
from reference import AGG_MODES
from torch.utils._python_dispatch import TorchDispatchMode
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

import fspo_verl.register
from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.observe.metrics import as_sums

ROOT = Path(__file__).parents[1]


def actor_config(agg_mode="seq-mean-token-sum-norm", policy_loss=None, **kwargs):
    return FSDPActorConfig(
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=policy_loss or FSPOPolicyLossConfig(eps_low=0.05, eps_high=0.04, eps_dual=0.1),
        loss_agg_mode=agg_mode,
        loss_scale_factor=128,
        **kwargs,
    )


class MiniBatch:
    """Sequences of very different lengths, to be cut into micro-batches that verl's ``ppo_loss`` takes."""

    def __init__(self, lengths=(1, 3, 60, 17, 0, 120, 8, 2), prompt=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.prompt = lengths, prompt
        # A row without response tokens is verl's padding row: one token whose mask is 0.
        self.tokens = [max(n, 1) for n in lengths]
        self.masks = [
            (torch.rand(t, generator=generator) < 0.8).long() if t > 3 else torch.full((t,), int(n > 0))
            for n, t in zip(lengths, self.tokens, strict=True)
        ]
        self.old = [-torch.rand(t, generator=generator) for t in self.tokens]
        noise = [0.04 * torch.randn(t, generator=generator) for t in self.tokens]
        self.log_prob = [(o + n).requires_grad_() for o, n in zip(self.old, noise, strict=True)]
        self.advantage = torch.randn(len(lengths), generator=generator)

    def __len__(self):
        return len(self.lengths)

    @property
    def gradient(self):
        return torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in self.log_prob])

    def micro_batch(self, rows, dp_size=1):
        """(model_output, data) as verl's FSDP engine hands them to the loss, for the given rows."""
        nest = lambda xs: torch.nested.as_nested_tensor(list(xs), layout=torch.jagged)  # noqa: E731
        # The model's output at position i scores token i + 1.
        outputs = [torch.cat([torch.zeros(self.prompt - 1), self.log_prob[i], torch.zeros(1)]) for i in rows]
        data = tu.get_tensordict(
            {
                "prompts": nest(torch.zeros(self.prompt, dtype=torch.long) for _ in rows),
                "responses": nest(torch.zeros(self.tokens[i], dtype=torch.long) for i in rows),
                "response_mask": nest(self.masks[i] for i in rows),
                "old_log_probs": nest(self.old[i] for i in rows),
                "advantages": nest(self.advantage[i].expand(self.tokens[i]).clone() for i in rows),
            },
            {
                "dp_size": dp_size,
                "batch_num_tokens": int(sum(m.sum() for m in self.masks)),
                "global_batch_size": len(self),
            },
        )
        return {"log_probs": nest(outputs)}, data

    def step(self, cuts, config):
        """Forward and backward over ranks, each a list of micro-batches of rows; returns verl's reduced metrics."""
        ranks = []
        for micro_batches in cuts:
            metrics = {}
            for rows in micro_batches:
                loss, micro_metrics = ppo_loss(config, *self.micro_batch(rows, dp_size=len(cuts)))
                (loss / len(cuts)).backward()  # FSDP averages gradients over ranks
                append_to_dict(metrics, as_sums(micro_metrics))
            ranks.append(metrics)
        merged = {key: [Metric.aggregate_dp([rank[key] for rank in ranks])] for key in ranks[0]}
        return reduce_metrics(merged)


CUTS = {
    "one": [[range(8)]],
    "even": [[range(0, 4), range(4, 8)]],
    "ragged": [[[0], [5], [1, 2, 3, 4, 6], [7]]],
    "single rows": [[[i] for i in (3, 1, 4, 0, 5, 2, 6, 7)]],
    "two ranks": [[[0, 1, 2], [3]], [[4], [5, 6, 7]]],
}


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize("cut", ["even", "ragged", "single rows", "two ranks"])
def test_gradients_and_metrics_do_not_depend_on_the_cut(cut, agg_mode):
    whole, parts = MiniBatch(), MiniBatch()
    config = actor_config(agg_mode)
    expected = whole.step(CUTS["one"], config)
    got = parts.step(CUTS[cut], config)
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-5, atol=1e-12)
    assert (whole.gradient != 0).any()
    assert got.keys() == expected.keys()
    for key in (key for key in expected if key.startswith("actor/fspo/")):
        assert got[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-12), key
    assert 0 < expected["actor/fspo/better/clipped"] < expected["actor/fspo/better/responses"]
    assert expected["actor/fspo/sequence_fraction"] == 7 / 8


@pytest.mark.parametrize("rows", [1, 8, 200])
def test_a_call_hands_on_one_number_per_name_whatever_its_rows(rows):
    """verl gathers the metrics of a mini-batch on every rank."""
    batch = MiniBatch(lengths=range(rows), seed=1)
    _, metrics = ppo_loss(actor_config(), *batch.micro_batch(range(rows)))
    metrics = as_sums(metrics)
    assert {len(metric.values) for metric in metrics.values()} == {1}
    assert len(pickle.dumps(metrics)) < 4096
    # verl's reductions and averages go by these words of a name.
    words = ("min", "max", "sum", "total", "mean", "avg")
    names = [name for name in metrics if name.startswith("actor/fspo/")]
    assert [name for name in names if any(word in name for word in words)] == ["actor/fspo/step_rows_max"]


def test_metrics_equal_the_values_by_definition():
    batch = MiniBatch(lengths=(1, 3, 60, 17, 0, 120, 8, 2, *range(25, 60, 5)))
    batch.advantage[2] = 0.0
    metrics = batch.step([[range(len(batch))]], actor_config())
    expected = defaultdict(float)
    for log_prob, old, mask, advantage in zip(batch.log_prob, batch.old, batch.masks, batch.advantage, strict=True):
        d = (log_prob.detach() - old)[mask.bool()]
        if len(d) == 0:
            continue
        s, root = d.sum().item(), math.sqrt(len(d))
        above, below, dual = s > 0.04 * root, s < -0.05 * root, s > 0.1 * root
        has_advantage = advantage.item() != 0
        clipped = has_advantage and (above if advantage > 0 else (below or dual))
        in_bin = 16 <= len(d) <= 63 and has_advantage
        of_row = {
            "sequence_fraction": True,
            "moved_sigma_squared": d.square().mean().item(),
            "ratio": math.exp(s) * (has_advantage and not clipped),
            "ratio_squared": math.exp(2 * s) * (has_advantage and not clipped),
            "better/responses": advantage.item() > 0,
            "better/clipped": advantage.item() > 0 and clipped,
            "length_16_to_63/responses": in_bin,
            "length_16_to_63/clipped": in_bin and clipped,
        }
        for name, value in of_row.items():
            expected[name] += value
    for name, total in expected.items():
        assert metrics[f"actor/fspo/{name}"] == pytest.approx(total / len(batch), rel=1e-5), name
    assert 0 < expected["length_16_to_63/clipped"] < expected["length_16_to_63/responses"]


def padded_batch(rows=6, width=40, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator).to(dtype)
    log_prob = (old + 0.05 * torch.randn(rows, width, generator=generator).to(dtype)).requires_grad_()
    advantages = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < torch.linspace(0, 1, rows).unsqueeze(-1)
    return {"old_log_prob": old, "log_prob": log_prob, "advantages": advantages, "response_mask": mask}


def test_the_loss_survives_verls_in_place_arithmetic_and_empty_batches():
    batch = padded_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for agg_mode in AGG_MODES:
        loss, metrics = get_policy_loss_fn("fspo")(**batch, loss_agg_mode=agg_mode, config=actor_config(agg_mode))
        loss -= 0.1 * batch["log_prob"].sum()
        loss.backward()
        assert loss.isfinite() and metrics["actor/fspo/sequence_fraction"] == 0


def test_rollout_is_weights_multiply_the_token_losses():
    batch = padded_batch()
    config = actor_config()
    weights = torch.rand(6, 40)
    call = get_policy_loss_fn("fspo")
    with_weights, _ = call(**batch, loss_agg_mode="token-sum", config=config, rollout_is_weights=weights)
    weighted = {**batch, "advantages": batch["advantages"] * weights}
    torch.testing.assert_close(with_weights, call(**weighted, loss_agg_mode="token-sum", config=config)[0])
    garbage = torch.where(batch["response_mask"], weights, math.nan)
    torch.testing.assert_close(
        with_weights, call(**batch, loss_agg_mode="token-sum", config=config, rollout_is_weights=garbage)[0]
    )


def test_the_file_for_an_older_verl_registers_the_same_loss(monkeypatch):
    """Older versions call it alike, and hand over the totals of a mini-batch or none."""
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {})
    namespace = runpy.run_path(str(ROOT / "recipe/older_verl/fspo_loss_mode.py"))
    config = actor_config("seq-mean-token-sum-norm", FSPOPolicyLossConfig())
    for info in ({}, {"dp_size": 2, "batch_num_tokens": 500, "global_batch_size": 16}):
        config.global_batch_info.clear()
        config.global_batch_info.update(info, loss_scale_factor=namespace["MAX_RESPONSE_LENGTH"])
        found = []
        for loss_of in (namespace["fspo"], fspo_verl.register.compute_policy_loss_fspo):
            batch = padded_batch()
            loss, metrics = loss_of(**batch, loss_agg_mode="seq-mean-token-sum-norm", config=config)
            loss.backward()
            found.append((loss, batch["log_prob"].grad, metrics))
        (loss, grad, metrics), (expected_loss, expected_grad, expected) = found
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(grad, expected_grad)
        assert metrics["actor/ppo_kl"] == pytest.approx(expected["actor/ppo_kl"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_decide_in_float32(dtype):
    """Sums over half-precision inputs are taken in float32, so the loss is that of the same numbers cast up."""
    batch = padded_batch(width=4000, dtype=dtype)
    config = actor_config()
    call = get_policy_loss_fn("fspo")
    with torch.autocast("cpu", dtype=dtype):
        loss, _ = call(**batch, loss_agg_mode="seq-mean-token-sum-norm", config=config)
    loss.backward()
    wide = {**batch, "old_log_prob": batch["old_log_prob"].float(), "log_prob": batch["log_prob"].detach().float()}
    wide["log_prob"].requires_grad_()
    expected, _ = call(**wide, loss_agg_mode="seq-mean-token-sum-norm", config=config)
    expected.backward()
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
    assert torch.equal(batch["log_prob"].grad, wide["log_prob"].grad.to(dtype))


def test_without_its_schema_the_default_band_applies_and_is_named(caplog):
    batch = padded_batch()
    stock = actor_config(policy_loss=PolicyLossConfig(loss_mode="fspo"))
    call = get_policy_loss_fn("fspo")
    with caplog.at_level(logging.WARNING, logger="fspo_verl"):
        loss, _ = call(**batch, loss_agg_mode="token-mean", config=stock)
        call(**batch, loss_agg_mode="token-mean", config=stock)
    expected, _ = call(**batch, loss_agg_mode="token-mean", config=actor_config(policy_loss=FSPOPolicyLossConfig()))
    assert torch.equal(loss, expected)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert Band().describe() in caplog.text


class _HostReads(TorchDispatchMode):
    """Counts the operations by which Python reads a tensor's value: on a GPU, each waits for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 500, "global_batch_size": 16}])
def test_only_the_metrics_read_a_value_and_once(info, monkeypatch):
    batch, config, reads = padded_batch(), actor_config(), []
    config.global_batch_info.update(info)
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append(tensor.shape) or cpu(tensor))
    with _HostReads() as others:
        loss, _ = get_policy_loss_fn("fspo")(**batch, loss_agg_mode=config.loss_agg_mode, config=config)
        loss.backward()
    assert len(reads) == 1 and others.count == 0


@pytest.mark.parametrize("rows, width", [(8, 512), (64, 1024)])
def test_a_call_and_its_backward_are_fewer_operations_than_those_of_gspo(rows, width):
    """The host launches a kernel or more for each on a GPU, and that is what a call costs there."""
    batch, count = make_batch(rows, width, "cpu"), {}
    for name in ("fspo", "gspo"):
        function = call(name, batch)
        with Operations() as operations:
            function()
        count[name] = operations.count
    assert 0 < count["fspo"] < count["gspo"]
