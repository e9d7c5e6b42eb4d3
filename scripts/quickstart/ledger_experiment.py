# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's experiment: the ledger task, from a warm start."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "training"))
import launch  # noqa: E402
import ledger  # noqa: E402

from fspo_verl.launch import override  # noqa: E402
from fspo_verl.output import write_whole  # noqa: E402

# The band of this task: a little tighter than the default of 0.03.
EPS = 0.02
TRAIN_PROBLEMS, VALIDATION_PROBLEMS = 4096, 256


class LedgerExperiment(launch.Experiment):
    """The training of the quickstart and the folder of its results. Losses share the warm start of their seed."""

    preparation = "warm start"

    @property
    def start(self) -> Path:
        """Folder of the warm-started model and the data sets of the seed."""
        return self.output / f"warm-start-seed{self.seed}"

    def prepare(self) -> None:
        start = self.start
        print(f"[warm start] {start / 'model'}", flush=True)
        start.mkdir(parents=True, exist_ok=True)
        # Every seed has its own training problems; all seeds share the validation problems.
        sizes = {"train": (TRAIN_PROBLEMS, 1_000 + self.seed), "validation": (VALIDATION_PROBLEMS, 999)}
        for name, (size, data_seed) in sizes.items():
            file = start / f"{name}.parquet"
            if not file.exists():
                write_whole([(file, ledger.data_set(size, data_seed).to_parquet())])
        if not (start / "model").exists():
            unfinished = start / "model.unfinished"
            command = [sys.executable, HERE / "warm_start.py", unfinished, f"--seed={self.seed}"]
            # On matrices this small a second thread costs more than it brings.
            # A session of its own: Ctrl-C in a terminal is for this process, which then ends the other.
            if subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True).returncode:
                raise launch.Failure("the warm start failed, see above")
            unfinished.rename(start / "model")

    def task(self) -> list[str]:
        start, policy_loss = self.start, "actor_rollout_ref.actor.policy_loss"
        return [
            *([f"{policy_loss}.eps={EPS}"] if self.loss == "fspo" else []),
            f"{policy_loss}.length_bins=[10,20,40]",
            override("data.train_files", start / "train.parquet"),
            override("data.val_files", start / "validation.parquet"),
            f"data.max_prompt_length={ledger.MAX_PROMPT_TOKENS}",
            f"data.max_response_length={ledger.MAX_RESPONSE_TOKENS}",
            override("reward.custom_reward_function.path", HERE / "ledger.py"),
            override("actor_rollout_ref.model.path", start / "model"),
            # 32 prompts x 8 responses per rollout, in four optimiser steps: from the second on the ratio is not 1.
            "data.train_batch_size=32",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            f"actor_rollout_ref.rollout.max_model_len={ledger.MAX_PROMPT_TOKENS + ledger.MAX_RESPONSE_TOKENS}",
            "actor_rollout_ref.actor.optim.lr=2e-4",
            "trainer.project_name=quickstart",
            "trainer.test_freq=5",
        ]
