# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Token log-probabilities, old and new, as records of fspo-verl and as a table of sums by position."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from fspo_verl.band import Band
from fspo_verl.loss import fspo_loss
from fspo_verl.observe.columns import loss_columns, to_numpy, token_columns
from fspo_verl.observe.microbatch import MicroBatch
from fspo_verl.observe.records import RecordWriter
from fspo_verl.observe.settings import RunSettings

POSITIONS = "positions.parquet"
SETTINGS = "law.json"
_SHORTEST = 32  # tokens of a response whose sums by position are kept
_BATCH = 256

# Prompt, advantage, optimiser steps taken before, and the token log-probabilities [L]
Row = tuple[str, float, int, np.ndarray, np.ndarray]


def write_cell(folder: Path, rows: Sequence[Row]) -> None:
    """Write records and sums by position of the responses of a cell, in place of those in the folder.

    The decisions in the records are those of FSPO's default band. ``mini_batch`` is the number of optimiser steps that
    the policy took before.
    """
    for file in [*folder.glob("step-*.parquet"), folder / POSITIONS]:
        file.unlink(missing_ok=True)
    writer = RecordWriter(folder, RunSettings("fspo", Band()))
    rows = sorted(rows, key=lambda row: (row[2], len(row[3]), row[0]))
    for start in range(0, len(rows), _BATCH):
        for steps in sorted({row[2] for row in rows[start : start + _BATCH]}):
            part = [row for row in rows[start : start + _BATCH] if row[2] == steps]
            prompts = [row[0] for row in part]
            writer.add(_columns(part), MicroBatch(1, steps, 0, 1, prompts, prompts, staleness=[], mismatch={}))
    writer.flush()
    positions(rows).to_parquet(folder / POSITIONS, index=False)


def _columns(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    width = max(len(row[3]) for row in rows)
    old, new = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (_, _, _, before, after) in enumerate(rows):
        old[i, : len(before)], new[i, : len(after)] = torch.tensor(before), torch.tensor(after)
        mask[i, : len(before)] = True
    advantages = torch.tensor([row[1] for row in rows])[:, None].expand_as(old)
    sequences = fspo_loss(new, old, advantages, mask, Band())
    return to_numpy(loss_columns(sequences) | token_columns(new, old, advantages, mask))


def positions(rows: Sequence[Row]) -> pd.DataFrame:
    """Sums over the tokens at positions low to 2·low − 1 (from 1) of the responses with 32 tokens or more.

    Columns response (a number), prompt, length, low, tokens, log_ratio (Σ) and quadratic_variation (Σ of squares).
    """
    found = []
    for number, (prompt, _, _, old, new) in enumerate(rows):
        if len(old) < _SHORTEST:
            continue
        log_ratio = np.asarray(new, np.float64) - np.asarray(old, np.float64)
        starts = 2 ** np.arange(int(np.log2(len(old))) + 1) - 1
        sums = (np.add.reduceat(values, starts) for values in (np.ones(len(old), int), log_ratio, log_ratio**2))
        found += [(number, prompt, len(old), *values) for values in zip(starts + 1, *sums, strict=True)]
    types = {"response": "int32", "prompt": "category", "length": "int32", "low": "int32", "tokens": "int32"}
    types |= {"log_ratio": "float32", "quadratic_variation": "float32"}
    return pd.DataFrame(found, columns=list(types)).astype(types)
