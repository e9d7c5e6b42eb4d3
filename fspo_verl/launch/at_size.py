# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of what a launch meets at the size of a real run: half precision, long responses, a second engine."""

import dataclasses
import math
from collections.abc import Iterator

from fspo_verl.findings import Finding
from fspo_verl.keys import ACTOR
from fspo_verl.launch.view import Launch, note, warning
from fspo_verl.observe.attempts import BYTES_A_ROW, MOST_ROWS, MOST_STEPS
from fspo_verl.observe.noise import BF16_SIGMA, Noise, effective

_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINES_SIGMA = 0.047
"""Spread of a token's log-ratio between trainer and engine, nats: the least that was published of large models on GPUs,
see docs/noise.md."""
# Effective sample size, as a share: below it the gradient's standard error is more than twice as large.
_EFFECTIVE = 0.25


def numerical_noise(launch: Launch) -> Iterator[Finding]:
    """Old log-probs and updates in bfloat16 are cut differently, so that rounding alone moves S. Cut them alike."""
    if launch.loss_mode not in ("fspo", "gspo") or not launch.is_half_precision:
        return
    if launch.moves_nothing or launch.bypasses:  # what these do to the clip is told by other checks
        return
    if not (same := _same_micro_batches(launch)):
        return
    weighs, longest = launch.is_fspo, launch.max_response_length
    what = "log-probs are in bfloat16, and updates are cut into other micro-batches than old log-probs"
    why = "rounding alone then moves responses before any update, and is clipped like movement"
    if weighs and longest:
        most, least = (effective(sigma, longest) for sigma in BF16_SIGMA)
        why += (
            f"; as e^S carries it, it alone leaves an effective sample size of {least} to {most} at {longest:,} tokens"
        )
    found = warning(what, why, add=same)
    remedy = Noise(None, longest, weighs).remedy()
    yield dataclasses.replace(found, advice=f"{remedy} For the same micro-batches: {found.advice}")


def _same_micro_batches(launch: Launch) -> list[str]:
    """Overrides with which old log-probs and updates are cut into micro-batches of the same rows; none if they are."""
    size = launch.actor.get("ppo_micro_batch_size_per_gpu") or 2  # as in scripts/launch/body.sh
    wanted: dict[str, bool | int] = {f"{ACTOR}.use_dynamic_bsz": False}
    wanted |= {f"{_ROLLOUT}.log_prob_use_dynamic_bsz": False} | ({f"{ACTOR}.shuffle": False} if size > 1 else {})
    wanted |= {f"{ACTOR}.ppo_micro_batch_size_per_gpu": size, f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": size}
    missing = {key: value for key, value in wanted.items() if launch.get(key) != value}
    if missing.get(f"{ACTOR}.use_dynamic_bsz") is False:  # whose value these follow, and verl wants a size then
        others = ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu")
        missing |= {key: size for key in others if launch.get(key) is None}
    return [f"{key}={value}" for key, value in missing.items()]


def weights_of_whole_responses(launch: Launch) -> Iterator[Finding]:
    """Importance weights of whole, long responses leave the gradient to a few of them. Take weights of tokens."""
    key, longest = "algorithm.rollout_correction.rollout_is", launch.max_response_length
    if launch.get(key) != "sequence" or launch.bypasses or not longest:
        return
    if math.exp(-(_ENGINES_SIGMA**2) * longest) < _EFFECTIVE:
        why = (
            f"few of them then carry the gradient: {_ENGINES_SIGMA} nats per token, the least difference of two "
            f"engines that was published, leaves an effective sample size of {effective(_ENGINES_SIGMA, longest)}"
        )
        yield warning(f"{key}=sequence weighs whole responses of up to {longest:,} tokens", why, add=[f"{key}=token"])


def records_on_disk(launch: Launch) -> Iterator[Finding]:
    """The number of files and bytes of the records, by nodes and steps."""
    trainer, freq = launch.config.trainer, launch.policy_loss.get("records_freq") or 1
    if launch.policy_loss.get("records_dir") is None or not (prompts := launch.get("data.train_batch_size")):
        return
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    rows = prompts * launch.config.actor_rollout_ref.rollout.n * launch.actor.ppo_epochs  # of a step
    steps = trainer.get("total_training_steps") or 1000
    steps_a_file = max(min(MOST_STEPS, MOST_ROWS * ranks // rows), 1)
    files = ranks * math.ceil(steps // freq / steps_a_file)
    size = steps // freq * rows * BYTES_A_ROW / 1e9
    where = f"{trainer.nnodes} node{'s' * (trainer.nnodes > 1)} with {ranks} rank{'s' * (ranks > 1)} in all"
    yield note(f"records of {steps:,} steps on {where}: up to {files:,} files and about {size:.2g} GB")
