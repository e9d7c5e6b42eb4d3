# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The loss against a float64 reference over generated cases, its identities, and hostile input."""

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import fspo_verl
from fspo_verl import loss
from fspo_verl.band import Band
from fspo_verl.keys import GONE, Gone
from fspo_verl.loss import _token_gradient, _token_sums, fspo_loss
from fspo_verl.register import _aggregate

AGG_MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
NORMALIZATIONS = [
    *({"normalization": name, "length_power": p} for name in ("plain", "drift_corrected") for p in (0.0, 0.5, 1.0)),
]
SIDES = [
    {"eps": 0.4, "eps_high": 0.3},  # the dual clip is at 0.9
    {"eps_low": 0.4, "eps_high": 0.3, "eps_dual": math.inf},
]
BANDS = [Band(**eps, **normalization) for eps, normalization in itertools.product(SIDES, NORMALIZATIONS)]
BANDS += [Band(eps=math.inf)]
bands = st.sampled_from(BANDS)


@st.composite
def batches(draw):
    """(log_prob, old_log_prob, advantages, mask) in float64, with sequences on every side of their bands."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.integers(1, 5))
    width = draw(st.sampled_from([1, 2, 7, 40, 300]))
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.stack(
        [
            {
                "full": lambda: torch.ones(width, dtype=torch.bool),
                "empty": lambda: torch.zeros(width, dtype=torch.bool),
                "one token": lambda: torch.arange(width) == int(rand(1) * width),
                "prefix": lambda: torch.arange(width) <= int(rand(1) * width),
                "holes": lambda: rand(width) < 0.6,
            }[draw(st.sampled_from(["full", "empty", "one token", "prefix", "holes"]))]()
            for _ in range(rows)
        ]
    )
    old_log_prob = -3 * rand(rows, width)
    # S/√L of about ±1.5 puts sequences on every side of bands whose half-width is 0.3 to 0.9 in that unit.
    scale = draw(st.sampled_from([0.0, 0.05, 0.5, 2.0]))
    shift = 3 * (rand(rows, 1) - 0.5) / mask.sum(-1, keepdim=True).clamp(min=1).sqrt()
    log_prob = old_log_prob + scale * (shift + 0.3 * (rand(rows, width) - 0.5))
    advantages = {
        "constant": lambda: (rand(rows, 1) - 0.5).expand(rows, width),
        "varying": lambda: rand(rows, width) - 0.5,
        "zero": lambda: torch.zeros(rows, width, dtype=torch.float64),
    }[draw(st.sampled_from(["constant", "varying", "zero"]))]()
    return log_prob, old_log_prob, advantages, mask


def batch_info(draw):
    return draw(
        st.sampled_from(
            [
                {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None},
                {"dp_size": 1, "batch_num_tokens": 9, "global_batch_size": 4, "loss_scale_factor": 64},
                {"dp_size": 4, "batch_num_tokens": 1000, "global_batch_size": 32, "loss_scale_factor": 512},
            ]
        )
    )


def aggregated(log_prob, old_log_prob, advantages, mask, band, agg_mode, info):
    """Loss value and gradient with respect to log_prob, as the registered loss computes them."""
    log_prob = log_prob.clone().requires_grad_()
    sequences = fspo_loss(log_prob, old_log_prob, advantages, mask, band)
    loss = _aggregate(sequences, mask.shape[-1], agg_mode, dict(info))
    loss.backward()
    return loss.detach(), log_prob.grad, sequences


def expected(log_prob, old_log_prob, advantages, mask, band, agg_mode, info):
    info = dict(info)
    info["batch_num_tokens"] = info["batch_num_tokens"] or max(1, int(mask.sum()))
    info["global_batch_size"] = info["global_batch_size"] or max(1, int(mask.any(-1).sum()))
    weights = reference.token_weights(mask.int().tolist(), agg_mode, **info)
    args = [x.double().tolist() for x in (log_prob, old_log_prob, advantages)]
    return reference.fspo(*args, mask.tolist(), dataclasses.asdict(band), weights)


@given(batch=batches(), band=bands, agg_mode=st.sampled_from(AGG_MODES), data=st.data())
def test_value_and_gradient_equal_the_reference(batch, band, agg_mode, data):
    info = batch_info(data.draw)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        cast = [x.to(dtype) for x in batch[:3]] + [batch[3]]
        value, gradient, log_ratio, edges = expected(*cast, band, agg_mode, info)
        if _near_an_edge(log_ratio, edges, batch[3].sum(-1), tolerance):
            continue  # the rounding of S may put a sequence on either side; the edge itself has its own test
        loss, grad, _ = aggregated(*cast, band, agg_mode, info)
        largest = max((abs(g) for row in gradient for g in row), default=0.0)
        torch.testing.assert_close(
            grad.double(), torch.tensor(gradient, dtype=torch.float64), rtol=tolerance, atol=tolerance * largest
        )
        magnitude = sum(abs(g) for row in gradient for g in row) + abs(value)  # terms of both signs may cancel
        assert abs(loss.double().item() - value) <= tolerance * max(magnitude, abs(value), 1e-300)


def _near_an_edge(log_ratio, edges, length, tolerance):
    return any(
        0 < abs(s - edge) <= 10 * tolerance * max(1.0, n)
        for s, row, n in zip(log_ratio, edges, length.tolist(), strict=True)
        for edge in row
        if math.isfinite(edge)
    )


@pytest.mark.parametrize(
    "fields, low, high, dual",
    [
        ({}, 0.03, 0.03, 0.09),
        ({"eps": 0.02}, 0.02, 0.02, 0.06),
        ({"eps_high": 0.25}, 0.03, 0.25, 0.75),
        ({"eps": 0.02, "eps_low": 0.01}, 0.01, 0.02, 0.06),
        ({"eps": None, "eps_low": 0.1, "eps_high": 0.2}, 0.1, 0.2, 3 * 0.2),
        ({"eps_dual": 0.5}, 0.03, 0.03, 0.5),
        ({"eps_dual": math.inf}, 0.03, 0.03, math.inf),
        ({"eps_high": math.inf}, 0.03, math.inf, math.inf),
        ({"eps": math.inf}, math.inf, math.inf, math.inf),
    ],
)
def test_one_number_sets_the_sides_that_are_not_set(fields, low, high, dual):
    band = Band(**fields)
    assert (band.low, band.high, band.dual) == (low, high, dual)
    kept = Band.from_json(json.loads(json.dumps(band.to_json(), allow_nan=False)))
    assert (kept.low, kept.high, kept.dual) == (low, high, dual) and kept.to_json() == band.to_json()
    assert Band.from_json(band.to_json() | {"unknown": None}) == kept
    with pytest.raises(TypeError, match="unknown"):
        Band.from_json(band.to_json() | {"unknown": 1})


@pytest.mark.parametrize("field", GONE)
def test_a_field_that_is_gone_is_refused_with_what_to_do_instead(field):
    old = Band().to_json()
    assert Band.from_json(old | {field: None}) == Band.from_json(old)
    with pytest.raises(Gone, match=re.escape(GONE[field])):
        Band.from_json(old | {field: [[10, 3.1], [100, 9]]})


@pytest.mark.parametrize(
    "fields, refused",
    [
        ({"eps": 0}, "eps=0"),
        ({"eps": math.nan}, "eps=nan"),
        ({"eps": True}, "eps=True"),
        ({"eps": None, "eps_low": 0.1}, "eps=None"),
        ({"eps_low": -0.1}, "eps_low=-0.1"),
        ({"eps_high": "wide"}, "eps_high='wide'"),
        ({"eps_dual": 0.02}, "eps_dual=0.02.*upper half-width 0.03"),
        ({"eps": math.inf, "eps_dual": 1.0}, "eps_dual=1.0"),
        ({"length_power": 1.5}, "length_power=1.5"),
        ({"normalization": "sqrt"}, "normalization='sqrt'.*plain, drift_corrected"),
    ],
)
def test_a_band_out_of_bounds_is_refused(fields, refused):
    with pytest.raises(ValueError, match=refused):
        Band(**fields)


@pytest.mark.parametrize("band", BANDS, ids=Band.describe)
def test_long_sequences_equal_the_reference(band):
    length, generator = 32768, torch.Generator().manual_seed(0)  # several blocks of rows
    old = -3 * torch.rand(3, length, generator=generator, dtype=torch.float64)
    drift = torch.tensor([[0.0], [0.7], [-0.7]], dtype=torch.float64) / math.sqrt(length)
    log_prob = old + drift + 0.01 * torch.randn(3, length, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([[1.0], [0.5], [-2.0]], dtype=torch.float64).expand(3, length)
    args = (log_prob, old, advantages, torch.ones(3, length, dtype=torch.bool))
    info = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None}
    value, gradient, *_ = expected(*args, band, "token-mean", info)
    loss, grad, _ = aggregated(*args, band, "token-mean", info)
    assert loss.item() == pytest.approx(value, rel=1e-10)
    torch.testing.assert_close(grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-10, atol=0)


# --- identities ------------------------------------------------------------------------------------------------------

EDGE_CASES = [  # log-ratio of the single token, advantage, does a gradient flow; band [-0.5, +0.25], dual 1.0
    (0.25, 1.0, True),
    (math.nextafter(0.25, 1), 1.0, False),
    (-5.0, 1.0, True),
    (-0.5, -1.0, True),
    (math.nextafter(-0.5, -1), -1.0, False),
    (0.9, -1.0, True),
    (1.0, -1.0, True),
    (math.nextafter(1.0, 2), -1.0, False),
]


@pytest.mark.parametrize("log_ratio, advantage, flows", EDGE_CASES)
def test_an_edge_belongs_to_the_band(log_ratio, advantage, flows):
    log_prob = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    sequences = fspo_loss(log_prob, zero, one * advantage, one, Band(eps_low=0.5, eps_high=0.25, eps_dual=1.0))
    sequences.loss.sum().backward()
    clipped_log_ratio = min(log_ratio, 0.25) if advantage > 0 else min(max(log_ratio, -0.5), 1.0)
    assert sequences.loss.item() == pytest.approx(-advantage * math.exp(clipped_log_ratio), rel=1e-15)
    assert log_prob.grad.item() == (pytest.approx(-advantage * math.exp(log_ratio), rel=1e-15) if flows else 0)
    assert sequences.clipped.item() is not flows


@pytest.mark.parametrize("band", BANDS, ids=Band.describe)
def test_the_first_on_policy_update_is_the_policy_gradient(band):
    log_prob = (-torch.rand(4, 600, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(4, 600, dtype=torch.float64)
    mask = torch.rand(4, 600) < 0.8
    sequences = fspo_loss(log_prob, log_prob.detach(), advantages, mask, band)
    sequences.loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, -advantages * mask, rtol=0, atol=0)
    assert not sequences.clipped.any()


def random_batch(rows=64, width=50, scale=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    log_prob = old + scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return log_prob, old, advantages, torch.arange(width) < lengths


def gradient_of(log_prob, old, advantages, mask, band):
    log_prob = log_prob.clone().requires_grad_()
    sequences = fspo_loss(log_prob, old, advantages, mask, band)
    sequences.loss.sum().backward()
    return log_prob.grad, sequences


@given(batch=batches(), band=bands, seed=st.integers(0, 1000))
def test_permuting_sequences_permutes_gradients(batch, band, seed):
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(seed))
    grad, _ = gradient_of(*batch, band)
    permuted, _ = gradient_of(*(x[order] for x in batch), band)
    assert torch.equal(permuted, grad[order])


@given(batch=batches(), band=bands, extra=st.sampled_from([1, 63, 5000]))
def test_padding_to_another_width_changes_nothing(batch, band, extra):
    wider = [torch.cat([x, torch.zeros(len(x), extra, dtype=x.dtype)], dim=1) for x in batch]
    grad, sequences = gradient_of(*batch, band)
    wider_grad, wider_sequences = gradient_of(*wider, band)
    torch.testing.assert_close(wider_grad[:, : grad.shape[1]], grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(wider_sequences.loss, sequences.loss, rtol=1e-12, atol=1e-12)
    assert torch.equal(wider_sequences.clipped, sequences.clipped)


# --- hostile input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("band", BANDS, ids=Band.describe)
def test_padding_is_never_read(garbage, band):
    clean = random_batch()
    mask = clean[3]
    dirty = [torch.where(mask, x, garbage) for x in clean[:3]]
    grad, sequences = gradient_of(*clean, band)
    dirty_grad, dirty_sequences = gradient_of(*dirty, mask, band)
    assert torch.equal(grad, dirty_grad)
    assert torch.equal(sequences.loss, dirty_sequences.loss)


@pytest.mark.parametrize("stale", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("band", BANDS, ids=Band.describe)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stale_sequence_stays_finite(stale, advantage, band, dtype):
    log_prob = torch.full((2, 100), -1.0, dtype=dtype)
    log_prob[0, 3] = stale
    old, advantages = torch.full((2, 100), -1.0, dtype=dtype), torch.full((2, 100), advantage)
    grad, sequences = gradient_of(log_prob, old, advantages, torch.ones(2, 100), band)
    assert sequences.loss.isfinite().all() and grad.isfinite().all()
    assert sequences.finite.all()


@pytest.mark.parametrize("where", ["log_prob", "old_log_prob", "advantages"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("band", BANDS, ids=Band.describe)
def test_a_poisoned_response_is_reported_and_spreads_to_no_other(where, poison, band):
    batch = dict(zip(("log_prob", "old_log_prob", "advantages", "mask"), random_batch(rows=3), strict=True))
    clean_grad, clean = gradient_of(*batch.values(), band)
    batch[where] = batch[where].clone()
    batch[where][1, 0] = poison
    grad, sequences = gradient_of(*batch.values(), band)
    assert sequences.finite.tolist() == [True, False, True]
    assert sequences.loss[1] == 0 and (grad[1] == 0).all() and not sequences.clipped[1]
    assert torch.equal(grad[[0, 2]], clean_grad[[0, 2]])
    assert torch.equal(sequences.loss[[0, 2]], clean.loss[[0, 2]])


def test_layouts_mask_types_and_inference_mode_make_no_difference():
    log_prob, old, advantages, mask = random_batch()
    band = Band(0.4, eps_high=0.3)
    grad, _ = gradient_of(log_prob, old, advantages, mask, band)
    with torch.inference_mode():
        inference = [x.clone() for x in (old, advantages, mask)]
    variants = [
        (log_prob, *inference),
        (log_prob, old, advantages, mask.long()),
        (log_prob, old, advantages, mask.double()),
        (log_prob.t().contiguous().t(), old.t().contiguous().t(), advantages.contiguous(), mask),
    ]
    for variant in variants:
        torch.testing.assert_close(gradient_of(*variant, band)[0], grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("changed", ["log_prob", "old_log_prob", "advantages", "mask"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("part", [slice(None), slice(1, 2)], ids=["whole", "a view of one row"])
def test_a_change_in_place_before_backward_is_an_error_or_without_effect(changed, mask_dtype, inference, part):
    """As autograd has it. A tensor of inference mode has no version, and is not refused."""
    batch = dict(zip(("log_prob", "old_log_prob", "advantages", "mask"), random_batch(rows=3), strict=True))
    with torch.inference_mode(inference):
        batch |= {name: batch[name].clone() for name in ("old_log_prob", "advantages")}
        batch["mask"] = batch["mask"].to(mask_dtype, copy=True)
    before, _ = gradient_of(*batch.values(), Band(0.4))
    log_prob = batch["log_prob"].clone().requires_grad_()
    sequences = fspo_loss(log_prob, *(batch[name] for name in ("old_log_prob", "advantages", "mask")), Band(0.4))
    with torch.inference_mode(inference), torch.no_grad():
        (log_prob if changed == "log_prob" else batch[changed])[part] = 1 if changed == "mask" else 5.0
    read_again = changed == "advantages" or (changed == "mask" and mask_dtype == torch.bool)
    if read_again and not inference:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sequences.loss.sum().backward()
    else:
        sequences.loss.sum().backward()
        assert torch.equal(log_prob.grad, before)


@pytest.mark.parametrize("rows, width", [(64, 50), (0, 5), (3, 0), (0, 0)])
def test_a_batch_without_a_response_token_is_a_zero_with_a_graph(rows, width):
    log_prob = torch.rand(rows, width, dtype=torch.float64)
    grad, sequences = gradient_of(log_prob, log_prob - 1, log_prob, torch.zeros(rows, width), Band())
    assert grad.shape == (rows, width) and (grad == 0).all()
    assert sequences.loss.shape == (rows,) and (sequences.loss == 0).all()
    assert sequences.finite.all() and not sequences.clipped.any()


def test_wrong_shapes_and_types_name_what_came():
    log_prob, old, advantages, mask = random_batch(rows=2, width=5)
    with pytest.raises(ValueError, match=r"\(2, 5\), \(2, 4\), \(2, 5\), \(2, 5\)"):
        fspo_loss(log_prob, old[:, :4], advantages, mask, Band())
    with pytest.raises(ValueError, match=r"\(5,\)"):
        fspo_loss(log_prob[0], old[0], advantages[0], mask[0], Band())
    with pytest.raises(TypeError, match="int64"):
        fspo_loss(log_prob, old.long(), advantages, mask, Band())


def broken(*_):
    raise RuntimeError("PTX was compiled with an unsupported toolchain\nand more lines")


KERNELS = {  # what stands for fspo_verl.kernels: its sums and its gradient; and the reason that the warning gives
    "not there": (None, "fspo_verl.kernels"),
    "does not compile": ((broken, broken), "unsupported toolchain"),
    "wrong sums": ((lambda *x: _token_sums(*x) + 0.01, _token_gradient), "close"),
    "wrong gradient": ((_token_sums, lambda *x: -_token_gradient(*x)), "close"),
}


@pytest.mark.parametrize("kernels", KERNELS)
def test_where_kernels_fail_the_loss_goes_on_without_and_says_so_once(kernels, monkeypatch, caplog):
    passes, reason = KERNELS[kernels]
    module = SimpleNamespace(token_sums=passes[0], token_gradient=passes[1]) if passes else None
    monkeypatch.setitem(sys.modules, "fspo_verl.kernels", module)
    monkeypatch.setattr(fspo_verl, "kernels", module, raising=False)
    if not module:
        monkeypatch.delattr(fspo_verl, "kernels")
    monkeypatch.setattr(loss, "_kernels", functools.cache(loss._kernels.__wrapped__))
    batch = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    expected = fspo_loss(*batch, Band()).loss
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # with which a CPU takes kernels, too
    for _ in range(2):
        assert torch.equal(fspo_loss(*batch, Band()).loss, expected)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and reason in record.message and "\n" not in record.message
