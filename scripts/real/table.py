# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the table of README.md here, from finished runs of scripts/real_model.sh or from what was kept of them.

python scripts/real/table.py runs/real_model/fspo-hf-seed*    keep them in scripts/real/real_model.json, write the table
python scripts/real/table.py                                  the table again, from scripts/real/real_model.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import report  # noqa: E402

from fspo_verl.analysis import runs  # noqa: E402
from fspo_verl.output import between  # noqa: E402

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- begin of what `scripts/real/table.py` writes -->", "<!-- end of what it writes -->"
ROWS = {
    "held-out accuracy before": ("accuracy_before", "{:.3f}"),
    "held-out accuracy after": ("accuracy_after", "{:.3f}"),
    f"reward, mean of the first {report.EDGE} steps": ("reward_first", "{:.2f}"),
    f"reward, mean of the last {report.EDGE} steps": ("reward_last", "{:.2f}"),
    "steps": ("steps", "{:d}"),
    "clip rate, median step": ("clip_rate_median", "{:.1%}"),
    "shortest response, tokens": ("shortest", "{:.0f}"),
    "longest response, tokens": ("longest", "{:.0f}"),
    "seconds per step, median": ("seconds_per_step", "{:.0f}"),
    "minutes, installation and start-up included": ("minutes", "{:.1f}"),
    "peak memory, GB": ("peak_memory_gb", "{:.1f}"),
}


def read(folder: Path) -> dict:
    """What is kept of a finished run: settings, summary, a row per step.

    Raises:
        SystemExit: the folder holds no finished run.
    """
    if not (folder / "summary.json").exists():
        raise SystemExit(f"{folder} holds no finished run of scripts/real_model.sh (no summary.json)")
    settings, summary = (json.loads((folder / f"{name}.json").read_text()) for name in ("settings", "summary"))
    # Times are those of the last attempt: of a run that was interrupted they would not be the whole.
    uninterrupted = len(list(folder.glob("metrics-*.jsonl"))) == 1
    summary["minutes"] = sum(summary["seconds"].values()) / 60 if uninterrupted else None
    steps = report.read_metrics(runs.metric_files(folder)).round(4).reset_index(names="step")
    return {
        "run": folder.name,
        "settings": settings,
        "summary": summary | {"steps": settings["steps"]},
        "steps": json.loads(steps.to_json(orient="records")),
    }


def table(kept: list[dict]) -> str:
    """A column per run."""
    if not kept:
        return "Not run yet."
    lines = ["| | " + " | ".join(f"`{run['run']}`" for run in kept) + " |", "|---" * (len(kept) + 1) + "|"]
    for title, (key, form) in ROWS.items():
        values = [run["summary"][key] for run in kept]
        lines.append(f"| {title} | " + " | ".join("–" if v is None else form.format(v) for v in values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUN", help="folder of a finished run")
    args = parser.parse_args()
    file, page = HERE / "real_model.json", HERE / "README.md"
    if args.folders:
        file.write_text(json.dumps([read(folder) for folder in args.folders], indent=1) + "\n")
    kept = json.loads(file.read_text()) if file.exists() else []
    page.write_text(between(page.read_text(), BEGIN, END, table(kept)))
    print(table(kept))


if __name__ == "__main__":
    main()
