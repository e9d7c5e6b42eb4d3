# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What README, docs/ and the studies' own pages quote is what the committed records say."""

import json
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

STUDIES = Path(__file__).parents[1]
ROOT = STUDIES.parents[1]
sys.path[:0] = [str(STUDIES), str(STUDIES / "tasks")]

import analyse  # noqa: E402
import claims  # noqa: E402

from fspo_verl.analysis import conclusion, runs  # noqa: E402
from fspo_verl.analysis.verdict import verdict_of  # noqa: E402

README, RESULTS = "README.md", "docs/results.md"
SHORT, MIDDLE, LONG = range(3)


def says(page: str, *sentences: str) -> None:
    """Each sentence stands on the page, wherever its lines break."""
    text = " ".join((ROOT / page).read_text().replace("\n> ", "\n").split())
    missing = [sentence for sentence in sentences if sentence not in text]
    assert not missing, missing


# --- tasks ------------------------------------------------------------------------------------------------------------


@cache
def cells() -> pd.DataFrame:
    return analyse.per_task(analyse.read(STUDIES / "tasks/records"))


@cache
def rates() -> pd.DataFrame:
    return analyse.rates(cells())


@cache
def gained() -> pd.DataFrame:
    return analyse.differences(cells(), rates().compared).set_index(["endpoint", "regime", "arm", "task"]) * {
        "difference": 100, "lower": 100, "upper": 100, "p": 1, "verdict": 1, "seeds": 1
    }  # fmt: skip


def points(regime: str, arm: str, task: int) -> str:
    """How far an arm is from √L, without its sign, and the interval."""
    row = gained().loc["area", regime, arm, task]
    low, high = sorted((abs(row.lower), abs(row.upper)))
    return f"{abs(row.difference):.1f}", f"({low:.1f} to {high:.1f})"


def clipped(arm: str, *tasks: int) -> list[str]:
    return [f"{rates().loc[('many-30', arm)][task]:.0%}" for task in tasks]


def on_average(regime: str, arm: str) -> float:
    own = cells()[cells().regime == regime]
    own = own.pivot_table(index=["arm", "seed"], columns="task", values="area").mean(axis=1)
    return 100 * (own[arm] - own["sqrt"]).mean()


def test_who_pays():
    shares = {arm: clipped(arm, SHORT, LONG) for arm in ("linear", "sqrt", "measured", "fixed")}
    text = (
        "a range ∝ L takes {} of 8-token and {} of 512-token responses, √L {} and {}, a measured one {} and {}"
    ).format(*shares["linear"], *shares["sqrt"], *shares["measured"])
    says(README, text)
    text = (
        "clips {} of the short and {} of the long responses, √L {} and {}, "
        "the measured one {} and {}, a fixed one {} and {}"
    ).format(*sum(shares.values(), []))
    under, over, fixed = (points("many-30", arm, SHORT) for arm in ("linear", "measured", "fixed"))
    cost = points("many-30", "fixed", LONG)
    says(
        RESULTS,
        text,
        f"the short task learns {' points less under L '.join(under)}",
        f"{' more under the measured range '.join(over)}",
        f"{' more under the fixed one '.join(fixed)}",
        f"costs the long task {' '.join(cost)}".rstrip(")"),
    )


def test_the_figure():
    own = cells()[cells().regime == "many-30"].groupby(["arm", "task"]).area.mean().unstack()
    lost = 100 * (own.loc["none"] - own)
    words = {"linear": "{} points and that of 512 {}", "sqrt": "√L {} and {}", "measured": "a measured range {} and {}"}
    words["fixed"] = "a fixed one {} and {}"
    for arm, text in words.items():
        numbers = [f"{lost.loc[arm, task]:.0f}".replace("-0", "0") for task in (SHORT, LONG)]
        says(README, text.format(*("none" if number == "0" else number for number in numbers)))


def test_published_ranges():
    base = cells()[cells().regime == "published"].pivot_table(index="seed", columns=["arm", "task"], values="area")
    less = [100 * (base["fspo"] - base["gspo"])[task].mean() for task in (SHORT, MIDDLE, LONG)]
    of_all = [rates().loc[("published", arm), "all"] for arm in ("gspo", "fspo")]
    says(
        RESULTS,
        "{:.0f}, {:.0f} and {:.0f} points less than FSPO at 0.03".format(*less),
        "clips {:.0%} in all, FSPO {:.0%}".format(*of_all),
    )


def test_on_average_over_the_tasks():
    regimes = [name for name in analyse.PRIMARY if analyse.REGIMES[name].rate and ("sqrt" in own_arms(name))]
    above = [on_average(name, "measured") for name in regimes]
    assert all(on_average(name, "linear") < 0 for name in regimes)
    number = {4: "four", 5: "five", 6: "six"}[len(regimes)]
    says(
        RESULTS,
        f"the measured range is above √L by {min(above):.1f} to {max(above):.1f} points in {number} regimes, and L is "
        f"below √L in all {number}",
    )


def own_arms(regime: str) -> set[str]:
    return set(cells().arm[cells().regime == regime])


def test_the_meter_and_acting():
    ranges = cells()[~cells().arm.isin(analyse.TOKEN_CLIPS)]
    slope = analyse.meter(ranges, analyse.PRIMARY).set_index("of").loc["many-30"]
    low, high = sorted((-10 * slope.lower, -10 * slope.upper))
    says(RESULTS, f"clipped by 10 points more is behind by {-10 * slope.slope:.1f} later ({low:.1f} to {high:.1f})")
    acted = analyse.acting(cells())
    acted = acted[acted.endpoint == "later"].set_index(["regime", "arm", "task"])

    def change(regime: str, arm: str, task: str = "mean of the tasks") -> tuple[float, float, float]:
        row = 100 * acted.loc[(regime, arm, task), ["difference", "lower", "upper"]].astype(float)
        return row.difference, row.lower, row.upper

    from_l = change("many-30", "linear, then measured")
    short, long = (change("many-30", "linear, then measured", task)[0] for task in ("8", "512"))
    published, kept, anew = (
        change("published", f"gspo, then measured{how}") for how in ("", ", aggregation kept", ", Adam anew")
    )
    says(
        RESULTS,
        f"from L short {short:+.1f}, long {long:.1f}, on average {{:+.1f}} points ({{:.1f}} to {{:.1f}})".format(
            *from_l
        ),
        "it was {:.1f} ({:.1f} to {:.1f})".format(*published),
        "{:+.1f} with the aggregation kept ({:.1f} to {:.1f})".format(*kept),
        "{:+.1f} with Adam anew ({:.1f} to {:.1f})".format(*anew),
    )
    says(
        README,
        f"by {from_l[0]:.1f} points from L",
        f"lost {-published[0]:.1f}, as `loss_agg_mode` changed",
        f"With the mode kept, tried afterwards, it gained {kept[0]:.1f}",
    )


def test_small_transformers():
    areas = cells()[cells().regime == "transformer-reuse"].groupby(["arm", "task"]).area.mean().unstack()
    less = {
        arm: [f"{100 * (areas.loc['sqrt'] - areas.loc[arm])[task]:.0f}" for task in range(3)] for arm in areas.index
    }
    says(
        RESULTS,
        "without one they learn {}, {} and {} points less than under √L".format(*less["none"]),
        "under L {}, {} and {} less".format(*less["linear"]),
    )
    regimes = "transformer-many", "transformer-reuse"
    best = [max(set(analyse.SHOWN) & own_arms(name), key=lambda arm: on_average(name, arm)) for name in regimes]
    assert best == ["fixed"] * 2
    ordered = [analyse.order(gained().reset_index(), name) for name in regimes]
    assert ordered == ["confirmed"] * 2


def test_through_verl():
    tables = "\n".join(analyse.through_verl(pd.read_parquet(STUDIES / "tasks/records/verl.parquet")))
    fixed = next(line for line in tables.splitlines() if line.startswith("| fixed"))
    assert fixed.split("|")[2].strip() == "12" and re.search(r"p 0\.\d+, equivalent \|.*p 0\.[1-9]", fixed)
    seeds = "[twelve seeds](../scripts/studies/tasks/README.md)"
    says(RESULTS, f"with {seeds} L and a fixed range differ by no more than chance")


def test_fair_to_lengths_is_not_fair_to_tasks():
    by_task = rates().loc[("by-task", "measured")]
    shares = sorted((by_task[task] for task, label in analyse.labels("by-task").items() if "64" in label), reverse=True)
    said = "clips one of two tasks of 64 tokens by {:.0%} and the other by {:.0%}"
    says(RESULTS, said.format(*shares))


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
    says(README, f"p = {all_six:.5f}", f"p = {set_before.p:.2f}")
    says(
        RESULTS,
        f"p = {all_six:.5f} for all six, {five:.3f} for the five that clip",
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
    even = fairness.loc[("all", "measured")]
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
    folder = "scripts/studies/measured_shape/records/grpo-4-float32"
    says("docs/measure.md", verdict_of(runs.read_run(ROOT / folder, "")).sentence, f"`fspo-verl report {folder}`")


def test_from_where_on_a_cause_is_concluded():
    says(
        "docs/measure.md",
        f"{conclusion.SHARE_NOT_FINITE:.1%} of the responses or more hold NaN or inf",
        f"{conclusion.SHARE_CUT_OFF:.0%} or more fill what they were allowed",
        f"or {conclusion.SHARE_MASKED:.0%} are masked by",
    )


def test_what_a_run_clips_after_a_calibration():
    rows = rows_of("recalibrate", "<!-- recalibrate.py -->")
    once, once_4, twice, twice_4 = (
        [round(float(row[column].split("%")[0])) for row in rows if row[0].strip() == epochs]
        for column in (3, 4)
        for epochs in "14"
    )
    assert {*twice} == {10}
    says(
        "docs/measure.md",
        f"clipped {min(once)} to {max(once)}% after one calibration, "
        f"and {min(once_4)} to {max(once_4)}% with four epochs",
        f"After a second they clipped 10%, and with four epochs {min(twice_4)} to {max(twice_4)}%",
    )


def test_how_far_the_shares_of_the_clips_are_off():
    simulated = rows_of("levels", "<!-- attribution.py -->")
    assert max(float(error) for _, *errors, _ in simulated for error in errors if error.strip()) < 0.1
    says("docs/healthy.md", "off by [less than 0.1]")


def test_upstream_scripts_that_train():
    counts = [int(count) for *_, count in rows_of("upstream_scripts", "**Answer**")]
    says("docs/install.md", f"has {sum(counts)} scripts that train a policy. {counts[0]} of them train fspo")


def test_bytes_of_a_record():
    folders = sorted((STUDIES / "measured_shape/records").glob("*/"))
    sizes = [sum(file.stat().st_size for file in folder.glob("*.parquet")) for folder in folders]
    each = [size / len(runs.read_run(folder, "").records) for size, folder in zip(sizes, folders, strict=True)]
    says("docs/scripts.md", f"Records take {min(each):.0f} to {max(each):.0f} bytes of disk per response")


def test_the_law_of_long_texts(capsys):
    claims.law()
    (found,) = re.findall(r"\d+ responses to \d+ prompts", capsys.readouterr().out)
    says(RESULTS, f"The last rests on {found}.")
