# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Write DAPO-Math-17k for training, and MATH500, AIME24 and AIME25 for validation, in verl's data format.

Each set comes from the Hugging Face hub, or from local files with the columns of one of its published forms, and
becomes one parquet file whose `data_source` makes verl score it with the right function:

  file             data_source             problems  scored by (verl.utils.reward_score)
  dapo.parquet     math_dapo               17,398    math_dapo: "Answer: ..." as the last line, -1 or 1
  math500.parquet  HuggingFaceH4/MATH-500  500       math_reward: the last \\boxed{...}, 0 or 1
  aime24.parquet   aime24                  30        math_dapo
  aime25.parquet   aime25                  30        math_dapo

Repeated problems are kept once (the original DAPO-Math-17k holds each about 100 times), those with different answers
left out. So are training problems that contain the text of a validation problem in the same folder; rewordings are not
found. AIME answers are written as plain integers. Refused: unknown columns, another number of problems than above, and
answers that verl's scorer does not recognise in a right response.
"""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

EXAMPLES = """examples:
  python scripts/prepare_data.py                                  all four sets from the hub, into data/
  python scripts/prepare_data.py --only math500 aime24 aime25     the validation sets
  python scripts/prepare_data.py --dapo dapo.parquet --math500 test.jsonl --aime24 aime.parquet \\
                                 --aime25 aime2025-I.jsonl aime2025-II.jsonl     no network
"""

# The instruction around each problem of DAPO-Math-17k, and of AIME-2024 by the same authors.
ANSWER_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
ANSWER_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
# verl's examples/data_preprocess/math_dataset.py.
BOXED_AFTER = " Let's think step by step and output the final answer within \\boxed{}."


@dataclass(frozen=True)
class DataSet:
    """A set to prepare.

    Attributes:
        hub: path, configuration and split on the hub.
        columns: those of problem and answer, in each published form.
        problems: the fewest and the most that it may have.
        split: the split written.
    """

    data_source: str
    hub: tuple[str, str | None, str]
    columns: tuple[tuple[str, str], ...]
    problems: tuple[int, int]
    split: str = "test"
    integer_answers: bool = False
    before: str = ANSWER_BEFORE
    after: str = ANSWER_AFTER
    reply: str = "Answer: {}"  # a response that gives an answer in the form asked for


# Columns and numbers of problems are those of the sets' cards and viewers on the hub, as of November 2026. The training
# set comes last: problems of the others must not be among its own.
SETS = {
    "math500": DataSet(
        data_source="HuggingFaceH4/MATH-500",
        hub=("HuggingFaceH4/MATH-500", None, "test"),
        columns=(("problem", "answer"),),
        problems=(500, 500),
        before="",
        after=BOXED_AFTER,
        reply="\\boxed{{{}}}",
    ),
    "aime24": DataSet(
        data_source="aime24",
        hub=("HuggingFaceH4/aime_2024", None, "train"),
        # Its own; Maxwell-Jia/AIME_2024; BytedTsinghua-SIA/AIME-2024.
        columns=(("problem", "answer"), ("Problem", "Answer"), ("prompt", "reward_model")),
        problems=(30, 30),
        integer_answers=True,
    ),
    "aime25": DataSet(
        data_source="aime25",
        hub=("math-ai/aime25", None, "test"),
        columns=(("problem", "answer"), ("question", "answer")),  # its own; opencompass/AIME2025
        problems=(30, 30),
        integer_answers=True,
    ),
    "dapo": DataSet(
        data_source="math_dapo",
        hub=("open-r1/DAPO-Math-17k-Processed", "all", "train"),
        columns=(("prompt", "solution"), ("prompt", "reward_model")),  # its own; BytedTsinghua-SIA/DAPO-Math-17k
        # The card's number, less the few that differ in spaces only or have two answers.
        problems=(17_000, 17_398),
        split="train",
    ),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("data"), help="folder for the files (default: %(default)s)")
    add("--only", nargs="+", choices=SETS, default=list(SETS), metavar="SET", help=f"some of {', '.join(SETS)}")
    for name, data_set in SETS.items():
        text = f"local .parquet, .jsonl or .json files (default: {data_set.hub[0]}, from the hub)"
        add(f"--{name}", nargs="+", type=Path, metavar="FILE", help=text)
    add("--subset", action="store_true", help="accept another number of problems than a set has")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> None:
    """Write the sets that ``args`` asks for, see :func:`parse_args`.

    Raises:
        SystemExit: a set cannot be read, or is not what it should be; says how. Files finished before stay.
    """
    args.output.mkdir(parents=True, exist_ok=True)
    for name in [name for name in SETS if name in args.only]:
        data_set, file = SETS[name], args.output / f"{name}.parquet"
        found = problems(name, _rows(name, getattr(args, name)))
        _check(name, found, args.subset)
        if data_set.split == "train":
            found = _without_held_out(found, args.output)
        unfinished = file.with_suffix(".unfinished")
        verl_format(data_set, found).to_parquet(unfinished)
        unfinished.replace(file)
        print(f"  {len(found):,} problems: {file}")


def _rows(name: str, files: list[Path] | None) -> Iterable[dict]:
    """The raw rows of a set."""
    import datasets  # not at the top: takes seconds, and --help needs nothing of it

    path, config, split = SETS[name].hub
    if files:
        kind = "parquet" if files[0].suffix == ".parquet" else "json"
        path, config, split = kind, None, "train"
    try:
        return datasets.load_dataset(path, config, split=split, data_files=files and [str(file) for file in files])
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:  # no connection, no such set, no such file
        source = ", ".join(map(str, files)) if files else path
        raise SystemExit(f"{source} could not be loaded ({error}); --{name} FILE takes local files") from error


def problems(name: str, rows: Iterable[dict]) -> dict[str, str]:
    """Each problem's text and answer once, in the order of the rows; those with different answers are left out.

    Raises:
        SystemExit: a row has other columns, no text, or an answer that is none.
    """
    answers: dict[str, set[str]] = {}
    for index, row in enumerate(tqdm(rows, desc=f"  {name}", unit=" rows", disable=None)):
        question, answer = _problem(SETS[name], row, f"{name}, row {index}")
        answers.setdefault(question, set()).add(answer)
    for question in [question for question, found in answers.items() if len(found) > 1]:
        print(f"  left out, with different answers {sorted(answers.pop(question))}: {question[:100]!r}")
    return {question: found.pop() for question, found in answers.items()}


def _problem(data_set: DataSet, row: dict, where: str) -> tuple[str, str]:
    """Text and answer of one raw row."""
    pair = next((pair for pair in data_set.columns if {*pair} <= row.keys()), None)
    if pair is None:
        known = " or ".join(" and ".join(pair) for pair in data_set.columns)
        raise SystemExit(f"{where}: found the columns {', '.join(row)}; expected {known}")
    question, answer = row[pair[0]], row[pair[1]]
    if isinstance(question, list):  # a chat of one message
        chat, question = question, question[0]["content"].removeprefix(ANSWER_BEFORE).removesuffix(ANSWER_AFTER)
        if chat != [{"role": "user", "content": f"{ANSWER_BEFORE}{question}{ANSWER_AFTER}"}]:
            raise SystemExit(f"{where}: expected one message with DAPO's instruction around the problem, found {chat}")
    if isinstance(answer, dict):
        answer = answer.get("ground_truth")
    question, answer = str(question or "").strip(), "" if answer is None else str(answer).strip()
    if not question or not answer:
        raise SystemExit(f"{where}: the {pair[1] if question else pair[0]} is empty")
    if data_set.integer_answers:
        digits = re.sub(r"\^\{?\\circ\}?$", "", answer)  # HuggingFaceH4 has 025, opencompass 336^\circ
        if not re.fullmatch(r"\d{1,3}", digits):
            raise SystemExit(f"{where}: {answer!r} is no AIME answer, an integer from 0 to 999")
        answer = str(int(digits))
    return question, answer


def _check(name: str, found: dict[str, str], subset: bool) -> None:
    """Refuse a wrong number of problems, and answers that verl's scorer does not recognise."""
    from verl.utils.reward_score import default_compute_score  # not at the top: takes seconds

    data_set = SETS[name]
    fewest, most = data_set.problems
    if not subset and not fewest <= len(found) <= most:
        raise SystemExit(
            f"{name}: found {len(found):,} problems; the whole set has {most:,}. --subset accepts another number"
        )
    for question, answer in found.items():
        reply = data_set.reply.format(answer)
        score = default_compute_score(data_set.data_source, reply, answer)
        if (score["score"] if isinstance(score, dict) else score) != 1:
            raise SystemExit(
                f"{name}: verl's scorer for {data_set.data_source} does not recognise the answer {answer!r} in a "
                f"response that gives it as asked, {reply!r}. The problem: {question}"
            )


def _without_held_out(found: dict[str, str], folder: Path) -> dict[str, str]:
    """The problems but those that contain one of the validation problems in the folder."""
    files = [file for name in SETS if SETS[name].split == "test" and (file := folder / f"{name}.parquet").exists()]
    if not files:
        print(f"  compared with no validation set: {folder} holds none")
    held_out = {_essence(info["question"]) for file in files for info in pd.read_parquet(file).extra_info}
    essences = {question: _essence(question) for question in found}
    kept = [question for question, text in essences.items() if not any(held in text for held in held_out)]
    print(f"  {len(found) - len(kept)} contain a validation problem and are left out")
    return {question: found[question] for question in kept}


def _essence(question: str) -> str:
    """A problem's text without spaces, case, math delimiters and the full stop at its end."""
    return re.sub(r"\\[()\[\]]|[$\s]", "", question).casefold().rstrip(".?!")


def verl_format(data_set: DataSet, found: dict[str, str]) -> pd.DataFrame:
    """The rows that verl's RLHFDataset reads."""
    return pd.DataFrame(
        {
            "data_source": data_set.data_source,
            "prompt": [{"role": "user", "content": f"{data_set.before}{question}{data_set.after}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": data_set.split, "index": index, "question": question},
        }
        for index, (question, answer) in enumerate(found.items())
    )


if __name__ == "__main__":
    prepare(parse_args())
