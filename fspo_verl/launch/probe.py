# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tries, on a verl that was never tested, whether the loss trains what it says.

All that this package assumes of verl is in tests/verl_contract. What fails with an error of its own is not tried here.
"""

from collections.abc import Iterator

from fspo_verl import output, versions
from fspo_verl.launch.view import Finding


def findings() -> Iterator[Finding]:
    """Two warnings at most: that the installed verl was never tested, and what it does otherwise than needed."""
    if not (version := versions.untested_verl()):
        return
    tested = versions.TESTED["verl"]
    what = f"verl {version} was not tested with fspo_verl"
    yield Finding("warning", "untested_verl", what, f"tested are {', '.join(tested)}")
    if wrong := problems():
        what = f"verl {version} does not do what fspo_verl needs of it: {'; '.join(wrong)}"
        fix = f"a newer fspo_verl, or pip install verl=={tested[-1]}"
        yield Finding("warning", "probe", what, "the loss would fail, or train something else than it says", fix)


def problems() -> list[str]:
    """What the installed verl does otherwise than the losses need. Takes about a second, without Ray."""
    try:
        with output.reserved():
            return [*_loss()]
    except Exception as error:  # another signature, type or name: whatever verl made of it
        return [f"the loss cannot be called: {type(error).__name__}: {error}"]


def _loss() -> Iterator[str]:
    """Two responses inside the band, a micro-batch each, through verl's ``ppo_loss``: value and gradient."""
    import torch
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from fspo_verl.config import FSPOPolicyLossConfig

    config = FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=FSPOPolicyLossConfig(),
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=8,
    )
    totals = {"dp_size": 1, "batch_num_tokens": 5, "global_batch_size": 2}
    for length, advantage in ((2, 1.0), (3, -1.0)):
        # What a model puts out at one position scores the next token; -3 scores none of the response.
        log_prob = torch.tensor([-3.0, *[-1.0] * length, -3.0], requires_grad=True)
        rows = {
            "prompts": torch.zeros(2, dtype=torch.long),
            "responses": torch.zeros(length, dtype=torch.long),
            "response_mask": torch.ones(length, dtype=torch.long),
            "old_log_probs": torch.full((length,), -1.01),
            "advantages": torch.full((length,), advantage),
        }
        data = get_tensordict({key: _nested(row) for key, row in rows.items()}, totals)
        loss, _ = ppo_loss(config, {"log_probs": _nested(log_prob)}, data)
        loss.backward()
        ratio = torch.tensor(0.01 * length).exp()
        gradient = -advantage * ratio / totals["global_batch_size"] / config.loss_scale_factor
        expected = torch.cat([torch.zeros(1), gradient.expand(length), torch.zeros(1)])
        found = log_prob.grad
        if found is None or not (torch.allclose(loss, gradient * length) and torch.allclose(found, expected)):
            yield f"loss_mode=fspo gives {loss.item():.4g} on {length} tokens, not {gradient.item() * length:.4g}"


def _nested(row):
    """One row as verl's engines hand over tokens without padding."""
    import torch

    return torch.nested.as_nested_tensor([row], layout=torch.jagged)
