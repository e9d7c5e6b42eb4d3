# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a Hugging Face folder: weights, tokenizer, and what is refused."""

import gguf_to_hf
import pytest
import small_gguf
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def converted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    file = small_gguf.write(folder / "small.gguf", tied=request.param)
    gguf_to_hf.convert(file, folder / "model")
    return file, folder / "model", request.param


def test_the_tokenizer_is_the_files(converted):
    _, folder, _ = converted
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for holder in (tokenizer, model.config, model.generation_config):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 2)
    assert len(tokenizer) == model.config.vocab_size == len(small_gguf.TOKENS)
    assert tokenizer.tokenize("ab ab 12") == ["ab", "Ġab", "Ġ", "1", "2"]  # though there is a merge for 12
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "naïve 7²"}], add_generation_prompt=True)
    assert tokenizer.decode(chat["input_ids"]) == "<start>user\nnaïve 7²<end>\n<start>assistant\n"
    assert chat["input_ids"].count(1) == 2 and chat["input_ids"].count(2) == 1
    assert tokenizer.decode(chat["input_ids"], skip_special_tokens=True) == "user\nnaïve 7²\nassistant\n"


def test_another_tokenizer_is_refused_and_leaves_nothing(tmp_path):
    file = small_gguf.write(tmp_path / "small.gguf", pre="qwen2")
    with pytest.raises(gguf_to_hf.ConversionError, match="qwen2"):
        gguf_to_hf.convert(file, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [file]


def test_every_weight_is_compared(converted):
    file, folder, _ = converted
    model, reader = AutoModelForCausalLM.from_pretrained(folder), GGUFReader(file)
    gguf_to_hf.check_weights(model, reader)
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-6
        with pytest.raises(gguf_to_hf.ConversionError, match=f"{name} differs"):
            gguf_to_hf.check_weights(model, reader)
        with torch.no_grad():
            parameter.copy_(kept)

    reader.tensors.pop()
    with pytest.raises(gguf_to_hf.ConversionError, match="no tensor for"):
        gguf_to_hf.check_weights(model, reader)
    model.model.layers.pop(-1)
    with pytest.raises(gguf_to_hf.ConversionError, match="no place for"):
        gguf_to_hf.check_weights(model, GGUFReader(file))
