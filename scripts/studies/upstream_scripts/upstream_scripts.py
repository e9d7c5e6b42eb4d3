# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What trains when FSPO is asked of each of verl's own example scripts: a table in Markdown.

  python scripts/studies/upstream_scripts/upstream_scripts.py CHECKOUT [SCRIPT ...] > table.md

CHECKOUT is a folder with verl's sources; its verl is examined, beside this environment's other packages. SCRIPT is a
path below CHECKOUT/examples; without one, all that train with a policy loss. Each is tried twice: with
`+algorithm.policy_loss=fspo` at its end, and as `fspo-verl switch` mends it. Nothing is trained, downloaded or
installed.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from fspo_verl.launch import doctor, switch
from fspo_verl.launch.view import Launch

# Without a policy loss: supervised training, generation, data.
_OTHERS = ("sft", "generation", "data_preprocess")


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

    print("| script | with the override at its end | after `fspo-verl switch` |\n|---|---|---|")
    counts = Counter()
    for script in tqdm(scripts, unit="script"):
        with tempfile.TemporaryDirectory() as home:
            for entry in checkout.iterdir():
                Path(home, entry.name).symlink_to(entry)  # what a script writes, it writes here
            os.environ["HOME"] = home
            words = ["bash", str(examples / script)]
            try:
                override, after = with_override(words, Path(home)), with_switch(words, Path(home))
            except ValueError as error:
                override, after = "starts no policy training", str(error).split("says: ")[-1]
        print(f"| {script} | {override} | {after.replace('|', chr(92) + '|')} |", flush=True)
        counts[override, after.split(":")[0] if override != "starts no policy training" else "-"] += 1
    print("\n| with the override | after `fspo-verl switch` | scripts |\n|---|---|---|")
    for (override, after), count in counts.most_common():
        print(f"| {override} | {after} | {count} |")


def with_override(words: list[str], folder: Path) -> str:
    """What becomes of a script that is given the override."""
    command = switch.command_of([*words, switch.SELECT], folder)
    if switch.SELECT not in command.arguments:
        return "the override never arrives"
    return trains(command)


def with_switch(words: list[str], folder: Path) -> str:
    """What becomes of a script's command after it is mended; with the first thing that is left."""
    command, _, found = switch.switched(switch.command_of(words, folder))
    errors = [finding.what for finding in found if finding.severity == "error"]
    return ": ".join([trains(command), *errors[:1]])


def trains(command: switch.Command) -> str:
    """What trains, by the launch checks of this package and by the config, built as workers do."""
    from verl.utils.config import omega_conf_to_dataclass

    config, found = doctor.compose(command.module, command.arguments)
    if config is None:
        others = [argument for argument in command.arguments if argument != switch.SELECT]
        return "fails with the override" if doctor.compose(command.module, others)[0] else "fails, with it or without"
    if any(finding.severity == "error" for finding in found):
        return "refused"
    try:
        omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    except Exception:  # whatever verl's dataclasses raise stops the launch
        return "fails with the override"
    loss = Launch(config).loss_mode
    return "fspo trains" if loss == "fspo" else f"SILENT {loss} trains"


if __name__ == "__main__":
    main()
