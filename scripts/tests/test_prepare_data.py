# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""scripts/prepare_data.py on small files with the columns of the published sets; the hub's loader on local folders."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import prepare_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl.utils.reward_score import default_compute_score

SETS = prepare_data.SETS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def problems(size: int, topic: str) -> list[tuple[str, str]]:
    return [(f"{index}: what is ${index}+{topic}$ {index % 7}", str(index * 7 % 1000)) for index in range(size)]


def chat(question: str) -> list[dict]:
    return [{"role": "user", "content": f"{prepare_data.ANSWER_BEFORE}{question}{prepare_data.ANSWER_AFTER}"}]


def original(question: str, answer: str) -> dict:
    """A row of BytedTsinghua-SIA's sets."""
    reward = {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}
    return {"data_source": "math_dapo", "prompt": chat(question), "ability": "MATH", "reward_model": reward}


# What a row of each published set looks like.
ORIGINS = [
    ("math500", lambda question, answer: {"problem": question, "solution": "...", "answer": answer, "level": 2}),
    ("aime24", lambda question, answer: {"id": 60, "problem": question, "solution": "...", "answer": answer.zfill(3)}),
    ("aime24", lambda question, answer: {"ID": "I-1", "Problem": question, "Solution": "...", "Answer": int(answer)}),
    ("aime24", original),
    ("aime25", lambda question, answer: {"problem": question, "answer": answer, "id": "0"}),
    ("aime25", lambda question, answer: {"question": question, "answer": rf"{answer}^\circ"}),
    ("aime25", lambda question, answer: {"question": question, "answer": rf"{answer}^{{\circ}}"}),
    ("dapo", lambda question, answer: {"prompt": question, "solution": answer, "source_prompt": chat(question)}),
    ("dapo", original),
]
MATH500, AIME24, _, _, AIME25, _, _, DAPO, _ = (row for _, row in ORIGINS)


def write(file: Path, rows: list[dict]) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)) if file.suffix == ".jsonl" else json.dumps(rows))
    return file


def prepare(output: Path, *options, **files: Path) -> dict[str, list[dict]]:
    """Prepare the sets that have files; return their rows."""
    sources = [part for name, file in files.items() for part in (f"--{name}", file)]
    command = ["--output", output, "--only", *files, *sources, *options]
    prepare_data.prepare(prepare_data.parse_args(list(map(str, command))))
    return {name: pq.read_table(output / f"{name}.parquet").to_pylist() for name in files}


def questions(rows: list[dict]) -> list[str]:
    return [row["extra_info"]["question"] for row in rows]


FORMS = [(*form, ".parquet") for form in ORIGINS] + [("aime24", AIME24, ".jsonl"), ("dapo", original, ".json")]


@pytest.mark.parametrize(("name", "origin", "suffix"), FORMS)
def test_every_published_form_becomes_verls_format(tmp_path, name, origin, suffix):
    data_set, pairs = SETS[name], problems(30, name)
    file = write(tmp_path / f"raw{suffix}", [origin(*pair) for pair in pairs])
    assert prepare(tmp_path / "data", "--subset", **{name: file})[name] == [
        {
            "data_source": data_set.data_source,
            "prompt": [{"role": "user", "content": f"{data_set.before}{question}{data_set.after}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": data_set.split, "index": index, "question": question},
        }
        for index, (question, answer) in enumerate(pairs)
    ]


@pytest.mark.parametrize("data_set", SETS.values(), ids=SETS)
def test_verls_scorer_wants_the_form_that_the_prompt_asks_for(data_set):
    def is_right(response: str) -> bool:
        score = default_compute_score(data_set.data_source, f"Some steps.\n{response}", "204")
        return (score["score"] if isinstance(score, dict) else score) == 1

    assert is_right(data_set.reply.format("204"))
    assert not is_right(data_set.reply.format("205"))
    assert not is_right("It is 204.")
    assert ("\\boxed{}" if "boxed" in data_set.reply else "Answer: $Answer") in data_set.before + data_set.after


def test_repeated_problems_are_kept_once_and_those_with_different_answers_left_out(tmp_path):
    pairs = [*problems(30, "x"), ("a riddle", "1"), ("another", "5"), ("a riddle", "2"), ("a riddle", "1")]
    file = write(tmp_path / "raw.parquet", [original(*pair) for pair in pairs] * 100)
    kept = prepare(tmp_path / "data", "--subset", dapo=file)["dapo"]
    assert questions(kept) == [question for question, _ in pairs if question != "a riddle"]


REFUSED = {
    "unknown columns": ("math500", [{"problem": "q", "target": "1"}], "found the columns problem, target; expect"),
    "no text": ("math500", [{"problem": "q", "answer": "1"}, {"problem": " ", "answer": "1"}], "row 1: the problem is"),
    "no answer": ("math500", [{"problem": "q", "answer": None}], "row 0: the answer is empty"),
    "no AIME answer": ("aime25", [{"problem": "q", "answer": "1000"}], "'1000' is no AIME answer"),
    "a fraction": ("aime25", [{"problem": "q", "answer": 0.5}], "'0.5' is no AIME answer"),
    "another instruction": (
        "dapo",
        [original("q", "1") | {"prompt": [{"role": "user", "content": "q"}]}],
        "expected one",
    ),
    "an answer that the scorer misreads": ("math500", [{"problem": "q", "answer": "}"}], "does not recognise"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    name, rows, message = REFUSED[case]
    file = write(tmp_path / "raw.json", rows)
    with pytest.raises(SystemExit, match=message):
        prepare(tmp_path / "data", "--subset", **{name: file})
    assert not list((tmp_path / "data").iterdir())


def test_training_problems_that_contain_a_validation_problem_are_left_out(tmp_path):
    validation = [*problems(30, "x"), (r"Compute $\tan 60^\circ$.", "3")]
    training = [
        *problems(30, "y"),
        (r"compute \(\tan  60^\circ\)", "3"),
        (r"Compute $\tan 60^\circ$ The original answer is $\sqrt{k}$, give k.", "3"),
        (r"Compute $\tan 61^\circ$.", "4"),
    ]
    math500 = write(tmp_path / "v.json", [MATH500(*pair) for pair in validation])
    prepare(tmp_path / "data", "--subset", math500=math500)
    dapo = write(tmp_path / "t.json", [DAPO(*pair) for pair in training])
    rows = prepare(tmp_path / "data", "--subset", dapo=dapo)["dapo"]  # in a later run, too
    assert questions(rows) == [question for question, _ in (*training[:30], training[-1])]


def test_the_hubs_loader_with_and_without_a_configuration(tmp_path, monkeypatch):
    pairs = problems(30, "x")
    (tmp_path / "all").mkdir()
    write(tmp_path / "all/train-00000-of-00001.parquet", [DAPO(*pair) for pair in pairs])
    write(tmp_path / "test.jsonl", [AIME25(*pair) for pair in pairs])
    entry = "---\nconfigs:\n- config_name: {}\n  data_files:\n  - split: {}\n    path: {}\n---\n"
    for name, config, split, path in (("dapo", "all", "train", "all/train-*"), ("aime25", None, "test", "test.jsonl")):
        (tmp_path / "README.md").write_text(entry.format(config or "default", split, path))
        monkeypatch.setitem(SETS, name, dataclasses.replace(SETS[name], hub=(str(tmp_path), config, split)))
        assert prepare_data.problems(name, prepare_data._rows(name, None)) == dict(pairs)


def test_data_that_cannot_be_read_is_an_error_that_names_the_option_for_local_files(tmp_path):
    with pytest.raises(SystemExit, match="nowhere.jsonl could not be loaded .* --math500 FILE"):
        prepare(tmp_path, math500=tmp_path / "nowhere.jsonl")
    command = [sys.executable, prepare_data.__file__, "--output", tmp_path]
    ended = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert ended.returncode == 1 and "--math500 FILE" in ended.stderr and "Traceback" not in ended.stderr
