# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What a launch will do, in numbers that follow from its config alone: band, batches, records."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from omegaconf import DictConfig

from fspo_verl.launch.view import Launch
from fspo_verl.observe.records import COLUMNS


@dataclass(frozen=True)
class Row:
    """One line of the plan."""

    name: str
    value: str
    how: str = ""
    """The arithmetic, or where the value comes from."""


def typical_lengths(launch: Launch) -> list[int]:
    """Response lengths at which to look at a band, up to the longest of this launch."""
    longest = launch.max_response_length
    if longest is None:
        raise ValueError("data.max_response_length is null")
    return [*(length for length in (64, 256, 1024, 4096, 16384) if length < longest), longest]


def plan(config: DictConfig) -> list[Row]:
    """The plan of a launch with ``actor_rollout_ref``."""
    launch = Launch(config)
    return [*_band(launch), *_batches(launch), *_records(launch)]


def _band(launch: Launch) -> Iterator[Row]:
    """What is left unclipped: ratios of whole responses; of one token where a loss clips tokens."""
    low, high = launch.clip_range
    if launch.loss_mode == "vanilla":
        yield Row("unclipped token ratio", f"{1 - low:g} to {1 + high:g}", f"1 - {low:g}, 1 + {high:g}")
    elif launch.loss_mode == "gspo":
        for length in typical_lengths(launch):
            ratios = f"{(1 - low) ** length:.3g} to {(1 + high) ** length:.3g}"
            yield Row(f"unclipped ratio at L={length}", ratios, f"(1 - {low:g})^{length}, (1 + {high:g})^{length}")
    elif launch.is_fspo and launch.band.normalization != "plain":
        yield Row("unclipped ratio", "set by the data", launch.band.describe())
    elif launch.is_fspo:
        for length, (lowest, highest) in launch.band_as_ratios(typical_lengths(launch)).items():
            yield Row(f"unclipped ratio at L={length}", f"{lowest:.3g} to {highest:.3g}", launch.band.describe())


def _batches(launch: Launch) -> Iterator[Row]:
    mini, n = launch.actor.ppo_mini_batch_size, launch.config.actor_rollout_ref.rollout.n
    prompts, how = launch.prompts_per_rollout, "data.train_batch_size"
    if (fully_async := launch.get("async_training")) is not None:
        how = f"{mini} x {fully_async.require_batches} require_batches x {launch.rounds_per_sync} rounds between syncs"
    yield Row("prompts per rollout", f"{prompts:,}", how)
    yield Row("responses per rollout", f"{prompts * n:,}", f"{prompts} prompts x {n}")
    yield Row("responses per mini-batch", f"{mini * n:,}", f"{mini} prompts x {n}")
    how = f"{prompts} prompts / {mini}, rounded up, x {launch.actor.ppo_epochs} ppo_epochs"
    yield Row("optimiser steps per rollout", str(launch.optimizer_steps_per_rollout), how)


def _records(launch: Launch) -> Iterator[Row]:
    """Size of the records of one recorded step, before compression."""
    if launch.is_ours and launch.policy_loss.records_dir is not None:
        rows = launch.prompts_per_rollout * launch.config.actor_rollout_ref.rollout.n * launch.actor.ppo_epochs
        fraction = launch.policy_loss.records_fraction
        width = sum(4 if pa.types.is_dictionary(dtype) else dtype.bit_width // 8 for dtype in COLUMNS.values())
        how = f"{rows:,} responses x {fraction:g} x {width} bytes, before compression"
        yield Row("records of a step", f"{rows * fraction * width / 2**20:.3g} MiB", how)
