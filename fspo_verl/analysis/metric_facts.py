# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Facts from verl's own metrics, for runs without our series: numbers, each with its sentence.

They do not say why a clip acts, nor on whom: noise, staleness and movement look alike in ``actor/pg_clipfrac``.
:data:`LEARN_MORE` is the launch that would tell.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from fspo_verl.analysis.evidence import TRAINED
from fspo_verl.analysis.logs import CLIPPED, CUT_OFF_BY_TRL, NOT_FINITE
from fspo_verl.analysis.runs import Run
from fspo_verl.observe.metrics import NAMES
from fspo_verl.output import percent

LEARN_MORE = "fspo-verl run --loss observed -- bash my_script.sh"

PPO_KL, K3 = "actor/ppo_kl", "rollout_corr/k3_kl"
CUT_OFF = "response_length/clip_ratio"
_ALWAYS = 0.9  # share of the steps whose longest response has the same length, from which that is the limit
_TIES = 0.25  # share of the responses that are as long as the longest, from which chance cannot have made them so


@dataclass(frozen=True)
class Fact:
    """One thing that the metrics say."""

    about: str
    """``not finite``, ``no advantage``, ``cut off``, ``clipped``, ``one step``, ``lengths``, ``kl`` or ``mismatch``."""

    sentence: str
    """Plain text without line breaks."""

    values: Mapping[str, float]
    """The numbers; what is not known is missing. Shares between 0 and 1, lengths in tokens, log-ratios in nats."""


class Course(NamedTuple):
    """A metric over the steps that logged a finite value: means of the first and the last tenth of them."""

    first: float
    last: float
    highest: float
    first_steps: tuple[int, int]
    last_steps: tuple[int, int]
    highest_step: int
    steps: int

    def text(self, form: Callable[[float], str], of: str) -> str:
        """In words, such as ``38% of the tokens in steps 127-140 (2.1% in steps 1-14, at most 44% in step 131)``."""
        first, last, highest = map(form, (self.first, self.last, self.highest))
        if first == last == highest:
            return f"{last} {of} in {self.all_steps}"
        rest = f"{first} in {_steps(self.first_steps)}, at most {highest} in step {self.highest_step}"
        return f"{last} {of} in {_steps(self.last_steps)} ({rest})"

    @property
    def values(self) -> dict[str, float]:
        return {"first": self.first, "last": self.last, "highest": self.highest, "highest_step": self.highest_step}

    @property
    def all_steps(self) -> str:
        return _steps((self.first_steps[0], self.last_steps[1]))


def facts(run: Run) -> list[Fact]:
    """All facts in the metrics of a run, faults first; empty where they hold none."""
    asked = (_not_finite, _no_advantage, _cut_off, _clipped, _one_step, _lengths, _kl, _mismatch)
    return [fact for ask in asked if (fact := ask(run)) is not None]


def course(values: pd.Series) -> Course | None:
    """A metric's course over the steps; None if no step logged a finite value."""
    values = values[values.abs() < math.inf]
    if values.empty:
        return None
    tenth = max(len(values) // 10, 1)
    first, last = values.iloc[:tenth], values.iloc[-tenth:]
    means = float(first.mean()), float(last.mean()), float(values.max())
    return Course(*means, _ends(first), _ends(last), int(values.idxmax()), len(values))


def _ends(values: pd.Series) -> tuple[int, int]:
    return int(values.index[0]), int(values.index[-1])


def _metric(run: Run, name: str) -> pd.Series:
    return run.metrics[name].dropna() if name in run.metrics else pd.Series(dtype=float)


def _count(run: Run, key: str) -> int | None:
    value = run.setting(key)
    return value if isinstance(value, int) else None


def _steps(ends: tuple[int, int]) -> str:
    return f"step {ends[0]}" if ends[0] == ends[1] else f"steps {ends[0]}-{ends[1]}"


def _not_finite(run: Run) -> Fact | None:
    logged = run.metrics.attrs.get(NOT_FINITE, {})
    broken = {name: steps for name, steps in logged.items() if name.startswith(TRAINED)}
    if not broken:
        return None
    begins = sorted({steps[0] for steps in broken.values()})
    names = [", ".join(sorted(name for name, steps in broken.items() if steps[0] == begin)) for begin in begins]
    parts = [f"{of_step} from step {begin}" for begin, of_step in zip(begins, names, strict=True)]
    count, steps = len(set().union(*broken.values())), len(run.metrics)
    sentence = f"NaN or inf in {count} of {steps} steps: {', '.join(parts)}."
    return Fact("not finite", sentence, {"step": begins[0], "count": count, "steps": steps})


def _no_advantage(run: Run) -> Fact | None:
    highest, lowest = _metric(run, "critic/advantages/max").align(_metric(run, "critic/advantages/min"), join="inner")
    without = (highest == 0) & (lowest == 0)
    if not without.any():
        return None
    count, steps = int(without.sum()), len(without)
    sentence = f"No response has an advantage in {count} of {steps} steps, as where all rewards of a group are alike."
    return Fact("no advantage", sentence, {"count": count, "steps": steps})


def _cut_off(run: Run) -> Fact | None:
    if (found := course(_metric(run, CUT_OFF_BY_TRL))) is not None:
        return Fact("cut off", f"Cut off: {found.text(percent, 'of the responses')}.", found.values)
    counted, longest = _metric(run, CUT_OFF), _metric(run, NAMES["longest"])
    counted, longest = counted.align(longest, join="inner")
    if counted.empty:
        return None
    # verl 0.9 counts the responses that are as long as the longest of the batch, whether or not that is the limit.
    limit = _count(run, "data.max_response_length")
    if limit is None and len(longest) > 1 and (longest == longest.max()).mean() >= _ALWAYS:
        limit = longest.max()
    found = course(counted if limit is None else counted.where(longest >= limit, 0.0))
    if found is not None and (limit is not None or found.last >= _TIES):
        at = f"at {longest.iloc[-1] if limit is None else limit:,.0f} tokens"
        return Fact("cut off", f"Cut off {at}: {found.text(percent, 'of the responses')}.", found.values)
    if not counted.any():
        sentence = (
            f"None is cut off by data.max_response_length; {CUT_OFF} does not count what rollout.max_model_len cuts."
        )
        return Fact("cut off", sentence, {})
    if len(counted) == 1:
        share, most = float(counted.iloc[0]), float(longest.iloc[0])
        what = f"{percent(share)} of the responses have {most:,.0f} tokens"
        return Fact("cut off", f"{what}: cut off if that is data.max_response_length.", {"at_most": share})
    sentence = f"How many are cut off is not known: {CUT_OFF} counts those as long as the longest of each step."
    return Fact("cut off", sentence, {})


def _clipped(run: Run) -> Fact | None:
    if (found := course(_metric(run, CLIPPED))) is None:
        return None
    if found.highest == 0:
        amount = "fewer than 1 of 2,000 tokens" if _rounded(run) else "no token"
        return Fact("clipped", f"The clip takes {amount} in {found.all_steps}.", found.values)
    return Fact("clipped", f"The clip takes {found.text(percent, 'of the tokens')}.", found.values)


def _one_step(run: Run) -> Fact | None:
    rollout, batch, epochs = (
        _count(run, key)
        for key in (
            "data.train_batch_size",
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "actor_rollout_ref.actor.ppo_epochs",
        )
    )
    if rollout and batch and epochs == 1 and rollout <= batch:
        sentence = f"Each rollout trains one optimiser step ({rollout} prompts): what is clipped has not moved."
        return Fact("one step", sentence, {"steps": 1})
    clipped, moved = _metric(run, CLIPPED), _metric(run, PPO_KL)
    if clipped.empty or clipped.any() or moved.any() or _rounded(run):
        return None
    what = "The clip fraction is" if moved.empty else "Clip fraction and ppo_kl are"
    return Fact("one step", f"{what} 0 in every step, as where each rollout trains one optimiser step.", {"steps": 1})


def _rounded(run: Run) -> bool:
    """Whether the log shows three digits, as verl's console did up to 0.4: then its learning rates are all 0."""
    rates = _metric(run, "actor/lr")
    return len(rates) > 0 and not rates.any()


def _lengths(run: Run) -> Fact | None:
    if (found := course(_metric(run, NAMES["response_length"]))) is None:
        return None
    values, sentence = found.values, f"Responses have {found.text('{:,.0f}'.format, 'tokens on average')}"
    ends = float(_metric(run, NAMES["shortest"]).min()), float(_metric(run, NAMES["longest"]).max())
    if all(map(math.isfinite, ends)):
        sentence += f", {ends[0]:,.0f} to {ends[1]:,.0f} in all"
        values |= {"shortest": ends[0], "longest": ends[1]}
    return Fact("lengths", f"{sentence}.", values)


def _kl(run: Run) -> Fact | None:
    names = {PPO_KL: "old to new policy", "actor/kl_loss": "to the reference"}
    found = {name: one for name in names if (one := course(_metric(run, name))) is not None}
    if not found:
        return None
    parts = [f"{names[name]} {one.text('{:.2g}'.format, 'nats per token')}" for name, one in found.items()]
    return Fact("kl", f"KL: {'; '.join(parts)}.", {name: one.last for name, one in found.items()})


def _mismatch(run: Run) -> Fact | None:
    found = course(_metric(run, K3))
    if found is None or found.last < 0:
        return None
    sigma = math.sqrt(2 * found.last)
    sentence = (
        f"A token's log-ratio between trainer and rollout engine spreads by {sigma:.2g} nats ({K3} {found.last:.2g})."
    )
    return Fact("mismatch", sentence, {"k3": found.last, "sigma": sigma})
