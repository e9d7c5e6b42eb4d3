# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
import os

import pytest
import torch
from hypothesis import settings

# Timed limits have no place in a shared CI; `HYPOTHESIS_PROFILE=long` runs many more generated cases.
settings.register_profile("ci", max_examples=150, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory):
    """A folder with the quickstart's small Qwen3 model, not yet trained, and its tokenizer."""
    import ledger
    import warm_start

    folder = tmp_path_factory.mktemp("untrained") / "model"
    torch.manual_seed(0)
    warm_start.small_qwen3().save_pretrained(folder)
    ledger.tokenizer().save_pretrained(folder)
    return folder
