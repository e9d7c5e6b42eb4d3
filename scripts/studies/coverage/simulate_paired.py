# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""How often the intervals of scripts/compare hold the truth, with a handful of seeds, on simulated differences.

A law is a distribution of the difference between two losses in one seed. Of each law and number of seeds many
comparisons are drawn. Writes FOLDER/paired_coverage.json, and the table of FOLDER/results.md between its two marks.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "compare"))
BEGIN, END = "<!-- begin of what `simulate_paired.py` writes -->", "<!-- end of what simulate_paired writes -->"
SEEDS = (6, 8, 12)
# A law draws [comparisons, seeds] differences from a generator; then its mean.
LAWS: dict[str, tuple[Callable, float]] = {
    "normal": (lambda rng, size: rng.normal(0, 0.1, size), 0.0),
    "heavy tails (Student's t, 3)": (lambda rng, size: 0.1 * rng.standard_t(3, size), 0.0),
    "skewed (log-normal)": (lambda rng, size: 0.1 * rng.lognormal(0, 1, size), 0.1 * math.exp(0.5)),
    "counts (0 or 1, with 0.7 and 0.5)": (
        lambda rng, size: (rng.random(size) < 0.7) * 1.0 - (rng.random(size) < 0.5),
        0.2,
    ),
    "one seed in ten collapses, with either loss": (
        lambda rng, size: rng.normal(0, 0.1, size) + (rng.random(size) < 0.1) * 0.8 - (rng.random(size) < 0.1) * 0.8,
        0.0,
    ),
    "one seed in ten collapses, with one loss only": (
        lambda rng, size: rng.normal(0, 0.1, size) - (rng.random(size) < 0.1) * 0.8,
        -0.08,
    ),
}
COLUMNS = {  # of a row
    "flips": "over seeds: all flips of signs",
    "student": "the same by Student's t",
    "width": "width of the first, by that of the second (median)",
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--comparisons", type=int, default=2000, help="simulated per law and number of seeds (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=HERE, metavar="FOLDER", help="default: the study's folder")
    args = parser.parse_args(argv)
    if args.comparisons < 1:
        parser.error(f"--comparisons={args.comparisons} has to be 1 or more")
    return args


def main() -> None:
    args = parse_args()
    from tqdm import tqdm  # not at the top: --help must work before anything is installed

    from fspo_verl.output import between, write_whole

    cells = [(law, seeds) for law in LAWS for seeds in SEEDS]
    rows = [coverage(law, seeds, args.comparisons, args.seed) for law, seeds in tqdm(cells, unit="row")]
    result = {"comparisons": args.comparisons, "seed": args.seed, "rows": rows}
    page = args.output / "results.md"
    content = between(page.read_text() if page.exists() else "", BEGIN, END, table(result))
    kept = f"{json.dumps(result, indent=1)}\n"
    write_whole([(args.output / "paired_coverage.json", kept.encode()), (page, content.encode())])
    print(table(result))


def coverage(law: str, seeds: int, comparisons: int, seed: int) -> dict[str, str | int | float]:
    """Share of the comparisons whose intervals hold the true mean, and how wide they are."""
    import measures
    import numpy as np
    from scipy import stats

    draw, mean = LAWS[law]
    rng = np.random.default_rng([seed, list(LAWS).index(law), seeds])
    found = []
    for difference in draw(rng, (comparisons, seeds)):
        lower, upper = measures.sign_flip_interval(difference)
        middle, error = difference.mean(), difference.std(ddof=1) / seeds**0.5
        half = stats.t.ppf(0.975, seeds - 1) * error
        found.append(
            {
                "flips": lower <= mean <= upper,
                "student": abs(middle - mean) <= half,
                "width": (upper - lower) / (2 * half) if half else np.nan,
            }
        )
    shares = {name: float(np.mean([row[name] for row in found])) for name in ("flips", "student")}
    return {"law": law, "seeds": seeds, **shares, "width": float(np.nanmedian([row["width"] for row in found]))}


def table(result: dict) -> str:
    """The table of the page: coverage in percent, of 95% intervals."""
    from fspo_verl.output import markdown_table

    forms = {name: ".2f" if name == "width" else ".1%" for name in COLUMNS}
    rows = [
        [row["law"], str(row["seeds"]), *(format(row[name], form) for name, form in forms.items())]
        for row in result["rows"]
    ]
    header = ["differences", "seeds", *COLUMNS.values()]
    text = f"{result['comparisons']:,} simulated comparisons per row, seed {result['seed']}."
    return f"{text}\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    main()
