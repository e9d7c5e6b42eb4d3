# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What metrics and records cost, as a share of the time of an actor update.

    VERL_PLATFORM=cpu python scripts/benchmark_observation.py
    VERL_PLATFORM=cpu python scripts/benchmark_observation.py --layers 4 --hidden 256 --length 512 --responses 64

One process, verl's own training worker with FSDP2, a Qwen3-architecture model with random weights, one mini-batch of
responses of mixed lengths. Every round runs each variant once, in turn, so that a slow moment of the machine meets all
of them: fspo bare (its metrics cut out), with metrics, and with records; verl's gspo bare, observed, and with records.
Reported: median time of the update, and the paired difference to the bare loss of the same round as a share of it,
median and quartiles. The larger the model, the smaller the share: the cost depends on tokens and responses alone.
"""

import argparse
import contextlib
import functools
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch
from tqdm import trange
from verl.workers.config import PolicyLossConfig

import fspo_verl.register
from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig
from fspo_verl.gpu import responses, worker

LOSSES = {"fspo": "seq-mean-token-sum-norm", "gspo": "seq-mean-token-mean"}
VARIANTS = ("bare", "metrics", "records")
PROMPT = 16


def batch(args: argparse.Namespace, generator: torch.Generator, step: int):
    """The mini-batch of a step; lengths are spread evenly on a log scale."""
    lengths = np.geomspace(5, args.length, args.responses).astype(int)
    ids = [torch.randint(args.vocabulary, (PROMPT + n,), generator=generator) for n in lengths]
    advantages = torch.randn(args.responses, generator=generator).tolist()
    groups = [str(row // 8) for row in range(args.responses)]
    data = worker.batch_of([x[:PROMPT] for x in ids], [x[PROMPT:] for x in ids], advantages, groups, step=step)
    worker.set_old_log_probs(data, (-torch.rand(n, generator=generator) for n in lengths))
    worker.set_mini_batch(data, args.responses)
    return data


def policy_loss(loss: str, variant: str, records: Path) -> PolicyLossConfig:
    """The config of a loss, bare, observed, or recorded to a folder."""
    records_dir = str(records) if variant == "records" else None
    if loss == "fspo":
        return FSPOPolicyLossConfig(records_dir=records_dir)
    if variant == "bare":
        return PolicyLossConfig(loss_mode=loss)
    return ObservedPolicyLossConfig(loss_mode=loss, records_dir=records_dir)


def measure(args: argparse.Namespace, folder: Path) -> pd.DataFrame:
    """Seconds of an actor update, ``[round, (loss, variant)]``."""
    # The fspo loss has no switch for its metrics: what is measured here is what leaving them out would save.
    without_metrics = {"_observe": lambda *_, **__: ({}, {}), "_verl_metrics": lambda *_: {}}
    updates = {
        (loss, variant): worker.loss_function(policy_loss(loss, variant, folder / loss), mode)
        for loss, mode in LOSSES.items()
        for variant in VARIANTS
    }
    heads = {"num_attention_heads": args.hidden // 32, "num_key_value_heads": args.hidden // 32, "head_dim": 32}
    size = {"vocab_size": args.vocabulary, "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
    model = responses.small_model(folder / "model", num_hidden_layers=args.layers, **size, **heads)
    worker.join()
    trainer = worker.training_worker(str(model), worker.Cut(rows=args.micro_batch_size), "bf16")
    generator = torch.Generator().manual_seed(args.seed)
    rows = []
    for step in trange(1, args.rounds + 2, desc="rounds", disable=None):
        seconds = {}
        for (loss, variant), update in updates.items():
            trainer.set_loss_fn(update)
            data = batch(args, generator, step)
            bare = mock.patch.multiple(fspo_verl.register, **without_metrics)
            with bare if variant == "bare" else contextlib.nullcontext():
                begin = time.perf_counter()
                trainer.train_mini_batch(data)
                seconds[loss, variant] = time.perf_counter() - begin
        rows.append(seconds)
    return pd.DataFrame(rows[1:])  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, type=int)
    add("--hidden", default=64, help="hidden size of the model (default: %(default)s, the quickstart's)")
    add("--layers", default=2, help="layers of the model (default: %(default)s)")
    add("--vocabulary", default=24, help="size of the vocabulary (default: %(default)s)")
    add("--responses", default=64, help="responses in the mini-batch (default: %(default)s)")
    add("--length", default=81, help="tokens of the longest response (default: %(default)s)")
    add("--micro-batch-size", default=32, help="responses per micro-batch (default: %(default)s)")
    add("--rounds", default=20, help="rounds (default: %(default)s)")
    add("--seed", default=0, help="of the data (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(args, Path(folder))
    for loss in LOSSES:
        bare = seconds[loss, "bare"]
        print(f"{loss}: actor update {bare.median() * 1e3:.1f} ms without metrics")
        for variant in VARIANTS[1:]:
            share = (seconds[loss, variant] - bare) / bare
            low, median, high = share.quantile([0.25, 0.5, 0.75])
            print(f"  with {variant:8} {median:+.1%} (quartiles {low:+.1%} to {high:+.1%})")


if __name__ == "__main__":
    main()
