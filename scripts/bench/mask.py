# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whom the mask takes where some responses are broken: the table of docs/noise.md.

    python scripts/bench/mask.py    # half a minute

An update of 512 responses of 16 to 4,096 tokens, whose tokens are off by independent noise of 0.06 nats, at the
mismatch_eps that masks 10% of them; ten seeds of each. Some of the responses are broken in one of three ways.
"""

import math

import numpy as np
import pandas as pd
import torch

from fspo_verl import mismatch_mask
from fspo_verl.observe.columns import MASKED
from fspo_verl.selftest import worker

RESPONSES, SIGMA, SEEDS = 512, 0.06, 10
EPS = 1.645 * SIGMA
BREAK = {
    "each token off by 5 nats": lambda d: d.add_(5.0),
    "one token at -1e4": lambda d: d[:1].fill_(-1e4),
    "one token at -inf": lambda d: d[:1].fill_(-math.inf),
}


def masked(share: float, how: str, seed: int) -> tuple[float, float]:
    """Masked share of the sound and of the broken responses."""
    generator, broken = torch.Generator().manual_seed(seed), round(share * RESPONSES)
    lengths = torch.exp(torch.empty(RESPONSES).uniform_(math.log(16), math.log(4096), generator=generator)).long()
    d = [SIGMA * torch.randn(length, generator=generator) - SIGMA**2 / 2 for length in lengths.tolist()]
    for tokens in d[:broken]:
        BREAK[how](tokens)
    ones = [torch.ones_like(tokens) for tokens in d]
    data = worker.batch_of([torch.tensor([1])] * RESPONSES, [one.long() for one in ones], [1.0] * RESPONSES)
    data["old_log_probs"], data["rollout_log_probs"] = worker.nested(d), worker.nested([0 * one for one in ones])
    found = mismatch_mask.masked_copy(data, EPS)[MASKED].double()
    return found[broken:].mean().item(), found[:broken].mean().item()


def table(ways=tuple(BREAK), shares=(0.0, 0.01, 0.05, 0.2)) -> pd.DataFrame:
    """The table of docs/noise.md: of the sound responses mean of the seeds, least and most, and of all broken ones."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    rows = {}
    for how in ways:
        found = np.array([[masked(share, how, seed) for seed in range(SEEDS)] for share in shares])
        heads = [f"{share:.0%} broken" if share else "none broken" for share in shares]
        cells = [f"{sound.mean():.0%} [{sound.min():.0%}, {sound.max():.0%}]" for sound in found[..., 0]]
        broken = np.nanmin(found[..., 1])
        rows[how] = dict(zip(heads, cells, strict=True)) | {"of the broken": f"{broken:.0%}"}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("broken responses")


def main() -> None:
    print(table().to_string())


if __name__ == "__main__":
    main()
