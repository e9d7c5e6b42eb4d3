# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The runs of the study train with what was calibrated, and on other responses."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "recalibrate"))

import recalibrate  # noqa: E402

from fspo_verl.analysis import fit  # noqa: E402


def test_each_run_has_the_eps_of_the_one_before_and_responses_of_its_own(monkeypatch):
    monkeypatch.setattr(recalibrate, "SEEDS", range(2))
    monkeypatch.setattr(recalibrate, "TIMES", 1)
    trained, train = [], recalibrate.recorded

    def recorded(regime, bands, attempt):
        trained.append((bands, train(regime._replace(rollouts=3), bands, attempt)))
        return trained[-1][1]

    monkeypatch.setattr(recalibrate, "recorded", recorded)
    rates = recalibrate.clip_rates(epochs=4, eps=0.01)
    (_, first), (bands, second) = trained
    for band, before, after, (wide, near) in zip(bands, first, second, rates.T, strict=True):
        offline = fit.clipped_by(band, before)[before.advantage != 0].mean()
        assert abs(offline - recalibrate.TARGET) < 0.01 < near - recalibrate.TARGET < wide - recalibrate.TARGET
        np.testing.assert_array_equal(fit.clipped_by(band, after), after.clipped > 0)
        assert not np.array_equal(before.advantage, after.advantage)
