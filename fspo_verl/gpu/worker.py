# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's training worker with its FSDP engine in this process: what a Ray worker runs, without Ray and trainer.

On a machine without a GPU set ``VERL_PLATFORM=cpu`` before verl is imported.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import verl  # noqa: F401  loads this package's plugin, as in every worker
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_platform
from verl.utils.metric import reduce_metrics
from verl.workers import engine_workers
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)

from fspo_verl.gpu.exact import free_port


@dataclass(frozen=True)
class Cut:
    """How a mini-batch is cut into micro-batches: into so many rows, or (dynamic batch size) up to so many tokens."""

    rows: int | None = None
    tokens: int | None = None
    packed: bool = False
    """verl's ``use_remove_padding``: the sequences of a micro-batch one after the other, without padding."""

    def sizes(self) -> dict:
        """What verl's engine has to be told for it, by its config or by a batch."""
        return {
            "use_dynamic_bsz": self.tokens is not None,
            "micro_batch_size_per_gpu": self.rows,
            "max_token_len_per_gpu": self.tokens,
            "use_remove_padding": self.packed,
        }


def join() -> None:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; without them one alone."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "WG_BACKEND": "ray"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    get_platform().communication_backend_name()  # on a CPU, joins the gloo group


def training_worker(
    model: str, cut: Cut, dtype: str = "fp32", lr: float = 0.0, fused: bool = False
) -> "engine_workers.TrainingWorker":
    """The worker, its model loaded and sharded.

    Args:
        model: folder of a model.
        cut: into micro-batches, of updates.
        dtype: ``fp32`` or ``bf16``: of the weights in the forward pass, and of autocast.
        lr: of AdamW.
        fused: verl's ``use_fused_kernels`` (its torch backend), which takes the softmax in float32.
    """
    worker = engine_workers.TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                use_remove_padding=cut.packed,
                use_fused_kernels=fused,
                fused_kernel_options={"impl_backend": "torch"},
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                **cut.sizes(),
            ),
            optimizer_config=FSDPOptimizerConfig(lr=lr, clip_grad=1e9),
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    worker.reset()
    return worker


def batch_of(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    advantages: Sequence[float],
    groups: Sequence[str],
    masks: Sequence[Tensor] | None = None,
    step: int = 1,
) -> TensorDict:
    """Sequences in the nested layout of verl's v1 trainer, without old log-probs.

    Args:
        prompts, responses: ``[tokens]`` ids of each sequence.
        advantages: one per sequence.
        groups: ids of their prompts.
        masks: ``[tokens]`` of each response; all ones by default.
        step: training step.
    """
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones(len(x), dtype=torch.long) for x in responses] if masks is None else masks
    return tu.get_tensordict(
        {
            "input_ids": _nested(ids),
            "position_ids": _nested(torch.arange(len(x)) for x in ids),
            "prompts": _nested(prompts),
            "responses": _nested(responses),
            "response_mask": _nested(masks),
            "loss_mask": _nested(masks),
            "advantages": _nested(torch.full((len(x),), float(a)) for a, x in zip(advantages, responses, strict=True)),
            "uid": list(groups),
            "global_steps": [step] * len(ids),
        },
        {},
    )


def _nested(rows: Iterable[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def set_old_log_probs(batch: TensorDict, old: Iterable[Tensor]) -> None:
    """Put old log-probs, ``[tokens]`` of each response, into a batch."""
    batch["old_log_probs"] = _nested(old)


def log_probs(worker, batch: TensorDict, cut: Cut) -> list[Tensor]:
    """Log-probs of each response, ``[tokens]`` float32, as verl's trainer computes those of the old policy."""
    data = batch.select("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask")
    tu.assign_non_tensor(
        data,
        **cut.sizes(),
        temperature=1.0,
        compute_loss=False,
        calculate_entropy=False,
        global_batch_size=len(batch),
    )
    found = worker.infer_batch(data)["log_probs"].unbind()
    prompts, responses = (batch[name].unbind() for name in ("prompts", "responses"))
    # The output at a position scores the token after it.
    return [
        whole[len(prompt) - 1 : len(prompt) - 1 + len(response)].float().clone()
        for whole, prompt, response in zip(found, prompts, responses, strict=True)
    ]


def update(worker, batch: TensorDict, policy_loss: PolicyLossConfig, mini_batch: int, scale: float) -> dict:
    """Optimiser steps over the rows of this rank, in mini-batches of all ranks together; verl's reduced metrics."""
    worker.set_loss_fn(loss_function(policy_loss, "seq-mean-token-sum-norm", scale))
    set_mini_batch(batch, mini_batch)
    result = worker.train_mini_batch(batch)
    if result is None:
        return {}
    return {name: float(value) for name, value in reduce_metrics(dict(tu.get(result, "metrics"))).items()}


def loss_function(policy_loss: PolicyLossConfig, loss_agg_mode: str, scale: float | None = None) -> Callable:
    """verl's ``ppo_loss`` with a policy loss, as its workers call it."""
    config = FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=scale,
        policy_loss=policy_loss,
    )
    return functools.partial(engine_workers.ppo_loss, config)


def set_mini_batch(batch: TensorDict, rows: int) -> None:
    """Put into a batch how ``train_mini_batch`` goes through it: once, in mini-batches of so many rows."""
    tu.assign_non_tensor(
        batch,
        global_batch_size=rows,
        mini_batch_size=rows,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
    )
