# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A random Llama of 50,000 parameters as a GGUF file, quantised as real ones are."""

from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 2, 64, 4, 2, 96
HEAD = HIDDEN // HEADS
ROPE_BASE, EPSILON = 10_000.0, 1e-5
# "12" is a merge on purpose: it must never be applied, as digits are tokens of their own.
MERGES = [("1", "2"), ("a", "b"), ("Ġ", "ab")]
CONTROL = ["<unk>", "<start>", "<end>"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def write(file: Path, tied: bool = True, pre: str = "smollm", seed: int = 0) -> Path:
    """Write the model; with ``tied`` the output layer is the embedding matrix, and the file has it once."""
    torch.manual_seed(seed)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("small")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL if t in CONTROL else gguf.TokenType.NORMAL for t in TOKENS])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int, kind: Kind = Kind.Q4_1) -> None:
        norm = len(shape) == 1
        values = (torch.rand(shape) + 0.5 if norm else torch.randn(shape) * 0.2).numpy()
        kind = Kind.F32 if norm else kind
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd", len(TOKENS), HIDDEN, kind=Kind.Q8_0)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm", HIDDEN)
        add(f"{block}.attn_q", HIDDEN, HIDDEN)
        add(f"{block}.attn_k", KV_HEADS * HEAD, HIDDEN)
        add(f"{block}.attn_v", KV_HEADS * HEAD, HIDDEN)
        add(f"{block}.attn_output", HIDDEN, HIDDEN)
        add(f"{block}.ffn_norm", HIDDEN)
        add(f"{block}.ffn_gate", FEED_FORWARD, HIDDEN)
        add(f"{block}.ffn_up", FEED_FORWARD, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, FEED_FORWARD)
    add("output_norm", HIDDEN)
    if not tied:
        add("output", len(TOKENS), HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
