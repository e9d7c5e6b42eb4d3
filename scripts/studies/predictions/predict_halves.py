# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does a band that is calibrated on one half of a run do in the other half what was predicted?

Every RUN is a folder with records. fspo-verl calibrate fits each kind of band on the earlier half of its steps (of a
single step: on every other prompt) and judges it on the rest. Here that is put side by side for several runs.
Writes FOLDER/predictions.json, and the table of FOLDER/results.md between its two marks.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """example, with the records in the repository:
  python scripts/studies/predictions/predict_halves.py scripts/studies/law/records/*/
"""
HERE = Path(__file__).resolve().parent
SHOWN = ("sqrt(L)", "L^p", "sqrt(Q) limited, -Q/2")  # in the table, besides what is recommended
BEGIN, END = "<!-- begin of what `predict_halves.py` writes -->", "<!-- end of what it writes -->"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run with records; others are passed over")
    add("--target-clip-rate", type=float, default=0.1, metavar="RATE", help="on each side (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=HERE, metavar="FOLDER", help="default: the study's folder")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    import numpy as np  # not at the top: --help must work before anything is installed
    from tqdm import tqdm

    from fspo_verl.analysis.calibrate import calibrate
    from fspo_verl.files import publish
    from fspo_verl.observe.records import read_records

    rows = []
    for folder in tqdm(args.runs, unit="run"):
        records = read_records(folder)
        if records.empty:
            continue
        try:
            result = calibrate(records, args.target_clip_rate, np.random.default_rng(args.seed))
        except ValueError as error:
            tqdm.write(f"{folder} is left out: {error}")
            continue
        for index, (fit, judgement) in enumerate(zip(result.earlier, result.judged, strict=True)):
            if judgement is not None:
                row = {"run": folder.resolve().name, "judged_on": result.halves[1]}
                row |= {"recommended": index == result.recommended, "shown": fit.shape.name in SHOWN}
                rows.append(row | _row(fit, judgement))
    if not rows:
        raise SystemExit("none of the runs has records from which a band can be calibrated")
    result = {"target": args.target_clip_rate, "seed": args.seed, "rows": rows}
    publish(args.output / "predictions.json", result, args.output / "results.md", BEGIN, END, table(result))
    print(table(result))


def _row(fit, judgement) -> dict:
    by_length = judgement.by_length[judgement.by_length["n"] > 0]
    lre = {
        f"{name}_{side}": None if math.isnan(judgement.lre[side][name]) else judgement.lre[side][name]
        for side in ("upper", "lower")
        for name in ("lre", "floor_upper")
    }
    return {
        "band": fit.name,
        "predicted": list(fit.rates["all"]),
        "found": judgement.rates["all"],
        "lengths": by_length["low"].tolist(),
        "responses": by_length["n"].tolist(),
        "found_by_length": by_length["rate"].tolist(),
    } | lre


def table(result: dict) -> str:
    """The table of the page."""
    from fspo_verl.files import markdown_table

    header = ["run", "judged on", "band", "clip rate predicted", "found", "found by length", "LRE, A > 0", "LRE, A < 0"]
    rows, missed = [], []
    for row in result["rows"]:
        if not (row["shown"] or row["recommended"]):
            continue
        value, lower, upper = row["predicted"]
        if not lower <= row["found"] <= upper:
            away = max(lower - row["found"], row["found"] - upper)
            missed.append(f"{row['band']} in {row['run']} by {100 * away:.1f}")
        by_length = ", ".join(
            f"{rate:.0%} from {low}" for low, rate in zip(row["lengths"], row["found_by_length"], strict=True)
        )
        band = f"**{row['band']}**" if row["recommended"] else row["band"]
        predicted = f"{value:.1%} [{lower:.1%}, {upper:.1%}]"
        lre = [_lre(row[f"lre_{side}"], row[f"floor_upper_{side}"]) for side in ("upper", "lower")]
        rows.append([row["run"], row["judged_on"], band, predicted, f"{row['found']:.1%}", by_length, *lre])
    text = markdown_table(header, rows)
    held = f"The clip rate found lies in the predicted interval in {len(rows) - len(missed)} of {len(rows)} cases."
    if missed:
        held += f" It misses for {', '.join(missed)} percentage points."
    return f"{held}\n\n{text}"


def _lre(value: float | None, floor: float | None) -> str:
    if value is None or floor is None:
        return "–"
    return f"**{value:.2f}** ({floor:.2f})" if value > floor else f"{value:.2f} ({floor:.2f})"


if __name__ == "__main__":
    main()
