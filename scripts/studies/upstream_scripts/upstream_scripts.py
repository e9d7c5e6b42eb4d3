# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What trains when `fspo-verl switch` has switched each of verl's own example scripts: a table in Markdown.

  python scripts/studies/upstream_scripts/upstream_scripts.py CHECKOUT [SCRIPT ...] > table.md

CHECKOUT is a folder with verl's sources; its verl is examined, beside this environment's other packages. SCRIPT is a
path below CHECKOUT/examples; without one, all that train with a policy loss.

Each script is switched, and what switch says is compared with what the new script does: it runs in a scratch folder,
with stand-ins for the programs that it starts. The command that would reach verl is composed by verl's own main and
judged by the checks of a launch. Nothing is trained, downloaded or installed. Run it on scripts that you trust.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from fspo_verl.keys import GROUP
from fspo_verl.launch import doctor
from fspo_verl.launch.view import Launch

# Without a policy loss: supervised training, generation, data.
_OTHERS = ("sft", "generation", "data_preprocess")
_STAND_INS = (
    "python python3 pip pip3 uv conda ray torchrun accelerate deepspeed docker git wget curl ssh scp rsync aws hf "
    "huggingface-cli nvidia-smi npu-smi sleep kill pkill killall sbatch srun"
).split()
_STAND_IN = """#!/bin/bash
[[ ${{0##*/}} == python* && $1 == -c ]] && exec {python} "$@"  # arithmetic, and questions about the machine
printf '%s\\0' "${{0##*/}}" "$@" >{noted}/$(date +%s%N)
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with verl's sources")
    parser.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT", help="paths below CHECKOUT/examples")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    examples = checkout / "examples"
    scripts = args.scripts or sorted(
        path.relative_to(examples)
        for path in examples.rglob("*.sh")
        if path.relative_to(examples).parts[0] not in _OTHERS
    )
    if not scripts:
        parser.error(f"{examples} holds no scripts")
    sys.path.insert(0, str(checkout))  # before anything imports verl
    os.chdir(checkout)  # where the scripts are to be started: configs of the asynchronous mains are relative to it

    print("| script | switch says | the new script |\n|---|---|---|")
    counts = Counter()
    for script in tqdm(scripts, unit="script"):
        with tempfile.TemporaryDirectory() as scratch:
            said, new = switched(checkout, examples / script, Path(scratch))
            does = judged(new, checkout, Path(scratch)) if new else "-"
        print(f"| {script} | {said} | {does} |".replace("\n", " "), flush=True)
        counts[said.split(":")[0], does.split(":")[0]] += 1
    print("\n| switch says | the new script | scripts |\n|---|---|---|")
    for (said, does), count in counts.most_common():
        print(f"| {said} | {does} | {count} |")


def switched(checkout: Path, script: Path, scratch: Path) -> tuple[str, Path | None]:
    """The first line of `fspo-verl switch`, without numbers and names, and the new script."""
    new = scratch / "new" / script.name
    command = [sys.executable, "-m", "fspo_verl.cli", "switch", str(script), "-o", str(new)]
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    first = (run.stdout or run.stderr).splitlines()[0].removeprefix(f"{script.name} ")
    said = re.sub(r" after (these \d+ changes|this change)|, in all of its \d+ trainings,|\.$", "", first)
    return re.sub(r"(the key|\d+ of its) \S+$", "a key", said), new if new.exists() else None


def judged(script: Path, checkout: Path, scratch: Path) -> str:
    """What the new script trains, by the command that it would start."""
    home, programs, noted = (scratch / name for name in ("home", "bin", "noted"))
    for folder in (home, programs, noted):
        folder.mkdir()
    for entry in checkout.iterdir():
        (home / entry.name).symlink_to(entry)  # what a script writes, it writes here
    for name in _STAND_INS:
        (programs / name).write_text(_STAND_IN.format(python=sys.executable, noted=noted))
        (programs / name).chmod(0o755)
    wanted = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "BASH_FUNC_ulimit%%": "() { :; }"}
    arguments: list[str] = []
    for _ in range(20):
        run = subprocess.run(
            ["bash", str(script), *arguments],
            cwd=home,
            env=os.environ | wanted,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        for file in sorted(noted.iterdir()):
            words = file.read_text().split("\0")[:-1]
            if "-m" in words and "verl" in words[place := words.index("-m") + 1]:
                return trains(words[place], words[place + 1 :])
        unset = re.search(r"line \d+: (\w+): (unbound variable|.*(set|required|must))", run.stderr)
        if unset and not unset[1].isdigit() and unset[1] not in wanted:
            wanted[unset[1]] = "/given"  # a path or name that only the user has
        elif not arguments:
            arguments = ["8", "/given"]
        else:
            break
    return f"starts nothing: {(run.stderr.strip().splitlines() or ['-'])[-1]}"


def trains(module: str, arguments: list[str]) -> str:
    """What trains, by the launch checks of this package and by the config, built as workers do."""
    from verl.utils.config import omega_conf_to_dataclass

    group = [f"+{argument}" if argument.startswith(f"{GROUP}=") else argument for argument in arguments]
    config, found = doctor.compose(module, group)
    if config is None:
        ours = (f"+{GROUP}=", "actor_rollout_ref.actor.policy_loss.records_dir=")
        if doctor.compose(module, [argument for argument in group if not argument.startswith(ours)])[0] is None:
            return f"fails, as without FSPO: {found[0].why.splitlines()[0]}"
        return f"fails with FSPO: {found[0].why.splitlines()[0]}"
    if errors := [str(finding) for finding in found if finding.severity == "error"]:
        return f"refused: {errors[0]}"
    try:
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    except Exception as error:  # whatever verl's dataclasses raise stops the launch
        return f"fails: {error}"
    return f"{Launch(config).loss_mode} trains"


if __name__ == "__main__":
    main()
