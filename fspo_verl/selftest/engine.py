# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl's training worker with its FSDP engine in this process: what a Ray worker runs, without Ray and trainer."""

import functools
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
import verl  # noqa: F401  loads this package's plugin, as in every worker
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_platform
from verl.utils.metric import reduce_metrics
from verl.workers import config, engine_workers

from fspo_verl.config import FSPOPolicyLossConfig
from fspo_verl.observe import noise


def micro_batches(rows: int, packed: bool = False) -> dict:
    """verl's settings for micro-batches of so many rows, padded or packed."""
    return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": rows, "use_remove_padding": packed}


def training_worker(model: str | Path, dtype: str = "fp32", lr: float = 0.0, **model_settings):
    """The worker, its model loaded and sharded over the ranks that RANK and WORLD_SIZE describe (default: this one).

    Args:
        model: folder of a model.
        dtype: ``fp32`` or ``bf16``: of the weights in the forward pass, and of autocast.
        lr: of AdamW.
        model_settings: further fields of verl's ``HFModelConfig``.
    """
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


def batch_of(prompts: list[Tensor], responses: list[Tensor], advantages: Iterable, step: int = 1) -> TensorDict:
    """Sequences of ``[tokens]`` ids of a training step, two to a group, in the nested layout of verl's v1 trainer."""
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    ones = [torch.ones_like(response) for response in responses]
    tensors = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(x)) for x in ids],
        "prompts": prompts,
        "responses": responses,
        "response_mask": ones,
        "loss_mask": ones,
        "advantages": [float(a) * one for a, one in zip(advantages, ones, strict=True)],
    }
    groups = {"uid": [f"prompt {i // 2}" for i in range(len(ids))], "global_steps": [step] * len(ids)}
    return tu.get_tensordict({name: nested(rows) for name, rows in tensors.items()} | groups, {})


def nested(rows: Iterable[Tensor]) -> Tensor:
    """Rows ``[tokens]`` of several lengths as one tensor, as verl has them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def log_probs(worker, batch: TensorDict, cut: dict) -> list[Tensor]:
    """Log-probs of each response, ``[tokens]`` float32, as verl's trainer computes those of the old policy."""
    data = batch.copy()
    tu.assign_non_tensor(data, **cut, temperature=1.0, compute_loss=False, global_batch_size=len(batch))
    found = worker.infer_batch(data)["log_probs"].unbind()
    # The output at a position scores the token after it.
    return [x[len(prompt) - 1 : -1].float().clone() for x, prompt in zip(found, batch["prompts"].unbind(), strict=True)]


def update(worker, batch: TensorDict, policy_loss, cut: dict, mini_batch: int, scale: float = 1.0) -> dict[str, float]:
    """Optimiser steps over the rows of this rank, each of ``mini_batch`` rows of all ranks; verl's reduced metrics."""
    actor = config.FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=scale,
        policy_loss=policy_loss,
    )
    worker.set_loss_fn(functools.partial(engine_workers.ppo_loss, config=actor))
    loader = {"epochs": 1, "seed": 0, "dataloader_kwargs": {"shuffle": False}, "temperature": 1.0}
    tu.assign_non_tensor(batch, **cut, **loader, global_batch_size=mini_batch, mini_batch_size=mini_batch)
    metrics = reduce_metrics(dict(tu.get(worker.train_mini_batch(batch), "metrics")))
    return {name: float(value) for name, value in metrics.items()}


def small_model(folder: str | Path, **shape: int) -> str:
    """Write a random Qwen3 of 7 million parameters (or of another shape); returns the folder."""
    torch.manual_seed(0)
    usual = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4}
    usual |= {"vocab_size": 4096, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
    # Wider weights than the usual 0.02, with which layers do nearly nothing: a token then has a log-prob of -3 on
    # average, as that of a trained model.
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(initializer_range=0.08, **(usual | shape)))
    torch.nn.init.constant_(model.model.norm.weight, 3.0)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def sample(model: str | Path, count: int, shortest: int, longest: int, step: int = 1) -> TensorDict:
    """A batch of responses sampled from the model at temperature 1, of lengths spread evenly on a log scale."""
    torch.manual_seed(0)
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(get_platform().device_name)
    prompts = torch.full((count, 1), policy.config.bos_token_id or 0, device=policy.device)
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "attention_mask": prompts * 0 + 1}
    ids = policy.generate(prompts, min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0, **settings).cpu()
    lengths = np.random.default_rng(0).permutation(np.geomspace(shortest, longest, count)).round().astype(int)
    responses = [row[1 : 1 + length] for row, length in zip(ids, lengths, strict=True)]
    return batch_of(list(prompts.cpu()), responses, np.resize([-1.0, 1.0], count), step)


def check_step() -> dict:
    """One optimiser step with fspo in float32 on a small model."""
    with tempfile.TemporaryDirectory() as folder:
        small_model(folder)
        batch, worker, cut = sample(folder, 16, 1, 96), training_worker(folder, lr=1e-4), micro_batches(4)
    # As if the tokens had moved by 0.2 nats: two half-widths of the band, so that some responses are clipped.
    batch["old_log_probs"] = nested(x + 0.2 * torch.randn_like(x) for x in log_probs(worker, batch, cut))
    metrics = update(worker, batch, FSPOPolicyLossConfig(eps=0.1), cut, len(batch))
    text = (
        f"gradient norm {metrics['grad_norm']:.4g}, {metrics['actor/fspo/clip_fraction']:.1%} of the responses clipped"
    )
    if not (0 < metrics["grad_norm"] < float("inf") and 0 < metrics["actor/fspo/clip_fraction"] < 1):
        raise ArithmeticError(f"an optimiser step of verl's FSDP engine does not learn: {text}")
    return {"text": f"an optimiser step of verl's FSDP engine: {text}"}


def check_noise(dtype: str, model: Path | None) -> dict:
    """How far a token's log-prob (sigma, nats) is from that in padded rows of 8, by layout; the smallest eps above."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = model or small_model(scratch)
        batch = sample(folder, 32, 16, 128 if get_platform().device_name == "cpu" else 1024)
        worker = training_worker(folder, dtype)
    old = torch.cat(log_probs(worker, batch, micro_batches(8)))
    layouts = {"1 row": micro_batches(1), "32 rows": micro_batches(32), "packed": micro_batches(4, packed=True)}
    new = {name: torch.cat(log_probs(worker, batch, layout)) for name, layout in layouts.items()}
    sigma = {name: (x - old).double().square().mean().sqrt().item() for name, x in new.items()}
    eps = noise.rounded_up(noise.EPS_IN_SIGMA * max(sigma.values())) if any(sigma.values()) else 0.0
    moves = ", ".join(f"{value:.2g} ({name})" for name, value in sigma.items())
    text = f"an eps below {eps:g} is lost in rounding, which moves a token by sigma = {moves}"
    return {"text": text, "sigma": sigma, "eps": eps}
