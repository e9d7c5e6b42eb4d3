# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numerical noise of S, and what each remedy does to it, through verl's FSDP engine.

    VERL_PLATFORM=cpu python scripts/bench/noise.py                      # a small random model
    VERL_PLATFORM=cpu python scripts/bench/noise.py --model FOLDER       # a real one

Responses are sampled from the model. For each setting verl's worker computes their old log-probs as its trainer does,
and then takes optimiser steps on them with a learning rate of 0: nothing has moved, and whatever S is, is noise.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import worker
from tensordict import TensorDict
from tqdm import tqdm

from fspo_verl.band import Band
from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.observe import observer
from fspo_verl.observe.noise import SHARE
from fspo_verl.observe.records import read_records

DYNAMIC = {"use_dynamic_bsz": True, "micro_batch_size_per_gpu": None, "max_token_len_per_gpu": 1024}
DYNAMIC |= {"use_remove_padding": False}
CUTS = {  # into micro-batches: of the old log-probs, then of the update
    "8 rows, then 1": (worker.micro_batches(8), worker.micro_batches(1)),
    "dynamic": (DYNAMIC, DYNAMIC),
    "4 rows both times": (worker.micro_batches(4), worker.micro_batches(4)),
}
# Dtype, cut, and whether verl's fused kernels take the softmax in float32: last, as verl replaces the forward function
# of the model's class for them.
SETTINGS = {f"{dtype}, {cut}": (dtype, cut, False) for dtype in ("bf16", "fp32") for cut in CUTS}
SETTINGS["bf16, softmax in fp32, 8 rows, then 1"] = ("bf16", "8 rows, then 1", True)


def measure(model: str, sampled: TensorDict, setting: tuple[str, str, bool], folder: Path, step: int) -> dict:
    """One row of the table; half of the responses are in the first mini-batch of its step, and count."""
    dtype, cut, fused = setting
    count = len(sampled)
    batch = worker.with_advantages(sampled, np.resize([-1.0, 1.0], count), step)
    fused = {"use_fused_kernels": fused, "fused_kernel_options": {"impl_backend": "torch"}}
    trainer = worker.training_worker(model, dtype, **fused)
    batch["old_log_probs"] = worker.nested(worker.log_probs(trainer, batch, CUTS[cut][0]))
    loss = FSPOPolicyLossConfig(records_dir=str(folder))
    worker.update(trainer, batch, loss, CUTS[cut][1], count // 2)
    observer.flush_records()  # as the weight sync at the end of a step does
    records = read_records(folder)
    return in_bands(records[records.mini_batch == 0])


def in_bands(still: pd.DataFrame) -> dict[str, str]:
    """Return how many responses the noise moves out of the default range, and the eps that keeps 99% inside.

    Args:
        still: length, log-ratio and quadratic variation of responses that no update has moved.
    """
    score = still.log_ratio.abs() / still.length**0.5
    return {
        "σ of a token": f"{(still.quadratic_variation / still.length).mean() ** 0.5:.2g}",
        "outside ±0.03·√L": f"{(score > Band().high).mean():.0%}",
        "eps with 1% outside": f"{score.quantile(1 - SHARE):.2g}",
    }


def table(model: str | None = None, responses: int = 64, longest: int = 256, settings=tuple(SETTINGS)) -> pd.DataFrame:
    """A row per dtype and cut."""
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = model or worker.small_model(f"{scratch}/model")
        sampled = worker.sample(model, responses, 8, longest)
        for step, name in enumerate(tqdm(settings, "settings", disable=None), 1):
            rows[name] = measure(model, sampled, SETTINGS[name], Path(scratch, f"records-{step}"), step)
    found = pd.DataFrame.from_dict(rows, orient="index")
    return found.rename_axis("dtype and cut of old log-probs, then of the update")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--model", metavar="FOLDER", help="default: a random model of 7 million parameters, made here")
    parser.add_argument("--responses", type=int, help="a multiple of 8 (default: 64)")
    parser.add_argument("--longest", type=int, help="tokens of the longest (default: 256)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="default: all")
    print(table(**vars(parser.parse_args())).to_string())


if __name__ == "__main__":
    main()
