# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every wrap of verl, Hydra and Ray, and nothing else: what is wrapped, why, and what is lost where it fails.

verl (0.9.0 to 0.10.0.dev) registers losses. It offers no hook where a launch is checked, where a worker knows step and
prompts, around an update, and where metrics are logged. Those functions are wrapped by name. A wrap waits for the
import of its module, so that a process which never imports it pays nothing:

- :func:`see_launches`, in each process that loads the plugin (:mod:`fspo_verl.plugin`).
- :func:`compose_with`, in Hydra applications of verl (the search-path plugin).
- :data:`WORKERS` serve the losses of this package. The import of :mod:`fspo_verl.config` arms them: verl imports it
  where a config names one of its schemas, and nowhere else.
- :func:`end_before_ray`, in a launch that the doctor examines.

A wrap is an ordinary function around the other one, and shows in tracebacks. docs/developing.md lists them all. This
module imports nothing of verl. A wrap that fails is logged with what is lost, and takes away neither another one nor
the user's import.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import wrapt

logger = logging.getLogger("fspo_verl")


class Wrap(NamedTuple):
    """A function of another package, and what is called around it."""

    module: str
    name: str
    """The name of a function, or CLASS.METHOD."""

    around: Callable
    """Called as ``around(function, *args, **kwargs)`` in place of the function."""

    lost: str
    """The consequence where the wrap fails."""


# Owner, name, and what is called around it; a mark on the function could be lost in another plugin's wrap.
_wrapped: list[tuple[Any, str, Callable]] = []


def arm(wraps: Iterable[Wrap]) -> None:
    """Wrap functions when their modules are imported, or at once where they have been."""
    for wrap in wraps:
        when_imported(wrap.module, functools.partial(_wrap_in, wrap), wrap.lost)


def when_imported(module: str, act: Callable[[Any], object], lost: str) -> None:
    """Call ``act(module)`` once a module has been imported; warn of what is ``lost`` where that fails."""

    def tried(imported) -> None:
        try:
            act(imported)
        except Exception as error:  # wrapt would hand it to whoever imports the module
            logger.warning(
                "fspo_verl could not plug itself into %s (%s: %s): %s",
                *(module, type(error).__name__, error, lost),
            )

    wrapt.register_post_import_hook(tried, module)


def _wrap_in(wrap: Wrap, module) -> None:
    *owner, name = wrap.name.split(".")
    wrap_once(functools.reduce(getattr, owner, module), name, wrap.around)


def wrap_once(owner, name: str, around: Callable) -> None:
    """Have ``around(function, *args, **kwargs)`` called in place of the function ``name`` of a module or class.

    The same ``around`` wraps a function once.

    Raises:
        AttributeError: there is no such function.
    """
    if any(known is owner and (of, wrapped_by) == (name, around) for known, of, wrapped_by in _wrapped):
        return
    function = getattr(owner, name)
    if inspect.iscoroutinefunction(function):  # which verl's dispatch asks of a method

        @functools.wraps(function)
        async def wrapper(*args, **kwargs):
            return await around(function, *args, **kwargs)

    else:

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return around(function, *args, **kwargs)

    _wrapped.append((owner, name, around))
    setattr(owner, name, wrapper)


# --- launches: what would train another loss than asked for is refused before Ray starts -----------------------------


def see_launches(begin: Callable, at_the_logger: Callable) -> None:
    """Look at every launch of verl in this process.

    Args:
        begin: called with the name of a function, and the config that a main hands to it before Ray starts; None where
            it hands over none.
        at_the_logger: called with the config where a trainer builds its logger, before its first step: late, in a Ray
            worker, without Hydra's choices, and all there is for a main that calls none of verl's functions.
    """

    def seen(name):
        def looked_at(function, config=None, *args, **kwargs):
            begin(name, config)
            return function(config, *args, **kwargs)

        return looked_at

    def logs(init, tracking, *args, **kwargs):
        for config in _configs(args, kwargs):
            at_the_logger(config)
        return init(tracking, *args, **kwargs)

    device, runtime = "auto_set_device", "get_ppo_ray_runtime_env"
    arm(
        (
            # The first thing that every main of verl calls.
            Wrap("verl.utils.device", device, seen(device), "launches are not checked"),
            # Called right before ray.init, by mains of others as well.
            Wrap("verl.trainer.constants_ppo", runtime, seen(runtime), "launches by run_ppo are not checked"),
            Wrap("verl.utils.tracking", "Tracking.__init__", logs, "launches are not checked where the trainer logs"),
        )
    )


def _configs(args: tuple, kwargs: Mapping) -> Iterable[Mapping]:
    """The configs of a launch, by what is in them: a logger of the user's own takes other arguments than verl's."""
    return [one for one in (*args, *kwargs.values()) if isinstance(one, Mapping) and "actor_rollout_ref" in one]


def end_before_ray(end: Callable[[], None]) -> None:
    """Call ``end`` in place of ``ray.init``, which every way into Ray calls, so that nothing starts."""
    arm((Wrap("ray", "init", lambda _init, *_args, **_kwargs: end(), "a launch that is examined may start Ray"),))


# --- Hydra: the group without a plus, and what the environment asks for ----------------------------------------------


def compose_with(load: Callable, list_defaults: Callable) -> None:
    """Have Hydra (1.3) compose a config, and list its defaults for ``--info``, by functions around its own.

    Hydra has no hook there. Lost where this fails: Hydra refuses ``algorithm.policy_loss=fspo`` without a plus, an old
    verl trains its own loss, and nobody hears what the environment asks for.
    """
    loader, lost = "hydra._internal.config_loader_impl", "algorithm.policy_loss=OPTION needs a plus"
    arm(
        (
            Wrap(loader, "ConfigLoaderImpl.load_configuration", load, lost),
            Wrap(loader, "ConfigLoaderImpl.compute_defaults_list", list_defaults, lost),
        )
    )


# --- workers: what a loss of this package needs to know, and what moves eps after a training step ---------------------


def _in_its_micro_batch(ppo_loss, config, model_output, data, dp_group=None):
    """``ppo_loss`` knows prompts and mini-batch, and hands the loss tensors alone; it makes means of all metrics."""
    from fspo_verl.observe import microbatch
    from fspo_verl.observe.metrics import as_sums

    with microbatch.entered(data, dp_group):
        loss, metrics = ppo_loss(config, model_output, data, dp_group)
    return loss, as_sums(metrics)


def _at_a_weight_sync(update_weights, worker, global_steps=None, *args, **kwargs):
    """Settle eps: a worker learns of the end of a step only by the weight sync to the rollout engines.

    The worker that sends the weights also knows how long a response may get.
    """
    from fspo_verl.observe import microbatch

    if (controller := _controller_of(getattr(worker, "actor", None))) is not None:
        controller.end_step()
    microbatch.synced(global_steps, worker)
    return update_weights(worker, global_steps, *args, **kwargs)


def _around_an_update(train_mini_batch, worker, data, *args, **kwargs):
    """Write the records of an update when it has ended, and count its clipped responses for ``target_clip_rate``.

    Of ranks that share responses one returns outputs: only that one writes and counts.
    """
    from fspo_verl.observe import observer

    is_source, counted = worker.engine.is_mp_src_rank_with_outputs(), contextlib.nullcontext()
    if (controller := _controller_of(worker)) is not None:
        from verl.utils.device import get_device_name

        counted = controller.update(get_device_name(), is_source)
    with counted:
        output = train_mini_batch(worker, data, *args, **kwargs)
    observer.flush_records(writes=is_source)
    return output


def _with_the_eps(action: str) -> Callable:
    """Save or load eps before a method saves or loads a checkpoint."""

    def save_or_load(method, worker, local_path, *args, **kwargs):
        controller = _controller_of(worker)
        if controller is not None and local_path is not None:
            getattr(controller, action)(local_path)
        return method(worker, local_path, *args, **kwargs)

    return save_or_load


def _controller_of(worker):
    """Return what moves the eps of a training worker of verl; None where nothing does, and for a critic."""
    config = getattr(getattr(worker, "loss_fn", None), "keywords", {}).get("config")
    return getattr(getattr(config, "policy_loss", None), "controller", None)


def _tell_alerts(init, tracking, *args, **kwargs):
    """Keep the alerts of a run with the logger that its trainer builds."""
    from fspo_verl.analysis import alerts

    tracking.fspo_alerts = alerts.of_run(next(iter(_configs(args, kwargs)), None))
    return init(tracking, *args, **kwargs)


def _with_live_series(log, tracking, data, *args, **kwargs):
    """Divide the sums of a step where all trainers of verl log them, and give alerts."""
    from fspo_verl.analysis import alerts, live

    logged = live.logged(data)
    if logged is not data:
        if not hasattr(tracking, "fspo_alerts"):  # a logger that was built before this wrap: its config is not known
            tracking.fspo_alerts = alerts.of_run(None)
        alerts.say(tracking.fspo_alerts, logged, kwargs.get("step", args[0] if args else None))
    return log(tracking, logged, *args, **kwargs)


_ENGINES = "verl.workers.engine_workers"  # every engine (FSDP, Megatron, TorchTitan) takes ppo_loss there
_NO_RECORDS = "there are no records and no metrics of numerical noise"
_NO_STEPS = "records have the wrong steps, and target_clip_rate moves no eps"
_NO_EPS = "target_clip_rate stops a run at its first update"
_NO_SERIES = "no live series fspo/* are logged, and no alerts"
WORKERS = (
    Wrap(_ENGINES, "ppo_loss", _in_its_micro_batch, _NO_RECORDS),
    Wrap("verl.trainer.distillation.losses", "ppo_loss", _in_its_micro_batch, f"{_NO_RECORDS} of distillation"),
    Wrap(_ENGINES, "ActorRolloutRefWorker.update_weights", _at_a_weight_sync, _NO_STEPS),
    Wrap(_ENGINES, "TrainingWorker.train_mini_batch", _around_an_update, _NO_EPS),
    Wrap(_ENGINES, "TrainingWorker.save_checkpoint", _with_the_eps("save"), _NO_EPS),
    Wrap(_ENGINES, "TrainingWorker.load_checkpoint", _with_the_eps("load"), _NO_EPS),
    Wrap("verl.utils.tracking", "Tracking.__init__", _tell_alerts, _NO_SERIES),
    Wrap("verl.utils.tracking", "Tracking.log", _with_live_series, _NO_SERIES),
)
