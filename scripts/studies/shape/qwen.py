# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The model that verl trains, as a policy of the laboratory."""

import torch
from stairs import EOS, MAX_RESPONSE, PAD, PROMPT, VOCABULARY
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM


class Qwen(nn.Module):
    """A Qwen3 model of the laboratory's size, with what :class:`stairs.Policy` has."""

    def __init__(self):
        super().__init__()
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=PROMPT + MAX_RESPONSE,
                initializer_range=0.1,  # Qwen's own 0.02 is too small a start for so narrow a model
                tie_word_embeddings=False,
                pad_token_id=PAD,
                eos_token_id=EOS,
                bos_token_id=None,
            )
        )

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
