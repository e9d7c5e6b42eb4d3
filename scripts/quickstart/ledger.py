# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's task: keep a running total.

The prompt lists operations under letters, ``c+7d-8e+4?``; the response works them off one by one and carries a total
modulo 100, ``c+7=07d-8=99e+4=03``. Its last two digits are the answer. With 1 to ``MAX_OPERATIONS`` operations a
response has 5 to 81 tokens, and an answer is right only if no step before it went wrong.

The demonstrator that the model first learns from is careless: subtracting a large digit it often forgets to borrow
(``07-8`` becomes ``09``, not ``99``). Reinforcement learning has to unlearn that from right and wrong answers alone.
"""

import random
import re
from typing import NamedTuple

import pandas as pd
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAX_OPERATIONS = 20
LETTERS = "abcdefghijklmnopqrst"
DIGITS = "0123456789"
SPECIAL_TOKENS = ["<pad>", "<eos>", "<user>", "<assistant>", "<unk>"]
# An operation is one token, and so are the equals sign and the digit after it.
OPERATIONS = [f"{sign}{digit}" for sign in "+-" for digit in DIGITS[1:]]
TENS = [f"={digit}" for digit in DIGITS]
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *LETTERS, *OPERATIONS, *TENS, *DIGITS, "?"])}
TOKEN_PATTERN = "[+-][1-9]|=[0-9]|."
PAD, EOS, USER, ASSISTANT = (VOCABULARY[token] for token in SPECIAL_TOKENS[:4])

MAX_PROMPT_TOKENS = 2 * MAX_OPERATIONS + 3  # "a", "+1" each; "?" and two role tokens
MAX_RESPONSE_TOKENS = 4 * MAX_OPERATIONS + 1  # "a", "+1", "=0", "1" each; end of sequence

# How the demonstrator errs: it forgets to borrow with this chance when it subtracts this digit or a larger one.
FORGET_BORROW = 0.8
FORGET_FROM = 7


class Problem(NamedTuple):
    """A prompt, the demonstrator's (possibly wrong) response to it, and the right answer, two digits."""

    prompt: str
    demonstration: str
    answer: str
    operations: int


def draw_problem(rng: random.Random, operations: int | None = None) -> Problem:
    """Draw a problem; ``operations`` is uniform over 1..MAX_OPERATIONS where not given."""
    operations = operations or rng.randint(1, MAX_OPERATIONS)
    first = rng.randint(0, MAX_OPERATIONS - operations)
    prompt, demonstration, total, right_total = "", "", 0, 0
    for letter in LETTERS[first : first + operations]:
        sign, digit = rng.choice("+-"), rng.randint(1, 9)
        change = digit if sign == "+" else -digit
        forgets = digit >= FORGET_FROM and total % 10 + change < 0 and rng.random() < FORGET_BORROW
        total = (total + change + 10 * forgets) % 100
        right_total = (right_total + change) % 100
        prompt += f"{letter}{sign}{digit}"
        demonstration += f"{letter}{sign}{digit}={total:02d}"
    return Problem(f"{prompt}?", demonstration, f"{right_total:02d}", operations)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """verl's reward function: 1 if the response ends in ``=`` and the right total, else 0."""
    return float(solution_str.endswith(f"={ground_truth}"))


def encode_prompt(prompt: str) -> list[int]:
    """Token ids of a prompt in the chat format of :func:`tokenizer`."""
    return [USER, *_encode(prompt), ASSISTANT]


def encode_response(response: str) -> list[int]:
    """Token ids of a response, end of sequence included."""
    return [*_encode(response), EOS]


def _encode(text: str) -> list[int]:
    return [VOCABULARY[token] for token in re.findall(TOKEN_PATTERN, text)]


def tokenizer(vocabulary: dict[str, int] = VOCABULARY, pattern: str = TOKEN_PATTERN) -> PreTrainedTokenizerFast:
    """The tokens above, or others beside the special ones, and a chat template of one role token per message.

    Args:
        pattern: a regular expression for one token.
    """
    words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        padding_side="left",
        chat_template=(
            "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content }}<eos>"
            "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        ),
    )


def data_set(size: int, seed: int) -> pd.DataFrame:
    """Problems in verl's data format, one per row."""
    rng = random.Random(seed)
    return pd.DataFrame(
        {
            "data_source": "ledger",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "operations": problem.operations},
        }
        for index, problem in enumerate(draw_problem(rng) for _ in range(size))
    )
