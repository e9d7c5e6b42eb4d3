# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The planted faults of mutations.py can be planted; whether they are noticed takes hours, and is asked at night."""

import mutations
import pytest


@pytest.mark.parametrize("fault", mutations.MUTATIONS, ids=[name for name, *_ in mutations.MUTATIONS])
def test_the_text_that_a_fault_replaces_stands_once(fault):
    name, files, sound, planted = fault
    texts = [(mutations.ROOT / "fspo_verl" / file).read_text() for file in files]
    assert sum(text.count(sound) for text in texts) == 1 and sound != planted
