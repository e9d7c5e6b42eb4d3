# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One data-parallel rank: verl's training worker with FSDP2 trains on eight sequences; rank 0 saves what came out.

RANK=0 WORLD_SIZE=1 ... python fsdp_rank.py MODEL OUTPUT CUT [--loss gspo] [--observed] ...

CUT is MICRO_BATCH_SIZE, packed:MICRO_BATCH_SIZE or dynamic:MAX_TOKENS. Records go to the folder OUTPUT.records.
"""

import argparse
import functools
import os
from collections import Counter

import torch
import verl  # noqa: F401  loads this package's plugin, as in every worker
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
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

from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig

PROMPT, RESPONSES, STEP = 5, [1, 3, 60, 17, 30, 90, 8, 2], 12


def mini_batch(vocab_size: int) -> TensorDict:
    """Eight sequences of 1 to 90 response tokens, one fully masked, in the nested layout of verl's v1 trainer."""
    generator = torch.Generator().manual_seed(0)
    nest = lambda xs: torch.nested.as_nested_tensor(list(xs), layout=torch.jagged)  # noqa: E731
    ids = [torch.randint(2, vocab_size, (PROMPT + n,), generator=generator) for n in RESPONSES]
    mask = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    mask[1][:] = 0
    mask[2][10:20] = 0
    old = [-3 + 0.2 * torch.randn(n, generator=generator) for n in RESPONSES]
    advantages = torch.randn(len(RESPONSES), generator=generator)
    return tu.get_tensordict(
        {
            "input_ids": nest(ids),
            "position_ids": nest(torch.arange(len(x)) for x in ids),
            "prompts": nest(x[:PROMPT] for x in ids),
            "responses": nest(x[PROMPT:] for x in ids),
            "response_mask": nest(mask),
            "loss_mask": nest(mask),
            "old_log_probs": nest(old),
            "advantages": nest(a.expand(n).clone() for a, n in zip(advantages, RESPONSES, strict=True)),
            "uid": [f"prompt {i // 2}" for i in range(len(RESPONSES))],
            "global_steps": [STEP] * len(RESPONSES),
        },
        {},
    )


def policy_loss(loss: str, observed: bool, records_dir: str) -> PolicyLossConfig:
    if loss == "fspo":
        return FSPOPolicyLossConfig(eps_low=0.5, eps_high=0.5, eps_dual=1.5, records_dir=records_dir)
    if observed:
        return ObservedPolicyLossConfig(loss_mode=loss, records_dir=records_dir)
    return PolicyLossConfig(loss_mode=loss)


class Collectives(TorchDispatchMode):
    """Counts the collective operations of a rank by name. (torch's CommDebugMode does not get on with FSDP2.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            self.counts[function.name()] += 1
        return function(*args, **kwargs or {})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "output", "cut"):
        parser.add_argument(name)
    parser.add_argument("--loss", default="fspo")
    parser.add_argument("--observed", action="store_true")
    parser.add_argument("--mini-batch-size", type=int, default=len(RESPONSES))
    parser.add_argument("--lr", type=float, default=0.0)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    get_platform().communication_backend_name()  # joins the gloo group, as in verl's workers
    kind, _, size = args.cut.rpartition(":")
    dynamic = kind == "dynamic"
    worker = engine_workers.TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=args.model,
                use_remove_padding=kind == "packed",
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                use_dynamic_bsz=dynamic,
                micro_batch_size_per_gpu=None if dynamic else int(size),
                max_token_len_per_gpu=int(size) if dynamic else None,
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            ),
            optimizer_config=FSDPOptimizerConfig(lr=args.lr, clip_grad=1e9),
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    worker.reset()
    config = FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=128,
        policy_loss=policy_loss(args.loss, args.observed, f"{args.output}.records"),
    )
    worker.set_loss_fn(functools.partial(engine_workers.ppo_loss, config))

    batch = mini_batch(worker.engine.module.config.vocab_size)
    share = torch.arange(rank, len(RESPONSES), world_size)  # every rank gets short and long ones
    data = tu.index_select_tensor_dict(batch, share)
    tu.assign_non_tensor(
        data,
        global_batch_size=args.mini_batch_size,
        mini_batch_size=args.mini_batch_size,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
    )
    gradient, optimizer_step = {}, worker.engine.optimizer_step

    def keep_gradient():  # verl drops it after the step
        for name, parameter in worker.engine.module.named_parameters():
            gradient[name] = parameter.grad.full_tensor()
        return optimizer_step()

    worker.engine.optimizer_step = keep_gradient
    with Collectives() as collectives:
        result = worker.train_mini_batch(data)
    weights = {name: parameter.full_tensor() for name, parameter in worker.engine.module.named_parameters()}
    if rank == 0:
        metrics = {name: float(value) for name, value in reduce_metrics(dict(tu.get(result, "metrics"))).items()}
        saved = {"gradient": gradient, "weights": weights, "metrics": metrics, "collectives": dict(collectives.counts)}
        torch.save(saved, args.output)


if __name__ == "__main__":
    main()
