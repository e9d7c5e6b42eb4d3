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


def table() -> pd.DataFrame:
    """Of the sound responses: mean of the seeds, least and most, and the share of the broken ones that is masked."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return pd.DataFrame({how: row(how) for how in BREAK}).T.rename_axis("broken responses")


def row(how: str, shares=(0.0, 0.01, 0.05, 0.2)) -> dict[str, str]:
    found = np.array([[masked(share, how, seed) for seed in range(SEEDS)] for share in shares])
    cells = {
        f"{share:.0%} broken" if share else "none broken": f"{x.mean():.0%} [{x.min():.0%}, {x.max():.0%}]"
        for share, x in zip(shares, found[..., 0], strict=True)
    }
    return cells | {"of the broken": f"{np.nanmean(found[..., 1]):.0%}"}


def main() -> None:
    print(table().to_string())


if __name__ == "__main__":
    main()
