# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The study of the law of S: estimates by definition, and published numbers against their records."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from scipy import stats
from simulated_records import assert_covered, holds, simulate_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fspo_verl.analysis.clip_rates import length_edges, prompts_of

STUDY = Path(__file__).parents[1] / "law"
sys.path.insert(0, str(STUDY))
import draw  # noqa: E402
import law  # noqa: E402
import measure  # noqa: E402
from estimates import exponent, interval  # noqa: E402
from prompts import KINDS  # noqa: E402

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"
SMALL = ("--prompts 12 --group 2 --train-prompts 1 --train-group 3 --shortest-cut 4 --max-tokens 60 --lr 1e-3").split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random Llama of two layers and a tokenizer of bytes; a response ends after 40 tokens or so."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(["<end>", *alphabet])}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", chat_template=CHAT).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words.get_vocab()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def log_probs_by_hand(policy, prompt, response, temperature):
    logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


@pytest.mark.parametrize("count", [2, 4, 10])
def test_the_interval_of_few_equal_deviations_is_students_t_interval(count):
    value = 0.3 + np.resize([1.0, -1.0], count)
    found = interval(value.mean(), (value - value.mean()) / count, np.arange(count))
    assert found[1:] == pytest.approx(stats.t.interval(0.95, count - 1, value.mean(), stats.sem(value)))


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_the_interval_of_the_exponent_holds_the_truth_as_often_as_it_says(power):
    rng, hits = np.random.default_rng(0), []
    for _ in range(150):
        records = simulate_run(rng, steps=8, power=power, kappa=0.0).query("mini_batch == 3")
        hits.append(holds(exponent(records.log_ratio, records.length, prompts_of(records)), power))
    assert_covered(hits, 0.93)


def study_records(rng, prompts=120, group=4, power=0.5):
    """Records of the study with independent tokens whose spread is .05 at first and goes like position^(power - .5)."""
    rows = []
    for prompt in range(prompts):
        kind, center = list(KINDS)[prompt % 3], np.exp(rng.uniform(2, 7.2))
        for _ in range(group):
            length = int(np.clip(center * np.exp(0.2 * rng.standard_normal()), 2, 1000))
            spread = 0.05 * np.arange(1, length + 1) ** (power - 0.5)
            old = np.log(rng.uniform(0.02, 1, length))
            row = law.sums(old, old + spread * rng.standard_normal(length))
            rows.append(row | {"kind": kind, "prompt": str(prompt), "length": length, "distinct": rng.uniform(0.7, 1)})
    return pd.DataFrame(rows).assign(
        temperature=1.0, direction="grpo", mini_batch=4, advantage=rng.choice([-1.0, 1.0], len(rows))
    )


def test_the_study_finds_a_known_law_and_who_is_clipped(tmp_path):
    law.recorded(tmp_path).add(pa.Table.from_pandas(study_records(np.random.default_rng(0))))
    records = draw.read(tmp_path)
    for found in (
        exponent(records.log_ratio, records.length, prompts_of(records)),
        draw.exponent_within(records, 127),
        draw.exponent_within(records, 511),
    ):
        assert holds(found, 0.5) and found.upper - found.lower < 0.5
    for last in draw.PREFIXES[:2]:
        np.testing.assert_allclose(draw.by_position(records, last).value[3:], 0.05, rtol=0.15)
    np.testing.assert_allclose(draw.by_probability(records).value[1:4], 0.05, rtol=0.05)
    judged = draw.fairness(records).query("kind == 'all' and part == 'all'").set_index("width")
    np.testing.assert_allclose(judged.rate, 0.1, atol=2 / len(records))
    assert judged.k["L"] < -0.3 < judged.k["sqrt(L)"] < 0.3 < judged.k["fixed"] and abs(judged.k["fitted"]) < 0.3
    # A length counts for more or less by its acceptance over that of all, bin by bin.
    clips = draw.clipped(records, "fixed")
    edges = length_edges(records.length, 6)
    bins = [clips[records.length.between(low, high - 1)] for low, high in zip(edges, edges[1:], strict=False)]
    used = [(len(part), abs((1 - part.mean()) / (1 - clips.mean()) - 1)) for part in bins if len(part) >= 50]
    assert judged.lengths_mean["fixed"] == pytest.approx(sum(n * m for n, m in used) / sum(n for n, _ in used))
    assert judged.lengths_largest["fixed"] == pytest.approx(max(m for _, m in used))


def small_study(model, folder):
    """The arguments of a small measurement, with responses and records below a folder."""
    return [*("--model", str(model), "--output", str(folder / "work"), "--records", str(folder / "records")), *SMALL]


@pytest.mark.long
def test_the_records_hold_what_was_measured_and_the_study_draws_them(model, tmp_path, monkeypatch):
    command = small_study(model, tmp_path)
    law.main([*command, "--temperatures", "1.0"])
    law.main(command)
    monkeypatch.setattr(measure, "load", None)
    law.main(command)  # no model is needed where everything is measured
    with pytest.raises(SystemExit, match="was measured with"):
        law.main([*command, "--seed", "1"])
    monkeypatch.undo()

    args, state, log_ratios = law.parse_args(command), law.State("random", 4), []
    start, moved = measure.load(str(model), torch.float32, "cpu"), law.load_state(args, 0.7, state)
    records = draw.read(tmp_path / "records").query("temperature == 0.7 and direction == 'random'")
    tables = {kind: law.responses(args, 0.7, kind, "measured") for kind in KINDS}
    with torch.no_grad():
        for kind, table in tables.items():
            of_kind = records[records.kind == kind]
            for row, found in zip(table.itertuples(), of_kind.itertuples(), strict=True):
                text = (list(row.prompt_ids), list(row.ids), 0.7)
                old, new = (log_probs_by_hand(policy, *text).double().numpy() for policy in (start, moved))
                ratio, place = new - old, np.arange(1, len(old) + 1)
                blocks = [ratio[(place >= 2**k) & (place < 2 ** (k + 1))].sum() for k in range(len(found.s))]
                np.testing.assert_allclose(found.s, blocks, atol=1e-4)
                edges = zip(law.PROBABILITIES, [*law.PROBABILITIES[1:-1], 2.0], strict=False)
                inside = [(np.exp(old) >= low) & (np.exp(old) < high) for low, high in edges]
                np.testing.assert_allclose(
                    found.q_by_probability, [(ratio[part] ** 2).sum() for part in inside], atol=1e-3
                )
                assert (found.length, found.log_ratio) == (len(row.ids), pytest.approx(ratio.sum(), abs=1e-3))
                log_ratios.append(ratio.sum())
    assert np.std(log_ratios) > 0.01
    trained = [law.responses(args, 0.7, kind, "trained") for kind in KINDS]
    assert not {*pd.concat(trained).prompt} & {*pd.concat(tables.values()).prompt}

    draw.main([str(tmp_path / "records"), "--output", str(tmp_path)])
    assert set(pd.read_csv(tmp_path / "numbers.csv").temperature) == {0.7, 1.0}
    for picture in ("law.png", "widths.png"):
        assert len(Image.open(tmp_path / picture).convert("RGB").getcolors()) > 20


def test_a_step_of_the_study_is_that_of_adamw_on_responses_of_all_kinds(model, tmp_path):
    command = small_study(model, tmp_path)
    args = law.parse_args(command)
    law.claim(args)
    law.train(args, 1.0, "grpo")
    rows = pd.concat([law.responses(args, 1.0, kind, "trained") for kind in KINDS]).query("step == 0")
    policy = measure.load(str(model), torch.float32, "cpu")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.01)
    for row in rows.itertuples():
        log_prob = log_probs_by_hand(policy, list(row.prompt_ids), list(row.ids), 1.0)
        (-row.advantage * log_prob.sum() / rows.ids.map(len).sum()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    found = dict(law.load_state(args, 1.0, law.State("grpo", 1)).named_parameters())
    differences = torch.cat([(found[name] - value).abs().flatten() for name, value in policy.named_parameters()])
    # The first step divides each gradient by its size: one of rounding errors alone has any sign.
    assert (differences < args.lr / 100).float().mean() > 0.98
