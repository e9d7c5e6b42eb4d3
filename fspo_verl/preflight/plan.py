# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a launch will do, in numbers that follow from its config alone, each with the arithmetic behind it.

Sizes are those of weights, gradients, optimiser state and logits. Activations, CUDA graphs and fragmentation come on
top: they depend on kernels and versions, and are not guessed at here.
"""

from dataclasses import dataclass

import pyarrow as pa
from omegaconf import DictConfig

from fspo_verl.observe.records import COLUMNS
from fspo_verl.preflight.launch import Launch

_GIB = 2**30
_FUSED_TOKENS = 512  # whose logits verl's torch backend of use_fused_kernels holds at a time; no setting of verl's


@dataclass(frozen=True)
class Row:
    """One line of the plan."""

    name: str
    value: str
    how: str = ""
    """The arithmetic, or where the value comes from."""


def plan(config: DictConfig) -> list[Row]:
    """The plan of a launch with ``actor_rollout_ref``: what trains, its band, batches, memory per GPU, disk."""
    launch = Launch(config)
    return [*_what(launch), *_band(launch), *_batches(launch), *_memory(launch), *_disk(launch)]


def _what(launch: Launch):
    config = launch.config
    loss = launch.loss_mode if launch.is_fspo else f"{launch.loss_mode} (observed)" if launch.is_ours else "not ours"
    yield Row("policy loss", loss, f"loss_agg_mode={launch.actor.loss_agg_mode}, lr={launch.actor.optim.lr:g}")
    yield Row("advantages", config.algorithm.adv_estimator)
    yield Row("model", str(config.actor_rollout_ref.model.path).rstrip("/").rsplit("/", 1)[-1])
    yield Row("training GPUs", str(_gpus(config.trainer)), _pool(config.trainer) + f", {launch.actor.strategy}")
    if (pool := launch.rollout_pool) is not None:
        yield Row("rollout GPUs", str(_gpus(pool)), _pool(pool) + ", a pool of their own")


def _band(launch: Launch):
    """What is left unclipped: ratios of whole responses; of one token where a loss clips tokens."""
    low, high = launch.clip_range
    if launch.loss_mode == "vanilla":
        yield Row("unclipped token ratio", f"{1 - low:g} to {1 + high:g}", f"1 - {low:g}, 1 + {high:g}")
    elif launch.loss_mode == "gspo":
        for length in launch.typical_lengths:
            ratios = f"{(1 - low) ** length:.3g} to {(1 + high) ** length:.3g}"
            yield Row(f"unclipped ratio at L={length}", ratios, f"(1 - {low:g})^{length}, (1 + {high:g})^{length}")
    elif launch.is_fspo and (not launch.half_widths or launch.band.band_center == "realized"):
        yield Row("unclipped ratio", "set by the data", launch.band.describe())
    elif launch.is_fspo:
        band = launch.band
        for length, (lowest, highest) in launch.band_as_ratios(launch.typical_lengths).items():
            power = f"{length}^{band.length_power:g}"
            center = f"-{band.drift_per_token:g} x {length} " if band.drift_per_token else ""
            how = f"exp({center}-{band.eps_low:.3g} x {power}), exp({center}+{band.eps_high:.3g} x {power})"
            yield Row(f"unclipped ratio at L={length}", f"{lowest:.3g} to {highest:.3g}", how)


def _batches(launch: Launch):
    config, actor = launch.config, launch.actor
    n, mini = config.actor_rollout_ref.rollout.n, actor.ppo_mini_batch_size
    prompts, how = launch.prompts_per_rollout, "data.train_batch_size"
    if (fully_async := launch.get("async_training")) is not None:
        how = f"{mini} x {fully_async.require_batches} require_batches x {launch.rounds_per_sync} rounds between syncs"
    yield Row("prompts per rollout", f"{prompts:,}", how)
    yield Row("responses per rollout", f"{prompts * n:,}", f"{prompts} prompts x {n}")
    steps = launch.optimizer_steps_per_rollout
    yield Row("optimiser steps per rollout", str(steps), f"each on {mini} prompts x {n} = {mini * n} responses")
    longest = config.data.max_prompt_length + config.data.max_response_length
    yield Row("tokens per rollout, at most", f"{prompts * n * longest:,}", f"{prompts * n:,} x {longest}")
    if actor.use_dynamic_bsz:
        limit, ranks = actor.ppo_max_token_len_per_gpu, _data_parallel(launch)
        yield Row("tokens per GPU and micro-batch", f"{limit:,}", "ppo_max_token_len_per_gpu")
        at_most = -(-mini * n * longest // (ranks * limit))
        how = f"{mini * n} x {longest} tokens / {ranks} ranks / {limit}"
        yield Row("micro-batches per step, at most", f"about {at_most:,}", how)


def _memory(launch: Launch):
    if (model := _model_on_meta(launch)) is None:
        path = launch.config.actor_rollout_ref.model.path
        yield Row("parameters", "not known here", f"{path} is not on this machine")
        return
    total = sum(parameter.numel() for parameter in model.parameters())
    yield Row("parameters", f"{total:,}", type(model).__name__)
    if launch.actor.strategy == "megatron":
        yield from _megatron_states(launch, total)
    elif launch.actor.strategy in ("fsdp", "fsdp2"):
        yield from _fsdp_states(launch, model, total)
    if launch.actor.use_dynamic_bsz:
        tokens, vocabulary = launch.actor.ppo_max_token_len_per_gpu, model.config.vocab_size
        if launch.config.actor_rollout_ref.model.use_fused_kernels:
            how = f"4 bytes x {_FUSED_TOKENS} tokens x vocabulary {vocabulary}, in chunks by use_fused_kernels"
            yield _size("logits, per GPU", 4 * _FUSED_TOKENS * vocabulary, how)
        else:
            key = "actor_rollout_ref.model.use_fused_kernels"
            how = f"2 bytes x {tokens} tokens x vocabulary {vocabulary}, which {key}=True does without"
            yield _size("logits of a micro-batch, per GPU", 2 * tokens * vocabulary, how)
    rollout = launch.config.actor_rollout_ref.rollout
    tensor, width = rollout.tensor_model_parallel_size, 4 if rollout.dtype == "float32" else 2
    yield _size("rollout weights, per GPU", width * total / tensor, f"{width} bytes x {total:,} / TP {tensor}")


def _fsdp_states(launch: Launch, model, total: int):
    """FSDP shards of weights, gradients and Adam's two moments, all in ``model_dtype``."""
    fsdp, gpus = launch.actor.fsdp_config, _gpus(launch.config.trainer)
    shards = gpus if fsdp.fsdp_size in (-1, None) else min(fsdp.fsdp_size, gpus)
    width = 4 if fsdp.model_dtype in ("fp32", "float32") else 2
    trained, frozen = total, 0
    if rank := launch.config.actor_rollout_ref.model.lora_rank:
        modules = [module for name, module in model.named_modules() if "lm_head" not in name]
        linear = [module for module in modules if type(module).__name__ == "Linear"]
        trained, frozen = sum(rank * (module.in_features + module.out_features) for module in linear), total
        yield Row("LoRA parameters", f"{trained:,}", f"rank {rank} x (in + out) of {len(linear)} linear layers")

    def shard(name: str, parameters: int, copies: int, offloaded: bool) -> Row:
        host = ", in host memory between uses" if offloaded else ""
        how = f"{copies} x {width} bytes x {parameters:,} / {shards} shards{host}"
        return _size(f"{name}, per GPU", copies * width * parameters / shards, how)

    yield shard("weights", frozen + trained, 1, fsdp.param_offload)
    yield shard("gradients", trained, 1, False)
    yield shard("optimiser state", trained, 2, fsdp.optimizer_offload)


def _megatron_states(launch: Launch, total: int):
    """bf16 weights and fp32 gradients per model-parallel part; fp32 master weights and Adam over the ranks as well."""
    megatron, parts = launch.actor.megatron, _model_parallel(launch)
    ranks = _data_parallel(launch) * megatron.context_parallel_size if megatron.use_distributed_optimizer else 1
    part = f"{total:,} / (TP x PP = {parts})"
    yield _size("weights, per GPU", 2 * total / parts, f"2 bytes x {part}")
    yield _size("gradients, per GPU", 4 * total / parts, f"4 bytes x {part}")
    yield _size("optimiser state, per GPU", 12 * total / parts / ranks, f"(4 + 8) bytes x {part} / {ranks} ranks")


def _disk(launch: Launch):
    if not launch.is_ours or launch.policy_loss.records_dir is None:
        return
    rows = launch.prompts_per_rollout * launch.config.actor_rollout_ref.rollout.n * launch.actor.ppo_epochs
    fraction = launch.policy_loss.records_fraction
    width = sum(4 if pa.types.is_dictionary(dtype) else dtype.bit_width // 8 for dtype in COLUMNS.values())
    how = f"{rows:,} responses x {fraction:g} x {width} bytes, before compression"
    freq = launch.policy_loss.records_freq
    name = "records per step" if freq == 1 else f"records per {freq} steps"
    yield Row(name, f"{rows * fraction * width / 2**20:.3g} MiB", how)


def _size(name: str, size: float, how: str) -> Row:
    return Row(name, f"{size / _GIB:.3g} GiB", how)


def _gpus(pool: DictConfig) -> int:
    return pool.nnodes * pool.n_gpus_per_node


def _pool(pool: DictConfig) -> str:
    return f"{pool.nnodes} nodes x {pool.n_gpus_per_node}"


def _data_parallel(launch: Launch) -> int:
    """Ranks among which the responses of a mini-batch are divided."""
    if launch.actor.strategy == "megatron":
        split = _model_parallel(launch) * launch.actor.megatron.context_parallel_size
    else:
        split = launch.get("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size") or 1
    return max(1, _gpus(launch.config.trainer) // split)


def _model_parallel(launch: Launch) -> int:
    """Parts into which Megatron cuts the model."""
    return launch.actor.megatron.tensor_model_parallel_size * launch.actor.megatron.pipeline_model_parallel_size


def _model_on_meta(launch: Launch):
    """The model without storage, from its config file on this machine; None without one. Runs no remote code."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(launch.config.actor_rollout_ref.model.path, local_files_only=True)
    except (OSError, ValueError):
        return None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
