# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tries, on a verl that was never tested, what would silently train something wrong if verl had changed it.

All that this package assumes of verl is in tests/verl_contract. What fails with an error of its own is not tried here.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from fspo_verl import terminal, versions
from fspo_verl.launch.view import Finding

# The modules of verl 0.9.0 to 0.10.0.dev that ask for the loss of bypass mode: trainers, when their workers have built
# theirs. `get("bypass_mode")` asks for the setting, `register_policy_loss("bypass_mode")` names the loss.
_BYPASS_LOSS = re.compile(r'apply_bypass_mode\(|(?<!get\()(?<!register_policy_loss\()"bypass_mode"')
_ASK_FOR_BYPASS_LOSS = {
    "trainer/ppo/rollout_corr_helper.py",
    "trainer/ppo/ray_trainer.py",
    "experimental/separation/ray_trainer.py",
}


def findings() -> Iterator[Finding]:
    """One warning that names what the installed verl does otherwise than the losses need; nothing if all holds.

    Takes about a second, without Ray.
    """
    try:
        with terminal.reserved():
            problems = [*_loss(), *_aggregation(), *_means()]
    except Exception as error:  # another signature, type or name: whatever verl made of it
        problems = [f"the loss cannot be called: {type(error).__name__}: {error}"]
    if problems:
        what = f"verl {versions.installed('verl')} does not do what fspo_verl needs of it: {'; '.join(problems)}"
        fix = f"a newer fspo_verl, or pip install verl=={versions.TESTED['verl'][-1]}"
        yield Finding("warning", "probe", what, "the loss would fail, or train something else than it says", fix)


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
        if not (torch.allclose(loss, gradient * length) and torch.allclose(log_prob.grad, expected)):
            yield f"loss_mode=fspo gives {loss.item():.4g} on {length} tokens, not {gradient.item() * length:.4g}"


def _nested(row):
    """One row as verl's engines hand over tokens without padding."""
    import torch

    return torch.nested.as_nested_tensor([row], layout=torch.jagged)


def _aggregation() -> Iterator[str]:
    """``agg_loss`` gives the same on one column per response as on the tokens."""
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    tokens, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    length = mask.sum(-1, keepdim=True)
    mean = (tokens * mask).sum(-1, keepdim=True) / length
    totals = {"dp_size": 2, "batch_num_tokens": 8, "global_batch_size": 4, "loss_scale_factor": 5}
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"):
        whole = agg_loss(loss_mat=tokens, loss_mask=mask, loss_agg_mode=mode, **totals)
        if not torch.allclose(agg_loss(loss_mat=mean, loss_mask=length, loss_agg_mode=mode, **totals), whole):
            yield f"loss_agg_mode={mode} depends on more of a response than its sum and length"


def _means() -> Iterator[str]:
    """A metric counts every value once, however many a micro-batch or a rank holds."""
    from verl.utils.metric import Metric

    def mean(*values: float) -> Metric:
        metric = Metric("mean")
        metric.values = list(values)  # as fspo_verl.observe.metrics does
        return metric

    few = mean(1.0)
    few.extend(mean(2.0, 6.0))
    if few.aggregate() != 3 or Metric.aggregate_dp([mean(1.0, 2.0), mean(3.0, 6.0)]) != 3:
        yield "metrics are not means over all responses"


def bypass_replaces_the_loss(folder: Path | None = None) -> bool:
    """Whether ``algorithm.rollout_correction.bypass_mode`` makes workers train verl's ``bypass_mode`` loss.

    It should, as verl's documentation has it (verl #4930), and up to 0.10.0.dev it does not: the trainer changes its
    config when the workers have built their loss. A verl in which other modules ask for that loss counts as replacing.

    Args:
        folder: the package verl; default: the installed one.
    """
    import verl

    folder = folder or Path(verl.__file__).parent
    asking = {file for file in folder.rglob("*.py") if _BYPASS_LOSS.search(file.read_text(errors="replace"))}
    return {file.relative_to(folder).as_posix() for file in asking} != _ASK_FOR_BYPASS_LOSS
