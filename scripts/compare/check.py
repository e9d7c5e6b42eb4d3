# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Check that each loss of a comparison trains what it is called, by two training steps of any launch of verl.

  python scripts/compare/check.py [DIR] -- bash my_script.sh trainer.total_training_steps=2 trainer.save_freq=-1 \\
      trainer.resume_mode=disable
  python scripts/compare/check.py DIR                      judges once more what DIR holds

The command is a launch with your model and data, where fspo_verl is installed. `fspo-verl run` runs it once per loss;
with checkpoints the second would go on from the first.
Each call of the loss by verl is written down: what the loss was given, its value and its gradient. Value and gradient
are then computed once more from S, L and A of each response, by code that shares nothing with fspo_verl.

The check fails where
  - the value of a call, or the gradient of a response, is another; it names the fault that explains all of them;
  - records hold other responses than were trained, or the logged loss is not that of the records;
  - fspo, from the rollout of no_clip, trains like it although something was clipped.
What a launch does not show, as no response has reached the dual clip, is marked with ?, and is no failure.

Exit code: 0 all holds, 1 something does not, 2 a wrong call or a training that failed. A Ray cluster that is up already
needs the printed variables, too: +ray_kwargs.ray_init.runtime_env.env_vars.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
import loss_probe  # noqa: E402
import method as methods  # noqa: E402
from method import Method  # noqa: E402

from fspo_verl.analysis.runs import Run, read_run  # noqa: E402
from fspo_verl.output import one_line, percent  # noqa: E402

ARMS = ("fspo", "no_clip", "gspo", "grpo")
TRAINS = {"fspo": "fspo", "no_clip": "fspo", "fixed_band": "fspo", "gspo": "gspo", "grpo": "vanilla"}
"""verl's ``loss_mode`` by arm."""
ROUNDING = 1e-4  # of float32 sums over some thousand tokens, and how near to an edge it decides what is clipped
CLIPS = {
    "upper": "above the range with A > 0",
    "lower": "below the range with A < 0",
    "dual": "above the dual clip with A < 0",
}
PACKAGED = {
    "no_clip": Method(math.inf, math.inf, math.inf),
    "fixed_band": Method(-math.log(0.8), math.log(1.2), math.inf, power=0.0),
    "gspo": Method(-math.log1p(-3e-4), math.log1p(4e-4), math.inf, power=1.0, weight="S/L", mode="seq-mean-token-mean"),
}
"""The losses that the packaged options are to train."""


class Verdict(NamedTuple):
    """One thing that was checked; ``kept`` is None where a run does not show it."""

    kept: bool | None
    text: str


class Arm(NamedTuple):
    """The files that one run left behind."""

    name: str
    run: Run | None
    calls: list[dict]  # of loss_probe, without their responses
    rows: pd.DataFrame  # the responses of all calls


def read_arm(name: str, folder: Path) -> Arm:
    """A folder of a run under the probe."""
    lines = [line for file in sorted(folder.glob(f"{loss_probe.PLACE}/*.jsonl")) for line in file.open()]
    calls = [json.loads(line) for line in dict.fromkeys(lines)]  # ranks that share responses write the same line
    tables = []
    for number, call in enumerate(calls):
        totals, rows = call["totals"], pd.DataFrame(call.pop("responses"))
        divisor = totals["loss_scale_factor"] or totals["width"]
        of_batch = {"ranks": totals["dp_size"], "tokens": totals["batch_num_tokens"], "divisor": divisor}
        of_batch |= {"responses": totals["global_batch_size"], "rounding": ROUNDING + call["rounding"]}
        tables.append(rows.assign(call=number, **of_batch))
    run = read_run(folder, name) if calls else None
    return Arm(name, run, calls, pd.concat(tables, ignore_index=True) if tables else pd.DataFrame())


# --- one run ----------------------------------------------------------------------------------------------------------


def judge_arm(arm: Arm, asked: Method | None = None) -> list[Verdict]:
    """The loss of a run, and its records.

    Args:
        asked: what the loss is to be, where that is not left to the config of the workers.
    """
    if not arm.calls:
        why = "no call of a loss is written down: the launch has trained nothing, or its workers lack LOSS_PROBE"
        return [Verdict(False, f"{arm.name}: {why}")]
    call = arm.calls[0]
    loss = call["config"]["inner"] if call["loss"] == "observed" else call["loss"]
    if loss != TRAINS.get(arm.name, loss):
        return [Verdict(False, f"{arm.name}: verl has trained loss_mode={loss}, not {TRAINS[arm.name]}")]
    method = asked or methods.asked(loss, call["loss_agg_mode"], call["config"])
    verdicts = [*(_loss(arm, method) if method else ()), *_as_verls_own(arm, loss)]
    if not verdicts:
        verdicts = [Verdict(None, f"{arm.name}: with this config loss_mode={loss} is not computed once more")]
    verdicts.append(_same_responses(arm))
    return [*verdicts, *([_logged_loss(arm, method)] if method and verdicts[-1].kept else ())]


def _as_verls_own(arm: Arm, loss: str) -> list[Verdict]:
    """A loss of verl that is observed trains as without it."""
    known = [call["as_verls_own"] for call in arm.calls if call["as_verls_own"] is not None]
    if not known:
        return []
    text = f"{arm.name}: value and gradient are those of verl's own {loss} in {sum(known)} of {len(known)} calls"
    return [Verdict(all(known), text)]


def _loss(arm: Arm, method: Method) -> list[Verdict]:
    """Value and gradient of all responses against the method; else what explains them, or how they differ."""
    if not _fits(arm, method):
        explained = [f"its {text}" for text, variant in method.variants.items() if _fits(arm, variant)]
        text = " or ".join(explained) or ", ".join(_symptoms(arm, method))
        return [Verdict(False, f"{arm.name}: {text}; asked was {method}")]
    counts = method.applied(arm.rows).decision.value_counts()
    right = f"value and gradient of {len(arm.rows):,} responses in {len(arm.calls)} calls are right: {method}"
    verdicts = [Verdict(True, f"{arm.name}: {right}")]
    for clip, where in CLIPS.items():
        if np.isfinite(method.widths[clip]):
            number = counts.get(clip, 0)
            text = f"{number:,} responses were {where}, none has a gradient" if number else f"no response was {where}"
            verdicts.append(Verdict(True if number else None, f"{arm.name}: {text}"))
    return verdicts


def _symptoms(arm: Arm, method: Method) -> list[str]:
    """How a loss that nothing explains differs from the method."""
    rows, decision = arm.rows, method.applied(arm.rows).decision
    wrong, values = _wrong_gradients(arm, method), _wrong_values(arm, method)
    lost = (rows.gradient_better == 0) & (rows.gradient_worse == 0)
    groups = [(decision == clip, True, where, "keep a gradient") for clip, where in CLIPS.items()]
    groups += [(decision == "kept", lost, "inside the range", "have no gradient")]
    groups += [(decision == "kept", ~lost, "inside the range", "have another gradient")]
    texts = [
        f"{(wrong & group & kind).sum():,} of {group.sum():,} responses {where} {what}"
        for group, kind, where, what in groups
        if (wrong & group & kind).any()
    ]
    return [*texts, *([f"{values.sum()} of {len(values)} calls have another value"] if values.any() else [])]


def _fits(arm: Arm, method: Method) -> bool:
    return not _wrong_values(arm, method).any() and not _wrong_gradients(arm, method).any()


def _wrong_gradients(arm: Arm, method: Method) -> pd.Series:
    """bool ``[rows]``: whose gradient is not the method's. Of a response on an edge rounding decides."""
    rows, expected = arm.rows, method.applied(arm.rows)
    wrong = rows.uneven > rows.rounding * (expected.unclipped_better.abs() + expected.unclipped_worse.abs())
    for side in ("better", "worse"):
        off = (rows[f"gradient_{side}"] - expected[f"gradient_{side}"]).abs()
        wrong |= ~(off <= rows.rounding * expected[f"unclipped_{side}"].abs()) & (expected.distance > ROUNDING)
    return wrong


def _wrong_values(arm: Arm, method: Method) -> pd.Series:
    """bool ``[calls]``: whose value is not the method's."""
    terms = method.applied(arm.rows).value.groupby(arm.rows.call).agg(["sum", _size])
    return ~((terms["sum"] - [call["value"] for call in arm.calls]).abs() <= ROUNDING * terms[_size.__name__])


def _size(terms: pd.Series) -> float:
    """Return the size that the rounding of a sum is relative to."""
    return terms.abs().sum()


# --- its records ------------------------------------------------------------------------------------------------------


def _same_responses(arm: Arm) -> Verdict:
    """The records hold S, L and A of the responses that the loss was given."""
    records, rows = arm.run.records, arm.rows[arm.rows.length > 0]
    if len(records) != len(rows):
        return Verdict(False, f"{arm.name}: {len(records):,} records of {len(rows):,} responses that were trained")
    mean = (rows.better + rows.worse) / rows.length
    tolerance = ROUNDING * (1 + rows.log_ratio.abs() + mean.abs()).to_numpy()
    # Sorted by a mixture of the three, responses are next to themselves; rounding exchanges only those that are alike.
    recorded, trained = _mixture(records, records.advantage), _mixture(rows, mean)
    order = np.argsort(trained)
    other = np.abs(np.sort(recorded) - trained[order]) > tolerance[order]
    if other.any():
        text = f"{percent(other.mean())} of the records are of other responses than those that were trained"
        return Verdict(False, f"{arm.name}: {text}")
    return Verdict(True, f"{arm.name}: the records are of the {len(rows):,} responses that were trained")


def _mixture(table: pd.DataFrame, advantage: pd.Series) -> np.ndarray:
    return (table.length + np.pi * table.log_ratio + np.e * advantage).to_numpy(np.float64)


def _logged_loss(arm: Arm, method: Method) -> Verdict:
    """``actor/pg_loss`` of each step, computed from its records; the mean over mini-batches, as verl logs it."""
    logged = arm.run.metrics.get("actor/pg_loss")
    if logged is None or (arm.rows.better * arm.rows.worse != 0).any():
        return Verdict(None, f"{arm.name}: without actor/pg_loss in a file of verl's file logger, no logged loss")
    records = arm.run.records
    batch = [records.step, records.mini_batch]
    total = records.length * records.advantage.astype(np.float64)
    rows = pd.DataFrame(
        {
            "length": records.length,
            "log_ratio": records.log_ratio.astype(np.float64),
            "variation": records.quadratic_variation,
            "better": total.clip(lower=0),
            "worse": total.clip(upper=0),
            "ranks": 1,
            "tokens": records.length.groupby(batch).transform("sum"),
            "responses": arm.rows.responses[0],
            "divisor": arm.rows.divisor[0],
        }
    )
    terms = method.applied(rows).value.groupby(batch).agg(["sum", _size]).groupby("step").mean()
    off = (terms["sum"] - logged.reindex(terms.index)).abs()
    if wrong := list(terms.index[~(off <= ROUNDING * terms[_size.__name__])]):
        step = wrong[0]
        values = f"in step {step} {logged.get(step, np.nan):.4g}, by the records {terms['sum'][step]:.4g}"
        return Verdict(False, f"{arm.name}: the logged loss is not that of the records: {values}")
    return Verdict(True, f"{arm.name}: the logged loss of {len(terms)} steps is that of the records")


# --- two runs from one rollout ----------------------------------------------------------------------------------------


def judge_fork(clipped: Arm, free: Arm) -> Verdict:
    """Check that the two train alike from one seed until something is clipped, and differ in the update after it.

    Equal is equal to the bit. On a GPU, whose sums may differ from run to run, that is not judged.
    """
    names = f"{clipped.name} and {free.name}"
    ours, theirs = (_first_step(arm.run.records) for arm in (clipped, free))
    clips = ours.decision.isin(list(CLIPS)).groupby(ours.mini_batch).sum()
    updates = sorted(clips.index)
    equal = {number: _alike(*(rows[rows.mini_batch == number] for rows in (ours, theirs))) for number in updates}
    first = next((number for number in updates if clips[number]), updates[-1])
    if early := [number for number in updates if number <= first and not equal[number]]:
        return Verdict(None, f"{names} differ from update {early[0] + 1} on, before anything was clipped")
    if first == updates[-1]:
        return Verdict(None, f"{names} are alike; before the last update of the first step nothing was clipped")
    event = f"update {first + 1} clips {clips[first]} responses of {clipped.name}"
    if equal[first + 1]:
        return Verdict(False, f"{event}, and the next one is that of {free.name}: the clip has stopped no gradient")
    return Verdict(True, f"{names} are equal until {event}, and differ after it")


def _first_step(records: pd.DataFrame) -> pd.DataFrame:
    return records[records.step == records.step.min()]


def _alike(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether the responses of a mini-batch, and how far the weights have moved them, are the same."""
    columns = ["prompt_text_hash", "length", "advantage", "log_ratio"]
    pair = [table[columns].sort_values(columns, ignore_index=True) for table in (one, other)]
    return pair[0].equals(pair[1])


# --- all of them ------------------------------------------------------------------------------------------------------


def judge(folders: Mapping[str, Path], asked: Mapping[str, Method] | None = None) -> list[Verdict]:
    """All that these runs show, each in the folder of its arm."""
    arms = {name: read_arm(name, folder) for name, folder in folders.items()}
    verdicts = [verdict for arm in arms.values() for verdict in judge_arm(arm, (asked or {}).get(arm.name))]
    pair = [arms[name] for name in ("fspo", "no_clip") if name in arms and len(arms[name].calls)]
    if len(pair) == 2 and not any(arm.run.records.empty for arm in pair):
        verdicts.append(judge_fork(*pair))
    return verdicts


def report(verdicts: Sequence[Verdict], complete: bool = False) -> tuple[str, bool]:
    """The conclusion, a line for each verdict, and what to do next; whether all holds.

    Args:
        complete: what was not judged does not hold, as these runs are made to show it.
    """
    wrong = [verdict for verdict in verdicts if not verdict.kept and (complete or verdict.kept is False)]
    unknown = [verdict for verdict in verdicts if verdict.kept is None and verdict not in wrong]
    judged = f"{len(verdicts) - len(unknown)} checks"
    first = f"{judged}, and all hold." if not wrong else f"{len(wrong)} of {judged} fail: {wrong[0].text}"
    label = {True: "ok  ", False: "FAIL", None: "FAIL" if complete else "?   "}
    lines = [f"{label[verdict.kept]} {verdict.text}" for verdict in verdicts]
    advice = "Train for longer, with several seeds: scripts/compare/compare.py says which loss ends higher."
    if wrong:
        advice = "Do not compare these losses before the first line with FAIL is mended."
    return "\n".join([first, *lines, advice]), not wrong


def launch(command: Sequence[str], arm: str, folder: Path) -> int:
    """Run a launch of verl with the loss of an arm; its exit code."""
    folder.mkdir(parents=True)
    policy_loss = "actor_rollout_ref.actor.policy_loss"
    settings = (f"{policy_loss}.records_dir={folder / 'records'}", f"{policy_loss}.records_freq=1")
    words = [sys.executable, "-m", "fspo_verl.cli", "run", "--loss", arm, *settings, "--", *command]
    own = loss_probe.environment(folder) | {"VERL_FILE_LOGGER_PATH": str(folder / "metrics-1.jsonl")}
    print(f"[{arm}]", *(f"{key}={value}" for key, value in own.items()), folder / "train.log", flush=True)
    with (folder / "train.log").open("w") as log:
        return subprocess.run(words, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT).returncode


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, nargs="?", metavar="DIR", help="of the runs, one per loss (default: runs/check)")
    add("--arms", default=",".join(ARMS), help="default: %(default)s; fixed_band is another")
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.command, args.arms = words[at + 1 :], args.arms.split(",")
    if unknown := set(args.arms) - TRAINS.keys():
        parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(TRAINS)}")
    args.folder = (args.folder or Path("runs/check")).resolve()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        for arm in args.arms if args.command else ():
            if code := launch(args.command, arm, args.folder / arm):
                tail = (args.folder / arm / "train.log").read_text(errors="replace")[-2000:]
                print(f"{tail}\ncheck: the training of {arm} ended with {code}", file=sys.stderr)
                return 2
        text, kept = report(judge({arm: args.folder / arm for arm in args.arms if (args.folder / arm).is_dir()}))
    except (OSError, ValueError) as error:
        print(f"check: {one_line(error)}", file=sys.stderr)
        return 2
    print(text)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
