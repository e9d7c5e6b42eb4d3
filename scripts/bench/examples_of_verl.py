# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Count what verl's own scripts train under ``fspo-verl run``: docs/install.md has the counts.

    git clone https://github.com/verl-project/verl && git -C verl checkout 1dda039b9
    python scripts/bench/examples_of_verl.py verl                  # also --loss observed, or --loss none

Each script of ``examples`` but those of supervised training runs unedited in a copy of the checkout. Programs that
write or download are stubs. Python is one, too: it notes the command of the training. The doctor then starts verl's
main of that checkout, which ends before Ray.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fspo_verl.findings import ERROR
from fspo_verl.keys import GROUP, OVERRIDES
from fspo_verl.launch import doctor

PYTHONS = ("python", "python3", "uv")
OTHERS = "ray torchrun pip pip3 sleep wget curl hf huggingface-cli npu-smi nvidia-smi conda git mkdir tee".split()
NOTE = '[[ " $* " == *" -m verl."* ]] && printf "%s\\0" "$@" > "$NOTED"; exit 0'
TRAINS = {  # by what the doctor finds
    "band_in_effect": "trains fspo",
    "loss_in_effect": "trains another loss, observed",
    "not_selected": "trains its own loss",
}
FOLDERS = ("HDFS_ROOT", "DATA_ROOT", "RAY_DATA_HOME", "MODEL_PATH", "LORA_ADAPTER_PATH", "HOME")  # that scripts ask for


def commands(verl: Path, scratch: Path) -> dict[str, list[str]]:
    """The arguments of the training that each script of a checkout starts; ``scratch`` takes what they write."""
    (stubs := scratch / "stubs").mkdir()
    for name in (*PYTHONS, *OTHERS):
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{NOTE if name in PYTHONS else 'exit 0'}\n")
        (stubs / name).chmod(0o755)
    noted, found = scratch / "noted", {}
    env = os.environ | dict.fromkeys(FOLDERS, str(scratch / "data"))
    env |= {"PATH": f"{stubs}:{os.environ['PATH']}", "NOTED": str(noted)}
    env |= {"INFER_BACKEND": "vllm", "BASH_FUNC_ulimit%%": "() { :; }"}
    for script in sorted(verl.glob("examples/**/*.sh")):
        name = str(script.relative_to(verl))
        if "/sft/" in name:
            continue
        noted.unlink(missing_ok=True)
        quiet = subprocess.DEVNULL
        subprocess.run(["bash", name], cwd=verl, env=env, stdin=quiet, stdout=quiet, stderr=quiet, timeout=60)
        if noted.exists():
            found[name] = noted.read_text().split("\0")[:-1]
    return found


def outcome(command: list[str]) -> str:
    """The loss that a training would train, or what stops it."""
    module = command.index("-m") + 1
    found = doctor.judge(command[module], command[module + 1 :])
    if errors := [one.sentence for one in found if one.severity == ERROR]:
        return f"stops: {errors[0]}"
    return next(text for id, text in TRAINS.items() if any(one.id == id for one in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", type=Path, help="a checkout of verl")
    parser.add_argument("--loss", default="fspo", help="of the group; none: as without fspo-verl run (default: fspo)")
    args = parser.parse_args()
    if args.loss != "none":
        os.environ[OVERRIDES] = f"{GROUP}={args.loss}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "verl")
        shutil.copytree(args.verl, copy, ignore=shutil.ignore_patterns(".git"))
        os.chdir(copy)
        sys.path.insert(0, str(copy))  # its verl comes before the installed one
        outcomes = {}
        for name, command in commands(copy, Path(folder)).items():
            outcomes[name] = outcome(command)
            print(f"{name}: {outcomes[name]}", flush=True)
        os.chdir("/")
    for text, count in Counter(outcomes.values()).most_common():
        print(f"{count:3}  {text[:150]}")


if __name__ == "__main__":
    main()
