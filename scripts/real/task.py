# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Problems and rewards of reasoning-gym (https://github.com/open-thought/reasoning-gym) in verl's formats."""

import functools
import json
import re
import warnings

import pandas as pd

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that it imports, when they are first compiled
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

NUMBER = r"-?\d+(?:\.\d+)?"


def data_set(
    name: str, options: dict, size: int, seed: int, without: frozenset[str] = frozenset(), instruction: str = ""
) -> pd.DataFrame:
    """``size`` problems, one per row, in verl's data format; ``without`` holds prompts that must not be among them.

    Args:
        name: of one of reasoning-gym's data sets.
        options: fields of its configuration.
        instruction: what follows each question in its prompt.

    Raises:
        ValueError: there is no such data set or option, or it has too few problems.
    """
    draw_size = 4 * size + 4 * len(without)
    try:
        # reasoning-gym draws problem i from seed + i: seeds that are neighbours would share most of their problems.
        drawn = reasoning_gym.create_dataset(name, size=draw_size, seed=1_000_000 * seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym cannot make {name} with {options}: {error}") from error
    rows = []
    for entry in drawn:
        prompt = f"{entry['question']} {instruction}".strip()
        if prompt in without:
            continue
        rows.append(
            {
                "data_source": name,
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "reasoning",
                "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
                "extra_info": {"index": len(rows), "entry": json.dumps(entry, default=str)},
            }
        )
        if len(rows) == size:
            return pd.DataFrame(rows)
    raise ValueError(f"{name} with {options} has only {len(rows)} problems that are not held out, {size} are needed")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """verl's reward function: 1 if reasoning-gym finds the response's answer right, else 0."""
    answer = answer_of(solution_str, ground_truth)
    return float(_scorer(data_source)(answer, json.loads(extra_info["entry"])) == 1)


def answer_of(response: str, ground_truth: str) -> str:
    """The answer in a response, as models write that were never taught a format.

    What is marked with ``<answer>`` tags; else the last number where a number is asked for; else the whole response.
    """
    if (tagged := extract_answer(response)) is not None:
        return tagged
    if re.fullmatch(NUMBER, ground_truth):
        numbers = re.findall(NUMBER, re.sub(r"(?<=\d),(?=\d{3})", "", response))
        return numbers[-1] if numbers else ""
    return response.strip()


@functools.cache
def _scorer(name: str):
    return reasoning_gym.get_score_answer_fn(name)
