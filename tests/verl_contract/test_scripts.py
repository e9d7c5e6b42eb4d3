# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What scripts/ of the repository need of verl. A change stops the script with an error; training is not touched."""

import inspect

from verl.utils.reward_score import default_compute_score


def test_reference_answers_are_scored_by_verls_function():
    """Lost: prepare_data.py."""
    assert {"data_source", "solution_str", "ground_truth"} <= set(inspect.signature(default_compute_score).parameters)


def test_verl_merges_the_shards_of_a_checkpoint(modules):
    """Lost: evaluate.sh."""
    assert "verl.model_merger" in modules
