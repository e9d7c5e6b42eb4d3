# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the records say: prints the verdicts and tables, and draws docs/tasks.png.

python scripts/studies/tasks/analyse.py > scripts/studies/tasks/results.md
"""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from regimes import PRIMARY, RECORDED, REGIMES, TRANSFORMERS

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "compare"))
from measures import CONFIDENCE, MIN_SEEDS, adjusted_p, sign_flip_interval  # noqa: E402

from fspo_verl.output import markdown_table, write_whole  # noqa: E402
from fspo_verl.report.figures import AMBER, BROWN, GREY  # noqa: E402

MARGIN = 0.02  # of success, within which two clips are equivalent
MATCHED_WITHIN = 0.01  # of the clip rate of all tasks together
END = 5  # rollouts whose mean is the end
KEY = ["regime", "arm", "seed", "task"]
FIGURE = HERE.parents[2] / "docs/tasks.png"


def read(folder: Path, names: Sequence[str] | None = None) -> pd.DataFrame:
    """The records of all regimes, with a column ``regime``."""
    names = list(names or REGIMES)
    files = {folder / REGIMES[name].file: name for name in names}
    tables = {name: pd.read_parquet(file) for file, name in files.items() if file.exists()}
    if not tables:
        raise SystemExit(f"{folder} holds no records: run.py makes them")
    # A file of several regimes names them itself.
    named = [table if "regime" in table else table.assign(regime=name) for name, table in tables.items()]
    records = pd.concat(named, ignore_index=True)
    return records[records.regime.isin(names)]


def per_task(records: pd.DataFrame) -> pd.DataFrame:
    """A row per regime, arm, seed and task: the end points, and clip rates of the run and of its first rollouts."""
    records = records.sort_values([*KEY, "rollout"])
    groups = records.groupby(KEY)
    found = groups.agg(
        length=("length", "first"), live=("live", "sum"), clipped=("clipped", "sum"), rollouts=("rollout", "nunique")
    )
    last = groups.rollout.transform("max")
    for name, kept in {
        "area": last >= 0,
        "later": records.rollout >= RECORDED,
        "end": records.rollout > last - END,
    }.items():
        found[name] = records[kept].groupby(KEY).success.mean()
    found["rate"] = found.clipped / found.live
    early = records[records.rollout < RECORDED].groupby(KEY)[["clipped", "live"]].sum()
    found["early_rate"] = early.clipped / early.live
    whole = early.groupby(level=KEY[:3])[["clipped", "live"]].sum()
    found = found.reset_index()
    found["early_rate_of_all"] = (
        (whole.clipped / whole.live).loc[list(map(tuple, found[KEY[:3]].to_numpy()))].to_numpy()
    )
    return found


def rates(cells: pd.DataFrame) -> pd.DataFrame:
    """Per regime and arm: clip rate by task and of all, and whether the arm is compared at equal rates."""
    total = cells.groupby(["regime", "arm"])[["clipped", "live"]].sum()
    by_task = cells.groupby(["regime", "arm", "task"])[["clipped", "live"]].sum()
    table = (by_task.clipped / by_task.live).unstack()
    table["all"] = total.clipped / total.live
    wished = pd.Series({name: np.nan if regime.rate is None else regime.rate for name, regime in REGIMES.items()})
    wished = wished.reindex(table.index.get_level_values("regime")).to_numpy()
    table["compared"] = np.isnan(wished) | ((table["all"] - wished).abs() <= MATCHED_WITHIN) | (table["all"] == 0)
    return table


def baseline_of(regime: str) -> str:
    """The arm that the others are compared with."""
    if REGIMES[regime].tasks.speeds:
        return "measured"
    return "fspo" if REGIMES[regime].rate is None else "sqrt"


def labels(regime: str) -> dict[int, str]:
    """What tables call the tasks."""
    tasks = REGIMES[regime].tasks
    speeds = tasks.speeds or [1.0] * len(tasks.lengths)
    pairs = zip(tasks.lengths, speeds, strict=True)
    return {task: f"{length} fast" if speed > 1 else str(length) for task, (length, speed) in enumerate(pairs)}


def differences(cells: pd.DataFrame, compared: pd.Series) -> pd.DataFrame:
    """A row per regime, arm, task and end point: the paired difference to the baseline, told apart or not.

    p is adjusted for all arms and tasks of all primary regimes at once, and for those of each other regime.
    """
    rows = []
    for endpoint in ("area", "end"):
        wide = cells.pivot_table(index="seed", columns=["regime", "arm", "task"], values=endpoint)
        pairs = {}
        for regime, arm, task in wide.columns:
            base = baseline_of(regime)
            both = (regime, base, task) in wide.columns and compared[regime, arm] and compared[regime, base]
            if arm != base and both:
                pairs[regime, arm, task] = wide[regime, arm, task] - wide[regime, base, task]
        pairs = pd.DataFrame(pairs).dropna(axis=1)
        families = np.where(
            pairs.columns.get_level_values(0).isin(PRIMARY), "primary", pairs.columns.get_level_values(0)
        )
        for family in pd.unique(families):
            own = pairs.loc[:, families == family]
            for (name, pair), p in zip(own.items(), adjusted_p(own.to_numpy()), strict=True):
                low, high = sign_flip_interval(pair.to_numpy())
                verdict = "higher" if pair.mean() > 0 else "lower"
                if p > 1 - CONFIDENCE:
                    verdict = "not shown"
                if -MARGIN <= low and high <= MARGIN:
                    verdict += ", equivalent"
                rows.append((endpoint, *name, pair.mean(), low, high, p, verdict, len(pair)))
    return pd.DataFrame(rows, columns="endpoint regime arm task difference lower upper p verdict seeds".split())


# --- the meter --------------------------------------------------------------------------------------------------------

UNCLIPPED = ("none", "random", "cispo")  # arms that take nothing by length: the meter has nothing to say of them


TOKEN_CLIPS = ("grpo", "dppo")


def meter(cells: pd.DataFrame, regimes: Sequence[str], draws: int = 2000) -> pd.DataFrame:
    """Slope of success after the records on the clip rate in them, over arms, and its interval over seeds.

    Both are differences to the mean over the arms that clip, of the same regime, seed and task. The clip rate of a task
    is relative to that of all tasks. A slope of -0.5 says that a task clipped by 10 points more is behind by 5 points.
    """
    compared = rates(cells).compared
    compared = compared[compared].index
    used = cells[cells.regime.isin(regimes) & ~cells.arm.isin(UNCLIPPED) & ~cells.arm.str.contains(", then")]
    used = used[pd.MultiIndex.from_frame(used[["regime", "arm"]]).isin(compared)].copy()
    used["x"] = used.early_rate - used.early_rate_of_all
    for name in ("x", "later"):
        used[name] -= used.groupby(["regime", "seed", "task"])[name].transform("mean")
    rng, rows = np.random.default_rng(0), []
    groups = [
        ("all", used),
        *used.groupby("regime"),
        *((f"{length} tokens", g) for length, g in used.groupby("length")),
    ]
    for name, own in groups:
        sums = own.assign(xy=own.x * own.later, xx=own.x**2).groupby("seed")[["xy", "xx"]].sum().to_numpy()
        chosen = sums[rng.integers(0, len(sums), (draws, len(sums)))].sum(1)
        low, high = np.quantile(chosen[:, 0] / chosen[:, 1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        correlation = np.corrcoef(own.x, own.later)[0, 1]
        rows.append((name, sums[:, 0].sum() / sums[:, 1].sum(), low, high, correlation, len(own)))
    return pd.DataFrame(rows, columns="of slope lower upper correlation points".split())


def acting(cells: pd.DataFrame) -> pd.DataFrame:
    """Runs that were calibrated after the first rollouts, against those that went on: success from there on."""
    rows = []
    for (regime, arm), own in cells[cells.arm.str.contains(", then")].groupby(["regime", "arm"]):
        before = cells[(cells.regime == regime) & (cells.arm == arm.split(",")[0])]
        if before.empty:
            continue
        for endpoint in ("later", "end"):
            pairs = own.pivot(index="seed", columns="task", values=endpoint)
            pairs = (pairs - before.pivot(index="seed", columns="task", values=endpoint)).dropna()
            pairs = pairs.rename(columns=labels(regime) if regime in REGIMES else {})
            pairs["mean of the tasks"] = pairs.mean(axis=1)
            for (task, pair), p in zip(pairs.items(), adjusted_p(pairs.to_numpy()), strict=True):
                rows.append((regime, arm, endpoint, task, pair.mean(), *sign_flip_interval(pair.to_numpy()), p))
    return pd.DataFrame(rows, columns="regime arm endpoint task difference lower upper p".split())


# --- through verl -----------------------------------------------------------------------------------------------------

VERL_MARGIN = 0.03  # of accuracy, within which two clips are equivalent there


def through_verl(records: pd.DataFrame) -> Iterator[str]:
    """Tables of ``verl.parquet``: accuracy per kind of problem, the mean over the validations after the first one."""
    records = records[records.step > 0].rename(columns={"accuracy": "success", "kind": "task"})
    cells = per_task(records.assign(rollout=records.step - 1, length=records.task, regime="verl"))
    cells = cells[cells.groupby("arm").seed.transform("nunique") >= MIN_SEEDS]
    arms, kinds = list(dict.fromkeys(cells.arm)), ["short", "long"]
    if not arms:
        return
    base = "sqrt" if "sqrt" in arms else "linear"
    found, areas = rates(cells).loc["verl"], cells.pivot_table("area", "seed", ["arm", "task"])
    pairs = pd.DataFrame({key: areas[key] - areas[base, key[1]] for key in areas if key[0] != base}).dropna()
    p = dict(zip(pairs, adjusted_p(pairs.to_numpy()), strict=True)) if len(pairs) else {}
    yield "## Through verl\n"
    yield f"{cells.seed.nunique()} seeds, at most. Difference to {base}, over the seeds that all arms have.\n"
    rows = []
    for arm in arms:
        row = [arm, str(cells.seed[cells.arm == arm].nunique()), *(f"{found[key][arm]:.1%}" for key in ("all", *kinds))]
        row += [f"{areas[arm, kind].mean():.3f}" for kind in kinds]
        for kind in kinds if arm != base else []:
            pair = pairs[arm, kind].to_numpy()
            low, high = sign_flip_interval(pair)
            equivalent = ", equivalent" * (-VERL_MARGIN <= low and high <= VERL_MARGIN)
            row.append(f"{pair.mean():+.3f} [{low:+.3f}, {high:+.3f}], p {p[arm, kind]:.3f}{equivalent}")
        rows.append(row + [""] * (9 - len(row)))
    header = ["clip", "seeds", "clipped, all", *(f"clipped, {kind}" for kind in kinds)]
    yield (
        markdown_table(header + [f"{text}, {kind}" for text in ("accuracy", "difference") for kind in kinds], rows)
        + "\n"
    )
    slope = meter(cells, ["verl"]).iloc[0]
    yield (
        f"The meter's slope is {slope.slope:+.2f} [{slope.lower:+.2f}, {slope.upper:+.2f}], its correlation "
        f"{slope.correlation:+.2f} ({slope.points} points).\n"
    )
    acted = acting(cells)
    if len(acted):
        yield "Acting on the first ten steps, against going on: accuracy from then on (later), and at the end.\n"
        rows = [[r.arm, r.endpoint, r.task, _signed(r), f"{r.p:.3f}"] for r in acted.itertuples()]
        yield markdown_table(["arm", "end point", "problems", "difference", "p"], rows)


# --- the predictions --------------------------------------------------------------------------------------------------


def order(told: pd.DataFrame, regime: str) -> str:
    """Whether the shortest task has the order linear < sqrt < fixed, and the longest one has fixed below sqrt."""
    own = told[(told.regime == regime) & (told.endpoint == "area")].set_index(["arm", "task"])
    wished = {("fixed", 0): 1, ("fixed", own.index.get_level_values("task").max()): -1, ("linear", 0): -1}
    if not {*wished} <= {*own.index}:
        return "arms are missing, or not compared"
    apart = {key: np.sign(own.difference[key]) * (own.p[key] <= 1 - CONFIDENCE) for key in wished}
    if any(apart[key] == -sign for key, sign in wished.items()):
        return "contradicted"
    return "confirmed" if all(apart[key] == sign for key, sign in wished.items()) else "not shown"


def predicted(cells: pd.DataFrame, told: pd.DataFrame, found: pd.DataFrame) -> Iterator[list[str]]:
    """A row per regime with a rate."""
    for regime in [name for name, setting in REGIMES.items() if setting.rate and name in set(cells.regime)]:
        tasks = sorted(set(cells.task[cells.regime == regime]))
        factor = found.loc[regime][tasks].max(axis=1) / found.loc[regime][tasks].min(axis=1)
        means = cells[cells.regime == regime].pivot_table(index="seed", columns="arm", values="area")
        row = [regime, order(told, regime)]
        row += [f"{factor[arm]:.2f}" if arm in factor else "" for arm in ("sqrt", "measured")]
        for arm, base in (("linear", "sqrt"), ("measured", "sqrt"), ("measured", "fixed")):
            pair = means[arm] - means[base] if {arm, base} <= {*means} else pd.Series(dtype=float)
            low, high = sign_flip_interval(pair.to_numpy())
            row.append(f"{pair.mean():+.3f} [{low:+.3f}, {high:+.3f}]" if len(pair) else "")
        short = cells[(cells.regime == regime) & (cells.task == 0)].pivot_table("area", "seed", "arm")
        pair = short["random"] - short["fixed"] if {"random", "fixed"} <= {*short} else pd.Series(dtype=float)
        low, high = sign_flip_interval(pair.to_numpy())
        yield [*row, f"{pair.mean():+.3f} [{low:+.3f}, {high:+.3f}]" if len(pair) else ""]


# --- tables and figure ------------------------------------------------------------------------------------------------


def _signed(row, digits: int = 3) -> str:
    return f"{row.difference:+.{digits}f} [{row.lower:+.{digits}f}, {row.upper:+.{digits}f}]"


def tables(cells: pd.DataFrame) -> Iterator[str]:
    """Markdown."""
    found = rates(cells)
    told = differences(cells, found.compared)
    for regime in [name for name in REGIMES if name in set(cells.regime)]:
        own, lengths = cells[cells.regime == regime], pd.Series(labels(regime))
        setting, base = REGIMES[regime], baseline_of(regime)
        yield f"## {regime}{' (primary)' if regime in PRIMARY else ''}\n"
        yield (
            f"{setting.updates} updates per rollout, learning rate {setting.learning_rate:g}, "
            f"{'own weights' if not (setting.tasks.shared or regime in TRANSFORMERS) else 'shared weights'}, "
            f"{'published ranges' if setting.rate is None else f'{setting.rate:.0%} clipped'}; "
            f"{own.seed.nunique()} seeds, {own.rollouts.max()} rollouts. Success over the run, difference to {base}.\n"
        )
        header = ["clip", "clipped, all", *(f"clipped, {length}" for length in lengths)]
        header += [f"success, {length}" for length in lengths] + [f"difference, {length}" for length in lengths] + ["p"]
        rows = []
        for arm in [arm for arm in dict.fromkeys(own.arm)]:
            rate, mine = found.loc[regime, arm], told[(told.regime == regime) & (told.arm == arm)]
            areas = own[own.arm == arm].groupby("task").area.mean()
            row = [arm, f"{rate['all']:.3f}", *(f"{rate[task]:.2f}" for task in lengths.index)]
            row += [f"{areas[task]:.3f}" for task in lengths.index]
            of_area = mine[mine.endpoint == "area"].set_index("task")
            row += [_signed(of_area.loc[task]) if task in of_area.index else "" for task in lengths.index]
            row += [", ".join(f"{p:.3f}" for p in of_area.p)]
            rows.append(row if rate.compared else [*row[: 2 + 2 * len(lengths)], *["not compared"] * len(lengths), ""])
        yield markdown_table(header, rows) + "\n"
        ends = told[(told.regime == regime) & (told.endpoint == "end")].pivot(index="arm", columns="task")
        if len(ends):
            yield f"At the end (mean of the last {END} rollouts):\n"
            order = [arm for arm in dict.fromkeys(own.arm) if arm in ends.index]
            text = ends.difference.map("{:+.3f}".format) + " (" + ends.verdict + ")"
            rows = [[arm, *(text.loc[arm, task] for task in lengths.index)] for arm in order]
            yield markdown_table(["clip", *map(str, lengths)], rows) + "\n"
    yield "## Predictions\n"
    header = ["regime", "order linear < sqrt < fixed on 8 tokens", "largest / smallest clip rate, sqrt", "measured"]
    header += ["mean of the tasks, linear - sqrt", "measured - sqrt", "measured - fixed", "8 tokens, random - fixed"]
    yield markdown_table(header, predicted(cells, told, found)) + "\n"
    equal = [name for name in PRIMARY if REGIMES[name].rate and name in set(cells.regime)]
    if equal:
        yield "## The meter\n\nSuccess after the first ten rollouts on the clip rate in them, at equal rates.\n"
        shown = {"As planned": (cells, equal), "Without token clips": (cells[~cells.arm.isin(TOKEN_CLIPS)], equal)}
        if {*TRANSFORMERS} & {*cells.regime}:
            shown["Small transformers"] = cells, TRANSFORMERS
        for title, (used, of) in shown.items():
            rows = [
                [r.of, f"{r.slope:+.2f} [{r.lower:+.2f}, {r.upper:+.2f}]", f"{r.correlation:+.2f}", str(r.points)]
                for r in meter(used, of).itertuples()
            ]
            yield f"{title}:\n\n" + markdown_table(["of", "slope", "correlation", "points"], rows) + "\n"
    acted = acting(cells)
    if len(acted):
        yield "## Acting on it, against going on\n\nSuccess after the calibration (later), and at the end.\n"
        rows = [[r.regime, r.arm, r.endpoint, r.task, _signed(r), f"{r.p:.3f}"] for r in acted.itertuples()]
        yield markdown_table(["regime", "arm", "end point", "task", "difference", "p"], rows)


SHOWN = {
    "linear": "range ~ L (GSPO)",
    "sqrt": "range ~ √L (FSPO)",
    "measured": "measured range",
    "fixed": "fixed range",
}
"""Rows of the figure, from the top: arm and what it is called."""
COLORS = (AMBER, GREY, BROWN)  # short, middle, long


def draw(cells: pd.DataFrame, regime: str) -> Figure:
    """What each clip takes of each task's success over the run, relative to training without a clip."""
    areas = cells[cells.regime == regime].pivot_table(index="seed", columns=["arm", "task"], values="area")
    lengths = cells[cells.regime == regime].groupby("task").length.first()
    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axes = figure.subplots()
    arms = [arm for arm in SHOWN if arm in areas.columns.get_level_values(0)]
    for place, arm in enumerate(arms):
        lost = np.array([100 * (areas[arm, task] - areas["none", task]) for task in lengths.index])
        means = lost.mean(1)
        axes.plot([means.min(), means.max()], [place, place], color="0.8", lw=5, zorder=1, solid_capstyle="round")
        for task, color in zip(lengths.index, COLORS, strict=True):
            low, high = sign_flip_interval(lost[task])
            at = place + 0.2 * (task - (len(lengths) - 1) / 2)  # so that none hides another
            axes.plot([low, high], [at, at], color=color, lw=2, zorder=2)
            axes.plot(means[task], at, "osD"[task], color=color, ms=9, zorder=3, mec="white")
    axes.axvline(0, color="black", lw=1)
    axes.set_yticks(range(len(arms)), [SHOWN[arm] for arm in arms], fontsize=11)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.set_xlabel("success over training, points below no clip", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    handles = [
        axes.plot([], [], "osD"[task], color=color, ms=8, label=f"{length} tokens")[0]
        for (task, length), color in zip(lengths.items(), COLORS, strict=True)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=11)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE / "records")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    args = parser.parse_args()
    cells = per_task(read(args.folder))
    complete = cells.groupby(["regime", "arm"]).seed.transform("nunique") >= MIN_SEEDS
    cells = cells[complete]
    print("# Who learns under which clip: all numbers\n\nWritten by `analyse.py`.\n")
    print("\n".join(tables(cells)))
    if (through := args.folder / "verl.parquet").exists() and (found := [*through_verl(pd.read_parquet(through))]):
        print("\n".join(["", *found]).rstrip())
    if {*SHOWN, "none"} <= set(cells.arm[cells.regime == PRIMARY[0]]):
        picture = io.BytesIO()
        draw(cells, PRIMARY[0]).savefig(picture, dpi=150, format="png", metadata={"Software": None})
        write_whole([(args.figure, picture.getvalue())])


if __name__ == "__main__":
    main()
