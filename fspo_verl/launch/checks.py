# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a launch that selects a loss of this package.

A check is a function from a launch to findings; this is all that a new one takes, and its name in a table below::

    def wide_upper_side(launch: Launch) -> Iterator[Finding]:
        # A docstring: what it finds, which is its row in docs/commands.md.
        if launch.band.high > 1:
            yield warning("what is the case", "why it matters", add=[f"{POLICY_LOSS}.eps_high=0.03"])

:func:`findings` runs them, for the launch itself (:mod:`fspo_verl.launch.hook`) and for ``fspo-verl doctor``.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from fspo_verl import versions
from fspo_verl.adaptive import AdaptiveBand
from fspo_verl.band import BadField, Band
from fspo_verl.config import Observation
from fspo_verl.findings import ERROR, WARNING, Finding
from fspo_verl.keys import ACTOR, GROUP, POLICY_LOSS, RECORDS_DIR
from fspo_verl.launch import at_size, selection
from fspo_verl.launch.hydra_files import as_value, leaves, overrides_that_decide, without
from fspo_verl.launch.view import Launch, error, finding, note, warning
from fspo_verl.observe import attempts
from fspo_verl.observe.noise import rounded_down
from fspo_verl.observe.settings import aggregation_in_effect, clip_ratios

# verl's defaults (ActorConfig): any other value next to fspo is taken for an attempt to set its clip range.
_CLIP_RATIO_DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
# Spread of a token's log-ratio, nats. Measured so far in training: 0.005 to 0.1 (noise under bfloat16 included).
_LARGEST_SIGMA = 0.1
# Of S, beyond which an edge counts as out of reach. Below 2, as eps=0.2 (mostly verl's clip_ratio) is 2 of 0.1, and a
# processor's rounding of a power would then decide.
_STANDARD_DEVIATIONS = 1.9
# The largest weight, and its inverse the smallest, that an edge may let through at the longest response: beyond it one
# response weighs as much as a hundred others.
_LARGEST_RATIO = 100
_TOKEN_RANGE = 0.05  # a range of token ratios; of a mean ratio it is a token's log-ratio of 0.05 on average
_CRASHED = "check_crashed"
_UNUSUAL = 100  # times larger or smaller than the longest response: no divisor that anybody means


# --- errors: another loss would train than the one asked for, or none ------------------------------------------------


def misplaced_fields(launch: Launch) -> Iterator[Finding]:
    """A field of the policy loss stands in a section above it, where nothing reads it. Move it."""
    fields = {field.name for kind in (AdaptiveBand, Observation) for field in dataclasses.fields(kind)}
    sections = ("", "algorithm", "actor_rollout_ref", ACTOR)
    for key, value in leaves(launch.config).items():
        section, _, name = key.rpartition(".")
        if name in fields and section in sections:
            what, add = f"{key}={value!r} sets nothing", [f"{POLICY_LOSS}.{name}={as_value(value)}"]
            yield error(what, "verl reads no such key", remove=without(key), add=add)


def bad_values(launch: Launch) -> Iterator[Finding]:
    """The class of ``policy_loss`` refuses a field or value, here as in every worker. Correct or remove it."""
    target = launch.policy_loss.get("_target_", "verl.workers.config.PolicyLossConfig")
    if not target.startswith(("fspo_verl.", "verl.")):
        return  # another plugin's, which may not be installed here
    kind = get_class(target)
    known = {field.name for field in dataclasses.fields(kind)}
    values: Any = OmegaConf.to_container(launch.policy_loss, resolve=True)
    for name, value in values.items():
        if name not in ("_target_", *known):
            key, near = f"{POLICY_LOSS}.{name}", difflib.get_close_matches(str(name), known, 1)
            add = [f"{POLICY_LOSS}.{one}={as_value(value)}" for one in near]
            fix = "" if near else f", or {GROUP}=fspo for a clip range"
            why = f"{target} has no such field"
            yield error(f"{key}={as_value(value)} sets nothing", why, fix, remove=without(key), add=add)
    try:
        kind(**{name: value for name, value in values.items() if name in known})
    except ValueError as problem:
        key = f"{POLICY_LOSS}.{problem.field}" if isinstance(problem, BadField) else POLICY_LOSS
        yield error(str(problem), fix=", or give an allowed value", remove=without(key))
    if launch.loss_mode == "observed" and not launch.has_our_schema:
        what, why = f"{POLICY_LOSS}.loss_mode=observed alone", "it does not say which loss is to be observed"
        add = [f"{GROUP}=observed", f"{POLICY_LOSS}.loss_mode=vanilla"]
        yield error(what, why, ", or another loss that trains", add=add)


def no_divisor(launch: Launch) -> Iterator[Finding]:
    """``loss_scale_factor`` is null, zero, or far from the longest response, which is to divide. Set it to that."""
    factor, longest = launch.actor.get("loss_scale_factor"), launch.max_response_length
    if launch.actor.loss_agg_mode != "seq-mean-token-sum-norm":
        return
    add = [f"{ACTOR}.loss_scale_factor={longest}"]
    what = f"{ACTOR}.loss_scale_factor={factor} is what {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by"
    if factor is None:
        what = f"{ACTOR}.loss_scale_factor=null makes verl divide by the padded width of each micro-batch"
        yield warning(what, "the loss then depends on how the batch is cut", add=add)
    elif not factor > 0:
        yield error(what, "zero makes the loss infinite, and a negative number trains towards lower rewards", add=add)
    elif longest and not 1 / _UNUSUAL <= factor / longest <= _UNUSUAL:
        scale = f"the loss is {longest / factor:.2g} times that of a division by the longest response, {longest} tokens"
        yield warning(what, scale, add=add)


def dropped_by_distillation(launch: Launch) -> Iterator[Finding]:
    """Distillation without task rewards drops the policy loss, and trains its own. Turn ``use_task_rewards`` on."""
    loss = launch.get("distillation.distillation_loss")
    if launch.get("distillation.enabled") and loss is not None and not loss.use_task_rewards:
        what = f"distillation.distillation_loss.use_task_rewards=False drops the policy loss {launch.loss_mode}"
        why = "only the distillation loss would train"
        add = ["distillation.distillation_loss.use_task_rewards=True"]
        yield error(what, why, ", or distillation.enabled=False", add=add)


def unreachable_clip_rate(launch: Launch) -> Iterator[Finding]:
    """``target_clip_rate`` cannot be followed, as the clip rate is not known, or always 0. Set it to null."""
    target, off = launch.policy_loss.get("target_clip_rate"), f"{POLICY_LOSS}.target_clip_rate=null"
    what = f"{POLICY_LOSS}.target_clip_rate={target}"
    dynamic = f"{ACTOR}.megatron.dynamic_context_parallel"
    if target is not None and launch.get(dynamic):
        why = "no rank knows which responses it was dealt, so that they cannot be counted"
        yield error(f"{what} with {dynamic}=True", why, f", or {off}", add=[f"{dynamic}=False"])
    if target is not None and launch.moves_nothing:
        why = "nothing can be clipped, and eps would shrink with every step"
        fix = ", or a smaller ppo_mini_batch_size"
        yield error(f"{what} with one optimiser step per rollout", why, fix, add=[off])


# --- folders ---------------------------------------------------------------------------------------------------------


def used_records_dir(launch: Launch) -> Iterator[Finding]:
    """``records_dir`` cannot be written on this machine. Name another, if workers have no such folder either."""
    if (records_dir := launch.policy_loss.get("records_dir")) is None:
        return
    folder = Path(records_dir)
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        why = "a node with a disk of its own may have it; each worker tries it before its first update"
        yield warning(f"{RECORDS_DIR}={records_dir} cannot be written on this machine", why, f"{RECORDS_DIR}=DIR")


def shared_folder(launch: Launch) -> Iterator[Finding]:
    """Another training has written into ``records_dir``, which nobody saw begin. Name a folder of this one alone."""
    folder = launch.policy_loss.get("records_dir")
    if folder is not None and attempts.attempts_below(folder):
        why = "another training has written them, and a report cannot tell the two apart"
        yield warning(f"{RECORDS_DIR}={folder} holds records already", why, f"{RECORDS_DIR}=DIR of this training alone")


# --- warnings: it trains, but not as FSPO means to -------------------------------------------------------------------


def one_step_per_rollout(launch: Launch) -> Iterator[Finding]:
    """A rollout trains one optimiser step, so that no response moves and nothing is clipped. Lower
    ``ppo_mini_batch_size``."""
    prompts = launch.prompts_per_rollout
    if prompts is None or not launch.moves_nothing:
        return
    why = "no update comes between, and nothing but noise is clipped"
    batch, mini = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
    what = f"{batch} <= {mini} and ppo_epochs=1"
    if launch.get("async_training") is not None:
        what = "trigger_parameter_sync_step * require_batches * ppo_epochs = 1"
        add = ["async_training.trigger_parameter_sync_step=4"]
    elif launch.rounds_per_sync is not None:  # verl insists on parameter_sync_step mini-batches
        size = 4 * launch.actor.ppo_mini_batch_size
        add = ["trainer.v1.separate_async.parameter_sync_step=4", f"{batch}={size}"]
    else:
        add = [f"{mini}={max(1, prompts // 4)}"]
    yield warning(f"one optimiser step per rollout ({what})", why, add=add)


def idle_clip_ratio(launch: Launch) -> Iterator[Finding]:
    """``clip_ratio*`` is set beside fspo, which does not read it. Set eps."""
    actor = launch.actor
    changed = [f"{key}={actor[key]}" for key, usual in _CLIP_RATIO_DEFAULTS.items() if actor.get(key) != usual]
    if changed:
        what = f"{ACTOR}: {', '.join(changed)} has no effect with loss_mode=fspo"
        why = f"its clip range is {POLICY_LOSS}.eps (and eps_low, eps_high, eps_dual; log-ratios per sqrt(token))"
        keys = [f"{ACTOR}.{item.partition('=')[0]}" for item in changed]
        yield warning(what, why, remove=without(*keys))


def range_of_tokens_for_gspo(launch: Launch) -> Iterator[Finding]:
    """GSPO has a range made for tokens, which the mean ratio of a response never leaves. Take its paper's range."""
    if launch.loss_mode != "gspo":
        return
    sides = clip_ratios(launch.actor.get)
    wide = {key: sides[key] for key in ("clip_ratio_low", "clip_ratio_high") if (sides[key] or 0) >= _TOKEN_RANGE}
    if wide:
        given = ", ".join(f"{ACTOR}.{key}={value}" for key, value in wide.items())
        why = "GSPO clips the mean ratio of a response, which no response moves so far: nothing will be clipped"
        fix = " sets its paper's range, 3e-4 and 4e-4"
        remove = [text for key in wide for text in overrides_that_decide(f"{ACTOR}.{key}")]
        yield warning(f"{given} with loss_mode=gspo", why, fix, remove=remove, add=[f"{GROUP}=gspo"])


def mean_over_own_length(launch: Launch) -> Iterator[Finding]:
    """``seq-mean-token-mean`` divides a response by its own length, which weighs short ones up. Take
    ``seq-mean-token-sum-norm``."""
    if launch.actor.loss_agg_mode == "seq-mean-token-mean":
        what = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean divides each sequence's loss by its own length"
        why = "so it weighs short responses up, which FSPO's objective does not"
        divisor = f"{ACTOR}.loss_scale_factor={launch.max_response_length}"
        add = [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", divisor]
        yield warning(what, why, f", or {ACTOR}.loss_agg_mode=token-mean", add=add)


def band_beyond_use(launch: Launch) -> Iterator[Finding]:
    """eps is so large that nothing is ever clipped, or that a few responses own the batch: it is no ratio bound like
    ``clip_ratio=0.2``. Lower it."""
    band, longest = launch.band, launch.max_response_length
    if not longest or band.target_clip_rate is not None:
        return  # where the data decide
    spread, scale = _LARGEST_SIGMA * math.sqrt(longest), band.scale_at(longest)
    reach = _STANDARD_DEVIATIONS * spread
    heaviest = math.log(_LARGEST_RATIO) if band.normalization == "plain" else math.inf
    # An infinite edge is no mistake: it says that nothing is to be clipped.
    edges = {"eps_low": band.low, "eps_high": band.high}
    far = {key: eps for key, eps in edges.items() if min(reach, heaviest) <= eps * scale < math.inf}
    if not far:
        return
    set_by = ("eps" if getattr(band, key) is None else key for key in far)
    usual = Band().high * math.sqrt(longest)  # as far out as the default band at the longest response
    usual = float(f"{usual / scale:.3g}") if usual < heaviest else rounded_down(heaviest / scale)
    values = (f"{POLICY_LOSS}.{key}={eps:g} is a log-ratio of {eps * scale:.3g}" for key, eps in far.items())
    why = (
        f"no long response will be clipped: even where a token's log-ratio spreads by {_LARGEST_SIGMA}, that "
        f"of a response spreads by {spread:.2g}"
    )
    if max(far.values()) * scale < reach:
        why = f"one response may then weigh as much as {_LARGEST_RATIO} others, or more, and a few own the batch"
    yield warning(
        f"{', '.join(values)} at a response of {longest} tokens",
        f"{why}; eps is not a ratio bound like clip_ratio=0.2",
        add=[*dict.fromkeys(f"{POLICY_LOSS}.{key}={usual:g}" for key in set_by)],
    )


def mismatch_of_engines(launch: Launch) -> Iterator[Finding]:
    """Log-probs of the rollout engine count as the old ones, are missing, or leave out tokens, so that its mismatch is
    clipped or not measured. Turn bypass mode off, ``calculate_log_probs`` on, or top-p off."""
    key, rollout = "actor_rollout_ref.rollout", launch.config.actor_rollout_ref.rollout
    if launch.bypasses:  # and there are no others to compare them with
        what = "algorithm.rollout_correction.bypass_mode=True takes the rollout engine's log-probs as old"
        why = "the clip range must also absorb the mismatch of engine and trainer, and the staleness of responses"
        if launch.is_fspo:
            yield warning(what, why, add=["algorithm.rollout_correction.bypass_mode=False"])
        return
    if not rollout.get("calculate_log_probs"):
        what = f"{key}.calculate_log_probs=False: the mismatch of trainer and rollout engine is not measured"
        why = "fspo/mismatch_* and its columns in the records need it"
        yield note(what, why, add=[f"{key}.calculate_log_probs=True"])
        return
    # Of the engines known here: vLLM's documentation of logprobs_mode, and decode.py in cpu/.
    mode = {"hf": "processed_logprobs", "vllm": rollout.get("logprobs_mode")}.get(launch.get(f"{key}.name"))
    cut = {"top_p": 1.0} if rollout.top_p < 1 else {}
    cut |= {"top_k": -1} if rollout.top_k > 0 else {}
    if mode == "processed_logprobs" and cut:
        what = ", ".join(f"{key}.{name}={rollout[name]}" for name in cut)
        why = (
            "the engine's log-probs are of the tokens that this leaves, the trainer's of all: their difference is then "
            "no noise, grows with length, and enters every rule that weighs or rejects by it"
        )
        yield warning(what, why, add=[f"{key}.{name}={off}" for name, off in cut.items()])


# --- notes -----------------------------------------------------------------------------------------------------------


def band_in_effect(launch: Launch) -> Iterator[Finding]:
    """The clip range in effect, in words and as ratios at two lengths, dual clip included."""
    text = f"policy loss fspo: {launch.band.describe()}"
    if (target := launch.band.target_clip_rate) is not None:
        text += f" at the start; eps follows a clip rate of {target:g}"
    if longest := launch.max_response_length:
        ratios = ((length, launch.band.ratios_at(length)) for length in (max(1, longest // 10), longest))
        said = [f"{text} at L={length}" for length, text in ratios if text]
        text += f"; as ratios {'; '.join(said)}" if said else ""
    yield note(text)


def loss_in_effect(launch: Launch) -> Iterator[Finding]:
    """The observed loss, its aggregation and its clip range, in which leftovers of another script show."""
    ranges = (f"{key}={value}" for key, value in clip_ratios(launch.actor.get).items())
    mode = aggregation_in_effect(launch.loss_mode, launch.actor.loss_agg_mode, versions.installed("verl"))
    yield note(f"policy loss {launch.loss_mode}, trained as verl has it and observed: {', '.join((mode, *ranges))}")


# --- which check is for which launch ---------------------------------------------------------------------------------

REFUSING = (misplaced_fields, bad_values, no_divisor, dropped_by_distillation, unreachable_clip_rate)
"""They yield errors, of the config alone. Where one of them crashes the launch is refused, as it was not judged."""

OF_ANY = (selection.unregistered_loss, used_records_dir, one_step_per_rollout, at_size.records_on_disk)
OF_SOUND_VALUES = (mismatch_of_engines, at_size.numerical_noise, at_size.weights_of_whole_responses)
OF_FSPO = (idle_clip_ratio, mean_over_own_length, band_beyond_use, band_in_effect)
OF_BASELINES = (range_of_tokens_for_gspo, loss_in_effect)
AT_THE_LOGGER = (shared_folder,)


def findings(config: DictConfig) -> list[Finding]:
    """Return the findings on a launch by its config; none where it neither selects a loss of ours nor tries to."""
    launch = Launch(config)
    found = [*selection.lost_selections(launch)]
    if launch.is_ours:
        found += run(launch, *REFUSING, *OF_ANY)
        if not any(one.id == bad_values.__name__ for one in found):
            found += run(launch, *OF_SOUND_VALUES, *(OF_FSPO if launch.is_fspo else OF_BASELINES))
    return found


def of_the_config_alone(config: DictConfig) -> list[Finding]:
    """Return what a trainer's logger can know of a launch of ours: its errors, and records of another training."""
    launch = Launch(config)
    errors = [one for one in run(launch, *REFUSING) if one.severity == ERROR and one.id != _CRASHED]
    return [*selection.lost_selections(launch), *errors, *run(launch, *AT_THE_LOGGER)]


def run(launch: Launch, *checks: Callable[[Launch], Iterator[Finding]]) -> list[Finding]:
    """Return what checks find, in their order."""
    return [one for check in checks for one in _found(check, launch)]


def _found(check: Callable[[Launch], Iterator[Finding]], launch: Launch) -> list[Finding]:
    try:
        return [dataclasses.replace(one, id=one.id or check.__name__) for one in check(launch)]
    except Exception as problem:
        what = f"{check.__name__} cannot judge this config: {type(problem).__name__}: {problem}"
    why = "a value in it is of another kind than verl expects, such as a text or 0 for a number"
    fix = f"look for it in {ACTOR}, data and trainer"
    return [finding(ERROR if check in REFUSING else WARNING, what, why, fix, id=_CRASHED)]
