# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's training worker in this process, without Ray and trainer, with batches and optimiser steps for it.

For benches, and for tests of ranks.
"""

import functools
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor


def micro_batches(rows: int, packed: bool = False) -> dict:
    """Return verl's settings for micro-batches of so many rows, padded or packed."""
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": rows, "use_remove_padding": packed}


def training_worker(model: str | Path, dtype: str = "fp32", lr: float = 0.0, **model_settings):
    """Return verl's worker with its model, sharded over the ranks of RANK and WORLD_SIZE (default: this one).

    Args:
        model: folder of a model.
        dtype: ``fp32`` or ``bf16``: of the weights in the forward pass, and of autocast.
        lr: of AdamW.
        model_settings: further fields of verl's ``HFModelConfig``.
    """
    import verl  # noqa: F401  first, as it loads this package's plugin
    from verl.trainer.config import CheckpointConfig
    from verl.utils.device import get_platform
    from verl.workers import config, engine_workers

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({"WG_BACKEND": "ray"} | alone | dict(os.environ))
    get_platform().communication_backend_name()  # on a CPU, joins the gloo group
    attention = {"attn_implementation": "sdpa"}
    usual = {"load_tokenizer": False, "enable_gradient_checkpointing": False, "override_config": attention}
    precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    worker = engine_workers.TrainingWorker(
        config.TrainingWorkerConfig(
            model_type="language_model",
            model_config=config.HFModelConfig(path=str(model), **usual | model_settings),
            engine_config=config.FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
            optimizer_config=config.FSDPOptimizerConfig(lr=lr, clip_grad=1e9),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def batch_of(prompts: list[Tensor], responses: list[Tensor]) -> TensorDict:
    """Return sequences of ``[tokens]`` ids in the nested layout of verl's v1 trainer; all response tokens count."""
    from verl.utils import tensordict_utils as tu

    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    positions = [torch.arange(len(x)) for x in ids]
    mask = nested(torch.ones_like(response) for response in responses)
    tensors = {"input_ids": ids, "position_ids": positions, "prompts": prompts, "responses": responses}
    masks = {"response_mask": mask, "loss_mask": mask}
    return tu.get_tensordict({name: nested(rows) for name, rows in tensors.items()} | masks, {})


def nested(rows: Iterable[Tensor]) -> Tensor:
    """Return rows ``[tokens]`` of several lengths as one tensor, as verl has them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def log_probs(worker, batch: TensorDict, cut: dict) -> list[Tensor]:
    """Return the log-probs of each response, ``[tokens]`` float32, as verl's trainer computes old log-probs."""
    from verl.utils import tensordict_utils as tu

    data = batch.copy()
    tu.assign_non_tensor(data, **cut, temperature=1.0, compute_loss=False, global_batch_size=len(batch))
    scores = worker.infer_batch(data)["log_probs"].unbind()
    # The output at a position scores the token after it.
    rows = zip(scores, batch["prompts"].unbind(), strict=True)
    return [x[len(prompt) - 1 : -1].float().clone() for x, prompt in rows]


def small_model(folder: str | Path) -> str:
    """Write a random Qwen3 of 7 million parameters; returns the folder."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4}
    shape |= {"vocab_size": 4096, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
    # Wider weights than the usual 0.02, with which layers do nearly nothing: a token then has a log-prob of -3 on
    # average, as that of a trained model.
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(initializer_range=0.08, **shape))
    torch.nn.init.constant_(model.model.norm.weight, 3.0)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def sample(model: str | Path, count: int, shortest: int, longest: int) -> TensorDict:
    """Return a batch of responses sampled from the model at temperature 1, of lengths spread evenly on a log scale."""
    import transformers
    from verl.utils.device import get_platform

    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(get_platform().device_name)
    prompts = torch.full((count, 1), policy.config.bos_token_id or 0, device=policy.device)
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "attention_mask": prompts * 0 + 1}
    ids = policy.generate(prompts, min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0, **settings).cpu()
    lengths = np.random.default_rng(0).permutation(np.geomspace(shortest, longest, count)).round().astype(int)
    responses = [row[1 : 1 + length] for row, length in zip(ids, lengths, strict=True)]
    return batch_of(list(prompts.cpu()), responses)


def with_advantages(batch: TensorDict, advantages: Iterable[float], step: int = 1) -> TensorDict:
    """Return a copy of a batch as a training step has it, two responses to a prompt."""
    from verl.utils import tensordict_utils as tu

    batch, count = batch.copy(), len(batch)
    rows = zip(advantages, batch["responses"].unbind(), strict=True)
    batch["advantages"] = nested(float(a) * torch.ones_like(response, dtype=torch.float32) for a, response in rows)
    tu.assign_non_tensor_stack(batch, "uid", [f"prompt {row // 2}" for row in range(count)])
    tu.assign_non_tensor_stack(batch, "global_steps", [step] * count)
    return batch


def update(trainer, batch: TensorDict, policy_loss, cut: dict, mini_batch: int, scale: float = 1.0) -> dict[str, float]:
    """Train on the rows of this rank, ``mini_batch`` rows of all ranks a step; returns verl's reduced metrics."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.workers import config, engine_workers

    actor = config.FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=scale,
        policy_loss=policy_loss,
    )
    trainer.set_loss_fn(functools.partial(engine_workers.ppo_loss, config=actor))
    loader = {"epochs": 1, "seed": 0, "dataloader_kwargs": {"shuffle": False}, "temperature": 1.0}
    tu.assign_non_tensor(batch, **cut, **loader, global_batch_size=mini_batch, mini_batch_size=mini_batch)
    metrics = reduce_metrics(dict(tu.get(trainer.train_mini_batch(batch), "metrics")))
    return {name: float(value) for name, value in metrics.items()}
