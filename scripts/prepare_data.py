# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Write DAPO-Math-17k for training, and MATH500, AIME24 and AIME25 for validation, in verl's data format.

Each set comes from the Hugging Face hub, or from local files of the same columns, and becomes one parquet file whose
`data_source` makes verl score it with the right function:

  file             data_source             problems  scored by (verl.utils.reward_score)
  dapo.parquet     math_dapo               17,398    math_dapo: "Answer: ..." as the last line, -1 or 1
  math500.parquet  HuggingFaceH4/MATH-500  500       math_reward: the last \\boxed{...}, 0 or 1
  aime24.parquet   aime24                  30        math_dapo
  aime25.parquet   aime25                  30        math_dapo

The prompts ask for the form of answer that the scorer reads. Repeated problems are kept once: the original
DAPO-Math-17k holds each of its problems about 100 times. AIME answers are written without leading zeros and degree
signs, which the scorer would take literally. Refused: unknown columns, another number of problems than above, problems
with different answers or with an instruction of their own, AIME answers that are no integer from 0 to 999, and answers
that verl's scorer does not recognise in a right response.

A training problem that contains the whole text of a validation problem is left out of training; spaces, case and math
delimiters do not count. Rewordings are not found.

A file that is there and was made from the same sources is left as it is.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
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

VERL_FORMAT = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("question", pa.string())])),
    ]
)
RECIPE = b"fspo_verl.recipe"  # the key of a file's metadata under which it says what it was made from


class DataError(Exception):
    """The data is not what it should be; the message says how."""


@dataclass(frozen=True)
class Columns:
    """The columns of a published data set: where problem and answer are, and what else (by name) may be there."""

    origin: str
    question: str
    answer: str
    others: str = ""

    def __str__(self) -> str:
        optional = f", optional: {', '.join(self.others.split())}" if self.others else ""
        return f"{self.origin}: {self.question}, {self.answer}{optional}"

    def fit(self, found: set[str]) -> bool:
        return {self.question, self.answer} <= found <= {self.question, self.answer, *self.others.split()}


@dataclass(frozen=True)
class DataSet:
    """A set to prepare. ``split`` is the split written; the hub's own is the last part of ``hub``."""

    name: str
    data_source: str
    hub: tuple[str, str | None, str]
    columns: tuple[Columns, ...]
    problems: tuple[int, int]  # the fewest and the most that it may have
    before: str
    after: str
    reply: Callable[[str], str]  # a response that gives this answer in the form asked for
    licence: str
    split: str = "test"
    integer_answers: bool = False


_ANSWER_LINE = {"before": ANSWER_BEFORE, "after": ANSWER_AFTER, "reply": "Answer: {}".format}
_BOXED = {"before": "", "after": BOXED_AFTER, "reply": "\\boxed{{{}}}".format}
# Columns and numbers of problems are those of the sets' cards and viewers on the hub, as of November 2026.
_DAPO_CHAT = "data_source ability extra_info __index_level_0__"
_DAPO_PROCESSED = "data_source source_prompt ability reward_model extra_info"
SETS = (
    DataSet(
        name="math500",
        data_source="HuggingFaceH4/MATH-500",
        hub=("HuggingFaceH4/MATH-500", None, "test"),
        columns=(Columns("HuggingFaceH4/MATH-500", "problem", "answer", "solution subject level unique_id"),),
        problems=(500, 500),
        **_BOXED,
        licence="see the dataset card (problems of MATH, arXiv 2103.03874, in the selection of PRM800K, which is MIT)",
    ),
    DataSet(
        name="aime24",
        data_source="aime24",
        hub=("HuggingFaceH4/aime_2024", None, "train"),
        columns=(
            Columns("HuggingFaceH4/aime_2024", "problem", "answer", "id solution url year"),
            Columns("Maxwell-Jia/AIME_2024", "Problem", "Answer", "ID Solution"),
            Columns("BytedTsinghua-SIA/AIME-2024", "prompt", "reward_model", _DAPO_CHAT),
        ),
        problems=(30, 30),
        **_ANSWER_LINE,
        licence="see the dataset card",
        integer_answers=True,
    ),
    DataSet(
        name="aime25",
        data_source="aime25",
        hub=("math-ai/aime25", None, "test"),
        columns=(
            Columns("math-ai/aime25", "problem", "answer", "id"),
            Columns("opencompass/AIME2025", "question", "answer"),
        ),
        problems=(30, 30),
        **_ANSWER_LINE,
        licence="Apache-2.0 (math-ai/aime25), MIT (opencompass/AIME2025), as their cards say",
        integer_answers=True,
    ),
    # After the validation sets, whose problems must not be among its own.
    DataSet(
        name="dapo",
        split="train",
        data_source="math_dapo",
        hub=("open-r1/DAPO-Math-17k-Processed", "all", "train"),
        columns=(
            Columns("open-r1/DAPO-Math-17k-Processed", "prompt", "solution", _DAPO_PROCESSED),
            Columns("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model", _DAPO_CHAT),
        ),
        # The card's number, 3,282 in Chinese among them, less the few that differ in spaces only or have two answers.
        problems=(17_000, 17_398),
        **_ANSWER_LINE,
        licence="Apache-2.0 (BytedTsinghua-SIA/DAPO-Math-17k); of the processed copy: see its dataset card",
    ),
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python scripts/prepare_data.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    add, names = parser.add_argument, [data_set.name for data_set in SETS]
    add("--output", type=Path, default=Path("data"), help="folder for the files (default: %(default)s)")
    add("--only", nargs="+", choices=names, default=names, metavar="SET", help=f"some of {', '.join(names)}")
    for data_set in SETS:
        path, config, split = data_set.hub
        origins = ", ".join(columns.origin for columns in data_set.columns)
        hub = f"{path}{f' ({config})' if config else ''}, split {split}"
        add(
            f"--{data_set.name}",
            nargs="+",
            type=Path,
            metavar="FILE",
            help=f"local .parquet, .jsonl or .json files with the columns of {origins} (default: {hub}, from the hub)",
        )
    add("--subset", action="store_true", help="accept another number of problems than a set has")
    add("--drop-conflicts", action="store_true", help="leave out problems that occur with different answers")
    add("--force", action="store_true", help="make files that are there again")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> None:
    """Write the sets that ``args`` asks for, see :func:`parse_args`.

    Raises:
        DataError: a set cannot be read, or is not what it should be. Files finished before stay.
    """
    held_out, held_out_recipes, made = {}, {}, {}
    for data_set in SETS:
        if data_set.name not in args.only:
            continue
        files, output = getattr(args, data_set.name), args.output / f"{data_set.name}.parquet"
        recipe = {"sources": _sources(data_set, files), "subset": args.subset, "drop_conflicts": args.drop_conflicts}
        if data_set.split == "train":
            recipe["held_out"] = held_out_recipes
        if args.force or not _is_finished(output, recipe):
            print(f"[{data_set.name}] {', '.join(recipe['sources'])}\n  licence: {data_set.licence}", flush=True)
            problems = _problems(data_set, _rows(data_set, files), args.drop_conflicts)
            _check(data_set, problems, args.subset)
            if data_set.split == "train":
                problems = _without(problems, held_out)
            _write(data_set, problems, output, recipe)
        else:
            print(f"[{data_set.name}] made before: {output}")
        made[data_set.name] = output
        if data_set.split != "train":
            held_out_recipes[data_set.name] = recipe["sources"]
            held_out[data_set.name] = _questions(output)
    _print_overrides(made)


def _sources(data_set: DataSet, files: list[Path] | None) -> list[str]:
    """Where a set comes from. Files count by their content, so that moving them changes nothing."""
    if files is None:
        return [", ".join(part for part in data_set.hub if part)]
    for file in files:
        if not file.is_file():
            raise DataError(f"--{data_set.name}: no file {file}")
    return [f"{file.name} (SHA-256 {_sha256(file)})" for file in files]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _is_finished(output: Path, recipe: dict) -> bool:
    if not output.exists():
        return False
    made_from = json.loads((pq.read_schema(output).metadata or {}).get(RECIPE, b"null"))
    if made_from != recipe:
        raise DataError(
            f"{output} was made from {json.dumps(made_from)}, not from {json.dumps(recipe)}: "
            "pass --force to make it again, or choose another --output"
        )
    return True


def _rows(data_set: DataSet, files: list[Path] | None) -> Iterator[dict]:
    """The raw rows of a set."""
    if files is None:
        yield from _rows_of_hub(data_set)
    for file in files or ():
        if file.suffix == ".parquet":
            # Batch by batch: as Python objects the 1.8 million rows of the original DAPO-Math-17k take gigabytes.
            for batch in pq.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        elif file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
        elif file.suffix == ".json":
            yield from json.loads(file.read_text(encoding="utf-8"))
        else:
            raise DataError(f"{file}: .parquet, .jsonl and .json files are read")


def _rows_of_hub(data_set: DataSet) -> Iterable[dict]:
    import datasets  # not at the top: takes seconds, and local files need nothing of it

    path, config, split = data_set.hub
    try:
        return datasets.load_dataset(path, config, split=split)
    except OSError as error:  # no connection, no such set: all of them are OSErrors
        raise DataError(
            f"{path} could not be loaded from the hub ({type(error).__name__}: {error}); download its files elsewhere "
            f"and pass them as --{data_set.name} FILE"
        ) from error


def _problems(data_set: DataSet, rows: Iterable[dict], drop_conflicts: bool) -> dict[str, str]:
    """Each problem's text and answer once, in the order of the rows."""
    answers: dict[str, set[str]] = {}
    count = 0
    for count, row in enumerate(tqdm(rows, desc=f"  {data_set.name}", unit=" rows", disable=None), 1):
        question, answer = _problem(data_set, row, count - 1)
        answers.setdefault(question, set()).add(answer)
    conflicts = {question: found for question, found in answers.items() if len(found) > 1}
    print(f"  {count:,} rows, {len(answers):,} different problems, {len(conflicts)} of them with different answers")
    if conflicts and not drop_conflicts:
        listed = "\n".join(f"  {sorted(found)}: {question}" for question, found in conflicts.items())
        raise DataError(
            f"{data_set.name}: these problems occur with different answers; --drop-conflicts leaves them out\n{listed}"
        )
    return {question: found.pop() for question, found in answers.items() if question not in conflicts}


def _problem(data_set: DataSet, row: dict, index: int) -> tuple[str, str]:
    """Text and answer of one raw row."""
    where = f"{data_set.name}, row {index}"
    columns = next((columns for columns in data_set.columns if columns.fit(row.keys())), None)
    if columns is None:
        raise DataError(
            f"{where}: found the columns {', '.join(row)}; expected those of one of\n"
            + "\n".join(f"  {known}" for known in data_set.columns)
        )
    question, answer = row[columns.question], row[columns.answer]
    if isinstance(question, list):
        question = _text_of_chat(question, where)
    if isinstance(answer, dict):
        answer = answer.get("ground_truth")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    question, answer = str(question or "").strip(), "" if answer is None else str(answer).strip()
    if not question or not answer:
        raise DataError(f"{where}: the {columns.answer if question else columns.question} is empty")
    return question, _aime_answer(answer, where) if data_set.integer_answers else answer


def _text_of_chat(messages: list[dict], where: str) -> str:
    """The problem in a chat of one user message, without DAPO's instruction."""
    if [message.get("role") for message in messages] != ["user"]:
        raise DataError(f"{where}: expected a prompt of one user message, found {messages}")
    text = messages[0]["content"]
    if text.startswith(ANSWER_BEFORE) and text.endswith(ANSWER_AFTER):
        return text[len(ANSWER_BEFORE) : -len(ANSWER_AFTER)]
    if text.startswith(ANSWER_BEFORE[:40]) or ANSWER_AFTER.strip()[:40] in text:
        raise DataError(f"{where}: the prompt has an instruction, but not the one of BytedTsinghua-SIA's sets: {text}")
    return text


def _aime_answer(answer: str, where: str) -> str:
    """An AIME answer as verl's string comparison wants it: HuggingFaceH4 has 025, opencompass 336^\\circ."""
    digits = re.sub(r"\^\{?\\circ\}?$", "", answer)
    if not re.fullmatch(r"\d{1,3}", digits):
        raise DataError(f"{where}: {answer!r} is no AIME answer, an integer from 0 to 999")
    return str(int(digits))


def _check(data_set: DataSet, problems: dict[str, str], subset: bool) -> None:
    """Refuse a wrong number of problems, instructions in them, and answers that verl's scorer does not recognise."""
    fewest, most = data_set.problems
    if not subset and not fewest <= len(problems) <= most:
        raise DataError(
            f"{data_set.name}: found {len(problems):,} problems; the whole set has "
            f"{f'{fewest:,} to ' if fewest < most else ''}{most:,}. --subset accepts another number"
        )
    beginning, end = os.path.commonprefix(list(problems)), os.path.commonprefix([text[::-1] for text in problems])[::-1]
    if len(problems) >= 10 and max(len(beginning), len(end)) > 20:
        raise DataError(
            f"{data_set.name}: all problems begin with {beginning!r} and end with {end!r}, which looks like an "
            "instruction; it would contradict the one that is added here. Use the published files, or take it out"
        )
    from verl.utils.reward_score import default_compute_score  # not at the top: takes seconds

    for question, answer in problems.items():
        score = default_compute_score(data_set.data_source, data_set.reply(answer), answer)
        if (score["score"] if isinstance(score, dict) else score) != 1:
            raise DataError(
                f"{data_set.name}: verl's scorer for {data_set.data_source} does not recognise the answer {answer!r} "
                f"in a response that gives it as asked, {data_set.reply(answer)!r}. The problem: {question}"
            )


def _without(problems: dict[str, str], held_out: dict[str, list[str]]) -> dict[str, str]:
    """The problems but those that contain a held-out one."""
    if not held_out:
        print("  not compared with any validation set: none is prepared in this run")
    kept = {question: _essence(question) for question in problems}
    for name, questions in held_out.items():
        essences = [_essence(question) for question in questions]
        found = [question for question, text in kept.items() if any(essence in text for essence in essences)]
        print(f"  {len(found)} contain a problem of {name} and are left out")
        for question in found:
            print(f"    {question[:100]!r}")
            del kept[question]
    return {question: problems[question] for question in kept}


def _essence(question: str) -> str:
    """A problem's text without spaces, case, math delimiters and the full stop at its end."""
    return re.sub(r"\\[()\[\]]|[$\s]", "", question).casefold().rstrip(".?!")


def _write(data_set: DataSet, problems: dict[str, str], output: Path, recipe: dict) -> None:
    rows = [
        {
            "data_source": data_set.data_source,
            "prompt": [{"role": "user", "content": f"{data_set.before}{question}{data_set.after}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": data_set.split, "index": index, "question": question},
        }
        for index, (question, answer) in enumerate(problems.items())
    ]
    table = pa.Table.from_pylist(rows, VERL_FORMAT.with_metadata({RECIPE: json.dumps(recipe).encode()}))
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_suffix(".unfinished")
    pq.write_table(table, unfinished)
    unfinished.replace(output)
    print(f"  {len(rows):,} problems: {output}")


def _questions(file: Path) -> list[str]:
    return [info["question"] for info in pq.read_table(file, columns=["extra_info"])["extra_info"].to_pylist()]


def _print_overrides(made: dict[str, Path]) -> None:
    print("\nFor verl:")
    if train := made.pop("dapo", None):
        print(f"  data.train_files={train}")
    if made:
        print(f"  data.val_files=[{','.join(map(str, made.values()))}]")


def main() -> None:
    try:
        prepare(parse_args())
    except DataError as error:
        sys.exit(f"prepare_data: {error}")


if __name__ == "__main__":
    main()
