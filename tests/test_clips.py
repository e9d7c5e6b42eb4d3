# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The catalogue of clips against verl, and where it has none against the paper, in plain loops with no shared code."""

import math
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from simulated_records import frame
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.workers.config import FSDPActorConfig

from fspo_verl.band import Band
from fspo_verl.clips import CLIPS, LOSSES, BandClip, of_run, upper_quantile
from fspo_verl.loss import fspo_loss
from fspo_verl.observe.columns import token_columns
from fspo_verl.observe.settings import RunSettings

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def batch():
    """Tokens of 400 responses, from hardly moved to far away: log-probabilities, old ones, advantages, mask."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 400, 50
    old = (torch.rand(rows, width, generator=generator) * 0.98 + 0.01).log()
    sigma = torch.logspace(-4.5, 0.9, rows)[:, None]
    log_prob = (old + (sigma * torch.randn(rows, width, generator=generator)).clamp(-15, 15)).clamp(max=-1e-3)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0]).repeat(rows // 5)[:, None].expand(rows, width)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    log_prob = torch.where(mask, log_prob, torch.nan)
    return log_prob, old, advantages, mask


@pytest.fixture(scope="module")
def records(batch):
    """Return the records that a run would write of the batch."""
    sequences = fspo_loss(*batch, Band())
    columns = {name: getattr(sequences, name) for name in ("length", "log_ratio", "quadratic_variation", "advantage")}
    return pd.DataFrame({name: column.numpy() for name, column in (columns | token_columns(*batch)).items()})


# --- definitions ------------------------------------------------------------------------------------------------------
# Of one response: its old and new log-probabilities and its advantage; the share of it that loses its gradient.


def beyond(low, high, dual=math.inf, power=0.0, drift=0.0):
    """A band on S: A > 0 is clipped above it, A < 0 below it and above the dual clip."""

    def decide(d, advantage):
        s, center, width = sum(d), -drift * sum(x * x for x in d), len(d) ** power
        return s > center + high * width if advantage > 0 else not -low <= (s - center) / width <= dual

    return decide


DEFINITIONS = {
    "fspo": beyond(0.03, 0.03, 0.03, 0.5),
    "fspo_drift_corrected": beyond(0.03, 0.03, 0.03, 0.5, 0.5),
    "fixed_band": beyond(-math.log(0.8), math.log(1.2)),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_clip_takes_what_its_definition_says(batch, records, name):
    expected = []
    for log_prob, old, advantage, mask in zip(*batch, strict=True):
        d = [new - before for before, new in zip(old[mask].tolist(), log_prob[mask].tolist(), strict=True)]
        expected.append(advantage[0].item() and float(DEFINITIONS[name](d, advantage[0].item())))
    assert 0 < np.mean(expected) < 0.8  # with a fifth of the responses without an advantage
    np.testing.assert_allclose(CLIPS[name].clipped(records), expected, atol=1e-9)


# --- against verl -----------------------------------------------------------------------------------------------------

RANGES = {
    "grpo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    "gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
}
REJECTIONS = {
    "seq_is": RolloutCorrectionConfig.decoupled_seq_is_rs(),
    "geo_rs": RolloutCorrectionConfig.decoupled_geo_rs(),
}


def test_every_clip_has_a_definition():
    assert CLIPS.keys() == {*DEFINITIONS, *RANGES, *REJECTIONS}


@pytest.mark.parametrize("name", RANGES)
def test_a_clip_drops_what_by_its_definition_in_verl_gets_no_gradient(batch, records, name):
    log_prob, old, advantages, mask = batch
    log_prob = torch.where(mask, log_prob, 0.0).requires_grad_()
    config = FSDPActorConfig(rollout_n=4, ppo_micro_batch_size_per_gpu=1, **RANGES[name])
    loss_mode = {"grpo": "vanilla"}.get(name, name)
    loss, _ = get_policy_loss_fn(loss_mode)(old, log_prob, advantages, mask, "token-sum", config)
    loss.backward()
    share = ((log_prob.grad == 0) & mask & (advantages != 0)).sum(-1) / mask.sum(-1)
    assert 0 < share.mean() < 0.8
    np.testing.assert_allclose(CLIPS[name].clipped(records), share, rtol=1e-6)


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejections_are_those_of_their_definition_in_verls_rollout_correction(batch, records, name):
    log_prob, old, advantages, mask = batch
    log_ratio = torch.where(mask, log_prob - old, 0.0)
    config = REJECTIONS[name]
    kept, _ = compute_rollout_rejection_mask(log_ratio, mask.long(), config.rollout_rs, config.rollout_rs_threshold)
    outside = (kept.sum(-1) == 0).numpy()
    assert 0 < outside.mean() < 0.9
    np.testing.assert_array_equal(CLIPS[name].outside(records), outside)
    np.testing.assert_array_equal(CLIPS[name].clipped(records), outside & (advantages[:, 0] != 0).numpy())


# --- the catalogue ----------------------------------------------------------------------------------------------------


BANDS = [name for name, clip in CLIPS.items() if isinstance(clip, BandClip)]


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.4])
def test_a_matched_clip_takes_the_rate_and_keeps_its_shape(records, name, rate):
    counted = (records.advantage != 0).sum()
    before, matched = CLIPS[name].band, CLIPS[name].matched(records, rate)
    assert matched.clipped(records).sum() == pytest.approx(math.floor(rate * counted), abs=1)
    factor = matched.band.low / before.low
    assert (matched.band.high, matched.band.dual) == pytest.approx((factor * before.high, factor * before.dual))
    assert matched.band.form == before.form


@pytest.mark.parametrize("name", [name for name in BANDS if not CLIPS[name].rejects])
def test_an_edge_is_inside_in_the_precision_of_the_loss(name):
    length, q = torch.arange(1.0, 1001), torch.linspace(0.01, 2, 1000)
    low, high, dual = (edge.numpy() for edge in CLIPS[name].band.edges(length, q))
    for s, advantage, beyond in ((high, 1, np.inf), (low, -1, -np.inf), (dual, -1, np.inf)):
        if np.isfinite(s).all():
            on_edge = frame(length.numpy(), s, q.numpy(), advantage)
            assert not CLIPS[name].clipped(on_edge).any()
            assert CLIPS[name].clipped(on_edge.assign(log_ratio=np.nextafter(s, np.float32(beyond)))).all()


def test_a_rate_that_too_few_responses_can_reach_is_refused():
    records = frame([10] * 8, [0.4, 0.5, 0.6] + [0.0] * 5, [0.1] * 3 + [0.0] * 5)
    assert CLIPS["fixed_band"].matched(records, 0.25).clipped(records).sum() == 2
    with pytest.raises(ValueError, match="fixed_band cannot clip 0.5 of these responses, as only 0.375 of them"):
        CLIPS["fixed_band"].matched(records, 0.5)
    with pytest.raises(ValueError, match="no response has an advantage"):
        CLIPS["fixed_band"].matched(records.assign(advantage=0.0), 0.1)
    for name in CLIPS.keys() - set(BANDS):
        with pytest.raises(ValueError, match=f"{name} clips token by token"):
            CLIPS[name].matched(records, 0.1)


@given(st.lists(st.integers(-9, 9).map(float), min_size=1), st.floats(0, 0.999))
def test_upper_quantile_is_the_smallest_value_with_at_most_the_share_beyond(values, share):
    found = upper_quantile(values, share)
    values = np.array(values)
    assert found in values and (values > found).sum() <= share * len(values) + 1e-9
    for smaller in values[values < found]:
        assert (values > smaller).sum() > share * len(values) + 1e-9


@pytest.mark.parametrize("name", ["fspo", "fixed_band", "gspo"])
def test_stock_constants_are_those_of_the_packaged_configs(name):
    group = resources.files("fspo_verl.configs") / "algorithm.policy_loss"
    actor = OmegaConf.create((group / f"{name}.yaml").read_text()).actor_rollout_ref.actor
    if name == "gspo":
        ratios = {side: actor[side] for side in ("clip_ratio_low", "clip_ratio_high")}
        expected = RunSettings(name, **ratios).trained_band
    else:
        expected = Band(**Band.fields_in(actor.policy_loss))
    got = CLIPS[name].band
    assert (got.low, got.high, got.dual) == pytest.approx((expected.low, expected.high, expected.dual), rel=1e-12)
    assert got.form == expected.form


def test_losses_to_train_with_are_those_of_the_packaged_configs_and_of_the_scripts():
    group = resources.files("fspo_verl.configs") / "algorithm.policy_loss"
    assert {*LOSSES, "no_clip", "observed"} == {Path(file.name).stem for file in group.iterdir()}
    sys.path.insert(0, str(ROOT / "scripts/training"))
    import options

    assert options.LOSSES == (*LOSSES, "no_clip")


@pytest.mark.parametrize(
    ("settings", "method", "band"),
    [
        (None, None, None),
        ({"loss": "vanilla", "band": None}, "grpo", None),
        ({"loss": "sapo"}, None, None),
        ({"loss": "gspo"}, None, None),  # without the range that it trained with
        ({"loss": "fspo", "band": {"eps_low": 0.02}}, "fspo", Band(eps_low=0.02)),
        ({"loss": "fspo", "band": {"length_power": 0.0}}, "fixed_band", Band(length_power=0.0)),
        (
            {"loss": "fspo", "band": {"normalization": "drift_corrected"}},
            "fspo_drift_corrected",
            Band(normalization="drift_corrected"),
        ),
        ({"loss": "fspo", "band": {"length_power": 0.25}, "of_2030": 1}, None, Band(length_power=0.25)),
    ],
)
def test_method_and_band_of_a_run(settings, method, band):
    settings = settings and RunSettings.from_json(settings)
    assert (settings and of_run(settings.loss, settings.trained_band)) == method
    assert (settings and settings.trained_band) == band
    assert settings is None or RunSettings.from_json(settings.to_json()).to_json() == settings.to_json()
