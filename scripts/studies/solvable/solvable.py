# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Problems that a warm start solves sometimes, for the sanity test of arXiv 2510.26788: a loss has to learn these.

  python scripts/studies/solvable/solvable.py OUTPUT SEED      writes OUTPUT/solvable-seedSEED.parquet

OUTPUT is that of a comparison; the warm start and the training problems of the seed are made there if missing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "compare"))
import pandas as pd  # noqa: E402
import training_run  # noqa: E402, also makes the modules of scripts/quickstart known
from ledger import compute_score  # noqa: E402
from training_run import Arm, TrainingRun, launch  # noqa: E402

NUMBER, TEMPERATURE = 64, 1.0
CANDIDATES, TRIES = 16, 16  # per problem that is wanted, as many at a time, and per candidate


def solvable_problems(problems: pd.DataFrame, model: Path, number: int, temperature: float) -> pd.DataFrame:
    """The first problems of which a model solves 20 to 80% of the tries at this temperature.

    Raises:
        Failure: there are too few.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from warm_start import respond

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    found = problems[:0]
    for begin in range(0, len(problems), CANDIDATES * number):
        candidates = problems[begin : begin + CANDIDATES * number]
        prompts = [prompt[0]["content"] for prompt in candidates.prompt]
        answers = [problem["ground_truth"] for problem in candidates.reward_model]
        solved = sum(
            pd.Series([compute_score("", *pair) for pair in zip(texts, answers, strict=True)], candidates.index)
            for texts in (respond(policy, prompts, temperature) for _ in range(TRIES))
        )
        found = pd.concat([found, candidates[solved.between(0.2 * TRIES, 0.8 * TRIES)]])
        if len(found) >= number:
            return found[:number]
    raise launch.Failure(
        f"the start solves 20 to 80% of the tries of {len(found)} of {len(problems)} problems, fewer than {number}"
    )


def main() -> None:
    output, seed = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    run = TrainingRun(output, output / "none", Arm("fspo", "fspo"), seed, 1.0, 0)
    training_run.warm_start(run)
    problems = pd.read_parquet(training_run.training_problems(run))
    model = output / f"warm-start-seed{seed}/model"
    solvable_problems(problems, model, NUMBER, TEMPERATURE).to_parquet(output / f"solvable-seed{seed}.parquet")


if __name__ == "__main__":
    main()
