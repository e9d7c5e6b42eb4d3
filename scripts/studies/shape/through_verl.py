# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The laboratory's experiment through verl's own trainer: Ray, FSDP workers, rollouts, a Qwen3 model of the same size.

python scripts/studies/shape/through_verl.py --jobs 2     cells/verl, 12 seeds; goes on where it was stopped

Needs what scripts/quickstart.sh installs. Problems, warm start, batches, learning rate and arms are those of the
laboratory; all else is verl's default, such as AdamW's weight decay and the limit on the gradient's norm.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pandas as pd
import torch
from lab import EPS, EPS_LENGTH, EPS_MAX, EVALUATED, LEARNING_RATE, MINI_BATCHES, POWERS, PROMPTS, RESPONSES, Cell
from run import HERE
from stairs import EOS, MAX_RESPONSE, PAD, PROMPT, START, TEXT, VOCABULARY, draw_problem, warm_start
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(HERE.parents[1] / "training"))
import launch
import report

from fspo_verl.analysis import runs
from fspo_verl.launch import override
from fspo_verl.output import write_whole

ARMS, SEEDS = ("sqrt", "none", "fixed"), 12
SPECIAL = {"<pad>": PAD, "<start>": START, "<eos>": EOS}


class Qwen(nn.Module):
    """A small Qwen3 model, to be warmed up as the laboratory's policy is."""

    def __init__(self):
        super().__init__()
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=PROMPT + MAX_RESPONSE,
                initializer_range=0.1,  # Qwen's own 0.02 is too small a start for so narrow a model
                tie_word_embeddings=False,
                pad_token_id=PAD,
                eos_token_id=EOS,
                bos_token_id=None,
            )
        )

    def log_probs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """As :meth:`stairs.Policy.log_probs`."""
        tokens = torch.cat([prompts, responses[:, :-1]], 1)
        logits = self.model(tokens, use_cache=False, logits_to_keep=responses.shape[1]).logits
        return -nn.functional.cross_entropy(logits.transpose(1, 2), responses, reduction="none")


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

    arm: str = "sqrt"

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
        band = {"records_dir": "null"}
        if self.arm in POWERS:
            power = POWERS[self.arm]
            eps = EPS * EPS_LENGTH ** (0.5 - power)
            band |= {"length_power": power, "eps": eps, "target_clip_rate": Cell._field_defaults["rate"]}
            band["eps_max"] = EPS_MAX
        return [
            *(f"{actor}.policy_loss.{name}={value}" for name, value in band.items()),
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


def run_seed(seed: int, output: Path, folder: Path) -> None:
    """Train what is missing of one seed."""
    torch.set_num_threads(1)
    for arm in ARMS:
        cell = Cell("verl", arm, seed)
        file = folder / f"{cell.name}.json"
        if file.exists():
            continue
        loss = "no_clip" if arm == "none" else "fspo"
        experiment = Stairs(output, loss, seed=seed, steps=cell.steps, name=arm, arm=arm)
        experiment.prepare()
        shutil.rmtree(experiment.run, ignore_errors=True)  # an attempt that was interrupted
        experiment.run.mkdir(parents=True)
        launch.train(experiment)
        files = runs.metric_files(experiment.run)
        metrics, steps = report.read_metrics(files), runs.read_metrics(files)
        found = {"reward": metrics.reward, "length": steps["response_length/mean"], "clip_rate": metrics.clip_rate}
        series = {name: [float(f"{value:.5g}") for value in column] for name, column in found.items()}
        ended = {**cell._asdict(), **series, "accuracy": metrics.accuracy.dropna().iloc[-1]}
        write_whole([(file, json.dumps(ended).encode())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, SEEDS), metavar=("FIRST", "END"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/shape"), help="of the runs (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=HERE / "cells")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    todo = [(seed, args.output.resolve(), args.folder) for seed in range(*args.seeds)]
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run_seed, *one) for one in todo]
        for future in tqdm(as_completed(futures), total=len(todo), unit="seed"):
            future.result()


if __name__ == "__main__":
    main()
