# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The noise floor of this machine: how far log-probs of the same responses move with unchanged weights.

verl computes the old log-probs and the new ones in other micro-batches. Here the same responses go through the same
model in several of them, padded and packed, and what their log-probs differ by is noise. See
:mod:`fspo_verl.observe.noise`.
"""

import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fspo_verl import versions
from fspo_verl.band import Band
from fspo_verl.gpu import responses
from fspo_verl.gpu.lines import Line, first_line
from fspo_verl.gpu.responses import Responses
from fspo_verl.observe import noise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTIONS = ("eager", "sdpa", "flash_attention_2")
_HEAD_TOKENS = 4096  # whose logits are held at a time
_SHORTEST_PREFIX = 16
_FEWEST = 4  # responses from which a root mean square is taken


@dataclass(frozen=True)
class Layout:
    """How responses are put into micro-batches."""

    name: str
    rows: int
    packed: bool = False


REFERENCE = Layout("padded, 8 rows", 8)
OTHERS = (
    Layout("the same again", 8),
    Layout("padded, 1 row", 1),
    Layout("padded, 32 rows", 32),
    Layout("packed, 4 rows", 4, packed=True),
)

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def _softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _fused_torch(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO()(hidden[None], weight, ids[None])[0][0]


def _fused_triton(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, ids, 1.0, "none")[0]


def heads(device: str) -> dict[str, Head]:
    """Ways from hidden states ``[tokens, width]`` to log-probs ``[tokens]``, by name; verl's where it is installed."""
    found = {
        "softmax in the model's dtype": lambda hidden, weight, ids: _softmax(hidden @ weight.T, ids),
        "softmax in float32": lambda hidden, weight, ids: _softmax((hidden @ weight.T).float(), ids),
        "head and softmax in float32": lambda hidden, weight, ids: _softmax(hidden.float() @ weight.float().T, ids),
    }
    if versions.installed("verl"):
        found["use_fused_kernels, torch"] = _fused_torch
        if device == "cuda":
            found["use_fused_kernels, triton"] = _fused_triton
    return found


def usual_head(device: str) -> str:
    """What verl's FSDP engine does by default: its softmax is in float32 under CUDA's autocast, not under a CPU's."""
    return "softmax in float32" if device == "cuda" else "softmax in the model's dtype"


@torch.no_grad()
def log_probs(model, sampled: Responses, layout: Layout, ways: dict[str, Head]) -> dict[str, list[Tensor]]:
    """Log-probs of each response, ``[tokens]`` float32 on the CPU, by head."""
    found = {name: [] for name in ways}
    weight = model.get_output_embeddings().weight
    for start in range(0, len(sampled), layout.rows):
        prompts, own = (part[start : start + layout.rows] for part in (sampled.prompts, sampled.responses))
        rows = [torch.cat(pair) for pair in zip(prompts, own, strict=True)]
        lengths = torch.tensor([len(row) for row in rows])
        if layout.packed:
            ids = torch.cat(rows)[None]
            used = torch.ones_like(ids, dtype=torch.bool)
            inputs = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
        else:
            ids = pad_sequence(rows, batch_first=True)
            used = torch.arange(ids.shape[1]) < lengths[:, None]
            inputs = {"attention_mask": used.long()}
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        hidden = model.base_model(input_ids=ids.to(model.device), use_cache=False, **inputs).last_hidden_state
        is_response = torch.cat([torch.arange(n) >= len(prompt) for n, prompt in zip(lengths, prompts, strict=True)])
        # The hidden state at a position scores the token after it.
        scored = hidden[used.to(model.device)][:-1][is_response[1:].to(model.device)].split(_HEAD_TOKENS)
        targets = torch.cat(own).to(model.device).split(_HEAD_TOKENS)
        for name, head in ways.items():
            parts = [head(states, weight, target).float() for states, target in zip(scored, targets, strict=True)]
            found[name] += torch.cat(parts).cpu().split([len(response) for response in own])
    return found


@dataclass(frozen=True)
class Floor:
    """Noise of log-probs with unchanged weights, over the responses and the layouts in which it was taken."""

    sigma: float  # of a token, nats: the root of the mean square
    power: float  # p of S ~ L^p, over prefixes of the responses; NaN where there is no noise, or too little material
    eps: float  # the smallest that means anything for a width of sqrt(L)
    longest: int  # tokens up to which eps was measured


def floor(differences: list[np.ndarray]) -> Floor:
    """The floor from differences of log-probs, ``[tokens]`` of each response.

    A width of sqrt(L) holds S of L tokens, of which :data:`fspo_verl.observe.noise.SHARE` lie outside
    :data:`fspo_verl.observe.noise.EPS_IN_SIGMA` root mean squares. S is taken of the prefixes of 16, 32, 64, ... tokens
    of the responses that are so long, so that the lengths are compared on the same responses as far as possible, and
    eps is that of the worst length.
    """
    tokens = np.concatenate(differences)
    sigma = float(np.sqrt(np.square(tokens).mean()))
    sums = [np.cumsum(difference) for difference in differences]
    spread = {}  # by the length of the prefix
    prefix = _SHORTEST_PREFIX
    while len(long := [s[prefix - 1] for s in sums if len(s) >= prefix]) >= _FEWEST:
        spread[prefix] = float(np.sqrt(np.mean(np.square(long))))
        prefix *= 2
    power = math.nan
    if len(spread) > 1 and all(std > 0 for std in spread.values()):
        power = float(np.polyfit(np.log(list(spread)), np.log(list(spread.values())), 1)[0])
    worst = max([sigma, *(std / math.sqrt(length) for length, std in spread.items())])
    return Floor(sigma, power, noise.EPS_IN_SIGMA * worst, max(spread, default=0))


def measure(model, sampled: Responses, ways: dict[str, Head]) -> dict[str, dict[str, Floor]]:
    """Floors by head and layout, each against :data:`REFERENCE`; ``any`` is over all layouts that differ from it."""
    base = log_probs(model, sampled, REFERENCE, ways)
    moved: dict[str, dict[str, list[np.ndarray]]] = {name: {} for name in ways}
    for layout in OTHERS:
        for name, values in log_probs(model, sampled, layout, ways).items():
            pairs = zip(values, base[name], strict=True)
            moved[name][layout.name] = [(value - old).double().numpy() for value, old in pairs]
    for by_layout in moved.values():
        by_layout["any"] = [row for layout in OTHERS[1:] for row in by_layout[layout.name]]
    return {name: {key: floor(rows) for key, rows in by_layout.items()} for name, by_layout in moved.items()}


def lines(device: str, model_path: str | None, count: int, longest: int) -> Iterator[Line]:
    """A line per precision and attention, each with the smallest eps that means anything there."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        shape = responses.GPU_SHAPE if device == "cuda" else {}
        path = model_path or str(responses.small_model(Path(scratch), **shape))
        sampler = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        sampled = responses.sample(sampler, responses.lengths(count, _SHORTEST_PREFIX, longest))
        del sampler
        name = model_path or "a random model"
        settings = [(dtype, attention) for dtype in DTYPES for attention in ATTENTIONS]
        for dtype, attention in tqdm(settings, "noise", leave=False):
            check = f"noise_{dtype}_{attention}"
            if reason := _impossible(dtype, attention, device):
                yield Line("skipped", check, reason)
                continue
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=DTYPES[dtype], attn_implementation=attention
            )
            try:
                found = measure(model.to(device).eval(), sampled, heads(device))
            except RuntimeError as error:  # memory that does not suffice; what a model or device cannot do
                yield Line("skipped", check, f"{dtype}, {attention}: {first_line(error)}")
                continue
            finally:
                del model
            yield _line(check, f"{dtype}, {attention}, {name}", found, usual_head(device))


def _impossible(dtype: str, attention: str, device: str) -> str:
    if attention != "flash_attention_2":
        return ""
    if device != "cuda":
        return "flash attention needs a GPU"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash_attn is not installed"
    return "flash attention has no float32" if dtype == "fp32" else ""


def _line(check: str, what: str, found: dict[str, dict[str, Floor]], usual: str) -> Line:
    own = found[usual]["any"]
    again = found[usual][OTHERS[0].name].sigma
    growth = "S too small to grow" if np.isnan(own.power) else f"S like L^{own.power:.2f} up to {own.longest:,} tokens"
    text = (
        f"{what}, {usual}: a token's log-prob moves by {own.sigma:.2g} in other micro-batches ({again:.2g} in the "
        f"same), {growth}; the smallest eps that means anything is {own.eps:.2g}"
    )
    others = ", ".join(f"{name} {floors['any'].sigma:.2g}" for name, floors in found.items() if name != usual)
    figures = {name: {layout: vars(floor) for layout, floor in floors.items()} for name, floors in found.items()}
    if own.eps <= Band().high:
        return Line("ok", check, text, f"by head: {others}", figures=figures)
    why = f"above the default eps of {Band().high:g}: rounding alone would be clipped; by head: {others}"
    fix = (
        f"an eps of {own.eps:.2g} or more, {noise.HELP}; fspo-verl doctor --noise {own.sigma:.2g} judges a launch by it"
    )
    return Line("warning", check, text, why, fix, figures)
