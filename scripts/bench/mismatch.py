# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The mismatch of trainer and rollout engine, and whom rules drop by it: the tables of docs/noise.md.

    VERL_PLATFORM=cpu python scripts/bench/mismatch.py                   # a small random model
    VERL_PLATFORM=cpu python scripts/bench/mismatch.py --model FOLDER    # a real one

The transformers rollout of this package samples responses in bfloat16, token by token with a cache, as engines do.
verl's FSDP engine scores the same tokens with the same weights, as its trainer does for old log-probs.
"""

import argparse
import tempfile

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM

from fspo_verl import worker
from fspo_verl.analysis.mismatch import mismatch
from fspo_verl.observe.columns import mismatch_columns
from fspo_verl_cpu.decode import Response, Sampling, sample

PROMPT = [1, 2, 3]
ROWS = 128  # that are decoded at once
NO_END = 10**9  # a token that no vocabulary has: responses end where they are to end


def rollouts(model: str, count: int, longest: int) -> list[Response]:
    """Responses of 16 to ``longest`` tokens, spread evenly on a log scale."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    limits = [
        Sampling(int(tokens)) for tokens in np.random.default_rng(0).permutation(np.geomspace(16, longest, count))
    ]
    parts = (limits[start : start + ROWS] for start in range(0, count, ROWS))
    vocabulary = policy.config.vocab_size
    return [one for part in parts for one in sample(policy, [PROMPT] * len(part), part, [NO_END], vocabulary)]


def measure(model: str, dtype: str, responses: list[Response]):
    """The mismatch where the trainer has this dtype."""
    ids = [torch.tensor(response.token_ids) for response in responses]
    batch = worker.batch_of([torch.tensor(PROMPT)] * len(ids), ids, [1.0] * len(ids))
    trainer = worker.log_probs(worker.training_worker(model, dtype), batch, worker.micro_batches(8))
    sampled = worker.nested(torch.tensor(response.log_probs) for response in responses)
    padded = (x.to_padded_tensor(0.0) for x in (worker.nested(trainer), sampled, batch["loss_mask"]))
    columns = {name: column.numpy() for name, column in mismatch_columns(*padded).items()}
    others = {"length": columns["rollout_length"], "log_ratio": 0.0, "staleness": 0.0}
    # An advantage of either sign, whatever the response.
    advantage = np.resize([-1.0, 1.0], len(ids))
    return mismatch(pd.DataFrame(columns | others | {"advantage": advantage, "prompt": range(len(ids))}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; by default a random one of 7 million parameters")
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--longest", type=int, default=384, help="response tokens (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or worker.small_model(scratch)
        responses = rollouts(model, args.responses, args.longest)
        for dtype in ("bf16", "fp32"):
            found = measure(model, dtype, responses)
            print(f"engine bf16, trainer {dtype}: sigma {found.sigma:.2g}, mean {found.mean:.2g}", end=", ")
            print(f"-sigma^2/2 {-(found.sigma**2) / 2:.2g}, k3 {found.kl:.2g}, spread ~ L^{found.exponent:.2f}\n")
            print(f"{found.dropped.map('{:.0%}'.format).to_string()}\n", flush=True)


if __name__ == "__main__":
    main()
