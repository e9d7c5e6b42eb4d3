# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The planted faults of mutations.py can be planted; whether they are noticed takes hours, and is asked at night."""

import mutations


def test_the_text_that_a_fault_replaces_stands_once():
    counts = {}
    for name, files, sound, planted in mutations.MUTATIONS:
        texts = [(mutations.ROOT / "fspo_verl" / file).read_text() for file in files]
        counts[name] = sum(text.count(sound) for text in texts)
        assert sound != planted, name
    assert {name: count for name, count in counts.items() if count != 1} == {}
