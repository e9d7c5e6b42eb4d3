# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a mix of tasks under one clip: all seeds of an arm at once, on one core.

A rollout is verl's: responses at temperature 1, GRPO's advantages, and updates by a policy loss as it is, this
package's ``fspo_loss`` or one that verl has registered. Each update takes as many prompts of every task. The optimiser
is Adam with verl's limit on the norm of the gradient. Neither Ray nor verl's trainer takes part.

In a regime with a clip rate every arm is held at this rate by one rule (:class:`Control`), each side of each seed by
itself. So arms differ in whom they clip, and not in how many.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from policy import RESPONSES, Policies, Rollout
from regimes import RECORDED, Regime, Tasks
from torch import Tensor
from transformer import Transformers
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig

from fspo_verl.analysis import fit
from fspo_verl.band import DUAL, Band, Edges
from fspo_verl.clips import ratio_band, upper_quantile
from fspo_verl.loss import fspo_loss
from fspo_verl.observe.columns import CLIPPED, loss_columns, observed_columns, to_numpy

PROMPTS = 2  # of each task in an update
GRADIENT_NORM = 1.0  # verl's clip_grad
UNIT = 64  # tokens: where all widths are equal at the start
EPS_OF_TOKENS = {"vanilla": 0.01, "dppo_tv": 0.001}  # where the control of verl's token clips starts
ADVISED_RATE = 0.1  # what ``calibrate`` aims at unless told otherwise; of regimes without a rate


class Arm(NamedTuple):
    """A clip. ``width`` is a power of the length, or what says it: measured, power, task; None has no band."""

    width: float | str | None = None
    start: float | None = None  # power of the width in the first RECORDED rollouts, of arms that act on their records
    loss: str | None = None  # verl's name of a loss that it has registered
    aggregation: str = "seq-mean-token-sum-norm"
    ranges: tuple[float, float] | None = None  # published: below and above, each as the loss takes it
    drop: bool = False  # drop as many responses by chance
    keeps: bool = False  # keeps its aggregation when it takes a measured width
    anew: bool = False  # starts Adam anew when it does


MATCHED = {
    "none": Arm(),
    "sqrt": Arm(0.5),
    "fixed": Arm(0.0),
    "linear": Arm(1.0),
    "measured": Arm("measured"),
    "linear, then measured": Arm("measured", start=1.0),
    "random": Arm(drop=True),
    "sqrt, then measured": Arm("measured", start=0.5),
    "power": Arm("power"),
    "grpo": Arm(loss="vanilla"),
    "dppo": Arm(loss="dppo_tv"),
}
"""Arms of a regime with a clip rate; ``measured`` and ``power`` are of ten rollouts under sqrt, and start over."""

TOGETHER = ("none", "sqrt", "fixed", "linear", "measured", "linear, then measured")
"""Arms of the transformers."""

_FIXED = ratio_band(0.8, 1.2, 0.0)
_GSPO = Arm(loss="gspo", aggregation="seq-mean-token-mean", ranges=(3e-4, 4e-4))
PUBLISHED = {
    "none": Arm(),
    "fspo": Arm(0.5, ranges=(0.03, 0.03)),
    "gspo": _GSPO,
    "fixed": Arm(0.0, ranges=(_FIXED.low, _FIXED.high)),
    "gspo, then measured": _GSPO._replace(width="measured", start=1.0),
    "measured": Arm("measured"),
    "grpo": Arm(loss="vanilla", aggregation="token-mean", ranges=(0.2, 0.2)),
    "fspo, then measured": Arm("measured", start=0.5, ranges=(0.03, 0.03)),
    "dppo": Arm(loss="dppo_tv", ranges=(0.15, 0.15)),
    "cispo": Arm(loss="cispo", ranges=(0.2, 0.2)),
    # Added when the others were known.
    "gspo, then measured, Adam anew": _GSPO._replace(width="measured", start=1.0, anew=True),
    "gspo, then measured, aggregation kept": _GSPO._replace(width="measured", start=1.0, keeps=True),
}
"""Arms of a regime without one. Those with ``measured`` take the advised width and eps at 10%."""

BY_TASK = {name: MATCHED[name] for name in ("none", "sqrt", "measured")} | {"task": Arm("task")}
"""Arms where tasks of one length move differently; ``task`` has a width per task, held at the rate task by task."""


def arms_of(regime: Regime) -> dict[str, Arm]:
    if regime.tasks.speeds:
        return BY_TASK
    return PUBLISHED if regime.rate is None else MATCHED


# --- the clip ---------------------------------------------------------------------------------------------------------


class RowBand(NamedTuple):
    """What ``fspo_loss`` asks of a band, with edges of each row: seeds have their own eps."""

    low: Tensor  # [rows], half-widths in nats
    high: Tensor
    dual: Tensor

    def edges(self, _length: Tensor, _variation: Tensor) -> Edges:
        return Edges(-self.low, self.high, self.dual)


class Control:
    """Holds both sides of every seed at a clip rate.

    After each rollout log eps moves by the log ratio of two normal quantiles: that of the wished rate and that of the
    rate seen. The wish is corrected for what the rollouts so far missed, so that the mean over the run is the rate.

    Args:
        eps: ``[S, K, 2]``, below and above, of S seeds and K clips that are held by themselves.
        rate: None leaves eps as it is.
        by_response: see :class:`Regime`.
    """

    PACE, LARGEST, TRIM = 0.7, 0.5, 0.3  # share of the move, its largest size, the largest correction of the wish

    def __init__(self, eps: Tensor, rate: float | None, by_response: bool = False):
        self.eps, self.rate, self.by_response = eps.double(), rate, by_response
        self._missed = torch.zeros_like(self.eps)

    def forget(self, rows: slice) -> None:
        """Leave what these seeds missed so far."""
        self._missed[rows] = 0

    def move(self, clipped: Tensor, counted: Tensor) -> None:
        """Take the responses of a rollout, ``[S, K, 2]``."""
        if self.rate is None:
            return
        seen = torch.where(counted > 0, clipped / counted.clamp(min=1), self.rate)
        weight = counted.clamp(min=1) if self.by_response else 1
        self._missed += (self.rate - seen) * weight
        trim = self.TRIM * self.rate
        wished = self.rate + (self._missed / weight).clamp(-trim, trim)
        quantile = torch.distributions.Normal(0.0, 1.0).icdf
        step = torch.log(quantile(1 - wished) / quantile(1 - seen.clamp(0.002, 0.45)))
        self.eps = self.eps * (self.PACE * step).clamp(-self.LARGEST, self.LARGEST).exp()


def actor_config(arm: Arm, low, high, rows: int, tokens: int, longest: int) -> ActorConfig:
    """verl's config of a registered loss with this range; rows and tokens of one seed's mini-batch."""
    config = FSDPActorConfig(
        rollout_n=RESPONSES,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=arm.aggregation,
        policy_loss=PolicyLossConfig(loss_mode=arm.loss),
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    totals = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": rows, "loss_scale_factor": longest}
    config.global_batch_info.update(totals)
    return config


class Clip:
    """The clip of an arm in force; C tasks, S seeds.

    Args:
        scale: widths in units of eps, ``[S, C]``; of arms with a band.
        eps: ``[S, K, 2]``: K is 1, or C where each task is held by itself.
    """

    def __init__(self, arm: Arm, regime: Regime, scale: Tensor | None, eps: Tensor | None, rate: float | None):
        self.arm, self.regime, self.scale = arm, regime, scale
        self.control = None if eps is None else Control(eps, rate, regime.by_response)

    def loss(self, task: int, tokens: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Of one task's responses in a mini-batch, the sum over the seeds, and what it did to each response.

        Args:
            tokens: log_prob, old_log_prob, advantages and mask, ``[S·n, L]``, the seeds one after the other.
        """
        lengths = self.regime.tasks.lengths
        each = PROMPTS * RESPONSES
        rows, longest = each * len(lengths), max(lengths)
        eps = self._eps(task, each, tokens[0].device)
        if self.arm.loss is None:
            found = fspo_loss(*tokens, self._band(task, eps))
            tokens_of_all = lengths[task] if self.arm.aggregation == "seq-mean-token-mean" else longest
            columns = {name: torch.from_numpy(column).float() for name, column in to_numpy(loss_columns(found)).items()}
            return found.loss.sum() / rows / tokens_of_all, columns
        low, high = self.arm.ranges if self.control is None else (part[:, None] for part in eps)
        config = actor_config(self.arm, low, high, rows, each * sum(lengths), longest)
        log_prob, old_log_prob, advantages, mask = tokens
        loss, _ = get_policy_loss_fn(self.arm.loss)(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=self.arm.aggregation,
            config=config,
        )
        (gradient,) = torch.autograd.grad(loss, log_prob, retain_graph=True)
        columns = observed_columns(gradient, log_prob.detach(), *tokens[1:])
        return loss, {name: column.cpu() for name, column in columns.items()}

    def _eps(self, task: int, each: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Below and above, ``[S·n]``."""
        if self.control is None:
            return None
        eps = self.control.eps[:, min(task, self.control.eps.shape[1] - 1)].float().repeat_interleave(each, 0)
        return tuple(eps.to(device).unbind(1))

    def _band(self, task: int, eps) -> RowBand | Band:
        if eps is None:
            return Band(eps=math.inf)
        scale = self.scale[:, task].repeat_interleave(len(eps[0]) // len(self.scale)).to(eps[0].device)
        low, high = (side * scale for side in eps)
        published = self.arm.ranges and self.regime.rate is None
        dual = torch.full_like(high, math.inf) if published else DUAL * torch.maximum(low, high)
        return RowBand(low, high, dual)


# --- widths from records ----------------------------------------------------------------------------------------------


def advised(records: pd.DataFrame, rate: float) -> Band:
    """What ``calibrate`` measures on these records: the one place that asks it."""
    return fit.fitted(records, fit.MEASURED, rate).band


def fitted_power(records: pd.DataFrame, rate: float) -> Band:
    """The power of the length that the upper quantile of sign(A)·S follows best, by least squares in logs."""
    moved = records[(records.quadratic_variation > 0) & (records.advantage != 0)]
    towards = (np.sign(moved.advantage) * moved.log_ratio).groupby(moved.length)
    reach = towards.agg(lambda values: upper_quantile(values.to_numpy(), rate)).clip(lower=1e-6)
    power = float(np.clip(np.polyfit(np.log(reach.index.to_numpy(float)), np.log(reach), 1)[0], 0, 1))
    return fit.with_eps(records, Band(length_power=power), rate)


def power_widths(power: float, lengths: Sequence[int]) -> Tensor:
    """Widths ``[C]`` that are a power of the length, in units of that at UNIT tokens."""
    return torch.tensor([(length / UNIT) ** power for length in lengths])


def scaled(bands: Sequence[Band], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Widths ``[S, C]`` in units of that at UNIT tokens, and eps ``[S, 1, 2]`` at them."""
    scale = torch.tensor([[band.scale_at(length) for length in lengths] for band in bands])
    unit = torch.tensor([band.scale_at(UNIT) for band in bands])
    eps = torch.tensor([[band.low, band.high] for band in bands]) * unit[:, None]
    return scale / unit[:, None], eps[:, None]


# --- training ---------------------------------------------------------------------------------------------------------


def updates(rollout: Rollout, regime: Regime, epoch_order: Callable[[], Tensor]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Per update a tuple (tokens, old_log_prob, advantages, prompts) of each task; rows are the seeds' in turn."""
    for _ in range(regime.epochs):
        for prompts in epoch_order().split(PROMPTS):
            yield [
                (
                    tokens[:, prompts].flatten(0, 2),
                    old[:, prompts].flatten(0, 2),
                    advantages[:, prompts].flatten(),
                    prompts.repeat_interleave(RESPONSES).repeat(len(tokens)),
                )
                for tokens, old, advantages in zip(*rollout, strict=True)
            ]


class Run:
    """All seeds of an arm, as far as they have come."""

    def __init__(self, regime: Regime, arm: Arm, policies: Policies | Transformers, seeds: Sequence[int]):
        self.regime, self.arm, self.policies, self.seeds = regime, arm, policies, list(seeds)
        self.optimizer = self._adam()
        self.order = torch.Generator().manual_seed(0)
        self.chance = torch.Generator().manual_seed(1)
        self.records: list[pd.DataFrame] = []
        self.rows: list[pd.DataFrame] = []
        self.clip = self._first_clip()

    def _first_clip(self) -> Clip:
        arm, regime, count, lengths = self.arm, self.regime, len(self.seeds), self.regime.tasks.lengths
        if arm.drop or (arm.width is None and arm.loss is None) or (arm.loss and arm.ranges):
            return Clip(arm, regime, None, None, regime.rate)
        power = arm.width if isinstance(arm.width, float) else arm.start if arm.start is not None else 0.5
        clips = len(lengths) if arm.width == "task" else 1
        eps = [EPS_OF_TOKENS[arm.loss]] * 2 if arm.loss else regime.start
        if arm.ranges:
            eps = [side * UNIT**power for side in arm.ranges]
        scale = power_widths(power, lengths).repeat(count, 1)
        return Clip(arm, regime, scale, torch.tensor(eps).repeat(count, clips, 1), regime.rate)

    def _adam(self) -> torch.optim.Adam:
        return torch.optim.Adam([self.policies.weights], self.regime.learning_rate)

    def set_bands(self, bands: Sequence[Band]) -> None:
        """Go on with the width and eps of these bands, one per seed."""
        scale, eps = scaled(bands, self.regime.tasks.lengths)
        if self.arm.anew:
            self.optimizer = self._adam()
        aggregation = {"aggregation": self.arm.aggregation} if self.arm.keeps else {}
        self.clip = Clip(Arm(self.arm.width, **aggregation), self.regime, scale, eps, self.regime.rate)

    def measured(
        self, seeds: Sequence[int] | None = None, how: Callable[[pd.DataFrame, float], Band] = advised
    ) -> list[Band]:
        """What the records so far advise each seed."""
        records = pd.concat(self.records, ignore_index=True)
        records = records[records.seed.isin(self.seeds if seeds is None else seeds)]
        rate = self.regime.rate or ADVISED_RATE
        return [how(own.reset_index(drop=True), rate) for _, own in records.groupby("seed")]

    def rollout(self, recorded: bool = False) -> None:
        """Sample, and train on it."""
        regime, number = self.regime, len(self.rows)
        rollout = self.policies.roll_out(PROMPTS * regime.mini_batches)
        order = lambda: torch.randperm(PROMPTS * regime.mini_batches, generator=self.order)  # noqa: E731
        chance = regime.rate * regime.updates / (regime.updates - 1) if self.arm.drop else 0.0
        found = []
        for update, tasks in enumerate(updates(rollout, regime, order)):
            table, total = self.policies.table(), 0.0
            for task, (tokens, old, advantages, prompts) in enumerate(tasks):
                dropped = torch.zeros(len(advantages), dtype=torch.bool)
                if chance and update:
                    dropped = torch.rand(len(advantages), generator=self.chance) < chance
                given = advantages.masked_fill(dropped, 0.0).to(old.device)[:, None].expand_as(old)
                log_prob = self.policies.log_prob(table, tokens)
                loss, columns = self.clip.loss(task, (log_prob, old, given, torch.ones_like(old, dtype=torch.bool)))
                total = total + loss
                taken = torch.where(dropped, 1.0, sum(columns[name] for name in CLIPPED))
                found.append((update, task, advantages, prompts, columns, taken))
            self.policies.weights.grad = None
            total.backward()
            self._step()
        self.rows.append(self._summary(found, number))
        if recorded:
            self.records.append(self._recorded(found, number))
        if self.clip.control is not None:
            self.clip.control.move(*self._sides(found))

    def _step(self) -> None:
        gradient = self.policies.weights.grad
        norm = gradient.norm(dim=1, keepdim=True)
        gradient *= (GRADIENT_NORM / (norm + 1e-6)).clamp(max=1)
        self.optimizer.step()

    def _per_task(self, found) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Per task the advantages and the clipped share of each response, ``[updates, S, n]``."""
        for task in range(self.policies.count):
            parts = [(advantages, taken) for _, of, advantages, _, _, taken in found if of == task]
            yield task, *(torch.stack(part).view(len(parts), len(self.seeds), -1) for part in zip(*parts, strict=True))

    def _sides(self, found) -> tuple[Tensor, Tensor]:
        """Clipped and counted responses of each side, ``[S, K, 2]``."""
        clipped, counted = [], []
        for _, advantages, taken in self._per_task(found):
            sides = [advantages < 0, advantages > 0]
            clipped.append(torch.stack([(taken * side).sum((0, 2)) for side in sides], -1))
            counted.append(torch.stack([side.sum((0, 2)) for side in sides], -1))
        clips = self.clip.control.eps.shape[1]
        every = [torch.stack(part, 1).double() for part in (clipped, counted)]
        return tuple(part if clips > 1 else part.sum(1, keepdim=True) for part in every)

    def _summary(self, found, number: int) -> pd.DataFrame:
        """A row per seed and task."""
        success, tables = self.policies.success(), []
        control = self.clip.control
        for task, advantages, taken in self._per_task(found):
            weight = advantages.abs()
            table = {
                "seed": self.seeds,
                "rollout": number,
                "task": task,
                "length": self.regime.tasks.lengths[task],
                "success": success[:, task],
                "live": (weight > 0).sum((0, 2)),
                "clipped": (taken * (weight > 0)).sum((0, 2)),
                "taken": (taken * weight).sum((0, 2)) / weight.sum((0, 2)).clamp(min=1e-9),  # of the advantages
            }
            if control is not None:
                eps = control.eps[:, min(task, control.eps.shape[1] - 1)]
                scale = 1.0 if self.clip.scale is None else self.clip.scale[:, task]
                table |= {"width_low": eps[:, 0] * scale, "width_high": eps[:, 1] * scale}
            tables.append(pd.DataFrame({name: np.asarray(column) for name, column in table.items()}))
        return pd.concat(tables, ignore_index=True)

    def _recorded(self, found, number: int) -> pd.DataFrame:
        """The columns of the package's records that ``calibrate`` reads, and the seed."""
        tables = []
        for update, task, advantages, prompts, columns, taken in found:
            names = ("length", "log_ratio", "quadratic_variation")
            table = {name: columns[name] for name in names} | {"advantage": advantages, "clipped": taken}
            table = {name: column.numpy() for name, column in table.items()}
            table["prompt"] = prompts.numpy() + 1000 * task + 100_000 * number
            table["seed"] = np.repeat(self.seeds, len(advantages) // len(self.seeds))
            tables.append(pd.DataFrame(table | {"mini_batch": update, "step": number}))
        return pd.concat(tables, ignore_index=True)


@functools.cache
def warm(tasks: Tasks, seeds: tuple[int, ...]) -> Policies | Transformers:
    """Where all arms of these seeds start."""
    return (Transformers if tasks.transformer else Policies)(tasks, seeds)


def recorded(regime: Regime, policies: Policies | Transformers, seeds: Sequence[int]) -> Run:
    """The first rollouts under a width of √L, which a width is measured on."""
    run = Run(regime, arms_of(regime)["fspo" if regime.rate is None else "sqrt"], policies, seeds)
    for _ in range(RECORDED):
        run.rollout(recorded=True)
    return run


def train_together(regime: Regime, names: Sequence[str], seeds: Sequence[int]) -> pd.DataFrame:
    """Train several arms of MATCHED that have a band or none, in one batch, for a GPU; rows as those of :func:`train`.

    An arm is what it is by itself: its seeds draw their own numbers, and each has an eps of its own.
    """
    count, arms = len(seeds), [MATCHED[name] for name in names]
    start = warm(regime.tasks, tuple(seeds))
    run = Run(regime, Arm(0.5), start.copy(len(arms)), range(len(arms) * count))
    own = [slice(place, place + count) for place in range(0, len(arms) * count, count)]

    def set_bands(rows: slice, bands: Sequence[Band]) -> None:
        run.clip.scale[rows], run.clip.control.eps[rows] = scaled(bands, regime.tasks.lengths)
        run.clip.control.forget(rows)

    for arm, rows in zip(arms, own, strict=True):
        power = arm.start if arm.start is not None else arm.width
        if power is None:
            run.clip.control.eps[rows] = math.inf
        elif power == "measured":
            set_bands(rows, recorded(regime, start.copy(), seeds).measured())
        else:
            run.clip.scale[rows] = power_widths(power, regime.tasks.lengths)
    acting = {place: rows for place, rows in enumerate(own) if arms[place].start is not None}
    for number in range(regime.rollouts):
        if number == RECORDED and acting:
            bands = run.measured([row for rows in acting.values() for row in range(len(run.seeds))[rows]])
            for place, rows in enumerate(acting.values()):
                set_bands(rows, bands[place * count : (place + 1) * count])
            run.records.clear()
        run.rollout(recorded=bool(acting) and number < RECORDED)
    table = pd.concat(run.rows, ignore_index=True).replace(math.inf, math.nan)
    table.insert(0, "arm", np.array(names)[table.seed // count])
    table["seed"] = np.array(seeds)[table.seed % count]
    return table


def train(regime: Regime, name: str, seeds: Sequence[int]) -> pd.DataFrame:
    """Train an arm; a row per seed, rollout and task."""
    arm = arms_of(regime)[name]
    fresh = warm(regime.tasks, tuple(seeds)).copy
    run = Run(regime, arm, fresh(), seeds)
    if arm.width in ("measured", "power") and arm.start is None:
        how = advised if arm.width == "measured" else fitted_power
        run.set_bands(recorded(regime, fresh(), seeds).measured(how=how))
    for number in range(regime.rollouts):
        if arm.start is not None and number == RECORDED:
            run.set_bands(run.measured())
            run.records.clear()
        run.rollout(recorded=arm.start is not None and number < RECORDED)
    table = pd.concat(run.rows, ignore_index=True)
    table.insert(0, "arm", name)
    return table
