# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""A band whose eps follows a wished clip rate, as verl's adaptive KL controller follows a wished KL.

After each training step, the eps of each side moves towards the clip rate that ``target_clip_rate`` asks for. Within a
step it is constant, and it is the same on every rank: the counts of a step are summed over all ranks once, after the
update, and integers add up to the same in every order. Checkpoints keep it.

verl (0.9.1) has no hook around an update. :func:`install` wraps three methods of its ``TrainingWorker``:
``train_mini_batch``, ``save_checkpoint`` and ``load_checkpoint``. Without ``target_clip_rate`` nothing is wrapped.
"""

import contextlib
import functools
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fspo_verl.band import Band
from fspo_verl.files import write_whole

logger = logging.getLogger("fspo_verl")

GAIN = 0.5
"""Largest change of log eps in one step."""

EPS_MIN = 1e-6
"""Lower bound of eps: below it even the rounding of float32 moves a response further."""

EPS_MAX_FACTOR = 10
"""The default upper bound, in units of the eps that a run starts with."""

FILE = "fspo_eps.json"
"""Holds the eps in force, in the actor's folder of a checkpoint."""

SIDES = ("low", "high")


def next_eps(eps: float, rate: float, target: float, eps_max: float) -> float:
    """The eps of one side for the next step; a clip rate above the target widens the band (derived here).

        log eps ← log eps + GAIN · clip((rate − target) / target, −1, 1), kept between EPS_MIN and eps_max

    Args:
        eps: in force until now, above 0.
        rate: share of the side's responses that was clipped in the step.
        target: the share to be clipped, between 0 and 1.
        eps_max: upper bound.
    """
    surplus = max(-1.0, min((rate - target) / target, 1.0))
    return max(EPS_MIN, min(eps * math.exp(GAIN * surplus), eps_max))


@dataclass
class AdaptiveBand(Band):
    """A band with what makes its eps follow a clip rate.

    Raises:
        ValueError: a field has a bad value, or no effect.
    """

    target_clip_rate: float | None = None
    """Share of the responses with an advantage that the clip is to take on each side, for example 0.1; null keeps eps
    as it is set. eps_low and eps_high are then where a run starts. After each training step each side moves towards the
    target: by a factor of at most 1.65, and the less the nearer its rate is. A side is the sign of the advantage."""

    eps_max: float | None = None
    """Largest half-width that target_clip_rate may set; null takes ten times the one that the side starts with."""

    def __post_init__(self):
        super().__post_init__()

        def require(condition: bool, field: str, allowed: str) -> None:
            if not condition:
                raise ValueError(f"{self.key_prefix}{field}={getattr(self, field)!r} is not allowed: {allowed}")

        target, widest = self.target_clip_rate, self.eps_max
        is_share = isinstance(target, float) and 0 < target < 1
        require(target is None or is_share, "target_clip_rate", "null (eps stays as set) or between 0 and 1")
        if target is None:
            require(widest is None, "eps_max", "null without target_clip_rate, as it has no effect")
            return
        require(
            max(self.low, self.high) < math.inf,
            "target_clip_rate",
            "null where a side of eps is inf, as it starts at a finite eps; set eps, eps_low and eps_high",
        )
        require(
            widest is None or max(self.low, self.high) <= widest < math.inf,
            "eps_max",
            f"null (ten times the start) or a finite number of at least the start, {max(self.low, self.high):g}",
        )


class Controller:
    """The eps in force of one run, on one rank.

    Args:
        config: where the run starts, and its target, which is set.
    """

    def __init__(self, config: AdaptiveBand):
        assert config.target_clip_rate is not None
        self.target = config.target_clip_rate
        self._fields = {field.name: getattr(config, field.name) for field in fields(Band)} | {"eps": None}
        dual = math.inf if config.eps_dual is None else config.eps_dual  # a dual clip inside the band would undo it
        widest = [config.eps_max or EPS_MAX_FACTOR * start for start in (config.low, config.high)]
        self._largest = {"low": widest[0], "high": min(widest[1], dual)}
        self._counts: np.ndarray | None = None  # clipped and counted of each side, ``[2, 2]``; None between two steps
        self._said: set[str] = set()
        self._set({"low": config.low, "high": config.high})

    def _set(self, eps: Mapping[str, float]) -> None:
        self.eps = {side: max(EPS_MIN, min(eps[side], self._largest[side])) for side in SIDES}
        self.band = Band(**self._fields | {f"eps_{side}": self.eps[side] for side in SIDES})

    def count(self, columns: Mapping[str, np.ndarray]) -> None:
        """Take in the responses of one micro-batch, ``[B]`` columns of :mod:`fspo_verl.observe.columns`.

        The dual clip counts for the lower side, as it takes responses with A < 0.

        Raises:
            RuntimeError: outside :meth:`step`, where nobody would ever move eps.
        """
        if self._counts is None:
            raise RuntimeError(
                "target_clip_rate cannot be followed: this trainer calls the loss outside verl's "
                "TrainingWorker.train_mini_batch, after which eps moves; set target_clip_rate=null"
            )
        advantage = columns["advantage"]
        lower = (advantage < 0) & (columns["clipped_lower"] + columns["clipped_dual"] > 0)
        upper = (advantage > 0) & (columns["clipped_upper"] > 0)
        self._counts += [[lower.sum(), (advantage < 0).sum()], [upper.sum(), (advantage > 0).sum()]]

    @contextlib.contextmanager
    def step(self, counts_here: bool = True) -> Iterator[None]:
        """One training step: eps is constant inside, and moves at the end. All ranks of the process group take part.

        Args:
            counts_here: whether this rank's responses count. Of ranks that share responses one does, as each response
                counts once.
        """
        self._counts = np.zeros((2, 2), dtype=np.int64)
        yield
        counts, self._counts = self._counts * counts_here, None
        self.move(_sum_over_ranks(counts))

    def move(self, counts: np.ndarray) -> None:
        """Set the eps of the next step from the clipped and counted responses of each side, ``[2, 2]``."""
        for side, (clipped, counted) in zip(SIDES, counts.tolist(), strict=True):
            if counted:
                rate, largest = clipped / counted, self._largest[side]
                self._set(self.eps | {side: next_eps(self.eps[side], rate, self.target, largest)})
                if self.eps[side] in (EPS_MIN, largest) and side not in self._said:
                    self._said.add(side)
                    logger.warning(
                        "eps_%s has reached its bound %g, where %.1f%% of its responses are clipped and "
                        "target_clip_rate asks for %g%%; training goes on with it. eps_max sets the upper bound, which "
                        "eps_dual limits. Said once.",
                        *(side, self.eps[side], 100 * rate, 100 * self.target),
                    )

    def metrics(self) -> dict[str, float]:
        """The eps in force, and the number of sides whose eps is at a bound, under the names of verl's metrics."""
        at_bound = sum(self.eps[side] in (EPS_MIN, self._largest[side]) for side in SIDES)
        values = {f"eps_{side}": self.eps[side] for side in SIDES} | {"eps_at_bound": float(at_bound)}
        return {f"actor/fspo/{name}": value for name, value in values.items()}

    def save(self, folder: str | Path) -> None:
        """Write the eps in force beside a checkpoint; the first rank does, as all have the same.

        Raises:
            OSError: the folder cannot be written.
        """
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            write_whole([(Path(folder) / FILE, json.dumps(self.eps).encode())])

    def load(self, folder: str | Path) -> None:
        """Go on with the eps of a checkpoint, read by the first rank for all; without one with that of the config."""
        distributed, file = torch.distributed.is_initialized(), Path(folder) / FILE
        found: list[dict | None] = [None]
        if not distributed or torch.distributed.get_rank() == 0:
            found = [json.loads(file.read_text()) if file.exists() else None]
        if distributed:
            torch.distributed.broadcast_object_list(found, src=0)
        if found[0] is None:
            logger.warning("%s is not there: target_clip_rate starts at the eps of the config", file)
        else:
            self._set(found[0])


def _sum_over_ranks(counts: np.ndarray) -> np.ndarray:
    """Sum over the ranks of the default process group, which are those of the training worker."""
    if not torch.distributed.is_initialized():
        return counts
    from verl.utils.device import get_device_name  # not at the top: readers of records may have no verl

    total = torch.from_numpy(counts).to(get_device_name())
    torch.distributed.all_reduce(total)
    return total.cpu().numpy()


def install() -> None:
    """Wrap verl's training worker in a process that has loaded it, once; a driver only checks the config."""
    workers: Any = sys.modules.get("verl.workers.engine_workers")
    if workers is None or hasattr(workers.TrainingWorker.train_mini_batch, "moves_eps"):
        return
    worker = workers.TrainingWorker
    train, save, load = worker.train_mini_batch, worker.save_checkpoint, worker.load_checkpoint

    @functools.wraps(train)  # with what verl's dispatch has noted on the method
    def train_mini_batch(self, *args, **kwargs):
        controller = _controller_of(self)
        # One rank of those that share responses has outputs: the first of its tensor, context and pipeline groups.
        step = controller.step(self.engine.is_mp_src_rank_with_outputs()) if controller else contextlib.nullcontext()
        with step:
            return train(self, *args, **kwargs)

    @functools.wraps(save)
    def save_checkpoint(self, local_path, *args, **kwargs):
        saved = save(self, local_path, *args, **kwargs)
        if (controller := _controller_of(self)) and local_path is not None:
            controller.save(local_path)
        return saved

    @functools.wraps(load)
    def load_checkpoint(self, local_path, *args, **kwargs):
        if (controller := _controller_of(self)) and local_path is not None:
            controller.load(local_path)
        return load(self, local_path, *args, **kwargs)

    train_mini_batch.moves_eps = True  # type: ignore[attr-defined]  # a mark on a function
    worker.train_mini_batch, worker.save_checkpoint, worker.load_checkpoint = (
        train_mini_batch,
        save_checkpoint,
        load_checkpoint,
    )


def _controller_of(worker) -> Controller | None:
    """The controller of a worker's policy loss; None for a critic, and without ``target_clip_rate``."""
    config = getattr(worker.loss_fn, "keywords", {}).get("config")
    return getattr(getattr(config, "policy_loss", None), "controller", None)
