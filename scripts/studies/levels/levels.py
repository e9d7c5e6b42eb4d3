# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How often the test of length errs where lengths are clipped alike, and what it sees where they are not.

  python scripts/studies/levels/levels.py [--runs 500]

Prints the table of README.md. A run has 3,840 responses unless its line says otherwise, of which 10% are clipped.
"""

import argparse

import numpy as np
import pandas as pd
from tqdm import tqdm

from fspo_verl.analysis.length_effect import length_effect

FAIR = {  # what is simulated, with lengths clipped alike
    "independent responses": {},
    "prompts with rates of their own": {"prompt_effect": 1.0},
    "prompts clipped whole or not at all": {"whole_prompts": True},
    "steps with rates of their own": {"step_effect": 0.7},
    "lengths and rates that rise over training": {"trend": 1.5, "step_effect": 0.3},
    "sides with other rates and lengths": {"sides": 1.0},
    "prompts of 4 epochs": {"epochs": 4, "prompt_effect": 1.0},
    "prompts of 30 epochs": {"steps": 30, "group": 4, "epochs": 30, "prompt_effect": 1.0},
    "two prompts a step": {"steps": 60, "prompts": 2, "prompt_effect": 1.0, "mini_batches": 1},
    "groups of unequal size": {"unequal": True, "prompt_effect": 1.0},
    "40 prompts of one step": {"steps": 1, "prompts": 40, "prompt_effect": 1.0},
    "shares of tokens": {"shares": True, "prompt_effect": 0.7},
    "slopes that vary by step, mean 0, sd 0.3": {"slopes": 0.3},
    "slopes that vary by step, mean 0, sd 0.6": {"slopes": 0.6},
}
UNFAIR = {  # clip rate ~ length^k
    "k = 0.1": {"exponent": 0.1},
    "k = -0.2": {"exponent": -0.2},
    "k = 0.2, prompts with rates of their own": {"exponent": 0.2, "prompt_effect": 1.0},
    "k = 0.2, slopes that vary by step, sd 0.3": {"exponent": 0.2, "slopes": 0.3},
}


def simulate(
    rng: np.random.Generator,
    steps: int = 15,
    prompts: int = 32,
    group: int = 8,
    mini_batches: int = 4,
    rate: float = 0.1,
    *,
    exponent: float = 0.0,
    slopes: float = 0.0,
    epochs: int = 1,
    prompt_effect: float = 0.0,
    step_effect: float = 0.0,
    trend: float = 0.0,
    sides: float = 0.0,
    whole_prompts: bool = False,
    unequal: bool = False,
    shares: bool = False,
) -> pd.DataFrame:
    """Records whose clip rate goes like length^exponent, lengths being alike within a prompt.

    Args:
        slopes: standard deviation of the exponent between steps.
        epochs: how often each prompt comes back.
        prompt_effect, step_effect: standard deviations of the log rate.
        trend: rise of the log rate, and of the log length, from the first to the last step.
        sides: difference of the log rate, and of the log length, between A > 0 and A < 0.
        whole_prompts: the responses to a prompt are clipped together.
        unequal: groups hold 1 to ``group`` responses.
        shares: a clip takes a random share of the tokens.
    """
    step = np.repeat(np.arange(steps), prompts * group)
    slot = np.tile(np.repeat(np.arange(prompts), group), steps)
    pool = steps * prompts // epochs  # an epoch takes each prompt once
    prompt = np.concatenate([rng.permutation(pool) for _ in range(epochs)])[step * prompts + slot]
    late = step / max(steps - 1, 1) - 0.5
    positive = rng.random(len(step)) < 0.5
    x = rng.normal(0, 0.7, pool)[prompt] + rng.normal(0, 0.4, len(step)) + trend * late + sides * (positive - 0.5)
    k = exponent + slopes * rng.standard_normal(steps)[step]
    effects = prompt_effect * rng.standard_normal(pool)[prompt] + step_effect * rng.standard_normal(steps)[step]
    odds = np.exp(k * x + effects + trend * late + sides * (positive - 0.5))
    drawn = rng.random((steps, pool))[step, prompt] if whole_prompts else rng.random(len(step))
    clipped = (drawn < rate * odds / odds.mean()) * (rng.random(len(step)) if shares else 1.0)
    records = pd.DataFrame(
        {
            "step": step,
            "mini_batch": slot * mini_batches // prompts,
            "prompt": prompt,
            "length": np.exp(4 + x).round().clip(1).astype(int),
            "advantage": np.where(positive, 1.0, -1.0),
            "clipped": clipped,
        }
    )
    return records[rng.random(len(step)) < rng.random(pool)[prompt]] if unequal else records


def rejections(settings: dict, runs: int, seed: int = 0) -> tuple[float, float, int]:
    """Share of the runs in which a dependence is called, and in which the interval holds k; runs with an answer."""
    found = [length_effect(simulate(np.random.default_rng([seed, run]), **settings)) for run in range(runs)]
    found = [effect for effect in found if effect is not None]
    k = settings.get("exponent", 0.0)
    called, covered = (
        np.mean(part) for part in zip(*((e.depends, e.lower <= k <= e.upper) for e in found), strict=True)
    )
    return float(called), float(covered), len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="of each line (default: %(default)s)")
    runs = parser.parse_args().runs
    print("| simulated | dependence called | interval holds k | runs |\n|---|---|---|---|")
    for name, settings in tqdm((FAIR | UNFAIR).items()):
        called, covered, answers = rejections(settings, runs)
        print(f"| {name} | {called:.1%} | {covered:.1%} | {answers} |", flush=True)


if __name__ == "__main__":
    main()
