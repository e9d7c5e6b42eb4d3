# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Configs of this package refuse bad values, and say what they hold."""

import dataclasses
import math
import re

import pytest

from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig

BAD = [  # values, of which the first is named
    (Band, {"eps": 0}),
    (Band, {"eps": math.nan}),
    (Band, {"eps": True}),
    (Band, {"eps": None, "eps_low": 0.1}),
    (Band, {"eps_low": -0.1}),
    (Band, {"eps_high": "wide"}),
    (Band, {"eps_dual": 0.02}),
    (Band, {"eps_dual": 1.0, "eps": math.inf}),
    (Band, {"length_power": 1.5}),
    (Band, {"normalization": "sqrt"}),
    (FSPOPolicyLossConfig, {"eps": 0.1, "eps_low": 0.1, "eps_high": 0.1}),
    (FSPOPolicyLossConfig, {"loss_mode": "vanilla"}),
    (FSPOPolicyLossConfig, {"target_clip_rate": 0.0}),
    (FSPOPolicyLossConfig, {"target_clip_rate": 1.0}),
    (FSPOPolicyLossConfig, {"target_clip_rate": "ten"}),
    (FSPOPolicyLossConfig, {"target_clip_rate": 0.1, "eps_high": math.inf}),
    (FSPOPolicyLossConfig, {"eps_max": 0.029, "target_clip_rate": 0.1}),
    (FSPOPolicyLossConfig, {"eps_max": math.inf, "target_clip_rate": 0.1}),
    (FSPOPolicyLossConfig, {"eps_max": 0.3}),
    (ObservedPolicyLossConfig, {"loss_mode": "fspo"}),
    *(
        (schema, {field: value})
        for schema in (FSPOPolicyLossConfig, ObservedPolicyLossConfig)
        for field, value in (
            *(("records_dir", "records"), ("records_freq", 0), ("records_freq", True)),
            *(("length_bins", [8, 8]), ("length_bins", [1]), ("length_bins", []), ("alerts", 1)),
        )
    ),
]


@pytest.mark.parametrize(("schema", "values"), BAD)
def test_a_bad_value_is_refused_by_its_key(schema, values):
    (field, value), *_ = values.items()
    key = field if schema is Band else f"actor_rollout_ref.actor.policy_loss.{field}"
    with pytest.raises(ValueError, match=re.escape(f"{key}={value!r} ")):
        schema(**values)


def test_the_built_config_names_the_wrapper_and_the_loss():
    for settings in ({"loss_mode": "gspo"}, {"loss_mode": "observed", "inner": "gspo"}):
        config = ObservedPolicyLossConfig(**settings)
        assert (config.loss_mode, config.inner) == ("observed", "gspo")
        rebuilt = ObservedPolicyLossConfig(**{f.name: config[f.name] for f in dataclasses.fields(config)})
        assert (rebuilt.loss_mode, rebuilt.inner) == ("observed", "gspo")
