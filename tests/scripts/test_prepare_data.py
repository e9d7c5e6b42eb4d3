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

SETS = {data_set.name: data_set for data_set in prepare_data.SETS}


def problems(size: int, topic: str) -> list[tuple[str, str]]:
    """Texts and answers that have no long beginning or end in common."""
    return [(f"{index}: what is ${index}+{topic}$ {index % 7}", str(index * 7 % 1000)) for index in range(size)]


def chat(question: str) -> list[dict]:
    return [{"role": "user", "content": f"{prepare_data.ANSWER_BEFORE}{question}{prepare_data.ANSWER_AFTER}"}]


# What a row of each published set looks like.
ORIGINS = {
    "HuggingFaceH4/MATH-500": lambda question, answer: {
        "problem": question,
        "solution": "...",
        "answer": answer,
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    },
    "HuggingFaceH4/aime_2024": lambda question, answer: {
        "id": 60,
        "problem": question,
        "solution": "...",
        "answer": answer.zfill(3),
        "url": "...",
        "year": "2024",
    },
    "Maxwell-Jia/AIME_2024": lambda question, answer: {
        "ID": "2024-I-1",
        "Problem": question,
        "Solution": "...",
        "Answer": int(answer),
    },
    "BytedTsinghua-SIA/AIME-2024": lambda question, answer: {
        "data_source": "aime",
        "prompt": chat(question),
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": "0"},
    },
    "math-ai/aime25": lambda question, answer: {"problem": question, "answer": answer, "id": "0"},
    "opencompass/AIME2025": lambda question, answer: {"question": question, "answer": rf"{answer}^\circ"},
    "open-r1/DAPO-Math-17k-Processed": lambda question, answer: {
        "prompt": question,
        "solution": answer,
        "data_source": "math_dapo",
        "source_prompt": chat(question),
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
    "BytedTsinghua-SIA/DAPO-Math-17k": lambda question, answer: {
        "data_source": "math_dapo",
        "prompt": chat(question),
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
}
ORIGINS_OF_SETS = [(name, columns.origin) for name, data_set in SETS.items() for columns in data_set.columns]


def write(file: Path, rows: list[dict]) -> Path:
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    else:
        file.write_text(json.dumps(rows))
    return file


def prepare(output: Path, *options, **files: Path) -> dict[str, list[dict]]:
    """Prepare the sets that have files; return their rows."""
    sources = [part for name, file in files.items() for part in (f"--{name}", file)]
    command = ["--output", output, "--only", *files, *sources, *options]
    prepare_data.prepare(prepare_data.parse_args(list(map(str, command))))
    return {name: pq.read_table(output / f"{name}.parquet").to_pylist() for name in files}


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize(("name", "origin"), ORIGINS_OF_SETS)
def test_every_published_form_becomes_verls_format(tmp_path, name, origin, suffix):
    data_set, pairs = SETS[name], problems(30, name)
    file = write(tmp_path / f"raw{suffix}", [ORIGINS[origin](*pair) for pair in pairs])
    rows = prepare(tmp_path / "data", "--subset", **{name: file})[name]
    assert rows == [
        {
            "data_source": data_set.data_source,
            "prompt": [{"role": "user", "content": f"{data_set.before}{question}{data_set.after}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": data_set.split, "index": index, "question": question},
        }
        for index, (question, answer) in enumerate(pairs)
    ]


def test_verl_can_join_the_files(tmp_path):
    raw = {}
    for name, data_set in SETS.items():
        row = ORIGINS[data_set.columns[0].origin]
        raw[name] = write(tmp_path / f"{name}.json", [row(*pair) for pair in problems(30, name)])
    prepare(tmp_path / "data", "--subset", **raw)
    files = [str(tmp_path / f"data/{name}.parquet") for name in raw]
    # As verl's RLHFDataset does.
    parts = [datasets.Dataset.from_parquet(file, cache_dir=str(tmp_path / "cache")) for file in files]
    joined = datasets.concatenate_datasets(parts)
    assert set(joined["data_source"]) == {data_set.data_source for data_set in SETS.values()}


@pytest.mark.parametrize("data_set", SETS.values(), ids=SETS)
def test_verls_scorer_wants_the_form_that_the_prompt_asks_for(data_set):
    def is_right(response: str) -> bool:
        score = default_compute_score(data_set.data_source, f"Some steps.\n{response}", "204")
        return (score["score"] if isinstance(score, dict) else score) == 1

    assert is_right(data_set.reply("204"))
    assert not is_right(data_set.reply("205"))
    assert not is_right("It is 204.")
    form = "\\boxed{}" if "boxed" in data_set.reply("") else "Answer: $Answer"
    assert form in data_set.before + data_set.after


@pytest.mark.parametrize(
    ("name", "origin", "copies"),
    [("dapo", "BytedTsinghua-SIA/DAPO-Math-17k", 100), ("aime24", "BytedTsinghua-SIA/AIME-2024", 32)],
)
def test_repeated_problems_are_kept_once(tmp_path, name, origin, copies):
    pairs = problems(30, name)
    file = write(tmp_path / "raw.parquet", [ORIGINS[origin](*pair) for pair in pairs] * copies)
    rows = prepare(tmp_path / "data", "--subset", **{name: file})[name]
    assert [row["extra_info"]["question"] for row in rows] == [question for question, _ in pairs]


def test_problems_with_different_answers_are_refused_or_left_out(tmp_path):
    pairs = [*problems(30, "x"), ("a riddle", "1"), ("another", "5"), ("a riddle", "2"), ("a riddle", "1")]
    file = write(tmp_path / "raw.json", [ORIGINS["open-r1/DAPO-Math-17k-Processed"](*pair) for pair in pairs])
    with pytest.raises(prepare_data.DataError, match=r"--drop-conflicts.*\n  \['1', '2'\]: a riddle$"):
        prepare(tmp_path / "data", "--subset", dapo=file)
    kept = prepare(tmp_path / "data", "--subset", "--drop-conflicts", dapo=file)["dapo"]
    assert [row["extra_info"]["question"] for row in kept] == [q for q, _ in pairs if q != "a riddle"]


@pytest.mark.parametrize(
    ("answer", "written"),
    [("025", "25"), ("0", "0"), ("000", "0"), (r"336^\circ", "336"), (r"336^{\circ}", "336"), (70.0, "70"), (7, "7")],
)
def test_aime_answers_are_plain_integers(tmp_path, answer, written):
    file = write(tmp_path / "raw.json", [{"question": "q", "answer": answer}])
    assert prepare(tmp_path, "--subset", aime25=file)["aime25"][0]["reward_model"]["ground_truth"] == written


REFUSED = {
    "unknown columns": ("math500", [{"problem": "q", "target": "1"}], "found the columns problem, target; expected"),
    "one more column": ("aime25", [{"problem": "q", "answer": "1", "hint": "?"}], "opencompass/AIME2025: question"),
    "no text": ("math500", [{"problem": "q", "answer": "1"}, {"problem": " ", "answer": "1"}], "row 1: the problem is"),
    "no answer": ("math500", [{"problem": "q", "answer": None}], "row 0: the answer is empty"),
    "no AIME answer": ("aime25", [{"problem": "q", "answer": "1000"}], "'1000' is no AIME answer"),
    "a fraction": ("aime25", [{"problem": "q", "answer": 0.5}], "'0.5' is no AIME answer"),
    "an answer that the scorer misreads": ("math500", [{"problem": "q", "answer": "}"}], "does not recognise"),
    "an instruction in each problem": (
        "math500",
        [{"problem": f"{q} Put your answer within boxes.", "answer": a} for q, a in problems(10, "x")],
        "looks like an instruction",
    ),
    "another instruction in the chat": (
        "dapo",
        [{"prompt": [{"role": "user", "content": prepare_data.ANSWER_BEFORE + "q"}], "reward_model": {}}],
        "has an instruction, but not the one",
    ),
    "a chat of two": ("dapo", [{"prompt": chat("q") * 2, "reward_model": {"ground_truth": "1"}}], "one user message"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    name, rows, message = REFUSED[case]
    file = write(tmp_path / "raw.json", rows)
    with pytest.raises(prepare_data.DataError, match=message):
        prepare(tmp_path / "data", "--subset", **{name: file})
    assert not (tmp_path / "data").exists()


def test_numbers_of_problems(tmp_path):
    origin = ORIGINS["math-ai/aime25"]
    short = write(tmp_path / "short.jsonl", [origin(*pair) for pair in problems(29, "x")])
    with pytest.raises(prepare_data.DataError, match="found 29 problems; the whole set has 30"):
        prepare(tmp_path / "data", aime25=short)
    whole = write(tmp_path / "whole.jsonl", [origin(*pair) for pair in problems(30, "x")])
    assert len(prepare(tmp_path / "data", aime25=whole)["aime25"]) == 30


def test_training_problems_that_contain_a_validation_problem_are_left_out(tmp_path, capsys):
    validation = [*problems(30, "x"), (r"Compute $\tan 60^\circ$.", "3")]
    training = [
        *problems(30, "y"),
        (r"compute \(\tan  60^\circ\)", "3"),
        (r"Compute $\tan 60^\circ$ The original answer is $\sqrt{k}$, give k.", "3"),
        (r"Compute $\tan 61^\circ$.", "4"),
    ]
    rows = prepare(
        tmp_path / "data",
        "--subset",
        math500=write(tmp_path / "v.json", [ORIGINS["HuggingFaceH4/MATH-500"](*pair) for pair in validation]),
        dapo=write(tmp_path / "t.json", [ORIGINS["open-r1/DAPO-Math-17k-Processed"](*pair) for pair in training]),
    )
    kept = [row["extra_info"]["question"] for row in rows["dapo"]]
    assert kept == [question for question, _ in (*training[:30], training[-1])]
    assert len(rows["math500"]) == len(validation)
    assert "2 contain a problem of math500 and are left out" in capsys.readouterr().out


def test_finished_files_are_kept_and_unfinished_ones_made(tmp_path):
    data, origin = tmp_path / "data", ORIGINS["math-ai/aime25"]
    good = write(tmp_path / "good.json", [origin(*pair) for pair in problems(30, "x")])
    bad = write(tmp_path / "bad.json", [{"prompt": "q", "solution": ""}])
    data.mkdir()
    (data / "aime25.unfinished").write_text("a run was killed while it wrote this")

    with pytest.raises(prepare_data.DataError, match="dapo, row 0"):
        prepare(data, aime25=good, dapo=bad)
    assert [file.name for file in data.iterdir()] == ["aime25.parquet"]

    made = (data / "aime25.parquet").stat()
    moved = good.rename(tmp_path / "data" / "good.json")
    prepare(data, aime25=moved)
    assert (data / "aime25.parquet").stat() == made

    other = write(tmp_path / "good.json", [origin(*pair) for pair in problems(30, "z")])
    with pytest.raises(prepare_data.DataError, match="pass --force"):
        prepare(data, aime25=other)
    assert (data / "aime25.parquet").stat() == made
    assert "+z" in prepare(data, "--force", aime25=other)["aime25"][0]["prompt"][0]["content"]


def test_training_data_is_made_again_when_the_validation_data_changes(tmp_path):
    training = [ORIGINS["open-r1/DAPO-Math-17k-Processed"](*pair) for pair in problems(30, "y")]
    dapo = write(tmp_path / "t.json", training)
    sets = [[ORIGINS["math-ai/aime25"](*pair) for pair in problems(30, topic)] for topic in "xz"]
    first, second = (write(tmp_path / f"{index}.json", rows) for index, rows in enumerate(sets))
    prepare(tmp_path / "data", "--subset", aime25=first, dapo=dapo)
    prepare(tmp_path / "data", "--subset", "--force", aime25=second)
    with pytest.raises(prepare_data.DataError, match="dapo.parquet was made from"):
        prepare(tmp_path / "data", "--subset", aime25=second, dapo=dapo)


def test_the_hubs_loader_with_and_without_a_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pairs, processed, aime = problems(30, "x"), ORIGINS["open-r1/DAPO-Math-17k-Processed"], ORIGINS["math-ai/aime25"]
    (tmp_path / "all").mkdir()
    write(tmp_path / "all/train-00000-of-00001.parquet", [processed(*pair) for pair in pairs])
    write(tmp_path / "test.jsonl", [aime(*pair) for pair in pairs])
    card = "---\nconfigs:\n{}---\n"
    entry = "- config_name: {}\n  data_files:\n  - split: {}\n    path: {}\n"
    for name, config, split, path in (("dapo", "all", "train", "all/train-*"), ("aime25", None, "test", "test.jsonl")):
        (tmp_path / "README.md").write_text(card.format(entry.format(config or "default", split, path)))
        local = dataclasses.replace(SETS[name], hub=(str(tmp_path), config, split))
        rows = prepare_data._rows(local, None)
        assert prepare_data._problems(local, rows, drop_conflicts=False) == dict(pairs)


def run(*options, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, prepare_data.__file__, *options]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_without_a_hub_the_error_names_the_option_for_local_files(tmp_path):
    ended = run("--output", tmp_path, HF_HUB_OFFLINE="1")
    assert ended.returncode == 1 and "--math500 FILE" in ended.stderr and "Traceback" not in ended.stderr


def test_help_names_sources_and_sizes():
    shown = run("--help").stdout
    assert "open-r1/DAPO-Math-17k-Processed" in shown and "17,398" in shown and "--aime25 aime2025-I.jsonl" in shown
