# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a smaller Length Reweighting Error (LRE) means a clipped gradient closer to the true one.

python scripts/studies/gradients/gradients.py            prints the answer; computes first what records.parquet lacks

A small policy trains under a range ∝ √L. After some of its rollouts fresh responses of the policy before are scored.
The true gradient is that of all of them, Σ w A ∇log π; a clipped one leaves out what a clip takes. Five clips are held
at one clip rate on each side, on these responses. LRE = max_b |a_b / a − 1|, with the acceptance a_b of a length and a
of all.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab")]
from cells import Cells  # noqa: E402
from fitted import fitted_power  # noqa: E402
from training import Arm, Regime, begun  # noqa: E402
from walks import Policies, Rollout  # noqa: E402

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
REGIME, LEARNING_RATES, SEEDS = Regime(LENGTHS, 16), (5e-4, 1e-3, 2e-3), range(12)
ROLLOUTS, PROMPTS = (0, 3, 8), 24  # scored; prompts of each task
RATES, POWERS = (0.1, 0.3), {"linear": 1.0, "sqrt": 0.5, "fixed": 0.0}
CLIPS = (*POWERS, "fitted", "random")
KEY = ("learning_rate", "rollout", "seed", "rate", "clip")


class Scored(NamedTuple):
    """Responses of a policy before, under the policy now; S, Q and advantages ``[S, tasks, n]``."""

    weights: Tensor  # [S, N]
    s: Tensor  # with a gradient
    q: Tensor
    advantages: Tensor

    def gradient(self, kept: Tensor) -> Tensor:
        """Σ w A ∇S over the responses that are kept, ``[S, N]``."""
        given = self.s.detach().exp() * self.advantages * kept
        return torch.autograd.grad(self.s, self.weights, given, retain_graph=True)[0]


def states(learning_rate: float) -> Iterator[tuple[int, Scored]]:
    """The run after each rollout that is scored."""
    run = begun(REGIME, Arm(0.5, 0.3), learning_rate, SEEDS)
    for number in range(max(ROLLOUTS) + 1):
        before = run.policies.copy()
        before.roll_out(2 * REGIME.mini_batches)  # what the run draws
        fresh = before.roll_out(PROMPTS)
        run.rollout()
        if number in ROLLOUTS:
            yield number, scored(run.policies, fresh)


def scored(policies: Policies, responses: Rollout) -> Scored:
    table = policies.table()
    ratios = [
        (policies.log_prob(table, tokens) - old).flatten(1, 2)
        for tokens, old in zip(responses.tokens, responses.old_log_prob, strict=True)
    ]
    s, q = [ratio.sum(-1) for ratio in ratios], [ratio.detach().square().sum(-1) for ratio in ratios]
    advantages = [part.flatten(1) for part in responses.advantages]
    return Scored(policies.weights, *(torch.stack(parts, 1) for parts in (s, q, advantages)))


def clipped(clip: str, rate: float, responses: Scored, seed: int) -> Tensor:
    """Return what a clip clips of one seed's responses, 0 or 1 ``[tasks, n]``."""
    s, q, a = (part[seed].detach() for part in responses[1:])
    if clip == "random":
        return (torch.rand(s.shape, generator=torch.Generator().manual_seed(seed)) < rate).float() * (a != 0)
    power = POWERS.get(clip)
    if power is None:
        columns = {"log_ratio": s, "quadratic_variation": q, "advantage": a}
        columns = {name: column.flatten().numpy() for name, column in columns.items()}
        power = fitted_power(pd.DataFrame(columns | {"length": np.repeat(LENGTHS, s.shape[1])}), rate)
    reach, taken = s * a.sign() / torch.tensor([length**power for length in LENGTHS])[:, None], torch.zeros_like(s)
    for side in (a < 0, a > 0):
        taken += side & (reach > reach[side].quantile(1 - rate))
    return taken


def judged(responses: Scored) -> pd.DataFrame:
    """A row per seed, rate and clip: cosine of both gradients, LRE, and κ, by which LRE bounds the cosine."""
    every, counted = torch.ones_like(responses.advantages), (responses.advantages != 0).double()
    share = counted.sum(2) / counted.sum((1, 2))[:, None]
    true, rows = responses.gradient(every), []
    # κ = Σ p_b |g_b| / |g|, where p_b g_b, the part of length b, is what its responses add to the sum.
    alone = (every * (torch.arange(len(LENGTHS)) == task)[:, None] for task in range(len(LENGTHS)))
    kappa = sum(responses.gradient(own).norm(dim=1) for own in alone) / true.norm(dim=1)
    for rate, clip in itertools.product(RATES, CLIPS):
        kept = 1 - torch.stack([clipped(clip, rate, responses, seed) for seed in range(len(share))])
        accepted = (kept * counted).sum(2) / counted.sum(2)
        overall = (accepted * share).sum(1)
        columns = {
            "cosine": torch.cosine_similarity(responses.gradient(kept), true, dim=1),
            "lre": (accepted / overall[:, None] - 1).abs().max(1).values,
            "kappa": kappa,
            "clipped": 1 - overall,
        }
        columns = {name: column.float().numpy() for name, column in columns.items()}
        rows.append(pd.DataFrame(columns).assign(seed=SEEDS, rate=rate, clip=clip))
    return pd.concat(rows, ignore_index=True)


# --- the answer -------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Means over the states of one clip rate; a state is a seed after a rollout at a learning rate."""

    means: pd.DataFrame  # per clip: cosine and LRE
    correlation: tuple[float, float, float]  # Spearman's of LRE and cosine over the clips of a state; mean and interval
    best_is_evenest: float  # share of states in which the clip of the least LRE has the largest cosine
    bounded: float  # share of states and clips in which κ·LRE < 1, so that the guarantee says something
    held: float  # share of those in which the cosine is as large as guaranteed


def answer(rate: float) -> Answer:
    own = pd.read_parquet(HERE / "records.parquet", filters=[("rate", "==", rate)])
    cosine, lre = (own.pivot(index=list(KEY[:3]), columns="clip", values=name) for name in ("cosine", "lre"))
    ranked = cosine.rank(axis=1), lre.rank(axis=1)
    spearman = ranked[0].corrwith(ranked[1], axis=1).groupby("seed").mean()
    error = 2.2 * spearman.sem()  # Student's t of 12 seeds
    same = cosine.to_numpy().argmax(1) == lre.to_numpy().argmin(1)
    slack = own.kappa * own.lre
    bound = np.sqrt(1 - np.square(slack[slack < 1]))
    return Answer(
        own.groupby("clip")[["cosine", "lre"]].mean().loc[list(CLIPS)],
        (spearman.mean(), spearman.mean() - error, spearman.mean() + error),
        float(same.mean()),
        float((slack < 1).mean()),
        float((own.cosine[slack < 1] >= bound).mean()),
    )


def main() -> None:
    torch.set_num_threads(1)
    cells = Cells(HERE / "records.parquet", KEY)
    for learning_rate in LEARNING_RATES:
        if (learning_rate, max(ROLLOUTS), SEEDS[-1], RATES[-1], CLIPS[-1]) not in cells.done():
            tables = [judged(responses).assign(rollout=number) for number, responses in states(learning_rate)]
            table = pd.concat(tables).assign(learning_rate=learning_rate)
            cells.add(pa.Table.from_pandas(table, preserve_index=False))
    for rate in RATES:
        print(f"\nClip rate {rate:.0%}")
        for name, value in answer(rate)._asdict().items():
            print(f"{name}:\n{value}")


if __name__ == "__main__":
    main()
