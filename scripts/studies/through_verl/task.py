# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Walks of three lengths as a task of verl, and a small Qwen3 model that is right with a chance of .05 on each.

A prompt names a task and a digit, ``a3``. A response is a walk: a free symbol, then the next digit, and so on, for 8,
64 or 256 tokens, and then the end. Each task has a permutation of the digits, and the reward is 1 if every digit
follows from the one before and the length is right. Any free symbol is right. No task is a part of another.

python scripts/studies/through_verl/task.py OUTPUT --seed 0       a warm start
"""

import argparse
import random
import re
import sys
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "quickstart"))
import ledger  # noqa: E402

LENGTHS = {"a": 8, "b": 64, "c": 256}  # tokens of a walk
DIGITS, FREE = "0123456789", "wxyz"
VOCABULARY = {token: index for index, token in enumerate([*ledger.SPECIAL_TOKENS, *LENGTHS, *DIGITS, *FREE])}
PAD, EOS, USER, ASSISTANT = (VOCABULARY[token] for token in ledger.SPECIAL_TOKENS[:4])
PROMPT_TOKENS, RESPONSE_TOKENS = 4, max(LENGTHS.values()) + 1  # with role tokens, and with the end
START = 0.05  # success of each task after the warm start
STEPS, WALKS, LEARNING_RATE = 1500, {"a": 16, "b": 4, "c": 2}, 3e-3  # of the warm start; walks of a task in a step


def permutations(seed: int) -> dict[str, str]:
    """The digit that follows on each, of each task."""
    rng = random.Random(f"permutations {seed}")
    return {task: "".join(rng.sample(DIGITS, len(DIGITS))) for task in LENGTHS}


def walk(task: str, first: str, following: dict[str, str]) -> str:
    """The digits of a right response."""
    digits = first
    for _ in range(LENGTHS[task] // 2):
        digits += following[task][int(digits[-1])]
    return digits[1:]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """verl's reward function: 1 if the digits are right and each has one free symbol before it, else 0."""
    pairs = re.fullmatch(f"(?:[{FREE}][{DIGITS}])*", solution_str)
    return float(pairs is not None and solution_str[1::2] == ground_truth)


def data_set(seed: int, blocks: int, prompts: int) -> pd.DataFrame:
    """Problems in verl's format, in blocks that hold as many of each task, in random order."""
    rng, following, rows = random.Random(f"problems {seed}"), permutations(seed), []
    for _ in range(blocks):
        block = [(task, rng.choice(DIGITS)) for task in LENGTHS for _ in range(prompts)]
        rows += rng.sample(block, len(block))
    return pd.DataFrame(
        {
            "data_source": f"walk_{LENGTHS[task]}",
            "prompt": [{"role": "user", "content": task + first}],
            "ability": "walks",
            "reward_model": {"style": "rule", "ground_truth": walk(task, first, following)},
            "extra_info": {"index": index},
        }
        for index, (task, first) in enumerate(rows)
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character."""
    return ledger.tokenizer(VOCABULARY, ".")


# --- warm start -------------------------------------------------------------------------------------------------------


def demonstrations(task: str, following: str, errors: torch.Tensor, count: int, generator) -> tuple[torch.Tensor, ...]:
    """Walks whose digits err so often: token ids ``[count, 4 + L]`` and what should come next ``[count, L + 1, V]``."""
    length, digit0, free0 = LENGTHS[task], VOCABULARY["0"], VOCABULARY[FREE[0]]
    target = torch.zeros(len(DIGITS), len(DIGITS)) + errors[:, None] / (len(DIGITS) - 1)
    target[range(len(DIGITS)), [int(digit) for digit in following]] = 1 - errors
    # Digits at random, and not as the walk goes, so that each is learnt alike.
    digits = torch.randint(len(DIGITS), (count, length // 2 + 1), generator=generator)
    free = torch.randint(len(FREE), (count, length // 2), generator=generator)
    walked = torch.stack([free + free0, digits[:, 1:] + digit0], -1).flatten(1)
    start = torch.tensor([USER, VOCABULARY[task]]).repeat(count, 1)
    ids = torch.cat([start, digits[:, :1] + digit0, torch.full((count, 1), ASSISTANT), walked], 1)
    wished = torch.zeros(count, length + 1, len(VOCABULARY))
    wished[:, 0:length:2, free0 : free0 + len(FREE)] = 1 / len(FREE)
    wished[:, 1:length:2, digit0 : digit0 + len(DIGITS)] = target[digits[:, :-1]]
    wished[:, length, EOS] = 1
    return ids, wished


def train(seed: int, steps: int = STEPS) -> Qwen3ForCausalLM:
    """A model whose digits err so often that a task succeeds with a chance of START."""
    from warm_start import small_qwen3  # the quickstart's

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = small_qwen3(len(VOCABULARY), PROMPT_TOKENS + RESPONSE_TOKENS, PAD, EOS)
    following = permutations(seed)
    errors = {task: torch.full((len(DIGITS),), 1 - START ** (2 / length)) for task, length in LENGTHS.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / 50) * max(0.02, 1 - step / steps)
        optimizer.zero_grad()
        for task, count in WALKS.items():
            ids, wished = demonstrations(task, following[task], errors[task], count, generator)
            logits = model(ids, use_cache=False, logits_to_keep=wished.shape[1]).logits
            # The end is one token of a walk, and the one that is hardest to learn.
            loss = F.cross_entropy(logits.flatten(0, 1), wished.flatten(0, 1), reduction="none").view(count, -1)
            (loss[:, :-1].mean() + 0.1 * loss[:, -1].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = train(args.seed)
    model.save_pretrained(args.output)
    tokenizer().save_pretrained(args.output)


if __name__ == "__main__":
    main()
