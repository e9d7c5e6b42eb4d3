# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The laboratory's arms through verl's own trainer: Ray, FSDP workers, rollouts.

python scripts/studies/shape/through_verl.py verl --jobs 2    the laboratory's task, 12 seeds
python scripts/studies/shape/through_verl.py real             SmolLM2-135M, 6 seeds

Cells go to records/verl.parquet and records/real.parquet; a run goes on where it was stopped. Needs what
scripts/quickstart.sh and scripts/real_model.sh install. In `verl`, a Qwen3 model of the laboratory's size has its
problems, warm start, batches, learning rate and arms; all else is verl's default, such as AdamW's weight decay and the
limit on the gradient's norm. `real` is scripts/real_model.sh.
"""

import argparse
import dataclasses
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pandas as pd
import torch
from lab import EPS, EPS_LENGTH, EPS_MAX, EVALUATED, LEARNING_RATE, MINI_BATCHES, POWERS, PROMPTS, RESPONSES, Cell
from qwen import Qwen
from run import HERE, RECORDS, stored
from stairs import EOS, MAX_RESPONSE, PAD, PROMPT, START, TEXT, draw_problem, warm_start
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(HERE.parents[1] / "training"))
import launch
import report

from fspo_verl.analysis import runs
from fspo_verl.launch import override
from fspo_verl.observe.metrics import NAMES

ARMS = {"verl": ("sqrt", "none", "fixed"), "real": ("sqrt", "none")}
SEEDS = {"verl": range(12), "real": range(3, 9)}  # of the real model, 0 to 2 are known from another comparison
STEPS = {"verl": Cell._field_defaults["steps"], "real": 12}
SPECIAL = {"<pad>": PAD, "<start>": START, "<eos>": EOS}


def tokenizer() -> PreTrainedTokenizerFast:
    """The laboratory's tokens, a character each."""
    vocabulary = SPECIAL | {character: token for token, character in enumerate(TEXT)}
    words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens([*SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<start>"],
        padding_side="left",
        chat_template="{{ messages[0].content }}<start>",
    )


def data_set(rng: random.Random, size: int) -> pd.DataFrame:
    """Problems in verl's data format, one per row."""
    return pd.DataFrame(
        {
            "data_source": "stairs",
            "prompt": [{"role": "user", "content": "".join(TEXT[token] for token in problem.prompt[:-1])}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, **problem._asdict()},
        }
        for index, problem in enumerate(draw_problem(rng) for _ in range(size))
    )


@dataclasses.dataclass(frozen=True)
class Stairs(launch.Experiment):
    """One cell; the arms of a seed share its warm start and its problems."""

    @property
    def start(self) -> Path:
        """Folder of what the seed's runs start from."""
        return self.output / f"warm-start-seed{self.seed}"

    def prepare(self) -> None:
        if self.start.exists():
            return
        unfinished = self.start.with_suffix(".unfinished")
        warm_start(self.seed, Qwen).model.save_pretrained(unfinished / "model")
        tokenizer().save_pretrained(unfinished / "model")
        data_set(random.Random(self.seed), self.steps * PROMPTS).to_parquet(unfinished / "train.parquet")
        data_set(random.Random("evaluation"), EVALUATED).to_parquet(unfinished / "validation.parquet")
        unfinished.rename(self.start)

    def task(self) -> list[str]:
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        return [
            f"{actor}.policy_loss.records_dir=null",
            override("data.train_files", self.start / "train.parquet"),
            override("data.val_files", self.start / "validation.parquet"),
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={MAX_RESPONSE}",
            f"data.train_batch_size={PROMPTS}",
            override("reward.custom_reward_function.path", HERE / "stairs.py"),
            override("actor_rollout_ref.model.path", self.start / "model"),
            f"{rollout}.n={RESPONSES}",
            f"{rollout}.max_model_len={PROMPT + MAX_RESPONSE}",
            f"{rollout}.val_kwargs.do_sample=true",
            f"{rollout}.val_kwargs.temperature=1",
            f"{actor}.ppo_mini_batch_size={PROMPTS // MINI_BATCHES}",
            f"{actor}.optim.lr={LEARNING_RATE}",
            "trainer.project_name=shape",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
            f"trainer.test_freq={self.steps}",
        ]


def band_of(cell: Cell, **start: float) -> list[str]:
    """Overrides of a cell's band, which starts at these fields and is held at the cell's clip rate."""
    held = {"target_clip_rate": cell.rate, "eps_max": EPS_MAX}
    return [f"actor_rollout_ref.actor.policy_loss.{name}={value}" for name, value in (start | held).items()]


def train_stairs(cell: Cell, output: Path) -> Path:
    """Train the laboratory's task; returns the folder of the run."""
    power = POWERS.get(cell.arm)
    loss = "no_clip" if power is None else "fspo"
    band = [] if power is None else band_of(cell, length_power=power, eps=EPS * EPS_LENGTH ** (0.5 - power))
    experiment = Stairs(output, loss, seed=cell.seed, steps=cell.steps, name=cell.arm, overrides=tuple(band))
    experiment.prepare()
    shutil.rmtree(experiment.run, ignore_errors=True)  # an attempt that was interrupted
    experiment.run.mkdir(parents=True)
    launch.train(experiment)
    return experiment.run


def train_real(cell: Cell, output: Path) -> Path:
    """Train the real model as its script does; returns the folder of the run."""
    loss, band = ("no_clip", []) if cell.arm == "none" else ("fspo", band_of(cell))
    command = ["bash", HERE.parents[1] / "real_model.sh", "--python", sys.executable, "--output", output]
    options = {"--loss": loss, "--name": cell.arm, "--seed": cell.seed, "--steps": cell.steps}
    run = output / f"{cell.arm}-hf-seed{cell.seed}"
    shutil.rmtree(run, ignore_errors=True)  # an attempt that was interrupted
    subprocess.run([*command, *(str(text) for pair in options.items() for text in pair), "--", *band], check=True)
    return run


def run_cell(cell: Cell, output: Path, folder: Path) -> None:
    """Train a cell, unless the records hold it."""
    torch.set_num_threads(1)
    records = stored(cell.experiment, folder)
    if cell.key in records.done():
        return
    run = {"verl": train_stairs, "real": train_real}[cell.experiment](cell, output)
    metrics = runs.read_metrics(runs.metric_files(run))
    columns = {"reward": "reward", "length": "response_length", "clip_rate": "clip_rate"}
    found = {name: metrics[NAMES[key]].dropna() for name, key in columns.items()}
    series = {name: [float(f"{value:.5g}") for value in column] for name, column in found.items()}
    accuracy = metrics.filter(regex=report.ACCURACY).iloc[:, 0].dropna().iloc[-1]
    records.add([{**cell._asdict(), **series, "accuracy": accuracy}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=ARMS)
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "END"), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes; more than one have a thread each")
    parser.add_argument("--output", type=Path, help="of the runs (default: runs/shape/EXPERIMENT)")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    args = parser.parse_args()
    if args.jobs > 1 or args.experiment == "verl":
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    output = (args.output or Path("runs/shape", args.experiment)).resolve()
    name, seeds = args.experiment, range(*args.seeds) if args.seeds else SEEDS[args.experiment]
    cells = [Cell(name, arm, seed, steps=STEPS[name]) for seed in seeds for arm in ARMS[name]]  # a seed whole first
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run_cell, cell, output, args.folder) for cell in cells]
        for future in tqdm(as_completed(futures), total=len(cells), unit="cell"):
            future.result()


if __name__ == "__main__":
    main()
