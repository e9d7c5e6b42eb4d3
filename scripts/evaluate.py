# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Print mean@k for each data set of an evaluation that scripts/evaluate.sh ran, and write it to results.json.

mean@k is the share of right answers among k responses to each question. The 95% interval is for other questions of the
same kind: it counts questions rather than responses, as the k responses to one question are alike.
"""

import argparse
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf


class EvaluationError(Exception):
    """The folder holds no evaluation that can be read; the message says why."""


def interval(accuracies: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval for the mean of per-question accuracies, with questions as clusters.

    Agresti and Coull's "plus four" rule for a proportion, applied to questions: two questions of accuracy 0 and two of
    accuracy 1 are added, then mean +- z * standard deviation / sqrt(questions). At 30 questions it holds the true mean
    about as often as it says, or more often, whatever k and the difficulties are, where a bootstrap over questions
    falls to 60% if few of them are ever solved; 0 of 30 gives 0 to 0.14.

    Args:
        accuracies: [questions], each in [0, 1].
        confidence: chance that the interval holds the true mean.
    """
    padded = np.concatenate([accuracies, [0.0, 0.0, 1.0, 1.0]])
    half = NormalDist().inv_cdf((1 + confidence) / 2) * padded.std(ddof=1) / math.sqrt(len(padded))
    return max(0.0, float(padded.mean() - half)), min(1.0, float(padded.mean() + half))


def read_config(folder: Path) -> DictConfig:
    """The composed configuration of the evaluation in ``folder``."""
    return OmegaConf.load(_existing(folder / "hydra/.hydra/config.yaml"))


def read_accuracies(folder: Path, config: DictConfig) -> pd.DataFrame:
    """One row per question that was answered: data_source, accuracy (missing responses count 0), responses.

    Raises:
        EvaluationError: responses cannot be attributed to a data set, or have no accuracy.
    """
    lines = _existing(folder / "generations/0.jsonl").read_text(encoding="utf-8").splitlines()
    responses = pd.DataFrame([json.loads(line) for line in lines])
    if "acc" not in responses or not responses["acc"].astype(float).between(0, 1).all():
        raise EvaluationError("the reward function gives no accuracy from 0 to 1 ('acc' of each response)")
    responses["acc"] = responses["acc"].astype(float)  # verl's scorers give booleans and numbers
    # verl's uid is question_response_turn; a response of several turns has one score, repeated.
    responses[["question", "response"]] = responses["uid"].str.rsplit("_", n=2, expand=True)[[0, 1]]
    responses = responses.drop_duplicates(["question", "response"])
    by_question = responses.groupby("question")
    questions = pd.DataFrame(
        {
            "prompt": by_question["input"].first(),
            "accuracy": by_question["acc"].sum() / config.actor_rollout_ref.rollout.val_kwargs.n,
            "responses": by_question.size(),
        }
    )
    questions["data_source"] = _sources(questions.pop("prompt"), read_problems(config))
    return questions


def read_problems(config: DictConfig) -> pd.DataFrame:
    """The validation problems: data_source, and the text of the last message of the prompt."""
    files = config.data.val_files
    frames = [pd.read_parquet(file) for file in ([files] if isinstance(files, str) else files)]
    problems = pd.concat(frames)[["data_source", "prompt"]]
    return problems.assign(prompt=[messages[-1]["content"] for messages in problems["prompt"]])


def _sources(prompts: pd.Series, problems: pd.DataFrame) -> list[str]:
    """The data source of each prompt, which verl's dump lacks: it has the decoded prompt with its chat template."""
    known = sorted(set(zip(problems["prompt"], problems["data_source"], strict=True)), key=lambda pair: -len(pair[0]))
    sources = []
    for prompt in prompts:
        matches = [(text, source) for text, source in known if text in prompt]
        if not matches:
            raise EvaluationError(f"this prompt is in none of the validation files: {prompt}")
        longest = {source for text, source in matches if text == matches[0][0]}
        if len(longest) > 1:
            raise EvaluationError(f"this prompt is in {' and in '.join(sorted(longest))}: {prompt}")
        sources.extend(longest)
    return sources


def summarize(accuracies: pd.DataFrame, problems: pd.DataFrame, k: int) -> list[dict]:
    """mean@k, interval, number of questions and of missing responses for each data set."""
    summary = []
    for source, questions in problems.groupby("data_source", sort=False).size().items():
        answered = accuracies[accuracies["data_source"] == source]
        accuracy = np.zeros(questions)
        accuracy[: len(answered)] = answered["accuracy"]
        low, high = interval(accuracy)
        row = {"data_source": source, "mean": float(accuracy.mean()), "low": low, "high": high}
        missing = int(questions * k - answered["responses"].sum())
        summary.append(row | {"questions": int(questions), "missing": missing})
    return summary


def report(folder: Path) -> None:
    """Print the table of an evaluation and write ``results.json``."""
    config = read_config(folder)
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    summary = summarize(read_accuracies(folder, config), read_problems(config), sampling.n)
    results = {"model": config.actor_rollout_ref.model.path, "k": sampling.n}
    results |= {name: sampling[name] for name in ("temperature", "top_p")}
    results |= {name: config.data[name] for name in ("max_prompt_length", "max_response_length")}
    results |= {"verl": version("verl"), "data_sets": summary}
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    print(f"\n{results['model']}\ntemperature {sampling.temperature}, top_p {sampling.top_p}\n")
    print(f"{'data set':24}{f'mean@{sampling.n}':>10}{'95% interval':>18}{'questions':>11}")
    for row in summary:
        print(
            f"{row['data_source']:24}{row['mean']:10.3f}{row['low']:10.3f} - {row['high']:.3f}{row['questions']:11,}"
            + (f"  {row['missing']:,} responses are missing and count as wrong, see the log" if row["missing"] else "")
        )
    print(f"\n{folder / 'results.json'}")


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise EvaluationError(f"no file {file}: {file.parents[-2]} holds no finished evaluation")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="OUTPUT of scripts/evaluate.sh")
    try:
        report(parser.parse_args().folder)
    except EvaluationError as error:
        sys.exit(f"evaluate: {error}")


if __name__ == "__main__":
    main()
