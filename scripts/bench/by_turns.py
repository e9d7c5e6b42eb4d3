# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Has each training step of a run of verl take another loss, for step.py; verl imports it in every process.

``VERL_USE_EXTERNAL_MODULES=by_turns`` loads it. A run trains with fspo and records; this module changes the policy loss
of a step, and notes how long its calls and the logging of a step take.
"""

import copy
import functools
import inspect
import json
import os
import random
import time
from pathlib import Path

import wrapt

LOG = "BY_TURNS_LOG"
"""Environment variable: the file to which the driver writes a line per step."""
GSPO, FSPO, FSPO_RECORDS, OBSERVED, OBSERVED_RECORDS = ARMS = (
    "gspo",
    "fspo",
    "fspo, records",
    "observed gspo",
    "observed gspo, records",
)
CALL_MS = "bench/call_ms"  # verl puts `actor/` in front of it


def arm_of(step: int) -> str:
    """Who trains in a step, from 1: each block of ``len(ARMS)`` steps has every arm once, in a random order."""
    block, place = divmod(step - 1, len(ARMS))
    return random.Random(block).sample(ARMS, len(ARMS))[place]


@functools.cache
def _policy_loss(arm: str, records_dir: str, length_bins: tuple[int, ...]):
    from verl.workers.config import PolicyLossConfig

    from fspo_verl.config import FSPOPolicyLossConfig, ObservedPolicyLossConfig

    if arm == GSPO:
        return PolicyLossConfig(loss_mode="gspo")
    observation = {"length_bins": list(length_bins), "records_dir": records_dir if "records" in arm else None}
    if arm in (FSPO, FSPO_RECORDS):
        return FSPOPolicyLossConfig(**observation)
    return ObservedPolicyLossConfig(loss_mode="gspo", **observation)


def _loss_of_the_step(loss, config, model_output, data, dp_group=None):
    """verl's ``ppo_loss`` with the policy loss of the step; stock gspo without what fspo_verl wraps around it."""
    from verl.utils import tensordict_utils as tu

    arm = arm_of(int(max(tu.get(data, "global_steps"))))
    config_of_arm = copy.copy(config)
    policy_loss = _policy_loss(arm, config.policy_loss.records_dir, tuple(config.policy_loss.length_bins))
    vars(config_of_arm)["policy_loss"] = policy_loss
    start = time.perf_counter()
    value, metrics = (inspect.unwrap(loss) if arm == GSPO else loss)(config_of_arm, model_output, data, dp_group)
    return value, metrics | {CALL_MS: 1e3 * (time.perf_counter() - start)}


@wrapt.when_imported("verl.workers.engine_workers")
def _take_turns(engine_workers):
    set_loss_fn = engine_workers.TrainingWorker.set_loss_fn

    @functools.wraps(set_loss_fn)  # with what verl notes on it for its dispatch
    def by_turns(worker, loss_fn):
        of_step = functools.partial(_loss_of_the_step, loss_fn.func)
        return set_loss_fn(worker, functools.partial(of_step, **loss_fn.keywords))

    engine_workers.TrainingWorker.set_loss_fn = by_turns


@wrapt.when_imported("verl.utils.tracking")
def _time_the_logging(tracking):
    init = tracking.Tracking.__init__

    @functools.wraps(init)  # whose arguments others look at
    def timed_init(self, *args, **kwargs):
        init(self, *args, **kwargs)

        def timed(*args, step, **kwargs):  # around all wraps of the class, which may come later
            start = time.perf_counter()
            type(self).log(self, *args, step=step, **kwargs)
            taken = {"step": step, "seconds": time.perf_counter() - start}
            with Path(os.environ[LOG]).open("a") as file:
                file.write(json.dumps(taken) + "\n")

        self.log = timed

    tracking.Tracking.__init__ = timed_init
