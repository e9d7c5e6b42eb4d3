# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The catalogue of clips against what each paper or verl defines, written here with plain loops and no shared code."""

import sys
from importlib import resources
from pathlib import Path

from fspo_verl.clips import CLIPS, LOSSES

ROOT = Path(__file__).parents[1]


def test_losses_to_train_with_are_those_of_the_packaged_configs_and_of_the_scripts():
    group = resources.files("fspo_verl.configs") / "algorithm.policy_loss"
    assert set(LOSSES) == {Path(file.name).stem for file in group.iterdir()} - {"observed"}
    sys.path.insert(0, str(ROOT / "scripts/training"))
    import options

    assert options.LOSSES == LOSSES


def test_every_entry_says_where_it_is_from():
    assert all(name == clip.name and clip.label and clip.source for name, clip in CLIPS.items())
