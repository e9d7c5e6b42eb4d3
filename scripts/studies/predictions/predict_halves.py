# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does a band that is calibrated on one half of a run do in the other half what was predicted?

Every RUN is a folder with records. fspo-verl calibrate fits each kind of band on the earlier half of its steps (of a
single step: on every other prompt) and tests it on the rest. Here that is put side by side for several runs.
Writes FOLDER/predictions.json, and the table of FOLDER/results.md between its two marks.
"""

import argparse
import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = """example, with the records in the repository:
  python scripts/studies/predictions/predict_halves.py scripts/studies/measured_shape/records/*/
"""
HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- begin of what `predict_halves.py` writes -->", "<!-- end of what it writes -->"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run with records; others are passed over")
    add("--target-clip-rate", type=float, default=0.1, metavar="RATE", help="on each side (default: %(default)s)")
    add("--output", type=Path, default=HERE, metavar="FOLDER", help="default: the study's folder")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    from tqdm import tqdm  # not at the top: --help must work before anything is installed

    from fspo_verl.analysis import fit
    from fspo_verl.observe.records import read_records
    from fspo_verl.output import between, write_whole

    rows = []
    for folder in tqdm(args.runs, unit="run"):
        records = read_records(folder)
        if records.empty:
            continue
        earlier, later = fit.halves(records)
        for width in (fit.ROOT, fit.MEASURED):
            with contextlib.suppress(fit.Unreachable):
                found = fit.fitted(earlier, width, args.target_clip_rate)
                rows.append({"run": folder.resolve().name} | _row(found, records, later, args.target_clip_rate))
    if not rows:
        raise SystemExit("none of the runs has records from which a band can be calibrated")
    result = {"target": args.target_clip_rate, "rows": rows}
    page = args.output / "results.md"
    content = between(page.read_text() if page.exists() else "", BEGIN, END, table(result))
    kept = f"{json.dumps(result, indent=1)}\n"
    write_whole([(args.output / "predictions.json", kept.encode()), (page, content.encode())])
    print(table(result))


def _row(fitted, records, later, target: float) -> dict:
    """What the fit says of the clip rate, and what its band, and one scaled to the target, do in the later half."""
    from fspo_verl.analysis import fit

    found = float(fit.clipped_by(fitted.band, later)[(later["advantage"] != 0).to_numpy()].mean())
    effect = fit.held_out(records, fitted.width, target)
    return {
        "band": fitted.width,
        "predicted": list(fitted.rate),
        "found": found,
        "exponent": effect and [end if math.isfinite(end) else None for end in effect[:3]],
        "who": effect and effect.who,
    }


def table(result: dict) -> str:
    """The table of the page."""
    from fspo_verl.output import markdown_table

    rows, missed = [], 0
    for row in result["rows"]:
        value, lower, upper = row["predicted"]
        missed += not lower <= row["found"] <= upper
        exponent = "–"
        if row["exponent"]:
            middle, *ends = ("open" if end is None else f"{end:.2f}" for end in row["exponent"])
            exponent = f"{middle} [{', '.join(ends)}]"
        predicted = f"{value:.1%} [{lower:.1%}, {upper:.1%}]"
        who = (row["who"] or "not shown") if row["exponent"] else "–"
        rows.append([row["run"], row["band"], predicted, f"{row['found']:.1%}", exponent, who])
    header = ["run", "width follows", "clip rate predicted", "found", "k held out", "clipped more"]
    held = f"The clip rate found lies in the predicted interval in {len(rows) - missed} of {len(rows)} cases."
    return f"{held}\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    main()
