# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A small random language model, and responses sampled from a model: material for checks that need no data."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4}
_SHAPE |= {"vocab_size": 4096, "num_key_value_heads": 2, "head_dim": 64}
GPU_SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16}
# With transformers' 0.02 and 1 layers do nearly nothing, and every token is about as likely as any other. With these a
# token has a log-prob of -3 on average, as that of a trained model.
_WEIGHT_STD, _FINAL_NORM = 0.08, 3.0


@dataclass(frozen=True)
class Responses:
    """Sequences of token ids: ``prompts[i]`` ``[tokens]``, then ``responses[i]`` ``[tokens]``."""

    prompts: list[Tensor]
    responses: list[Tensor]

    def __len__(self):
        return len(self.responses)


def small_model(folder: Path, **shape: int) -> Path:
    """Write a random Qwen3 of 7 million parameters (or of another shape) and a tokenizer; returns the folder."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        initializer_range=_WEIGHT_STD,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **(_SHAPE | shape),
    )
    model = transformers.Qwen3ForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, _FINAL_NORM)
    model.save_pretrained(folder)
    tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def tokenizer(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """One word per id; verl loads a tokenizer with every model."""
    import tokenizers

    words = {f"<{i}>": i for i in range(vocabulary)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<3>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<0>", bos_token="<1>", eos_token="<2>", unk_token="<3>"
    )


def lengths(count: int, shortest: int, longest: int) -> list[int]:
    """So many lengths from shortest to longest, evenly spaced in their logarithms, in a random order."""
    spaced = np.rint(np.geomspace(shortest, longest, count)).astype(int)
    return np.random.default_rng(0).permutation(spaced).tolist()


@torch.no_grad()
def sample(model, lengths: list[int], batch: int = 32) -> Responses:
    """Responses of the given lengths, sampled at temperature 1 from the model in its own precision.

    Each follows the model's first token (BOS) alone. No sequence ends by itself, so that lengths are as given.
    """
    config = model.config
    first = config.bos_token_id if config.bos_token_id is not None else 0
    prompt = torch.full((1, 1), first, device=model.device)
    torch.manual_seed(0)
    found: list[Tensor] = [torch.empty(0)] * len(lengths)
    order = np.argsort(lengths)[::-1]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        longest = max(lengths[row] for row in rows)
        ids = model.generate(
            prompt.expand(len(rows), 1),
            attention_mask=torch.ones(len(rows), 1, dtype=torch.long, device=model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=config.pad_token_id or 0,
        )
        for row, sequence in zip(rows, ids.cpu(), strict=True):
            found[row] = sequence[1 : 1 + lengths[row]]
    return Responses([prompt[0].cpu()] * len(found), found)
