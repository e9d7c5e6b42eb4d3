# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The numerical noise of S on a random model of Qwen3-8B's shape, through the forward pass of verl's FSDP engine.

    python scripts/bench/noise_8b.py                  # a GPU of 80 GB, 16 GB of disk, some minutes
    python scripts/bench/noise_8b.py --layers 2       # fewer of its layers

Responses are sampled from the model. Their log-probs are computed twice from the same weights, as verl does for old and
new log-probs, and S is the difference. The weights are random, so that this is no figure of a trained model.
"""

import argparse
import gc
import tempfile

import pandas as pd
import torch
import transformers
import worker
from noise import in_bands
from tqdm import tqdm
from verl.utils import tensordict_utils as tu

QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_8B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
DYNAMIC = {"use_dynamic_bsz": True, "micro_batch_size_per_gpu": None, "max_token_len_per_gpu": 4096}
DYNAMIC |= {"use_remove_padding": True}
CUTS = {  # of the old log-probs; of the update; into how many mini-batches the update cuts the responses first
    "packed, dynamic (USE_DYNAMIC_BSZ=True of the launch scripts)": (DYNAMIC, DYNAMIC, 2),
    "packed, 4 rows, then 16": (worker.micro_batches(4, True), worker.micro_batches(16, True), 1),
    "padded, 8 rows, then 1": (worker.micro_batches(8), worker.micro_batches(1), 1),
    "packed, 4 rows both times": (worker.micro_batches(4, True), worker.micro_batches(4, True), 2),
}


def write_model(folder: str, layers: int) -> None:
    """Random weights in bfloat16 as Qwen3 starts with them, but for logits that are as far apart as in use."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**QWEN3_8B | {"num_hidden_layers": layers}, dtype="bfloat16")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    torch.nn.init.constant_(model.model.norm.weight, 3.0)
    model.save_pretrained(folder)


def measure(trainer, batch, old_cut: dict, new_cut: dict, mini_batches: int) -> dict[str, str]:
    """One row of the table."""
    old = worker.log_probs(trainer, batch, old_cut)
    parts = tu.chunk_tensordict(batch, mini_batches)
    new = [scores for part in parts for scores in worker.log_probs(trainer, part, new_cut)]
    moved = [(a - b).double() for a, b in zip(new, old, strict=True)]
    columns = {
        "length": [len(x) for x in moved],
        "log_ratio": [float(x.sum()) for x in moved],
        "quadratic_variation": [float(x.square().sum()) for x in moved],
    }
    records = pd.DataFrame(columns)
    squares, long = records.log_ratio**2 / records.length, records.length > records.length.median()
    halves = {"rms of S/√L, shorter half": squares[~long], "longer half": squares[long]}
    return in_bands(records) | {name: f"{half.mean() ** 0.5:.2g}" for name, half in halves.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"])
    parser.add_argument("--responses", type=int, default=64, help="a multiple of 16 (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=1024, help="tokens (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args.layers)
        batch = worker.sample(folder, args.responses, 16, args.longest)
        for dtype in args.dtypes:
            trainer = worker.training_worker(folder, dtype)
            for name, cut in tqdm(CUTS.items(), dtype, disable=None):
                rows[f"{dtype}, {name}"] = measure(trainer, batch, *cut)
            scores = torch.cat(worker.log_probs(trainer, batch, worker.micro_batches(4, True)))
            print(f"{dtype}: a token has a log-prob of {scores.mean():.2f} on average", flush=True)
            print(pd.DataFrame.from_dict(rows, orient="index").to_string(), flush=True)
            del trainer
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
