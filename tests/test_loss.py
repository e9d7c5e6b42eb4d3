# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The loss against a float64 reference over generated cases, its identities, and hostile input."""

import dataclasses
import json
import math

import pytest
import reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fspo_verl.band import Band
from fspo_verl.loss import fspo_loss
from fspo_verl.register import _aggregate

TOTALS = [  # what verl hands over of the whole mini-batch
    {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None},
    {"dp_size": 1, "batch_num_tokens": 9, "global_batch_size": 4, "loss_scale_factor": 64},
    {"dp_size": 4, "batch_num_tokens": 1000, "global_batch_size": 32, "loss_scale_factor": 512},
]


@st.composite
def bands(draw):
    """Any band. Half-widths of 0.2 to 0.6 are those that the sequences of :func:`batches` leave on either side."""
    width = st.floats(0.2, 0.6)
    low, high = draw(st.none() | width), draw(st.none() | width | st.just(math.inf))
    band = Band(
        eps=draw(width | st.just(math.inf) | (st.nothing() if None in (low, high) else st.none())),
        eps_low=low,
        eps_high=high,
        normalization=draw(st.sampled_from(["plain", "drift_corrected"])),
        length_power=draw(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)),
    )
    multiple = draw(st.none() | st.floats(1, 3) | st.just(math.inf))
    return dataclasses.replace(band, eps_dual=multiple and multiple * band.high)


@st.composite
def batches(draw, widths=(1, 2, 7, 40, 300), most=5):
    """(log_prob, old_log_prob, advantages, mask) in float64, with sequences on every side of their bands."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    rows, width = draw(st.integers(1, most)), draw(st.sampled_from(widths))
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    masks = {
        "full": lambda: torch.ones(width, dtype=torch.bool),
        "empty": lambda: torch.zeros(width, dtype=torch.bool),
        "one token": lambda: torch.arange(width) == int(rand(1) * width),
        "prefix": lambda: torch.arange(width) <= int(rand(1) * width),
        "holes": lambda: rand(width) < 0.6,
    }
    mask = torch.stack([masks[draw(st.sampled_from(sorted(masks)))]() for _ in range(rows)])
    old_log_prob = -3 * rand(rows, width)
    # S/√L of up to ±1.5 puts sequences on every side of bands whose half-width is 0.2 to 1.8 in that unit.
    scale = draw(st.sampled_from([0.0, 0.05, 0.5, 2.0]))
    shift = 3 * (rand(rows, 1) - 0.5) / mask.sum(-1, keepdim=True).clamp(min=1).sqrt()
    log_prob = old_log_prob + scale * (shift + 0.3 * (rand(rows, width) - 0.5))
    advantages = {
        "constant": lambda: (rand(rows, 1) - 0.5).expand(rows, width),
        "varying": lambda: rand(rows, width) - 0.5,
        "zero": lambda: torch.zeros(rows, width, dtype=torch.float64),
    }[draw(st.sampled_from(["constant", "varying", "zero"]))]()
    return log_prob, old_log_prob, advantages, mask


def gradient_of(log_prob, old_log_prob, advantages, mask, band):
    """Gradient with respect to log_prob of the summed loss, and the sequences."""
    log_prob = log_prob.clone().requires_grad_()
    sequences = fspo_loss(log_prob, old_log_prob, advantages, mask, band)
    sequences.loss.sum().backward()
    return log_prob.grad, sequences


# --- the reference ---------------------------------------------------------------------------------------------------


def assert_equal_to_the_reference(batch, band, agg_mode, totals, dtype, tolerance):
    """Value and gradient as the registered loss computes them, but where rounding may put S beyond an edge."""
    log_prob, old_log_prob, advantages, mask = *(x.to(dtype, copy=True) for x in batch[:3]), batch[3]
    log_prob.requires_grad_()
    loss = _aggregate(fspo_loss(log_prob, old_log_prob, advantages, mask, band), mask.shape[-1], agg_mode, dict(totals))
    loss.backward()

    totals = totals | {
        "batch_num_tokens": totals["batch_num_tokens"] or max(1, int(mask.sum())),
        "global_batch_size": totals["global_batch_size"] or max(1, int(mask.any(-1).sum())),
    }
    weights = reference.token_weights(mask.int().tolist(), agg_mode, **totals)
    tables = [x.detach().double().tolist() for x in (log_prob, old_log_prob, advantages)]
    value, gradient, log_ratio, edges = reference.fspo(*tables, mask.tolist(), dataclasses.asdict(band), weights)
    for s, length, row in zip(log_ratio, mask.sum(-1).tolist(), edges, strict=True):
        if any(0 < abs(s - edge) <= 10 * tolerance * max(1.0, length) for edge in row if math.isfinite(edge)):
            return  # an edge has a test of its own

    gradient = torch.tensor(gradient, dtype=torch.float64).reshape(mask.shape)
    largest = gradient.abs().max().item()
    torch.testing.assert_close(log_prob.grad.double(), gradient, rtol=tolerance, atol=tolerance * largest)
    magnitude = gradient.abs().sum().item() + abs(value)  # terms of both signs may cancel
    assert abs(loss.item() - value) <= tolerance * max(magnitude, 1e-300)


@given(batch=batches(), band=bands(), agg_mode=st.sampled_from(reference.AGG_MODES), totals=st.sampled_from(TOTALS))
def test_value_and_gradient_equal_the_reference(batch, band, agg_mode, totals):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        assert_equal_to_the_reference(batch, band, agg_mode, totals, dtype, tolerance)


@settings(max_examples=4)
@given(batch=batches(widths=[40_000], most=3), band=bands())
def test_sequences_of_several_blocks_equal_the_reference(batch, band):
    assert_equal_to_the_reference(batch, band, "token-mean", TOTALS[0], torch.float64, 1e-10)


def test_an_edge_belongs_to_the_band():
    band = Band(eps_low=0.5, eps_high=0.25, eps_dual=1.0)
    cases = [  # log-ratio of the single token, advantage, does a gradient flow
        (0.25, 1.0, True),
        (math.nextafter(0.25, 1), 1.0, False),
        (-5.0, 1.0, True),
        (-0.5, -1.0, True),
        (math.nextafter(-0.5, -1), -1.0, False),
        (0.9, -1.0, True),
        (1.0, -1.0, True),
        (math.nextafter(1.0, 2), -1.0, False),
    ]
    log_ratio, advantage, flows = (torch.tensor(x, dtype=torch.float64) for x in zip(*cases, strict=True))
    one = torch.ones(len(cases), 1, dtype=torch.float64)
    grad, sequences = gradient_of(log_ratio[:, None], 0 * one, advantage[:, None], one, band)
    clipped = torch.where(advantage > 0, log_ratio.clamp(max=0.25), log_ratio.clamp(-0.5, 1.0))
    torch.testing.assert_close(sequences.loss, -advantage * clipped.exp(), rtol=1e-15, atol=0)
    torch.testing.assert_close(grad[:, 0], -advantage * log_ratio.exp() * flows, rtol=1e-15, atol=0)
    assert sequences.clipped.tolist() == [not flow for *_, flow in cases]


# --- the band --------------------------------------------------------------------------------------------------------


@given(band=bands())
@example(band=Band())
def test_a_band_in_json_keeps_its_edges(band):
    kept = Band.from_json(json.loads(json.dumps(band.to_json(), allow_nan=False)))
    assert (kept.low, kept.high, kept.dual, kept.form) == (band.low, band.high, band.dual, band.form)
    with pytest.raises(TypeError, match="unknown"):
        Band.from_json(band.to_json() | {"unknown": 1})


@given(batch=batches(), band=bands())
def test_the_first_on_policy_update_is_the_policy_gradient(batch, band):
    log_prob, _, advantages, mask = batch
    grad, sequences = gradient_of(log_prob, log_prob, advantages, mask, band)
    torch.testing.assert_close(grad, -advantages * mask, rtol=0, atol=0)
    assert not sequences.clipped.any()


# --- hostile input ---------------------------------------------------------------------------------------------------


@given(batch=batches(), band=bands(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_padding_is_never_read(batch, band, garbage):
    mask = batch[3]
    grad, sequences = gradient_of(*batch, band)
    dirty_grad, dirty = gradient_of(*(torch.where(mask, x, garbage) for x in batch[:3]), mask, band)
    assert torch.equal(grad, dirty_grad) and torch.equal(sequences.loss, dirty.loss)


@given(
    band=bands(),
    stale=st.sampled_from([1e4, -1e4]),
    advantage=st.sampled_from([1.0, -1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_stale_sequence_stays_finite(band, stale, advantage, dtype):
    old, advantages = torch.full((2, 100), -1.0, dtype=dtype), torch.full((2, 100), advantage)
    log_prob = old.clone()
    log_prob[0, 3] = stale
    grad, sequences = gradient_of(log_prob, old, advantages, torch.ones(2, 100), band)
    assert sequences.loss.isfinite().all() and grad.isfinite().all() and sequences.finite.all()


@given(
    batch=batches(),
    band=bands(),
    where=st.integers(0, 2),
    poison=st.sampled_from([math.nan, math.inf, -math.inf]),
    data=st.data(),
)
def test_a_poisoned_response_is_reported_and_spreads_to_no_other(batch, band, where, poison, data):
    clean_grad, clean = gradient_of(*batch, band)
    tokens = batch[3].nonzero().tolist()
    if not tokens:
        return
    row, token = data.draw(st.sampled_from(tokens))
    poisoned = [x.clone() for x in batch]
    poisoned[where][row, token] = poison
    grad, sequences = gradient_of(*poisoned, band)
    others = torch.arange(len(batch[0])) != row
    assert torch.equal(sequences.finite, others)
    assert sequences.loss[row] == 0 and (grad[row] == 0).all() and not sequences.clipped[row]
    assert torch.equal(grad[others], clean_grad[others]) and torch.equal(sequences.loss[others], clean.loss[others])


def random_batch(rows=64, width=50):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    log_prob = old + 0.3 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, width)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    return log_prob, old, advantages, torch.arange(width) < lengths


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


@given(
    changed=st.sampled_from(["log_prob", "old_log_prob", "advantages", "mask"]),
    mask_dtype=st.sampled_from([torch.bool, torch.int64]),
    inference=st.booleans(),
    part=st.sampled_from([slice(None), slice(1, 2)]),
)
def test_a_change_in_place_before_backward_is_an_error_or_without_effect(changed, mask_dtype, inference, part):
    """Autograd notices a change by the version of a tensor, which a tensor of inference mode has not."""
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


@given(rows=st.integers(0, 3), width=st.integers(0, 3))
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


# --- cost ------------------------------------------------------------------------------------------------------------


class _Sizes(TorchDispatchMode):
    """How many results of operations have as many elements as the batch, or more; a view is none of its own."""

    def __init__(self, elements: int):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = [] if operation.is_view else [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.count += sum(tensor.numel() >= self.elements for tensor in tensors)
        return result


def test_only_the_gradient_is_as_large_as_the_batch():
    log_prob, old, advantages, mask = random_batch(16, 8192)
    log_prob.requires_grad_()
    with _Sizes(log_prob.numel()) as sizes:
        sequences = fspo_loss(log_prob, old, advantages, mask, Band())
        assert sizes.count == 0
        sequences.loss.sum().backward()
    assert sizes.count == 1
