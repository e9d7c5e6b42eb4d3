# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Facts from verl's own metrics, for runs without our series.

They do not say why tokens are clipped, nor whose: noise, staleness and movement look alike in ``actor/pg_clipfrac``.
:data:`LEARN_MORE` is the launch that would tell.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

from fspo_verl.analysis.causes import short
from fspo_verl.analysis.logs import CLIPPED
from fspo_verl.analysis.runs import Run, setting
from fspo_verl.findings import NOTE, Finding
from fspo_verl.keys import ACTOR
from fspo_verl.observe.metrics import NAMES
from fspo_verl.output import percent

LEARN_MORE = "fspo-verl run --loss observed -- bash my_script.sh"
"""The launch that would tell why responses are clipped."""

_KL, _CUT_OFF = "actor/ppo_kl", "response_length/clip_ratio"
_COURSES = {
    "lengths": (NAMES["response_length"], "Response length", "tokens"),
    "reward": (NAMES["reward"], "Reward", ""),
    "entropy": ("actor/entropy", "Entropy", "nats per token"),
    "gradient norm": (NAMES["grad_norm"], "Gradient norm", ""),
    "kl": (_KL, "KL from the old to the new policy", "nats per token"),
    "kl to reference": ("actor/kl_loss", "KL to the reference", "nats per token"),
    "mismatch": ("rollout_corr/k3_kl", "Trainer against rollout engine, k3", "nats per token"),
}
"""Facts from metrics without a rule: by fact, the metric, its name and its unit."""
_ALWAYS = 0.9  # share of the steps whose longest response has the same length, from which that is the limit
_TIES = 0.25  # share of the responses that are as long as the longest, from which chance cannot have made them so


class Course:
    """A metric over the steps that logged it, and its means over the first and the last tenth of them."""

    def __init__(self, values: pd.Series):
        tenth = max(len(values) // 10, 1)
        self.values, self.start, self.end = values, values.iloc[:tenth], values.iloc[-tenth:]
        means = (self.start.mean(), self.end.mean(), values.max())
        self.first, self.last, self.highest = (float(value) + 0.0 for value in means)  # no -0

    def text(self, of: str, form: Callable[[float], str] = short) -> str:
        """Describe it, as in ``38% of the tokens in steps 127-140 (2.1% in steps 1-14, at most 44% in step 131)``."""
        first, last, highest = map(form, (self.first, self.last, self.highest))
        of = f" {of}" if of else ""
        if first == last == highest:
            return f"{last}{of} in {_steps(self.values)}"
        rest = f"{first} in {_steps(self.start)}, at most {highest} in step {self.values.idxmax()}"
        return f"{last}{of} in {_steps(self.end)} ({rest})"


def course(values: pd.Series) -> Course | None:
    """A metric's course over the steps; None if no step logged a finite value."""
    values = values[np.isfinite(values)]
    return None if values.empty else Course(values)


def facts(run: Run) -> list[Finding]:
    """Return the facts in the metrics of a run beside causes; empty where they hold nothing of it."""
    found = [one for rule in (_no_advantage, _clipped, _one_step, _cut_off_unknown) if (one := rule(run)) is not None]
    for name, (metric, what, unit) in _COURSES.items():
        if (values := course(_metric(run, metric))) is not None:
            found.append(Finding(name, NOTE, f"{what}: {values.text(unit)}.", "", values.last))
    return found


def cut_off(run: Run) -> pd.Series:
    """Share of the responses that are cut off, by step; empty where that is not known.

    verl counts the responses that are as long as the longest of the batch, whether or not that is the limit. It is,
    where the config says so, where nearly all steps have the same longest, or where so many are alike.
    """
    counted, longest = _metric(run, _CUT_OFF).align(_metric(run, NAMES["longest"]), join="inner")
    limit = _count(run, "data.max_response_length")
    if limit is None and len(longest) > 1 and (longest == longest.max()).mean() >= _ALWAYS and counted.any():
        limit = longest.max()
    if limit is not None:
        return counted.where(longest >= limit, 0.0)
    found = course(counted)
    return counted if found and found.last >= _TIES else counted[:0]


def _cut_off_unknown(run: Run) -> Finding | None:
    if not _metric(run, _CUT_OFF).any() or len(cut_off(run)):
        return None
    said = f"How many are cut off is not known: {_CUT_OFF} counts those as long as the longest of each step."
    return Finding("cut off unknown", NOTE, said)


def _no_advantage(run: Run) -> Finding | None:
    highest, lowest = _metric(run, "critic/advantages/max").align(_metric(run, "critic/advantages/min"), join="inner")
    if not (count := int(((highest == 0) & (lowest == 0)).sum())):
        return None
    said = f"No response has an advantage in {count} of {len(highest)} steps: all rewards of a group are alike there."
    return Finding("no advantage", NOTE, said, "", count / len(highest))


def _clipped(run: Run) -> Finding | None:
    if (found := course(_metric(run, CLIPPED))) is None:
        return None
    said = f"Clipped: {found.text('of the tokens', percent)}."
    if found.highest == 0:
        amount = "Fewer than 1 of 2,000 tokens is" if _rounded(run) else "No token is"
        said = f"{amount} clipped in {_steps(found.values)}."
    return Finding("clipped", NOTE, said, "", found.last)


def _one_step(run: Run) -> Finding | None:
    actor = (_count(run, f"{ACTOR}.{key}") for key in ("ppo_mini_batch_size", "ppo_epochs"))
    rollout, (batch, epochs) = _count(run, "data.train_batch_size"), actor
    clipped, moved = _metric(run, CLIPPED), _metric(run, _KL)
    if rollout and batch and epochs == 1 and rollout <= batch:
        said = f"Each rollout trains one optimiser step ({rollout} prompts): what is clipped has not moved."
    elif clipped.empty or clipped.any() or moved.any() or _rounded(run):
        return None
    else:
        what = "The clip fraction is" if moved.empty else "Clip fraction and ppo_kl are"
        said = f"{what} 0 in every step, as where each rollout trains one optimiser step."
    return Finding("one step", NOTE, said, "", 1.0)


def _rounded(run: Run) -> bool:
    """Whether the log shows three digits, as verl's console did up to 0.4: then its learning rates are all 0."""
    rates = _metric(run, "actor/lr")
    return len(rates) > 0 and not rates.any()


def _metric(run: Run, name: str) -> pd.Series:
    return run.metrics[name].dropna() if name in run.metrics else pd.Series(dtype=float)


def _count(run: Run, key: str) -> int | None:
    value = setting(run.config, key)
    return value if isinstance(value, int) else None


def _steps(values: pd.Series) -> str:
    first, last = values.index[0], values.index[-1]
    return f"step {first}" if first == last else f"steps {first}-{last}"
