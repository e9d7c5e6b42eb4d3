# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What metrics and records cost, as a share of the time of an actor update.

    VERL_PLATFORM=cpu python scripts/bench/observation.py
    VERL_PLATFORM=cpu python scripts/bench/observation.py --layers 4 --hidden 256 --length 512

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
from fspo_verl.selftest import engine

VARIANTS = ("bare", "metrics", "records")
VOCABULARY = 24


def batch(args: argparse.Namespace, step: int):
    """A mini-batch of random tokens; lengths are spread evenly on a log scale."""
    lengths = np.geomspace(5, args.length, args.responses).astype(int)
    responses = [torch.randint(VOCABULARY, (n,)) for n in lengths]
    data = engine.batch_of([torch.arange(16)] * len(responses), responses, torch.randn(len(responses)), step)
    data["old_log_probs"] = engine.nested(-torch.rand(n) for n in lengths)
    return data


def policy_loss(loss: str, variant: str, folder: Path) -> PolicyLossConfig:
    """The config of a loss, bare, observed, or recorded to a folder."""
    records_dir = str(folder / loss) if variant == "records" else None
    if loss == "fspo":
        return FSPOPolicyLossConfig(records_dir=records_dir)
    return (PolicyLossConfig if variant == "bare" else ObservedPolicyLossConfig)(
        loss_mode=loss, **({"records_dir": records_dir} if records_dir else {})
    )


def measure(args: argparse.Namespace, folder: Path) -> pd.DataFrame:
    """Seconds of an actor update, ``[round, (loss, variant)]``."""
    # The fspo loss has no switch for its metrics: what is measured here is what leaving them out would save.
    without_metrics = {"_observe": lambda *_, **__: ({}, {}), "_verl_metrics": lambda *_: {}}
    heads = {"num_attention_heads": args.hidden // 32, "num_key_value_heads": args.hidden // 32, "head_dim": 32}
    size = {"vocab_size": VOCABULARY, "hidden_size": args.hidden, "intermediate_size": 3 * args.hidden}
    model = engine.small_model(folder / "model", num_hidden_layers=args.layers, **size, **heads)
    trainer = engine.training_worker(model, "bf16")
    variants = [(loss, variant) for loss in ("fspo", "gspo") for variant in VARIANTS]
    losses = {key: policy_loss(*key, folder) for key in variants}
    rows = []
    for step in trange(args.rounds + 1, desc="rounds", disable=None):
        seconds = {}
        for key, loss in losses.items():
            data = batch(args, step)
            bare = mock.patch.multiple(fspo_verl.register, **without_metrics)
            with bare if key[1] == "bare" else contextlib.nullcontext():
                begin = time.perf_counter()
                engine.update(trainer, data, loss, engine.micro_batches(args.micro_batch_size), args.responses)
                seconds[key] = time.perf_counter() - begin
        rows.append(seconds)
    return pd.DataFrame(rows[1:])  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, type=int)
    add("--hidden", default=64, help="hidden size of the model (default: %(default)s, the quickstart's)")
    add("--layers", default=2, help="layers of the model (default: %(default)s)")
    add("--responses", default=64, help="responses in the mini-batch (default: %(default)s)")
    add("--length", default=81, help="tokens of the longest response (default: %(default)s)")
    add("--micro-batch-size", default=32, help="responses per micro-batch (default: %(default)s)")
    add("--rounds", default=20, help="rounds (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(args, Path(folder))
    for loss in ("fspo", "gspo"):
        bare = seconds[loss, "bare"]
        print(f"{loss}: actor update {bare.median() * 1e3:.1f} ms without metrics")
        for variant in VARIANTS[1:]:
            low, median, high = ((seconds[loss, variant] - bare) / bare).quantile([0.25, 0.5, 0.75])
            print(f"  with {variant:8} {median:+.1%} (quartiles {low:+.1%} to {high:+.1%})")


if __name__ == "__main__":
    main()
