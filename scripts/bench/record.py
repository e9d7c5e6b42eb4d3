# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs benches and keeps their tables in records.json, from which scripts/docs/generate.py writes those of pages.

python scripts/bench/record.py target_clip_rate                       # a minute
VERL_PLATFORM=cpu python scripts/bench/record.py noise                # a quarter of an hour
MALLOC_MMAP_THRESHOLD_=1048576 python scripts/bench/record.py loss    # some minutes; nothing else may run
python scripts/bench/record.py step                                   # half an hour
python scripts/bench/record.py engines                                # after the run that engines.py names
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
from pathlib import Path

import torch
import verl

from fspo_verl.output import write_whole

RECORDS = Path(__file__).with_name("records.json")


def machine() -> dict[str, str | int]:
    """Return the machine and the versions that a figure depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    commit = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return {
        "commit": subprocess.check_output(commit, cwd=RECORDS.parent, text=True).strip(),
        "torch": torch.__version__,
        "verl": verl.__version__,
        "cpu": f"{model} with {torch.backends.cpu.get_cpu_capability()}",
        "cores": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="+", choices=["target_clip_rate", "noise", "loss", "engines", "step"])
    for name in parser.parse_args().benches:
        measured = {"machine": machine()}
        measured["table"] = importlib.import_module(name).table().reset_index().to_dict("records")
        records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
        records = dict(sorted((records | {name: measured}).items()))
        write_whole([(RECORDS, (json.dumps(records, indent=1, ensure_ascii=False) + "\n").encode())])


if __name__ == "__main__":
    main()
