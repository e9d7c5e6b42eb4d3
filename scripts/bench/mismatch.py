# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The mismatch of trainer and rollout engine, and whom rules drop by it, after one prompt.

    python scripts/bench/mismatch.py --model FOLDER --longest 4096            # on a GPU
    VERL_PLATFORM=cpu python scripts/bench/mismatch.py --model FOLDER         # with vLLM for CPUs and a C++ compiler

vLLM samples responses in bfloat16. verl's FSDP engine scores the same tokens with the same weights, as its trainer does
for old log-probs.
"""

import argparse
import tempfile

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from fspo_verl.analysis.mismatch import mismatch
from fspo_verl.observe.columns import mismatch_columns
from fspo_verl.selftest import worker

PROMPT = "The history of bread began"  # after one that a model never saw, the first tokens differ most


def rollouts(model: str, prompt: list[int], lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """A response of each length: tokens and log-probs, ``[tokens]``."""
    limits = [SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False) for tokens in lengths]
    # Most of the memory is left to the trainer.
    engine = LLM(
        model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.15,
        max_model_len=len(prompt) + max(lengths) + 1,
        enable_prefix_caching=False,
        seed=0,
    )
    found = [one.outputs[0] for one in engine.generate([{"prompt_token_ids": prompt}] * len(limits), limits)]
    pairs = [zip(one.token_ids, one.logprobs, strict=True) for one in found]
    log_probs = [torch.tensor([of[token].logprob for token, of in tokens]) for tokens in pairs]
    return [torch.tensor(one.token_ids) for one in found], log_probs


def measure(model: str, dtype: str, prompt: list[int], ids: list[Tensor], engine: list[Tensor]):
    """The mismatch where the trainer has this dtype."""
    batch = worker.batch_of([torch.tensor(prompt)] * len(ids), ids, [1.0] * len(ids))
    trainer = worker.log_probs(worker.training_worker(model, dtype), batch, worker.micro_batches(8))
    padded = (x.to_padded_tensor(0.0) for x in (worker.nested(trainer), worker.nested(engine), batch["loss_mask"]))
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
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or worker.small_model(scratch)
        prompt = AutoTokenizer.from_pretrained(model)(PROMPT).input_ids if args.model else [1, 2, 3]
        lengths = np.random.default_rng(0).permutation(np.geomspace(16, args.longest, args.responses)).astype(int)
        ids, log_probs = rollouts(model, prompt, lengths.tolist())
        for dtype in ("bf16", "fp32"):
            found = measure(model, dtype, prompt, ids, log_probs)
            print(f"vllm bf16, trainer {dtype}: sigma {found.sigma:.2g}, mean {found.mean:.2g}", end=", ")
            print(f"-sigma^2/2 {-(found.sigma**2) / 2:.2g}, k3 {found.kl:.2g}, spread ~ L^{found.exponent:.2f}\n")
            print(f"{found.dropped.map('{:.0%}'.format).to_string()}\n", flush=True)


if __name__ == "__main__":
    main()
