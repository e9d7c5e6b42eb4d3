# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Turn a GGUF file of a Llama model with SmolLM's tokenizer into a folder in Hugging Face's format.

transformers (5.10) dequantises the weights, and every one of them is then compared with what the package gguf makes of
the file. The tokenizer is built here from the file's own metadata: transformers' conversion ends a sequence with the
token that begins a message, has no padding token, and does not split numbers into digits.
"""

import argparse
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

# On Python 3.10 transformers (5.10) cannot tell which package the module is of, and asks the module for its version.
sys.modules["gguf"].__version__ = metadata.version("gguf")


class ConversionError(Exception):
    """The file is not one that this module can convert exactly; the message says why."""


def convert(gguf: Path, output: Path) -> None:
    """Write model, tokenizer and chat template of the file ``gguf`` to the folder ``output``, in float32.

    The folder appears whole or not at all.

    Raises:
        ConversionError: another architecture or tokenizer, or weights that differ from those of the file.
    """
    reader = GGUFReader(gguf)
    words = tokenizer(reader)
    logging.disable_progress_bar()  # transformers shows one per file that it reads or writes
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    check_weights(model, reader)
    # Newer ones (seen: 5.17) take the model for a quantised one, and would not save it.
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    roles = {f"{role}_token_id": getattr(words, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    model.config.update(roles)
    model.generation_config = GenerationConfig(**roles)

    with tempfile.TemporaryDirectory(dir=output.parent) as unfinished:
        whole = Path(unfinished, output.name)
        model.save_pretrained(whole)
        words.save_pretrained(whole)
        if not output.exists():  # another run may have been quicker
            whole.rename(output)


def tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes: byte-level BPE on single digits and GPT-2's words.

    Raises:
        ConversionError: the file names another kind of tokenizer.
    """
    kind = {
        name: _value(reader, name) for name in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    }
    if list(kind.values()) != ["llama", "gpt2", "smollm"]:
        raise ConversionError(f"made for a Llama model with SmolLM's tokenizer (llama, gpt2, smollm), not for {kind}")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    bpe = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")],
        )
    )
    # What llama.cpp means by "smollm".
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    roles = {
        role: tokens[_value(reader, f"tokenizer.ggml.{role}_token_id")] for role in ("bos", "eos", "padding", "unknown")
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=roles["bos"],
        eos_token=roles["eos"],
        pad_token=roles["padding"],
        unk_token=roles["unknown"],
        additional_special_tokens=[roles["bos"], roles["eos"]],
        chat_template=_value(reader, "tokenizer.chat_template"),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=_value(reader, "llama.context_length"),
    )


def check_weights(model: LlamaForCausalLM, reader: GGUFReader) -> None:
    """Compare every parameter with the file's tensor of that name, dequantised by gguf.

    Raises:
        ConversionError: one differs, is missing or is left over.
    """
    config = model.config
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():  # tied ones once
        tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight",)), None)
        if tensor is None:
            raise ConversionError(f"the file has no tensor for {name}")
        expected = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        # llama.cpp rotates neighbouring rows of a head, transformers row i and i + half: undo the reordering.
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        found = parameter.detach()
        if heads:
            found = found.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if not torch.equal(found, expected):
            raise ConversionError(f"{name} differs from the file's {tensor.name}, dequantised")
    tensors.pop("rope_freqs.weight", None)  # derived from the configuration
    if tensors:
        raise ConversionError(f"the model has no place for the file's {', '.join(tensors)}")


def _value(reader: GGUFReader, name: str):
    if name not in reader.fields:
        raise ConversionError(f"the file does not say {name}")
    return reader.fields[name].contents()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="file to convert")
    parser.add_argument("output", type=Path, help="folder to write; must not exist")
    args = parser.parse_args()
    try:
        convert(args.gguf, args.output)
    except ConversionError as error:
        raise SystemExit(f"{args.gguf}: {error}") from None


if __name__ == "__main__":
    main()
