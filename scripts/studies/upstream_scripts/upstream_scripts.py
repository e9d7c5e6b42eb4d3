# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of `+algorithm.policy_loss=fspo` at the end of each of verl's own example scripts: a table in Markdown.

  python scripts/studies/upstream_scripts/upstream_scripts.py CHECKOUT [SCRIPT ...] > table.md

CHECKOUT is a folder with verl's sources; its verl is examined, beside this environment's other packages. SCRIPT is a
path below CHECKOUT/examples; without one, all that train with a policy loss. A script runs with stand-ins for python3,
uv, ray and whatever else it would start, which note their arguments; what reaches verl's main is then composed by that
main and judged by the launch checks. Nothing is trained, downloaded or installed.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

OVERRIDE = "+algorithm.policy_loss=fspo"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
# Without a policy loss: supervised training, generation, data.
_OTHERS = ("sft", "generation", "data_preprocess")
_STAND_INS = "python python3 uv ray torchrun hf huggingface-cli git pip wget curl ssh nvidia-smi npu-smi sleep".split()
_STAND_IN = """#!/bin/bash
[[ $1 == -c ]] && exec {python} "$@"  # arithmetic, and questions about the machine
printf '%s\\0' "$@" >"$COMMANDS/$(ls "$COMMANDS" | wc -l)"
"""


class Verdict(NamedTuple):
    """What becomes of one script's launch."""

    kind: str
    detail: str = ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with verl's sources")
    parser.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT", help="paths below CHECKOUT/examples")
    args = parser.parse_args()
    examples = args.checkout.resolve() / "examples"
    scripts = args.scripts or sorted(
        path.relative_to(examples)
        for path in examples.rglob("*.sh")
        if path.relative_to(examples).parts[0] not in _OTHERS
    )
    if not scripts:
        parser.error(f"{examples} holds no scripts")
    sys.path.insert(0, str(args.checkout.resolve()))  # before anything imports verl

    print("| script | verdict | detail |\n|---|---|---|")
    counts = Counter()
    for script in tqdm(scripts, unit="script"):
        command, said = launch_of(examples / script, examples.parent)
        kind, detail = judge(command) if command else Verdict("starts no policy training", said)
        print(f"| {script} | {kind} | {detail.replace('|', chr(92) + '|')} |", flush=True)
        counts[kind] += 1
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))


def launch_of(script: Path, checkout: Path) -> tuple[list[str], str]:
    """The arguments from ``-m`` on with which a script, given the override, starts verl; and its last line if none."""
    with tempfile.TemporaryDirectory() as scratch:
        for folder in ("bin", "commands", "home"):
            Path(scratch, folder).mkdir()
        for entry in checkout.iterdir():
            Path(scratch, "home", entry.name).symlink_to(entry)  # what a script writes, it writes here
        for name in _STAND_INS:
            stand_in = Path(scratch, "bin", name)
            stand_in.write_text(_STAND_IN.format(python=sys.executable))
            stand_in.chmod(0o755)
        env = {"PATH": f"{scratch}/bin:/usr/bin:/bin", "HOME": f"{scratch}/home", "COMMANDS": f"{scratch}/commands"}
        options = {"cwd": env["HOME"], "env": env, "stdin": subprocess.DEVNULL, "text": True, "timeout": 300}
        try:
            run = subprocess.run(["bash", script, OVERRIDE], capture_output=True, **options)
        except subprocess.TimeoutExpired:
            return [], f"not ended after {options['timeout']} s"
        for file in sorted(Path(scratch, "commands").iterdir()):
            words = file.read_text().split("\0")[:-1]
            for position, word in enumerate(words[:-1]):
                if word == "-m" and words[position + 1].startswith("verl."):
                    return words[position + 1 :], ""
    return [], (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]


def judge(command: list[str]) -> Verdict:
    """What trains, by the launch checks of this package and by the config."""
    main, *arguments = command
    try:
        loss, found = trains(main, arguments)
    except Exception as error:  # whatever stops Hydra, or verl's dataclasses, stops the launch
        try:
            trains(main, [argument for argument in arguments if argument != OVERRIDE])
        except Exception:
            return Verdict("fails, with the override or without", _first_line(error))
        return Verdict("fails with the override", _first_line(error))
    problems = "; ".join(f"{finding.severity} {finding.check}: {finding.what}" for finding in found)
    if OVERRIDE not in arguments:
        return Verdict("the override never arrives", f'no "$@" at the end of the script: {loss} trains; {problems}')
    if any(finding.severity == "error" for finding in found):
        advice = f"{LOSS_MODE}=fspo"
        again, left = trains(main, [*arguments, advice])
        mended = again == "fspo" and not any(finding.severity == "error" for finding in left)
        return Verdict("refused", f"{problems}; with {advice} after it {'fspo trains' if mended else 'as well'}")
    return Verdict("fspo trains" if loss == "fspo" else f"SILENT: {loss} trains", problems)


def trains(main: str, arguments: list[str]) -> tuple[str, list]:
    """The loss in the composed config, built as workers do, and what the checks say about it, notes aside."""
    from fspo_verl.launch import checks, doctor

    def look(config):
        from verl.utils.config import omega_conf_to_dataclass

        found = checks.findings(config)
        if not any(finding.severity == "error" for finding in found):
            omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
        return checks.Launch(config).loss_mode, [finding for finding in found if finding.severity != "note"]

    return doctor.with_config(main, arguments, look)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    main()
