# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numerical noise of S, and what each remedy does to it, through verl's FSDP engine on a CPU.

    python scripts/noise_floor.py                      # a small random model
    python scripts/noise_floor.py --model FOLDER       # a real one

Responses are sampled from the model. For each setting verl's worker computes their old log-probs as its trainer does,
and then takes optimiser steps on them with a learning rate of 0: nothing has moved, and whatever S is, is noise. The
numbers are those of the live metrics and of the records of the first of these steps.
"""

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "cpu")

import numpy as np
import pandas as pd
import torch
import transformers
from tqdm import tqdm

from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.gpu import responses, worker
from fspo_verl.gpu.worker import Cut
from fspo_verl.observe import noise, observer
from fspo_verl.observe.records import read_records

# What is tried: dtype, whether the softmax is in float32 (verl's fused kernels), how the old log-probs and the update
# are cut into micro-batches, mini-batches. Fused last: verl replaces the forward function of the model's class.
SETTINGS = {
    "bf16, 8 rows, then 1": ("bf16", False, Cut(rows=8), Cut(rows=1), 2),
    "bf16, dynamic": ("bf16", False, Cut(tokens=1024), Cut(tokens=1024), 2),
    "bf16, 4 rows both times": ("bf16", False, Cut(rows=4), Cut(rows=4), 2),
    "fp32, 8 rows, then 1": ("fp32", False, Cut(rows=8), Cut(rows=1), 2),
    "fp32, dynamic": ("fp32", False, Cut(tokens=1024), Cut(tokens=1024), 2),
    "fp32, 4 rows both times": ("fp32", False, Cut(rows=4), Cut(rows=4), 2),
    "bf16, softmax in fp32, 8 rows, then 1": ("bf16", True, Cut(rows=8), Cut(rows=1), 2),
}
BANDS = {
    "sqrt(L)": Band(),
    "sqrt(Q)": Band(1.645, normalization="studentized"),  # 10% of a normal S
}


def measure(model: str, sampled: responses.Responses, setting: tuple, folder: Path, step: int) -> dict[str, str]:
    """One row of the table."""
    dtype, fused, old_cut, cut, mini_batches = setting
    trainer = worker.training_worker(model, cut, dtype, fused=fused)
    count = len(sampled)
    advantages = np.where(np.arange(count) % 2, 1.0, -1.0)
    groups = [f"prompt {i}" for i in range(count)]
    batch = worker.batch_of(sampled.prompts, sampled.responses, advantages, groups, step=step)
    worker.set_old_log_probs(batch, worker.log_probs(trainer, batch, old_cut))
    loss = FSPOPolicyLossConfig(records_dir=str(folder))
    metrics = worker.update(trainer, batch, loss, count // mini_batches, scale=1.0)
    del trainer  # and its optimiser, before the next one is made
    gc.collect()
    observer.settle_records()
    records = read_records(folder)
    live = noise.of_metrics(pd.DataFrame([metrics]))
    found = {name: noise.of_records(records, None, band) for name, band in BANDS.items()}
    first = records[noise.unmoved(records.mini_batch, None)]
    # The power of L with which |S| grows: the slope of log|S| on log L, over the responses in which S is not 0.
    moved = first[first.log_ratio != 0]
    power = np.polyfit(np.log(moved.length), np.log(moved.log_ratio.abs()), 1)[0] if len(moved) > 2 else float("nan")
    return {
        "sigma (live metric)": f"{live.sigma:.2g}",
        "p in |S| ~ L^p": f"{power:.2f}",
        "outside +-0.03 sqrt(L)": f"{found['sqrt(L)'].outside:.0%}",
        "eps with 1% outside": f"{found['sqrt(L)'].widen * BANDS['sqrt(L)'].high:.2g}",
        "outside +-1.645 sqrt(Q)": f"{found['sqrt(Q)'].outside:.0%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", help="default: a random model of 7 million parameters, made here")
    parser.add_argument("--responses", type=int, default=64, help="a multiple of 8 (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest (default: %(default)s)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or str(responses.small_model(Path(scratch) / "model"))
        policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        sampled = responses.sample(policy, responses.lengths(args.responses, 8, args.longest))
        worker.join()
        size = policy.num_parameters() / 1e6
        del policy
        rows = {}
        for number, name in enumerate(tqdm(args.settings, "settings", file=sys.stderr)):
            rows[name] = measure(model, sampled, SETTINGS[name], Path(scratch) / f"records-{number}", number + 1)
    print(
        f"{args.model or 'random Qwen3'}, {size:.0f} million parameters, {args.responses} responses of 8 to "
        f"{args.longest} tokens, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )
    print(pd.DataFrame.from_dict(rows, orient="index").to_string())


if __name__ == "__main__":
    main()
