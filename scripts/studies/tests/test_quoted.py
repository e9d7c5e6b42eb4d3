# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What README, docs/ and the studies' own pages quote is what the committed records say."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd

STUDIES = Path(__file__).parents[1]
ROOT = STUDIES.parents[1]
sys.path.insert(0, str(STUDIES))

import claims  # noqa: E402

from fspo_verl.analysis import conclusion, runs  # noqa: E402
from fspo_verl.analysis.verdict import verdict_of  # noqa: E402

README, RESULTS = "README.md", "docs/results.md"


def says(page: str, *sentences: str) -> None:
    """Each sentence stands on the page, wherever its lines break."""
    text = " ".join((ROOT / page).read_text().replace("\n> ", "\n").split())
    missing = [sentence for sentence in sentences if sentence not in text]
    assert not missing, missing


# --- one task ---------------------------------------------------------------------------------------------------------


def test_whether_losses_differ():
    def values(name: str, metric: str) -> tuple[pd.DataFrame, dict]:
        found = json.loads((STUDIES / name / f"{name}.json").read_text())
        return pd.DataFrame(found["values"]).pivot(index="seed", columns="loss", values=metric), found

    table, found = values("comparison_16_steps", "accuracy_area")
    all_six, _ = claims.permuted_within_seeds(table.to_numpy())
    five, _ = claims.permuted_within_seeds(table.drop(columns="no_clip").to_numpy())
    set_before = pd.DataFrame(found["differences"]).set_index(["metric", "loss"]).loc[("accuracy_area", "no_clip")]
    assert all_six < 0.0001
    says(README, "(p < .0001)", f"p = {set_before.p:.2f}")
    says(
        RESULTS,
        f"p < .0001 for all six, {five:.3f} for the five that clip",
        f"lower in each of six seeds, by {set_before.difference:.2f} on average",
        f"adjusted for five losses p = {set_before.p:.2f}, no verdict",
        "fixed_band reaches {fixed_band:.2f}, gspo {gspo:.2f}, fspo {fspo:.2f}".format(**table.mean()),
    )
    four, _ = values("comparison", "accuracy")
    chance = np.sqrt(four.var().mean() / len(four)) * claims.expected_range(four.shape[1])
    says(RESULTS, f"Six means end within {np.ptp(four.mean()):.3f} of each other")
    says(RESULTS, f"equal losses would spread by {chance:.3f}")


# --- the law ----------------------------------------------------------------------------------------------------------


def test_the_law():
    """Temperature 1, mini-batches of a rollout that was trained with GRPO's gradient, texts that do not loop."""
    found = {}
    for where, folder in {"CPU": "law", "GPU": "law/long"}.items():
        for table, names in {"numbers": ["kind", "quantity"], "fairness": ["kind", "width"]}.items():
            rows = pd.read_csv(STUDIES / folder / f"{table}.csv")
            rows = rows[(rows.temperature == 1) & (rows.direction == "grpo") & (rows.mini_batch == 4)]
            found[where, table] = rows[rows.part == "plain"].set_index(names)

    def within(kind: str, where: str, longest: str) -> str:
        row = found[where, "numbers"].loc[(kind, f"p within responses, to {longest} tokens")]
        return f"{row.value:.2f}", f"{row.lower:.2f}", f"{row.upper:.2f}"

    (cpu, *on_cpu), (gpu, *on_gpu), (long, *on_long) = (
        within("text", *of) for of in (("CPU", "511"), ("GPU", "511"), ("GPU", "2047"))
    )
    says(
        RESULTS,
        f"like L^{cpu} on the CPU (95% interval {' to '.join(on_cpu)})",
        f"L^{gpu} on the GPU ({' to '.join(on_gpu)})",
        f"to 2,047 like L^{long} ({' to '.join(on_long)})",
        f"Within chat answers it is L^{within('chat', 'CPU', '511')[0]} and L^{within('chat', 'GPU', '511')[0]}"
        " to 511 tokens",
    )
    fairness = found["CPU", "fairness"]
    even = fairness.loc[("all", "fitted")]
    says(
        RESULTS,
        f"long texts more (k = {fairness.k['text', 'sqrt(L)']:.2f})",
        f"short chat answers more (k = {fairness.k['chat', 'sqrt(L)']:.2f})",
        f"even in length (k = {even.k:.2f}), and clips solutions {even.steps / even.text:.1f} times as often as texts",
    )


# --- what other pages quote -------------------------------------------------------------------------------------------


def rows_of(study: str, after: str) -> list[list[str]]:
    """Cells of the table on a study's page after a text, without the heads."""
    table = (STUDIES / study / "README.md").read_text().partition(after)[2].partition("<!-- end")[0]
    return [row.split("|")[1:-1] for row in re.findall(r"^\|.*\|$", table, flags=re.MULTILINE)][2:]


def test_the_sentence_of_committed_records():
    folder = "tests/recorded/grpo-4-float32"
    says("docs/measure.md", verdict_of(runs.read_run(ROOT / folder, "")).sentence, f"`fspo-verl report {folder}`")


def test_from_where_on_a_cause_is_concluded():
    says(
        "docs/measure.md",
        f"{conclusion.SHARE_NOT_FINITE:.1%} of the responses or more hold NaN or inf",
        f"{conclusion.SHARE_CUT_OFF:.0%} or more fill what they were allowed",
        f"or {conclusion.SHARE_REJECTED:.0%} are rejected by",
    )


def test_upstream_scripts_that_train():
    counts = [int(count) for *_, count in rows_of("upstream_scripts", "**Answer**")]
    says("docs/install.md", f"has {sum(counts)} scripts that train a policy. {counts[0]} of them train fspo")


def test_bytes_of_a_record():
    folders = sorted((ROOT / "tests/recorded").glob("*/"))
    sizes = [sum(file.stat().st_size for file in folder.glob("*.parquet")) for folder in folders]
    each = [size / len(runs.read_run(folder, "").records) for size, folder in zip(sizes, folders, strict=True)]
    says("docs/scripts.md", f"Records take {min(each):.0f} to {max(each):.0f} bytes of disk per response")


def test_the_law_of_long_texts(capsys):
    claims.law()
    (found,) = re.findall(r"\d+ responses to \d+ prompts", capsys.readouterr().out)
    says(RESULTS, f"The last rests on {found}.")
