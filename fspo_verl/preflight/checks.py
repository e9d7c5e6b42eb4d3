# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of a composed launch config: functions from a launch to findings; :func:`findings` runs them all.

Both the launch itself (:mod:`fspo_verl.preflight.hook`) and ``fspo-verl doctor`` run this list. Imported while verl is
only partly imported; hence modules are imported whole, and ``fspo_verl.config`` only inside functions.
"""

import dataclasses
import difflib
import functools
import math
import os
import re
import shlex
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from statistics import NormalDist

import verl.trainer.ppo.core_algos
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fspo_verl.band import Band
from fspo_verl.observe import folder as folders
from fspo_verl.preflight import composition, loss_history, ray_workers, sources
from fspo_verl.preflight.launch import ACTOR, GROUP, POLICY_LOSS, SEVERITIES, Finding, Launch, by_severity
from fspo_verl.preflight.overrides import override

# What a check yields; _run gives it the check's name.
error, warning, note = (functools.partial(Finding, severity, "") for severity in SEVERITIES)
# verl's defaults (ActorConfig): any other value next to fspo is taken for an attempt to set its clip range.
_CLIP_RATIO_DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
_GRAD_CLIP_DEFAULT = 1.0
# Spread of a token's log-ratio, nats. Measured so far: 0.005 to 0.1 (numerical noise under bfloat16 included).
_LARGEST_SIGMA = 0.1
_STANDARD_DEVIATIONS = 2  # of S, beyond which an edge counts as out of reach
_MOST, _RARE = 0.4, 1e-6  # share of responses beyond an edge that has lost its use
_TOKEN_RANGE = 0.01  # a token-level ratio range below this is one of GSPO's, meant for the mean over a response
# Of seq-mean-token-sum-norm over max_response_length; the quickstart's runs had 0.02 to 0.18.
_USUAL_GRAD_NORM = 0.1


def findings(config: DictConfig) -> list[Finding]:
    """Everything the config alone says about a launch, errors first; empty without ``actor_rollout_ref.actor``."""
    if OmegaConf.select(config, ACTOR) is None:
        return []
    launch = Launch(config)
    if found := _run((no_section,), launch):
        return found  # nothing else can be read
    found = _run(_ANY_LAUNCH, launch)
    if launch.is_ours:
        found += _run(_PACKAGE_LAUNCH, launch)
    if launch.is_fspo:
        found += _run(_BAND_FIELDS, launch) or _run(_FSPO_LAUNCH, launch)
    elif launch.is_ours or launch.loss_mode == "gspo":
        found += _run(_BASELINE_LAUNCH, launch)
    return by_severity(found)


def _run(checks, launch: Launch) -> list[Finding]:
    """A value that a check cannot judge, as it is of another kind than verl expects."""
    found = []
    for check in checks:
        try:
            found.extend(dataclasses.replace(f, check=f.check or check.__name__) for f in check(launch))
        except (ArithmeticError, TypeError, ValueError) as problem:
            what = f"{check.__name__} cannot judge this config: {type(problem).__name__}: {problem}"
            why = "a value in it is of another kind than verl expects, such as a text or 0 for a number"
            fix = f"look for it in {ACTOR}, data and trainer"
            found.append(Finding("error", "unjudged", what, why, fix))
    return found


# --- errors: another loss would train than the one asked for ---------------------------------------------------------


def dead_group_value(launch: Launch) -> Iterator[Finding]:
    """A plain value where the config group is meant: verl reads no such key."""
    value = launch.get(GROUP)
    if value is not None:
        yield error(
            f"{GROUP}={value!r} is a plain value in this config",
            f"verl reads no such key and would train loss_mode={launch.loss_mode!r}",
            f"select the config group instead: on the command line +{GROUP}={value}, or in your YAML "
            f"`defaults: [ppo_trainer, {GROUP}: {value}, _self_]` without the value under `algorithm:`",
        )


def no_section(launch: Launch) -> Iterator[Finding]:
    """A value where the section ``policy_loss`` belongs."""
    section = launch.actor.get("policy_loss")
    if not OmegaConf.is_dict(section):
        what = f"{POLICY_LOSS}={section!r} is no section"
        yield error(what, "verl finds no loss_mode there", f"remove it, and add +{GROUP}=fspo")


def near_miss(launch: Launch) -> Iterator[Finding]:
    """A key that looks like the selection of a loss, or a field of one, in a place that nothing reads."""
    from fspo_verl.config import Observation

    fields = {field.name for kind in (Band, Observation) for field in dataclasses.fields(kind)}
    losses = {file.name.removesuffix(".yaml") for file in (resources.files("fspo_verl.configs") / GROUP).iterdir()}
    for key, value in composition.leaves(launch.config).items():
        # Read elsewhere: the section itself, the group's name as a value, the losses that distillation names.
        if key == GROUP or key.startswith((f"{POLICY_LOSS}.", f"{GROUP}.", "distillation.")):
            continue
        name, loss = re.split("[./@]", key)[-1].lower(), str(value).lower()
        if ("loss" in name and loss in losses) or difflib.SequenceMatcher(None, name, "policy_loss").ratio() > 0.8:
            fix = f"+{GROUP}={loss if loss in losses else 'fspo'} instead of it"
        elif name in fields:
            fix = f"{POLICY_LOSS}.{name}={value} instead of it"
        else:
            continue
        why = f"verl reads no such key and would train loss_mode={launch.loss_mode!r}"
        yield error(f"{key}={value!r} selects and sets nothing", why, fix)


def missing_choice(launch: Launch) -> Iterator[Finding]:
    """``optional algorithm.policy_loss: NAME`` with a name that no file has: Hydra passes over it."""
    choice = _choice()
    if choice and not any(part.name == f"{GROUP}/{choice}" for part in launch.parts):
        what = f"{GROUP}={choice} is optional in the defaults list, and no file has that name"
        yield error(what, "nothing is selected", f"{GROUP}: fspo without `optional`")


def _choice() -> str | None:
    """The option of the group that the running Hydra application selects."""
    return HydraConfig.get().runtime.choices.get(GROUP) if HydraConfig.initialized() else None


def former_name(launch: Launch) -> Iterator[Finding]:
    """A name of the group that is kept for scripts that have it."""
    if _choice() == "rloo":
        why = "to verl rloo is an advantage estimator (algorithm.adv_estimator=rloo), which this does not select"
        yield warning(f"{GROUP}=rloo is the former name of {GROUP}=fixed_band", why, f"+{GROUP}=fixed_band")


def hidden_files(_launch: Launch) -> Iterator[Finding]:
    """Hydra takes the first file of a name, and searches --config-dir and hydra.searchpath last."""
    for hidden in composition.passed_over():
        why = "fspo_verl packages a config of that name, and Hydra takes the first it finds"
        yield error(f"{hidden} is not read", why, f"rename {Path(hidden).name}")


def _selected(launch: Launch) -> tuple[list[composition.Part], dict[str, object]]:
    """The packaged files of the group, in the order in which they were merged, and what they set by key."""
    group = [part for part in launch.parts if part.is_own and part.name.startswith(f"{GROUP}/")]
    return group, dict(leaf for part in group for leaf in composition.leaves(part.content).items())


def lost_to_group(launch: Launch) -> Iterator[Finding]:
    """A value in a config file of the user's that the selected group, merged after that file, replaces."""
    group, sets = _selected(launch)
    if not group:
        return
    final = composition.leaves(launch.config)
    before = launch.parts[: launch.parts.index(group[0])]
    for part in (part for part in before if part.is_of_user):
        lost = {
            key: value
            for key, value in composition.leaves(part.content).items()
            if key in sets and value != sets[key] == final.get(key) and not _is_verls_own(part, key, value)
        }
        if lost:
            option = group[-1].name.removeprefix(f"{GROUP}/")
            kept = " ".join(f"{key}={'null' if value is None else value}" for key, value in lost.items())
            yield error(
                f"{part.file} sets {', '.join(f'{key}={value}' for key, value in lost.items())}",
                f"{GROUP}={option} comes after that file and would train "
                + ", ".join(f"{key}={sets[key]}" for key in lost),
                f"{kept} on the command line to keep them (or the group in that file's defaults, before `_self_`), or "
                "remove them from the file",
            )


def _is_verls_own(part: composition.Part, key: str, value) -> bool:
    """Whether a value in a user's file says nothing against the group: which loss to train, or verl's default."""
    if key == f"{POLICY_LOSS}.loss_mode" or str(value).startswith(("verl.workers.config.", "fspo_verl.config.")):
        return True
    if OmegaConf.select(part.content, f"{ACTOR}._target_") is None:
        return False
    # The file is a copy of verl's whole config, which sets every key to its default.
    from verl.workers.config import ActorConfig

    stock = {f"{ACTOR}.{field.name}": field.default for field in dataclasses.fields(ActorConfig)}
    return key in stock and value == stock[key]


def overridden_group(launch: Launch) -> Iterator[Finding]:
    """A leftover ``loss_mode`` that beats the selected group."""
    group, sets = _selected(launch)
    choice, selected = _choice(), sets.get(f"{POLICY_LOSS}.loss_mode")
    packaged = any(part.name == f"{GROUP}/{choice}" for part in group)
    if packaged and selected and launch.loss_mode != selected:
        yield error(
            f"{POLICY_LOSS}.loss_mode={launch.loss_mode!r} overrides {GROUP}={choice}, which sets loss_mode={selected}",
            "the leftover value would train",
            f"{POLICY_LOSS}.loss_mode={selected}, or remove the leftover (of two overrides the last one counts), or "
            f"select another {GROUP}",
        )


def used_records_dir(launch: Launch) -> Iterator[Finding]:
    """A folder for records that belongs to another run, or that this machine cannot write."""
    if (records_dir := launch.policy_loss.get("records_dir")) is None:
        return
    folder, key = Path(records_dir), f"{POLICY_LOSS}.records_dir"
    checkpoints = Path(launch.config.trainer.default_local_dir)
    resumed = loss_history.point(launch.config)
    try:
        place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
        reason = folders.why_taken(folder, checkpoints, resumed is not None) if writable else None
        files = folders.record_files(folder) if writable else []
    except OSError:  # such as a loop of symbolic links
        writable = False
    if not writable:
        why = "a node with a disk of its own may have it; each worker tries it before its first update"
        yield warning(f"{key}={records_dir} cannot be written on this machine", why, f"{key}=DIR that can be")
        return
    if reason is None and files and resumed is not None and resumed[0].resolve() != checkpoints.resolve():
        (first, _, _), *_ = folders.numbered(files)
        if first <= resumed[1]:
            reason = f"it holds records from step {first} on, and this run branches off after step {resumed[1]}"
            reason += f" of the checkpoints in {resumed[0]}"
    if reason is not None:
        free = folders.free(records_dir)
        yield error(
            f"{key}={records_dir} is taken: {reason}", "one folder is for the records of one run", f"{key}={free}"
        )


def lost_checkpoint(launch: Launch) -> Iterator[Finding]:
    """A tracker of checkpoints that names none, or one that is gone."""
    folder = Path(launch.config.trainer.default_local_dir)
    tracker = folder / loss_history.TRACKER
    fix = f"rm {shlex.quote(str(tracker))} to start anew"
    if saved := loss_history.saved_steps(folder):
        fix = f"echo {max(saved)} > {shlex.quote(str(tracker))} to go on from the last one, or {fix}"
    try:
        step = loss_history.tracked(launch.config)
    except ValueError:
        yield error(f"{tracker} holds no step", "verl would fail once its workers have started", fix)
        return
    if step is not None and loss_history.point(launch.config) is None:
        what = f"{tracker} names a checkpoint of step {step}, which is gone"
        yield warning(what, "verl starts anew, and only prints it", fix)


def unknown_fields(launch: Launch) -> Iterator[Finding]:
    """Typos in the fields of the fspo policy loss, schema or not."""
    from fspo_verl.config import FSPOPolicyLossConfig

    known = [field.name for field in dataclasses.fields(FSPOPolicyLossConfig)]
    for key in launch.policy_loss:
        if key not in known:
            guess = difflib.get_close_matches(key, known, n=1)
            yield error(
                f"{POLICY_LOSS}.{key}={launch.policy_loss[key]!r} is no field of the fspo policy loss"
                f"{f', did you mean {guess[0]}' if guess else ''}?",
                "it would set nothing",
                f"remove it; fields: {', '.join(field for field in known if not field.startswith('_'))}",
            )


def band_fields(launch: Launch) -> Iterator[Finding]:
    """Values from which no band can be built."""
    try:
        _ = launch.band
    except ValueError as problem:
        yield error(str(problem), fix=f"remove that override of {POLICY_LOSS}, or give an allowed value")


def no_divisor(launch: Launch) -> Iterator[Finding]:
    """A normaliser that divides by zero or turns the gradient round."""
    factor = launch.actor.get("loss_scale_factor")
    if launch.actor.loss_agg_mode == "seq-mean-token-sum-norm" and factor is not None and not factor > 0:
        what = f"{ACTOR}.loss_scale_factor={factor} is what {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by"
        why = "zero makes the loss infinite, and a negative number trains towards lower rewards"
        fix = f"{ACTOR}.loss_scale_factor={launch.max_response_length}"
        yield error(what, why, fix)


def dropped_by_distillation(launch: Launch) -> Iterator[Finding]:
    """Distillation without task rewards: verl multiplies the policy loss by nothing at all."""
    loss = launch.get("distillation.distillation_loss")
    if launch.get("distillation.enabled") and loss is not None and not loss.use_task_rewards:
        what = f"distillation.distillation_loss.use_task_rewards=False drops the policy loss {launch.loss_mode}"
        why = "only the distillation loss would train"
        fix = "distillation.distillation_loss.use_task_rewards=True, or distillation.enabled=False"
        yield error(what, why, fix)


def replaced_by_bypass(launch: Launch) -> Iterator[Finding]:
    """Bypass mode in a verl that takes it to the workers: its own loss then trains."""
    if launch.bypasses and sources.bypass_replaces_the_loss():
        what = "algorithm.rollout_correction.bypass_mode=True makes this verl train its loss `bypass_mode`"
        why = f"loss_mode={launch.loss_mode} would not train"
        fix = "algorithm.rollout_correction.bypass_mode=False"
        yield error(what, why, fix)


# --- warnings: it trains, but not as FSPO means to -------------------------------------------------------------------


def unregistered_loss(launch: Launch) -> Iterator[Finding]:
    """A ``loss_mode`` that nobody registered in this process."""
    known = verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY
    if launch.loss_mode in known:
        return
    guess = difflib.get_close_matches(launch.loss_mode.lower(), known, n=1)
    what = f"{POLICY_LOSS}.loss_mode={launch.loss_mode!r} is not registered here"
    why = "unless a worker registers it, the run fails at its first actor update, after a whole rollout"
    fix = f"{f'did you mean {POLICY_LOSS}.loss_mode={guess[0]!r}? ' if guess else ''}known: {', '.join(sorted(known))}"
    yield warning(what, why, fix)


def changed_on_resume(launch: Launch) -> Iterator[Finding]:
    """A run that goes on from a checkpoint with another loss than trained it, as far as that is known."""
    if (resumed := loss_history.point(launch.config)) is None:
        return
    folder, step = resumed
    before, silent = None, launch.is_ours and f"{loss_history.FILE} in {folder} does not say"
    try:
        before = loss_history.loss_before(launch.config)
    except ValueError as problem:
        silent = str(problem)
    if before is None:
        if silent:
            what = f"this run resumes after step {step}, and which loss trained it until then is not known"
            fix = "compare .hydra/config.yaml of that run with this one; the loss of this launch is kept from now on"
            yield Finding("warning", "unknown_before_resume", what, silent, fix)
        return
    settings = loss_history.loss_settings(launch.config)
    changed = [key for key in settings if key in before and settings[key] != before[key]]
    if changed:
        yield warning(
            f"this run resumes after step {step} with "
            + ", ".join(f"{ACTOR}.{key}={settings[key]} (until then {before[key]})" for key in changed),
            "its later steps train another loss than its earlier ones",
            "if that is not meant: " + " ".join(f"{ACTOR}.{key}={before[key]}" for key in changed),
        )


def relative_checkpoints(launch: Launch) -> Iterator[Finding]:
    """A relative folder of checkpoints on a running cluster: its workers are where Ray was started, not here."""
    folder = Path(launch.config.trainer.default_local_dir)
    if not folder.is_absolute() and ray_workers.joins_a_cluster(launch.config):
        what = f"trainer.default_local_dir={folder} is relative, and this launch joins a running Ray cluster"
        why = (
            "the workers save and resume below the folder in which Ray was started; checkpoints are looked for below "
            f"{Path.cwd()}, so that records of a resumed run are refused and a loss that changes goes unnoticed"
        )
        yield warning(what, why, override("trainer.default_local_dir", folder.absolute()))


def one_step_per_rollout(launch: Launch) -> Iterator[Finding]:
    """Nothing moves between rollout and update, so nothing can be clipped."""
    if launch.optimizer_steps_per_rollout != 1 or launch.bypasses:
        return
    why = "the ratio stays 1 and no clip can act"
    batch, mini = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
    what = f"{batch} <= {mini} and ppo_epochs=1"
    if launch.get("async_training") is not None:
        what = "trigger_parameter_sync_step * require_batches * ppo_epochs = 1"
        fix = "async_training.trigger_parameter_sync_step=4"
    elif launch.rounds_per_sync is not None:  # verl insists on parameter_sync_step mini-batches
        fix = f"trainer.v1.separate_async.parameter_sync_step=4 {batch}={4 * launch.actor.ppo_mini_batch_size}"
    else:
        fix = f"{mini}={max(1, launch.prompts_per_rollout // 4)}"
    yield warning(f"one optimiser step per rollout ({what})", why, fix)


def remote_code(launch: Launch) -> Iterator[Finding]:
    """Code out of a model's or a tokenizer's repository."""
    for key in ("actor_rollout_ref.model.trust_remote_code", "data.trust_remote_code"):
        if launch.get(key):
            yield warning(
                f"{key}=true",
                "every worker runs whatever Python lies in the model's folder or repository, with your rights; Qwen3 "
                "and all other architectures of transformers need none",
                f"{key}=false",
            )


def idle_clip_ratio(launch: Launch) -> Iterator[Finding]:
    """verl's ratio-space clip range, dual clip included, beside fspo."""
    actor = launch.actor
    changed = [f"{key}={actor[key]}" for key, usual in _CLIP_RATIO_DEFAULTS.items() if actor.get(key) != usual]
    if changed:
        what = f"{ACTOR}: {', '.join(changed)} has no effect with loss_mode=fspo"
        why = f"its clip range is {POLICY_LOSS}.eps_low, eps_high and eps_dual (log-ratio per sqrt(token), not ratios)"
        fix = f"remove {' '.join(f'{ACTOR}.{item}' for item in changed)}"
        yield warning(what, why, fix)


def mean_over_own_length(launch: Launch) -> Iterator[Finding]:
    """An aggregation that weighs responses by length."""
    if launch.actor.loss_agg_mode == "seq-mean-token-mean":
        yield warning(
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean divides each sequence's loss by its own length",
            "so it weighs short responses up, which FSPO's objective does not",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm "
            f"{ACTOR}.loss_scale_factor={launch.max_response_length}, or {ACTOR}.loss_agg_mode=token-mean",
        )


def varying_scale(launch: Launch) -> Iterator[Finding]:
    """A normaliser that is not the same for all micro-batches."""
    if launch.actor.loss_agg_mode == "seq-mean-token-sum-norm" and launch.actor.get("loss_scale_factor") is None:
        what = f"{ACTOR}.loss_scale_factor=null makes verl divide by the padded width of each micro-batch"
        why = "the loss then depends on how the batch is cut"
        fix = f"{ACTOR}.loss_scale_factor={launch.max_response_length}"
        yield warning(what, why, fix)


def always_clipped_gradient(launch: Launch) -> Iterator[Finding]:
    """A loss so large that the gradient clip cuts every step to the same norm."""
    limit = OmegaConf.select(launch.actor, "optim.clip_grad")
    times = _times_the_norm_mode(launch)
    if not limit or times is None or times * _USUAL_GRAD_NORM < limit:
        return
    yield warning(
        f"{ACTOR}.loss_agg_mode={launch.actor.loss_agg_mode} with {ACTOR}.optim.clip_grad={limit:g} (grad_clip)",
        f"the loss is {times:,.0f} times that of seq-mean-token-sum-norm over max_response_length, whose gradient norm "
        f"is of the order of {_USUAL_GRAD_NORM:g}: every step is cut to the same norm, whatever the batch says",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor={launch.max_response_length}, or "
        f"{ACTOR}.optim.clip_grad={times:g}",
    )


def _times_the_norm_mode(launch: Launch) -> float | None:
    """The loss as a multiple of seq-mean-token-sum-norm's over max_response_length; None where lengths decide."""
    longest = launch.max_response_length
    if not longest:
        return None
    match launch.actor.loss_agg_mode:
        case "seq-mean-token-sum":
            return longest
        case "token-sum":
            return longest * launch.actor.ppo_mini_batch_size * launch.config.actor_rollout_ref.rollout.n
        case "seq-mean-token-sum-norm":
            return longest / (launch.actor.get("loss_scale_factor") or longest)
    return None


def unread_grad_clip(launch: Launch) -> Iterator[Finding]:
    """The key that verl's engines do not read."""
    value = launch.actor.get("grad_clip", _GRAD_CLIP_DEFAULT)
    if value not in (_GRAD_CLIP_DEFAULT, OmegaConf.select(launch.actor, "optim.clip_grad")):
        what = f"{ACTOR}.grad_clip={value} has no effect"
        why = f"verl 0.9's engines clip at {ACTOR}.optim.clip_grad, here {launch.actor.optim.clip_grad}"
        fix = f"{ACTOR}.optim.clip_grad={value}"
        yield warning(what, why, fix)


def one_sided_band(launch: Launch) -> Iterator[Finding]:
    """The one member of the family that is unfair by design."""
    if launch.band.band_center == "zero" and launch.band.band_width == "realized":
        what = f"{POLICY_LOSS}.band_width=realized with band_center=zero clips long or stale sequences on one side"
        why = "S drifts by about -Q/2, which outgrows a width of sqrt(Q)"
        fix = f"{POLICY_LOSS}.band_center=realized"
        yield warning(what, why, fix)


def band_beyond_use(launch: Launch) -> Iterator[Finding]:
    """An edge that no response reaches, mostly a ratio bound of another loss taken for this one's."""
    if not (edges := launch.half_widths):
        return
    longest = launch.max_response_length
    spread = _LARGEST_SIGMA * math.sqrt(longest)
    if far := {key: edge for key, edge in edges.items() if edge[1] >= _STANDARD_DEVIATIONS * spread}:
        values = (f"{key}={float(value):g} is a log-ratio of {half:.3g}" for key, (value, half) in far.items())
        band = (f"{POLICY_LOSS}.{name}={getattr(Band(), name)}" for name in ("eps_low", "eps_high", "eps_dual"))
        yield warning(
            f"{', '.join(values)} at data.max_response_length={longest}",
            f"the clip will never act on long responses: even where a token's log-ratio spreads by {_LARGEST_SIGMA}, "
            f"that of a response spreads by {spread:.2g}"
            + ("; eps is not a ratio bound like clip_ratio=0.2" if launch.is_fspo else ""),
            " ".join(band) if launch.is_fspo else f"{ACTOR}.clip_ratio_low=0.0003 {ACTOR}.clip_ratio_high=0.0004",
        )


def standard_deviations(launch: Launch) -> Iterator[Finding]:
    """An eps of a band in units of sqrt(L) kept for one in standard deviations, or the other way round."""
    if launch.band.band_width != "realized":
        return
    for key in ("eps_low", "eps_high"):
        eps = getattr(launch.band, key)
        beyond = 1 - NormalDist().cdf(eps)
        if not _RARE < beyond < _MOST:
            what = f"{POLICY_LOSS}.{key}={eps:g} with band_width=realized leaves about {beyond:.2g} of responses beyond"
            why = "it counts standard deviations of S, not sqrt(tokens)"
            fix = f"{POLICY_LOSS}.eps_low=1.5 {POLICY_LOSS}.eps_high=1.5 {POLICY_LOSS}.eps_dual=4.5"
            yield warning(what, why, fix)
            return


def idle_limit(launch: Launch) -> Iterator[Finding]:
    """A limit of a realised width so large that no response reaches it."""
    limit, longest = launch.band.realized_limit, launch.max_response_length
    if limit is None or not longest:
        return
    reach = limit * longest**launch.band.length_power
    root = _LARGEST_SIGMA * math.sqrt(longest)  # of Q, where tokens move as far as was seen
    if reach >= _STANDARD_DEVIATIONS * root:
        yield warning(
            f"{POLICY_LOSS}.realized_limit={limit:g} limits sqrt(Q) to {reach:.3g} at "
            f"data.max_response_length={longest}",
            f"it will never act: even where a token's log-ratio spreads by {_LARGEST_SIGMA}, sqrt(Q) is {root:.2g}",
            f"{POLICY_LOSS}.realized_limit={_LARGEST_SIGMA / 2} {POLICY_LOSS}.length_power=0.5, or what "
            "fspo-verl calibrate finds",
        )


def rollout_log_probs(launch: Launch) -> Iterator[Finding]:
    """A band that has to hold two engines' disagreement as well."""
    if launch.bypasses and not sources.bypass_replaces_the_loss():
        what = "algorithm.rollout_correction.bypass_mode=True takes the rollout engine's log-probs as old"
        why = "the band must also absorb the mismatch between engine and trainer, and the staleness of the responses"
        fix = "algorithm.rollout_correction.bypass_mode=False, or a wider eps"
        yield warning(what, why, fix)


def idle_correction(launch: Launch) -> Iterator[Finding]:
    """A rollout correction that verl leaves out: it weighs and rejects only where old log-probs are recomputed."""
    correction, log_probs = "algorithm.rollout_correction", "actor_rollout_ref.rollout.calculate_log_probs"
    keys = ("rollout_is", "rollout_rs", *(["loss_type"] if launch.bypasses else []))
    asked = {f"{correction}.{key}": launch.get(f"{correction}.{key}") for key in keys}
    idle = " ".join(f"{key}={value}" for key, value in asked.items() if value not in (None, "ppo_clip"))
    if idle and launch.bypasses and not sources.bypass_replaces_the_loss():
        why = f"{correction}.bypass_mode=True takes the engine's log-probs as old, and this verl then corrects nothing"
        yield warning(f"{idle} has no effect", why, f"{correction}.bypass_mode=False")
    elif idle and not launch.bypasses and not launch.get(log_probs):
        why = "it compares with the rollout engine's log-probs, which are not asked for"
        yield warning(f"{idle} has no effect", why, f"{log_probs}=True")


def followed_snapshot(launch: Launch) -> Iterator[Finding]:
    """An asynchronous launch that loses its old policy, or its updates: read in verl 0.9.1, not run on GPUs."""
    if launch.bypasses or launch.rounds_per_sync in (None, 1):
        return
    for name in _WEIGHTS_ON_THE_HOST.get(launch.actor.strategy, ()):
        if OmegaConf.select(launch.actor, name):
            yield warning(
                f"{ACTOR}.{name}=True in an asynchronous trainer",
                "verl keeps weights that lie in host memory by reference, not as a copy: those of the last sync, to "
                "which the old log-probs refer, follow the training or overwrite it",
                f"{ACTOR}.{name}=False",
            )


# Settings that leave the weights in host memory between uses, by strategy. FSDP1 and Megatron copy their snapshots.
_WEIGHTS_ON_THE_HOST = {
    "fsdp2": ("fsdp_config.param_offload", "fsdp_config.offload_policy"),
    "veomni": ("veomni.param_offload", "veomni.enable_fsdp_offload"),
}


def fused_untied_head(launch: Launch) -> Iterator[Finding]:
    """verl shards an untied lm_head on its own, and its fused kernels read the shard (seen in verl 0.9.1; #7427)."""
    if launch.actor.strategy != "fsdp2" or not launch.config.actor_rollout_ref.model.get("use_fused_kernels"):
        return
    if '"lm_head"' in sources.source("verl.utils.fsdp_utils"):
        yield warning(
            f"actor_rollout_ref.model.use_fused_kernels=True with {ACTOR}.strategy=fsdp2",
            "on several GPUs the first update stops (`mixed torch.Tensor and DTensor`), unless the model ties its "
            "embeddings as small ones do",
            f"{ACTOR}.strategy=fsdp, or actor_rollout_ref.model.use_fused_kernels=False",
        )


def refused_by_megatron(launch: Launch) -> Iterator[Finding]:
    """GSPO's aggregation under context parallelism, on a verl whose Megatron engine does not take it (0.9.0)."""
    megatron = OmegaConf.select(launch.actor, "megatron") or {}
    if launch.actor.strategy != "megatron" or launch.actor.loss_agg_mode != "seq-mean-token-mean":
        return
    if megatron.get("context_parallel_size", 1) < 2 or megatron.get("dynamic_context_parallel"):
        return
    if sources.megatron_refuses_means_over_tokens():
        yield warning(
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean with {ACTOR}.megatron.context_parallel_size="
            f"{megatron.context_parallel_size}",
            "this verl's Megatron engine refuses it where Megatron-Bridge normalises per token, as it does under "
            "context parallelism: the run fails at its first actor update, after a whole rollout (verl #7914)",
            f"{ACTOR}.megatron.context_parallel_size=1, or verl 0.9.1, which takes it",
        )


# --- warnings about a baseline ---------------------------------------------------------------------------------------


def gspo_aggregation(launch: Launch) -> Iterator[Finding]:
    """GSPO under an aggregation that is not its paper's."""
    if launch.loss_mode == "gspo" and launch.actor.loss_agg_mode != "seq-mean-token-mean":
        what = f"{ACTOR}.loss_agg_mode={launch.actor.loss_agg_mode} with loss_mode=gspo"
        why = "GSPO's objective is the mean over responses of a mean over tokens (arXiv 2507.18071)"
        fix = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
        yield warning(what, why, fix)


def token_range(launch: Launch) -> Iterator[Finding]:
    """A range for the mean over a response beside a loss that clips tokens."""
    ranges = {key: launch.actor.get(key) for key in ("clip_ratio_low", "clip_ratio_high")}
    if launch.loss_mode == "vanilla" and all(value is not None and value < _TOKEN_RANGE for value in ranges.values()):
        yield warning(
            " ".join(f"{ACTOR}.{key}={value}" for key, value in ranges.items()) + " with loss_mode=vanilla",
            "that loss clips the ratio of each token, which moves much more than the mean that GSPO clips: nearly "
            "every token that moved would be clipped",
            f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.2",
        )


def unread_clip_ratio(launch: Launch) -> Iterator[Finding]:
    """The key that counts only where the other two are null."""
    value, default = launch.actor.get("clip_ratio"), _CLIP_RATIO_DEFAULTS["clip_ratio"]
    low, high = launch.actor.get("clip_ratio_low"), launch.actor.get("clip_ratio_high")
    if value not in (default, low) and low is not None and high is not None:
        what = f"{ACTOR}.clip_ratio={value} has no effect"
        why = f"verl clips at clip_ratio_low={low} and clip_ratio_high={high}"
        fix = f"{ACTOR}.clip_ratio={default} {ACTOR}.clip_ratio_low={value} {ACTOR}.clip_ratio_high={value}"
        yield warning(what, why, fix)


# --- notes -----------------------------------------------------------------------------------------------------------


def band_in_effect(launch: Launch) -> Iterator[Finding]:
    """The band, and what it is as importance-sampling ratios at a tenth of the longest response and at the longest."""
    text = f"policy loss fspo: {launch.band.describe()}"
    longest = launch.max_response_length
    if launch.half_widths and launch.band.band_center != "realized":
        ratios = launch.band_as_ratios([max(1, longest // 10), longest])
        text += "; as ratios " + ", ".join(f"{low:.3g} to {high:.3g} at L={n}" for n, (low, high) in ratios.items())
    yield note(text)


def loss_in_effect(launch: Launch) -> Iterator[Finding]:
    """An observed loss, with what shapes it: leftovers of another script show here."""
    if launch.is_ours:
        ranges = (f"{key}={launch.actor.get(key)}" for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
        mode = f"loss_agg_mode={launch.actor.loss_agg_mode}"
        yield note(f"policy loss {launch.loss_mode}, trained as verl has it and observed: {', '.join((mode, *ranges))}")


def weighted_by_tokens(launch: Launch) -> Iterator[Finding]:
    """FSPO's update up to a factor that differs between mini-batches."""
    if launch.actor.loss_agg_mode == "token-mean":
        yield note(
            f"{ACTOR}.loss_agg_mode=token-mean divides a mini-batch by its number of tokens",
            "mini-batches of long responses then count less than those of short ones; lengths within one are treated "
            "alike",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor={launch.max_response_length}",
        )


_ANY_LAUNCH = (
    dead_group_value,
    near_miss,
    missing_choice,
    hidden_files,
    lost_to_group,
    overridden_group,
    former_name,
    no_divisor,
    unregistered_loss,
    changed_on_resume,
    lost_checkpoint,
)
_PACKAGE_LAUNCH = (
    used_records_dir,
    dropped_by_distillation,
    replaced_by_bypass,
    idle_correction,
    relative_checkpoints,
    one_step_per_rollout,
    followed_snapshot,
    fused_untied_head,
    refused_by_megatron,
    remote_code,
    unread_grad_clip,
)
_BAND_FIELDS = (unknown_fields, band_fields)
_FSPO_LAUNCH = (
    idle_clip_ratio,
    mean_over_own_length,
    varying_scale,
    always_clipped_gradient,
    one_sided_band,
    band_beyond_use,
    standard_deviations,
    idle_limit,
    rollout_log_probs,
    weighted_by_tokens,
    band_in_effect,
)
_BASELINE_LAUNCH = (band_beyond_use, gspo_aggregation, token_range, unread_clip_ratio, loss_in_effect)
