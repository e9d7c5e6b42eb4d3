# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The model that verl trains, as a policy of the laboratory."""

import sys
from pathlib import Path

import torch
from stairs import EOS, MAX_RESPONSE, PAD, PROMPT, VOCABULARY
from torch import Tensor, nn
from transformers import DynamicCache

sys.path.append(str(Path(__file__).resolve().parents[2] / "quickstart"))  # last: it has a run.py, too
from warm_start import small_qwen3


class Qwen(nn.Module):
    """A Qwen3 model of the laboratory's size, with what :class:`stairs.Policy` has."""

    def __init__(self):
        super().__init__()
        self.model = small_qwen3(VOCABULARY, PROMPT + MAX_RESPONSE, PAD, EOS)

    def log_probs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """As :meth:`stairs.Policy.log_probs`."""
        tokens = torch.cat([prompts, responses[:, :-1]], 1)
        logits = self.model(tokens, use_cache=False, logits_to_keep=responses.shape[1]).logits
        return -nn.functional.cross_entropy(logits.transpose(1, 2), responses, reduction="none")

    def forward(self, tokens: Tensor, cache: DynamicCache, start: int) -> Tensor:
        """Logits ``[B, 1, V]`` of what follows the tokens ``[B, N]``; the cache knows where they start."""
        return self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def new_cache(self, rows: int) -> DynamicCache:
        """For :meth:`forward`."""
        return DynamicCache(config=self.model.config)

    @staticmethod
    def kept(cache: DynamicCache, rows: Tensor) -> DynamicCache:
        """The cache of some rows."""
        cache.batch_select_indices(rows.nonzero()[:, 0])
        return cache
