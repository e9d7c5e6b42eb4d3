# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Supervised training of a small Qwen3 model on the ledger demonstrations: a policy neither random nor solved."""

import argparse
import random
import re
from pathlib import Path

import ledger
import torch
import torch.nn.functional as F
from tqdm import trange
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from fspo_verl_cpu.decode import Sampling, sample

STEPS = 2200
TOKENS_PER_STEP = 1000
LEARNING_RATE = 4e-3
# Short problems teach the arithmetic, cheaply; then the limit on operations rises to the full range.
SHORT = 5
SHORT_UNTIL, FULL_FROM = 0.25, 0.45
# What the model fails to copy now, reinforcement learning cannot reach later.
MIN_COPIED = 0.9


def small_qwen3(
    vocabulary: int = len(ledger.VOCABULARY),
    longest: int = ledger.MAX_PROMPT_TOKENS + ledger.MAX_RESPONSE_TOKENS,
    pad: int = ledger.PAD,
    eos: int = ledger.EOS,
) -> Qwen3ForCausalLM:
    """A model of Qwen3's architecture with about 100,000 parameters, by default for the quickstart's tokens."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            # As many as the tokenizer has: vLLM never samples rows beyond it, and log-probs would differ.
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=longest,
            # Qwen's own 0.02 is too small a start for so narrow a model: it barely learns.
            initializer_range=0.1,
            tie_word_embeddings=False,
            pad_token_id=pad,
            eos_token_id=eos,
            bos_token_id=None,
        )
    )


def train(seed: int, steps: int = STEPS) -> Qwen3ForCausalLM:
    """Train a new model on demonstrations; one batch holds problems of one length, so nothing is padded."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = small_qwen3()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    progress = trange(steps, desc="warm start", unit="step", mininterval=2, disable=None)
    for step in progress:
        done = step / steps
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / 50) * max(0.05, 1 - done)
        grown = min(1, max(0, (done - SHORT_UNTIL) / (FULL_FROM - SHORT_UNTIL)))
        operations = rng.randint(1, SHORT + round(grown * (ledger.MAX_OPERATIONS - SHORT)))
        problems = [ledger.draw_problem(rng, operations) for _ in range(TOKENS_PER_STEP // (6 * operations + 4))]
        token_ids = torch.tensor(
            [ledger.encode_prompt(p.prompt) + ledger.encode_response(p.demonstration) for p in problems]
        )
        response = token_ids[:, 2 * operations + 3 :]
        logits = model(token_ids, use_cache=False, logits_to_keep=response.shape[1] + 1).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), response.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    return model.eval()


def respond(model: Qwen3ForCausalLM, prompts: list[str], temperature: float) -> list[str]:
    """A response to each prompt; temperature 0 is greedy."""
    tokenizer = ledger.tokenizer()
    responses = sample(
        model,
        [ledger.encode_prompt(prompt) for prompt in prompts],
        [Sampling(ledger.MAX_RESPONSE_TOKENS, temperature)] * len(prompts),
        [ledger.EOS],
        len(tokenizer),
    )
    return tokenizer.batch_decode([response.token_ids for response in responses], skip_special_tokens=True)


def measure(model: Qwen3ForCausalLM, temperature: float, problems: int = 256) -> dict[str, float]:
    """Share of right answers, and of responses that work off exactly the operations of their prompt."""
    rng = random.Random(0)
    drawn = [ledger.draw_problem(rng) for _ in range(problems)]
    texts = respond(model, [problem.prompt for problem in drawn], temperature)
    pairs = list(zip(drawn, texts, strict=True))
    return {
        "accuracy": sum(ledger.compute_score("", text, problem.answer) for problem, text in pairs) / problems,
        "copied": sum(re.sub(r"=\d\d", "", text) + "?" == problem.prompt for problem, text in pairs) / problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    logging.disable_progress_bar()  # transformers shows one for writing a single small file
    model = train(args.seed)
    measured = measure(model, temperature=0.0)
    print(f"accuracy after the warm start: {measured['accuracy']:.2f}")
    if measured["copied"] < MIN_COPIED:
        raise SystemExit(
            f"warm start: only {measured['copied']:.0%} of the responses copy their operations, "
            f"{MIN_COPIED:.0%} are needed; try another seed"
        )
    model.save_pretrained(args.output)
    ledger.tokenizer().save_pretrained(args.output)


if __name__ == "__main__":
    main()
