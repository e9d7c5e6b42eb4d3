# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What metrics and records cost, as a share of the time of an actor update.

    VERL_PLATFORM=cpu python scripts/benchmark_observation.py
    VERL_PLATFORM=cpu python scripts/benchmark_observation.py --layers 4 --hidden 256 --length 512 --responses 64

One process, verl's own training worker with FSDP2, a Qwen3-architecture model with random weights, one mini-batch of
responses of mixed lengths. Every round runs each variant once, in turn, so that a slow moment of the machine meets all
of them: fspo bare (its metrics cut out), with metrics, and with records; verl's gspo bare, observed, and with records.
Reported: median time of the update, and the paired difference to the bare loss of the same round as a share of it,
median and quartiles. The larger the model, the smaller the share: the cost depends on tokens and responses alone.
"""

import argparse
import contextlib
import functools
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch
from tqdm import trange

LOSSES = {"fspo": "seq-mean-token-sum-norm", "gspo": "seq-mean-token-mean"}
VARIANTS = ("bare", "metrics", "records")
PROMPT = 16


def worker(folder: Path, args: argparse.Namespace):
    """verl's training worker with a model of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from verl.trainer.config import CheckpointConfig
    from verl.utils.device import get_platform
    from verl.workers import engine_workers
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 32,
            num_key_value_heads=args.hidden // 32,
            head_dim=32,
        )
    ).save_pretrained(folder)
    get_platform().communication_backend_name()  # joins the process group, as in verl's workers
    made = engine_workers.TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(folder),
                load_tokenizer=False,
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=args.micro_batch_size,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=0.0),
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    made.reset()
    return made


def batch(args: argparse.Namespace, generator: torch.Generator, step: int):
    """The mini-batch of a step in the nested layout of verl's v1 trainer; lengths are spread evenly on a log scale."""
    from verl.utils import tensordict_utils as tu

    nest = lambda rows: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)  # noqa: E731
    lengths = np.geomspace(5, args.length, args.responses).astype(int)
    ids = [torch.randint(args.vocabulary, (PROMPT + n,), generator=generator) for n in lengths]
    advantages = torch.randn(args.responses, generator=generator)
    data = tu.get_tensordict(
        {
            "input_ids": nest(ids),
            "position_ids": nest(torch.arange(len(row)) for row in ids),
            "prompts": nest(row[:PROMPT] for row in ids),
            "responses": nest(row[PROMPT:] for row in ids),
            "response_mask": nest(torch.ones(n, dtype=torch.long) for n in lengths),
            "loss_mask": nest(torch.ones(n, dtype=torch.long) for n in lengths),
            "old_log_probs": nest(-torch.rand(n, generator=generator) for n in lengths),
            "advantages": nest(a.expand(n).clone() for a, n in zip(advantages, lengths, strict=True)),
            "uid": [str(row // 8) for row in range(args.responses)],
            "global_steps": [step] * args.responses,
        },
        {},
    )
    tu.assign_non_tensor(
        data,
        global_batch_size=args.responses,
        mini_batch_size=args.responses,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
    )
    return data


def loss_function(loss: str, variant: str, records: Path):
    """verl's ``ppo_loss`` with one policy loss, as a worker calls it."""
    from verl.workers import engine_workers
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig

    records_dir = str(records) if variant == "records" else None
    if loss == "fspo":
        policy_loss = FSPOPolicyLossConfig(records_dir=records_dir)
    elif variant == "bare":
        policy_loss = PolicyLossConfig(loss_mode=loss)
    else:
        policy_loss = ObservedPolicyLossConfig(loss_mode=loss, records_dir=records_dir)
    config = FSDPActorConfig(
        rollout_n=8, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss, loss_agg_mode=LOSSES[loss]
    )
    return functools.partial(engine_workers.ppo_loss, config)


def measure(args: argparse.Namespace, folder: Path) -> pd.DataFrame:
    """Seconds of an actor update, ``[round, (loss, variant)]``."""
    import fspo_verl.register

    # The fspo loss has no switch for its metrics: what is measured here is what leaving them out would save.
    without_metrics = {"_observe": lambda *_, **__: {}, "_metrics": lambda *_: {}, "_verl_metrics": lambda *_: {}}
    updates = {(loss, variant): loss_function(loss, variant, folder / loss) for loss in LOSSES for variant in VARIANTS}
    trainer = worker(folder / "model", args)
    generator = torch.Generator().manual_seed(args.seed)
    rows = []
    for step in trange(1, args.rounds + 2, desc="rounds", disable=None):
        seconds = {}
        for (loss, variant), update in updates.items():
            trainer.set_loss_fn(update)
            data = batch(args, generator, step)
            bare = mock.patch.multiple(fspo_verl.register, **without_metrics)
            with bare if variant == "bare" else contextlib.nullcontext():
                begin = time.perf_counter()
                trainer.train_mini_batch(data)
                seconds[loss, variant] = time.perf_counter() - begin
        rows.append(seconds)
    return pd.DataFrame(rows[1:])  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, type=int)
    add("--hidden", default=64, help="hidden size of the model (default: %(default)s, the quickstart's)")
    add("--layers", default=2, help="layers of the model (default: %(default)s)")
    add("--vocabulary", default=24, help="size of the vocabulary (default: %(default)s)")
    add("--responses", default=64, help="responses in the mini-batch (default: %(default)s)")
    add("--length", default=81, help="tokens of the longest response (default: %(default)s)")
    add("--micro-batch-size", default=32, help="responses per micro-batch (default: %(default)s)")
    add("--rounds", default=20, help="rounds (default: %(default)s)")
    add("--seed", default=0, help="of the data (default: %(default)s)")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"WG_BACKEND": "ray", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    import verl  # noqa: F401  loads the plugin, as in every worker

    folder = Path(tempfile.mkdtemp())
    try:
        seconds = measure(args, folder)
    finally:
        shutil.rmtree(folder)
    for loss in LOSSES:
        bare = seconds[loss, "bare"]
        print(f"{loss}: actor update {bare.median() * 1e3:.1f} ms without metrics")
        for variant in VARIANTS[1:]:
            share = (seconds[loss, variant] - bare) / bare
            low, median, high = share.quantile([0.25, 0.5, 0.75])
            print(f"  with {variant:8} {median:+.1%} (quartiles {low:+.1%} to {high:+.1%})")


if __name__ == "__main__":
    main()
