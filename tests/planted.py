# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Plants one fault at a time in a copy of the sources, and checks that a test notices it.

  python tests/planted.py            all, some ten minutes
  python tests/planted.py records    those of which the file has this in its name

These are faults of more than one expression of the loss: `mutmut` plants those (see pyproject.toml).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """A fault of the package, and the tests that have to notice it."""

    what: str
    file: str  # below fspo_verl
    sound: str  # stands once in the file
    fault: str
    tests: str


ADAPTIVE, RECORDS, COLUMNS = "tests/test_adaptive.py", "tests/observe/test_records.py", "tests/observe/test_columns.py"
JUDGEMENT, LENGTHS, LIVE = (f"tests/analysis/test_{name}.py" for name in ("judgement", "length_effect", "live"))
FAULTS = [
    Fault("counts of other ranks ignored", "adaptive.py", "torch.distributed.all_reduce(counts)", "pass",
          "tests/training/test_fsdp.py"),
    Fault("the dual clip counts for no side", "adaptive.py", ' + columns["clipped_dual"] > 0', " > 0", ADAPTIVE),
    Fault("a checkpoint has the eps of before", "adaptive.py",
          "self.eps if self._of_step is None else", "self.eps if True else", ADAPTIVE),
    Fault("ranks with the same responses all count", "adaptive.py", "* counts_here", "* 1", ADAPTIVE),
    Fault("the weights of a rollout correction are lost", "register.py",
          "_weighted(advantages, response_mask, rollout_is_weights), response_mask)", "advantages, response_mask)",
          "tests/test_policy_loss.py"),
    Fault("a relative folder of records", "config.py", "require(Path(folder).is_absolute(),", "require(True,",
          "tests/test_config.py"),
    Fault("padding is recorded", "observe/records.py", 'columns.get("rollout_length", 0)) > 0',
          'columns.get("rollout_length", 0)) >= 0', RECORDS),
    Fault("a file that is there is overwritten", "observe/records.py", "file not in self._own and file.exists()",
          "False", RECORDS),
    Fault("damaged pages are read", "observe/records.py", "page_checksum_verification=True",
          "page_checksum_verification=False", RECORDS),
    Fault("what a killed process lost is read as a resume's", "observe/attempts.py",
          "began, min(began, attempt.began)", "math.inf, began", RECORDS),
    Fault("the first optimiser step of a rollout is not known", "observe/observer.py",
          "micro_batch.mini_batch == 0 and", "True and", "tests/observe/test_mismatch.py"),
    Fault("a noise that the weights carry is let in by a wider range", "observe/noise.py", "if not self.weighs:",
          "if True:", "tests/observe/test_noise.py"),
    Fault("the clipped ones weigh in the effective sample size", "observe/quotients.py",
          "part.responses - part.clipped for part in bins", "part.responses for part in bins", LIVE),
    Fault("causes stand in another order", "analysis/causes.py", "(_not_finite, _policy, _cut_off, _noise,",
          "(_cut_off, _not_finite, _policy, _noise,", JUDGEMENT),
    Fault("sides are compared with each other", "analysis/clip_rates.py",
          '2 * code + (records["advantage"].to_numpy() > 0)', "code", LENGTHS),
    Fault("a range is fitted without strata", "analysis/fit.py",
          "(np.bincount(stratum, x) / np.bincount(stratum))[stratum]", "x.mean()",
          "tests/analysis/test_calibration.py"),
    Fault("a range is taken though it is no more even", "analysis/widths.py", "measure.p_value(own, one) < rare",
          "True", JUDGEMENT),
    Fault("a dual clip is rounded down", "analysis/fit.py", "digits(1.001 * upper_quantile",
          "digits(0.999 * upper_quantile", "tests/analysis/test_calibration.py"),
    Fault("--strict is ignored", "findings.py", "(strict and one.severity == WARNING)", "False",
          "tests/launch/test_doctor.py"),
    Fault("a file is written in place", "output.py", "unfinished = path.with_name(f\".unfinished.{uuid.uuid4().hex}\")",
          "unfinished = path", "tests/test_output.py"),
]  # fmt: skip


def exit_code(sources: Path, tests: Collection[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(sources)}
    return subprocess.run(command, cwd=sources, capture_output=True, env=environment).returncode


def main() -> None:
    faults = [fault for fault in FAULTS if all(part in fault.file for part in sys.argv[1:])]
    for fault in faults:
        if (times := (ROOT / "fspo_verl" / fault.file).read_text().count(fault.sound)) != 1:
            sys.exit(f"{fault.what}: {fault.sound!r} stands {times} times in {fault.file}, and once is wanted")
    unseen = []
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, sources / name, follow_symlinks=False)
        if exit_code(sources, {fault.tests for fault in faults}):
            sys.exit("The tests do not pass without a fault, so that they would notice none.")
        for fault in (progress := tqdm(faults, unit="fault")):
            progress.set_postfix_str(fault.what)
            file = sources / "fspo_verl" / fault.file
            sound = file.read_text()
            file.write_text(sound.replace(fault.sound, fault.fault))
            if exit_code(sources, [fault.tests]) != 1:  # 2 and more: pytest itself did not get through
                unseen.append(fault.what)
                tqdm.write(f"not noticed: {fault.what}")
            file.write_text(sound)
    print(f"{len(faults) - len(unseen)} of {len(faults)} faults noticed")
    sys.exit(bool(unseen))


if __name__ == "__main__":
    main()
