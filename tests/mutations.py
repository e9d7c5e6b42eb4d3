# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Does the test suite notice a wrong loss, metric, record, check or interval?

    python tests/mutations.py                      # hours
    python tests/mutations.py loss.py band.py      # the faults of these files of the package

Plants one fault at a time and runs the tests. Each fault is one replacement in a copy of the sources; a fault that no
test notices makes this script fail.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
LOSS = ("loss.py", "band.py")
REGISTER, ADAPTIVE, CLIPS = ("register.py",), ("adaptive.py",), ("clips.py",)
METRICS, COLUMNS, RECORDS, MICROBATCH, ATTEMPTS = (
    (f"observe/{name}.py",) for name in ("metrics", "columns", "records", "microbatch", "attempts")
)
LAUNCH = tuple(f"launch/{name}.py" for name in ("view", "hydra_files"))
LENGTH_EFFECT, FIT = (("analysis/length_effect.py",), ("analysis/fit.py",))
WIDTHS, CAUSES, CLIP_RATES = ((f"analysis/{name}.py",) for name in ("widths", "causes", "clip_rates"))
PAIRED = ("../scripts/compare/measures.py",)
TESTS_OF_THE_LOSS = [f"tests/{name}.py" for name in ("test_loss", "test_policy_loss", "observe/test_columns")]
RECORDING = ["tests/observe/test_records.py"]
TESTS_OF = {  # files with tests of their own, which are long: those that a planted fault is for
    LOSS: TESTS_OF_THE_LOSS,
    REGISTER: TESTS_OF_THE_LOSS,
    COLUMNS: ["tests/observe/test_columns.py", "tests/test_policy_loss.py"],
    METRICS: ["tests/test_policy_loss.py", *RECORDING, "tests/analysis/test_live.py"],
    **dict.fromkeys((RECORDS, ATTEMPTS, MICROBATCH), RECORDING),
    ADAPTIVE: ["tests/test_adaptive.py"],
    LAUNCH: [
        *("tests/launch/test_launch.py", "tests/launch/test_launch_table.py"),
        *("-k", "fully_asynchronous_trainer or step_of_a_checkpoint or after_self"),
    ],
    FIT: ["tests/analysis/test_calibration.py", "-k", "fitted_power"],
    LENGTH_EFFECT: ["tests/analysis/test_length_effect.py"],
    CLIP_RATES: ["tests/analysis/test_length_effect.py"],
    WIDTHS: ["tests/analysis/test_judgement.py", "-k", "not_fitted or false_alarms or rarely"],
    CAUSES: ["tests/analysis/test_judgement.py", "-k", "first_cause"],
    CLIPS: ["tests/test_clips.py", "-k", "definition"],
    PAIRED: ["tests/compare/test_compare.py", "-k", "sign_flips or fewer_than_six or joint_flips"],
}

MUTATIONS = [  # what goes wrong, the files of which one holds it, the sound code, the fault
    ("sign of the loss flipped", LOSS, "weights = -clipped", "weights = clipped"),
    ("low and high eps swapped", LOSS, "-self.low * scale, self.high * scale", "-self.high * scale, self.low * scale"),
    ("eps_low ignored", LOSS, "return self._half_width(self.eps_low)", "return self.eps"),
    ("dual clip of eps for that of the upper side", LOSS, "return DUAL * self.high", "return DUAL * self.eps"),
    ("sqrt(L) dropped", LOSS, "length.pow(self.length_power)", "torch.ones_like(length)"),
    ("length power ignored", LOSS, "length.pow(self.length_power)", "length.sqrt()"),
    ("L for sqrt(L)", LOSS, "length.pow(self.length_power)", "length.pow(2 * self.length_power)"),
    ("centre forgotten", LOSS, "center = quadratic_variation / -2", "center = 0 * quadratic_variation"),
    ("centre of the wrong sign", LOSS, "center = quadratic_variation / -2", "center = quadratic_variation / 2"),
    ("centre without its half", LOSS, "center = quadratic_variation / -2", "center = -quadratic_variation"),
    ("dual clip without the scale", LOSS, "self.dual * scale)", "self.dual + 0 * scale)"),
    ("dual clip on positive advantages", LOSS, "torch.minimum(log_ratio, high)", "torch.minimum(log_ratio, dual)"),
    ("dual clip keeps the gradient", LOSS, "(clipped == log_ratio)",
     "((clipped == log_ratio) | ((log_ratio > dual) & torch.tensor([[False], [True]])))"),
    ("dual clip not in the value", LOSS, "log_ratio.clamp(low, dual)", "log_ratio.clamp(low)"),
    ("upper clip keeps the gradient", LOSS, "(clipped == log_ratio)",
     "((clipped == log_ratio) | torch.tensor([[True], [False]]))"),
    ("lower clip keeps the gradient", LOSS, "(clipped == log_ratio)",
     "((clipped == log_ratio) | ((log_ratio < low) & torch.tensor([[False], [True]])))"),
    ("both signs clipped alike", LOSS, "(clipped == log_ratio)", "(clipped == log_ratio).all(0)"),
    ("clipped value unclipped", LOSS, "-clipped.clamp(max=MAX", "-log_ratio.expand(2, -1).clamp(max=MAX"),
    ("edge outside the band", LOSS, "(clipped == log_ratio)", "((clipped == log_ratio) & (clipped != high))"),
    ("edge counted as clipped", LOSS, "(self.log_ratio > self.high) & (",
     "(self.log_ratio >= self.high) & ("),
    ("mean log-ratio for the sum", LOSS, "s, q = log_ratio.sum(-1)", "s, q = log_ratio.mean(-1)"),
    ("log-ratio upside down", LOSS, "log_prob.to(dtype) - old_log_prob.to(dtype)",
     "old_log_prob.to(dtype) - log_prob.to(dtype)"),
    ("mask multiplied", LOSS, "torch.where(mask, log_prob.to(dtype) - old_log_prob.to(dtype), 0.0)",
     "(log_prob.to(dtype) - old_log_prob.to(dtype)) * mask"),
    ("advantage of padding counted", LOSS, "torch.where(mask, advantages.to(dtype), 0.0)", "advantages.to(dtype)"),
    ("padding counted as length", LOSS, "mask.sum(-1),", "mask.sum(-1) * 0 + mask.shape[1],"),
    ("tokens without advantage counted", LOSS, "counts = positive.count_nonzero(-1)",
     "counts = (positive >= 0).sum(-1)"),
    ("sums in the input's half precision", LOSS, "s, q = log_ratio.sum(-1)",
     "s, q = log_ratio.to(log_prob.dtype).sum(-1)"),
    ("gradient of padding", LOSS, "mask & finite[:, None], product", "finite[:, None], product"),
    ("gradient of a poisoned row", LOSS, "mask & finite[:, None], product", "mask, product"),
    ("gradient without the advantage", LOSS, "(advantage.clamp(min=0) * upper[:, None])",
     "((advantage > 0) * upper[:, None])"),
    ("gradient of the other sign's sum", LOSS, "(advantage.clamp(max=0), lower[:, None])",
     "(advantage.clamp(max=0), upper[:, None])"),
    ("a change in place unnoticed", LOSS, "else x for x in", "else x.data for x in"),
    ("ratio not capped", LOSS, "clipped.clamp(max=MAX_LOG_RATIO).exp()", "clipped.exp()"),
    ("poisoned rows kept", LOSS, "finite = sums[1:5].sum(0).abs() < math.inf", "finite = sums[0] > -1"),
    ("a block as large as the batch", LOSS, "rows = max(1, size // max(1, tokens.shape[1]))",
     "rows = max(1, len(tokens))"),
    ("rollout weights ignored", REGISTER, "advantages * rollout_is_weights, 0.0)", "advantages, 0.0)"),
    ("row mean for the row sum", REGISTER, "loss_mat=(sequences.loss / length.clamp(min=1)).unsqueeze(-1)",
     "loss_mat=sequences.loss.unsqueeze(-1)"),
    ("batch totals ignored", REGISTER, "dict(config.global_batch_info))", "{})"),
    ("scale factor of one column", REGISTER, '["loss_scale_factor"] = width', '["loss_scale_factor"] = 1'),
    ("eps moved away from the target", ADAPTIVE, "math.exp(GAIN * surplus)", "math.exp(-GAIN * surplus)"),
    ("eps beyond its bound", ADAPTIVE, "min(eps * math.exp(GAIN * surplus), eps_max)",
     "eps * math.exp(GAIN * surplus)"),
    ("one side's clips for the other's", ADAPTIVE, "[[lower.sum(), below.sum()], [upper.sum(), above.sum()]]",
     "[[upper.sum(), above.sum()], [lower.sum(), below.sum()]]"),
    ("dual clips not counted", ADAPTIVE, 'columns["clipped_lower"] + columns["clipped_dual"] > 0',
     'columns["clipped_lower"] > 0'),
    ("the dual clip at three times the upper side, however narrow", ADAPTIVE, "DUAL * max(self.eps.values())",
     'DUAL * self.eps["eps_high"]'),
    ("no account of how steeply the rate falls", ADAPTIVE, "max(q * normal.pdf(q) / target, 1.0)", "1.0"),
    ("a single response that moves eps far", ADAPTIVE, "max(expected, FEWEST)", "expected"),
    ("a broken eps only on the first rank", ADAPTIVE, "found = [_read(file)]",
     "found = [x] if not isinstance(x := _read(file), str) else 1 / 0"),
    ("responses counted on every rank that shares them", ADAPTIVE, "self._counts * counts_here", "self._counts"),
    ("eps of the config after a resume", ADAPTIVE, "self.eps = {name: min(eps[name]", "_ = {name: min(eps[name]"),
    ("metrics averaged per call", METRICS, "metric.values = values.tolist()", "metric.values = [float(values.mean())]"),
    ("a bin that keeps its upper edge", METRICS, 'side="right"', 'side="left"'),
    ("bins that count every response", METRICS, '{"responses": has_advantage,', '{"responses": is_sequence,'),
    ("empty rows outside the band", COLUMNS, "sequences.outside & (sequences.length > 0)",
     "sequences.outside | (sequences.length == 0)"),
    ("a clipped response counted whole", COLUMNS, "sequences.clipped_upper * up", "sequences.clipped_upper"),
    ("responses without advantage clipped", COLUMNS, "dropped & (advantages < 0)", "dropped & (advantages <= 0)"),
    ("dual clip told from the lower by nothing", COLUMNS, "torch.where(upward, 0.0, negative)", "negative"),
    ("measured on what the loss has made of its arguments", REGISTER, "tensor.detach().clone() for",
     "tensor.detach() for"),
    ("dual clip of tokens not counted", CLIPS, "(ratio < 0.8) | (ratio > 3)", "(ratio < 0.8)"),
    ("a band on prefixes that does not widen", CLIPS, "tokens.mask.cumsum(-1).sqrt()", "tokens.mask.cumsum(-1) ** 0"),
    ("tokens of the other sign counted", CLIPS, "tokens.advantages > 0, ratio >",
     "tokens.advantages < 0, ratio >"),
    ("a step written before it has ended", RECORDS,
     "if self._step and micro_batch.step != self._step[-1][1].step:", "if self._step:"),
    ("a part of a step left after a full disk", RECORDS, "file.unlink(missing_ok=True)", "pass"),
    ("a whole file of another deleted", RECORDS, "and _rows_in(file) <= rows:", "and True:"),
    ("records of a copy of the process", RECORDS, "if self._is_written or self._is_a_copy:", "if self._is_written:"),
    ("a whole step replaced by a part", RECORDS, "if (rows := _rows_in(file)) > len(table):", "if False:"),
    ("superseded records read", ATTEMPTS, "if part.step < part.end]", "if True]"),
    ("the oldest attempt for the newest", ATTEMPTS, "of > order]", "of < order]"),
    ("steps that no rank has recorded not missed", ATTEMPTS, "due = latest.taken", "due = len(ranks)"),
    ("the end of a run that has finished not missed", ATTEMPTS, "for last in steps[attempt, FINISHED]",
     "for last in ()"),
    ("a step that ranks still write missed", ATTEMPTS, "due -= 1  #", "due -= 0  #"),
    ("steps beyond the limit missed", ATTEMPTS, "part.ranks and part.step <= limit]", "part.ranks]"),
    ("a damaged file that counts as there", RECORDS, "part._replace(damaged=True)", "part"),
    ("an attempt that counts from its first record", RECORDS, "self._mark(attempts.BEGAN, began)", "pass"),
    ("prompts drawn before a sync count for the step", MICROBATCH,
     "max(after_sync, int(np.max(drawn)))", "int(np.max(drawn))"),
    ("steps of a resume counted from 1", MICROBATCH, "self.step = step  # before", "self.step = 0  # before"),
    ("a sync before a step counts as one", MICROBATCH,
     "self.step if self.trained else self.step + 1", "(self.synced or 0) + 1"),
    ("mini-batches counted over steps", MICROBATCH, "self.mini_batch, self.rows = step, 0, 0",
     "self.rows = step, 0"),
    ("padding recorded", RECORDS, 'columns.get("rollout_length", 0)) > 0', 'columns.get("rollout_length", 0)) >= 0'),
    ("the id of a prompt hashed for what it says", RECORDS, "for text in batch.texts", "for text in batch.prompts"),
    ("the folder of another run taken", ATTEMPTS, "owner != str(checkpoints.resolve())", "False"),
    ("a folder that another has claimed meanwhile", ATTEMPTS,
     "reason = why_taken(folder, checkpoints)  # another", "pass  # another"),
    ("damaged pages read", RECORDS, "page_checksum_verification=True", "page_checksum_verification=False"),
    ("asynchronous steps without require_batches", LAUNCH, "self.rounds_per_sync * fully_async.require_batches *",
     "self.rounds_per_sync *"),
    ("a band of a file that the group replaces", LAUNCH, 'kept.append(f"~{GROUP}")', "pass"),
    ("step of resume_path always 0", LAUNCH, "int(name[1]) if name else 0", "0"),
    ("interval over seeds one rank too narrow", PAIRED, "float(means[-outside])", "float(means[-outside - 1])"),
    ("interval with too few seeds", PAIRED, "count < MIN_SEEDS", "count < 2"),
    ("verdicts of several losses not adjusted", PAIRED, "order[place:]]", "[loss]]"),
    ("steps that do not count as clusters", LENGTH_EFFECT,
     "variance = variance + (vectors * np.maximum(values, 0)) @ vectors.T", "pass"),
    ("slopes of steps that pass for a curve", LENGTH_EFFECT, "directions * information) * variance / 2",
     "directions * information) * 0"),
    ("a test that sees no curve", LENGTH_EFFECT, "np.stack([x, np.square(x)])", "np.stack([x, x])"),
    ("a width judged on what it was fitted to", WIDTHS, "fit.fitted_power(to, rate)", "fit.fitted_power(on, rate)"),
    ("a width that is taken though it is no more even", WIDTHS, "measure.p_value(own, one) < rare", "True"),
    ("causes in another order", CAUSES, "= (_not_finite, _cut_off,", "= (_cut_off, _not_finite,"),
    ("sides compared with each other", CLIP_RATES,
     '2 * code + (records["advantage"].to_numpy() > 0)', "code"),
    ("a width fitted without strata", FIT, "(np.bincount(stratum, x) / np.bincount(stratum))[stratum]", "x.mean()"),
]  # fmt: skip


def noticed(sources: Path, tests: Iterable[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(
        command, cwd=sources, capture_output=True, text=True, env={"PYTHONPATH": str(sources), "PATH": ""}
    )
    if run.returncode not in (0, 1):
        raise SystemExit(f"the tests could not run:\n{run.stdout}{run.stderr}")
    return run.returncode == 1


def main() -> None:
    asked = set(sys.argv[1:])
    faults = [fault for fault in MUTATIONS if not asked or asked & set(fault[1])]
    if not faults:
        raise SystemExit(f"no fault is planted in {', '.join(sorted(asked))}")
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder)
        for name in ("fspo_verl", "tests", "scripts", "recipe", "docs", "conftest.py", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, sources / name)
        suites = {tuple(TESTS_OF[files]) for _, files, *_ in faults}
        if any(noticed(sources, tests) for tests in suites):
            raise SystemExit("the tests fail on the sound sources; mend that first")
        progress = tqdm(faults, unit="fault")
        for name, files, sound, fault in progress:
            progress.set_postfix_str(name)
            texts = {file: (ROOT / "fspo_verl" / file).read_text() for file in files}
            if (count := sum(text.count(sound) for text in texts.values())) != 1:
                raise SystemExit(f"{name}: {sound!r} stands {count} times in {', '.join(files)}, not once")
            (file,) = (file for file, text in texts.items() if sound in text)
            (sources / "fspo_verl" / file).write_text(texts[file].replace(sound, fault))
            if not noticed(sources, TESTS_OF[files]):
                survivors.append(name)
            (sources / "fspo_verl" / file).write_text(texts[file])
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults noticed")
    if survivors:
        raise SystemExit("not noticed: " + "; ".join(survivors))


if __name__ == "__main__":
    main()
