# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every wrap of verl and of Hydra, and nothing else: what is wrapped, why, and what is lost where it fails.

verl (0.9.0 to 0.10.0.dev) registers losses, but offers no hook where a launch is checked, where a worker knows step and
prompts, around an update, and where metrics are logged. Those functions are wrapped by name. A wrap waits for the
import of its module, so that a process which never imports it pays nothing:

- :func:`see_launches`, in each process that imports verl (:mod:`fspo_verl.plugin`).
- :data:`WORKERS` serve the losses of this package. The import of :mod:`fspo_verl.config` arms them: verl imports it
  where a config names one of its schemas, and nowhere else.
- :func:`select_without_plus`, in Hydra applications of verl (the search-path plugin).

This module imports nothing of verl. A wrap that fails is logged with what is lost, and takes away neither another one
nor the user's import.
"""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import wrapt

logger = logging.getLogger("fspo_verl")


class Addition(NamedTuple):
    """Something that is done to a module of verl once it has been imported."""

    module: str
    add: Callable[[Any], None]
    lost: str  # what is missing where it fails


_wrapped: list[tuple[Any, str]] = []  # owner and name; a mark on the function could be lost in another plugin's wrap


def arm(additions: Iterable[Addition]) -> None:
    """Make additions when their modules are imported, or at once where they have been."""
    for addition in additions:
        wrapt.register_post_import_hook(functools.partial(_add, addition), addition.module)


def _add(addition: Addition, module) -> None:
    try:
        addition.add(module)
    except Exception as error:  # wrapt would hand it to whoever imports the module
        logger.warning(
            "fspo_verl could not plug itself into %s (%s: %s): %s",
            *(addition.module, type(error).__name__, error, addition.lost),
        )


def wrapping(owner: str = "", **around: Callable) -> Callable[[Any], None]:
    """What an addition does that wraps functions of a module, or methods of its class ``owner``, by their names."""

    def add(module) -> None:
        for name, function in around.items():
            wrap_once(getattr(module, owner) if owner else module, name, function)

    return add


def wrap_once(owner, name: str, around: Callable) -> None:
    """Have ``around(function, *args, **kwargs)`` called in place of the function ``name`` of a module or class, once.

    Raises:
        AttributeError: there is no such function.
    """
    if any(known is owner and of == name for known, of in _wrapped):
        return
    function = getattr(owner, name)
    if inspect.iscoroutinefunction(function):  # which verl's dispatch asks of a method

        @functools.wraps(function)
        async def wrapper(*args, **kwargs):
            return await around(function, *args, **kwargs)

    else:

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            try:
                return around(function, *args, **kwargs)
            except Exception as error:
                _leave_out_this_file(error)
                raise

    _wrapped.append((owner, name))
    setattr(owner, name, wrapper)
    # A main that ran its imports before this, as under VERL_USE_EXTERNAL_PLUGINS=none, holds the function by its name.
    main = sys.modules.get("__main__")
    if getattr(main, name, None) is function:
        setattr(main, name, wrapper)


def _leave_out_this_file(error: Exception) -> None:
    """Take the frames of a wrap out of the traceback of what it wraps; Python 3.10 adds one again."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace


_looked_at: set[type] = set()


def look_when_built(owner: type, look: Callable) -> None:
    """Have ``look(*args, **kwargs)`` called with what an instance of a class is built from, before it is; once a class.

    ``__new__`` has returned when ``__init__`` runs. A wrapped ``__init__`` would stand in the traceback of each of its
    errors, also where nothing of this package is used.

    Raises:
        AttributeError: the class has a ``__new__`` of its own.
    """
    if owner in _looked_at:
        return
    if owner.__new__ is not object.__new__:
        raise AttributeError(f"{owner.__name__} has a __new__ of its own")

    def __new__(cls, *args, **kwargs):
        look(*args, **kwargs)
        return object.__new__(cls)

    _looked_at.add(owner)
    owner.__new__ = staticmethod(__new__)  # type: ignore[assignment]


# --- launches: what would train another loss than asked for is refused before Ray starts -----------------------------


def see_launches(check: Callable, refuse: Callable) -> None:
    """Look at every launch of verl in this process.

    Args:
        check: called with the whole config before Ray starts.
        refuse: called with it where a trainer builds its logger, before its first step: late, in a Ray worker, without
            Hydra's choices, and all there is for a main that calls none of verl's functions.
    """

    def looked_at(function, config=None, *args, **kwargs):
        check(config)
        return function(config, *args, **kwargs)

    of_the_mains = wrapping(auto_set_device=looked_at)  # the first thing that every main of verl calls
    of_run_ppo = wrapping(get_ppo_ray_runtime_env=looked_at)  # called right before ray.init, by mains of others as well

    def at_the_logger(tracking):
        _tell_at_the_logger(tracking, refuse)

    arm(
        (
            Addition("verl.utils.device", of_the_mains, "launches are not checked"),
            Addition("verl.trainer.main_ppo", of_run_ppo, "launches by run_ppo are not checked"),
            Addition("verl.utils.tracking", at_the_logger, "launches are not checked where the trainer logs"),
        )
    )


_told: list[Callable] = []  # called with the config when a trainer builds its logger


def _tell_at_the_logger(tracking, told: Callable) -> None:
    look_when_built(tracking.Tracking, _at_the_logger)
    if told not in _told:
        _told.append(told)


def _at_the_logger(*args, **kwargs) -> None:
    """The config is looked for by what is in it, as a logger of the user's own takes other arguments than verl's."""
    for config in (*args, *kwargs.values()):
        if isinstance(config, Mapping) and "actor_rollout_ref" in config:
            for told in _told:
                told(config)


@contextlib.contextmanager
def handed_over(take: Callable) -> Iterator[None]:
    """Have a main of verl call ``take(config)`` in place of ``auto_set_device``: where the doctor stops it."""
    import verl.utils.device as device

    place = device, "auto_set_device"
    kept = device.auto_set_device
    _wrapped.append(place)  # no check of a launch runs first
    device.auto_set_device = take
    try:
        yield
    finally:
        device.auto_set_device = kept
        _wrapped.remove(place)


# --- workers: what a loss of this package needs to know, and what moves eps after an update ---------------------------


def _in_its_micro_batch(ppo_loss, config, model_output, data, dp_group=None):
    """``ppo_loss`` knows prompts and mini-batch, and hands the loss tensors alone."""
    from fspo_verl.observe import microbatch

    with microbatch.entered(data, dp_group):
        return ppo_loss(config, model_output, data, dp_group)


def _at_a_weight_sync(update_weights, worker, global_steps=None, *args, **kwargs):
    """A worker learns of the end of a step only by the weight sync to the rollout engines.

    The worker that sends them also knows how long a response may get.
    """
    from fspo_verl.observe import microbatch, observer

    microbatch.synced(global_steps, worker)
    observer.flush_records()
    return update_weights(worker, global_steps, *args, **kwargs)


def _around_an_update(train_mini_batch, worker, data, *args, **kwargs):
    """With ``target_clip_rate`` eps moves after it; verl has no hook there."""
    if (controller := _controller_of(worker)) is None:
        return train_mini_batch(worker, data, *args, **kwargs)
    from verl.utils.device import get_device_name

    # Ranks that share responses: only one of them returns outputs, and only that one counts.
    counts_here = worker.engine.is_mp_src_rank_with_outputs()
    with controller.step(get_device_name(), counts_here):
        return train_mini_batch(worker, data, *args, **kwargs)


def _with_the_eps(action: str) -> Callable:
    """Around a method that saves or loads a checkpoint: the controller does the same before it."""

    def save_or_load(method, worker, local_path, *args, **kwargs):
        controller = _controller_of(worker)
        if controller is not None and local_path is not None:
            getattr(controller, action)(local_path)
        return method(worker, local_path, *args, **kwargs)

    return save_or_load


def _controller_of(worker):
    """What moves the eps of a training worker of verl; None where nothing does, and for a critic."""
    config = getattr(worker.loss_fn, "keywords", {}).get("config")
    return getattr(getattr(config, "policy_loss", None), "controller", None)


def _log_live_series(tracking) -> None:
    """All trainers of verl log through ``Tracking.log``: there the sums of a step are divided, and alerts are given.

    The config comes from the logger's constructor.
    """
    from fspo_verl.analysis import alerts

    _tell_at_the_logger(tracking, alerts.begin)
    wrap_once(tracking.Tracking, "log", _with_live_series)


def _with_live_series(log, tracking, data, *args, **kwargs):
    from fspo_verl.analysis import alerts, live

    series = live.series_or_warning(data)
    if series:
        alerts.say(data, kwargs.get("step", args[0] if args else None))
    return log(tracking, {**data, **series}, *args, **kwargs)


_ENGINE_WORKERS = "verl.workers.engine_workers"  # every engine (FSDP, Megatron, TorchTitan) takes ppo_loss there
_NO_RECORDS = "there are no records and no metrics of numerical noise"
_KNOWS_THE_MICRO_BATCH = wrapping(ppo_loss=_in_its_micro_batch)
_KNOWS_THE_STEP = wrapping("ActorRolloutRefWorker", update_weights=_at_a_weight_sync)
_MOVES_EPS = wrapping(
    "TrainingWorker",
    train_mini_batch=_around_an_update,
    save_checkpoint=_with_the_eps("save"),
    load_checkpoint=_with_the_eps("load"),
)
WORKERS = (
    Addition(_ENGINE_WORKERS, _KNOWS_THE_MICRO_BATCH, _NO_RECORDS),
    Addition("verl.trainer.distillation.losses", _KNOWS_THE_MICRO_BATCH, f"{_NO_RECORDS} of distillation"),
    Addition(_ENGINE_WORKERS, _KNOWS_THE_STEP, "records have the wrong steps"),
    Addition(_ENGINE_WORKERS, _MOVES_EPS, "target_clip_rate stops a run at its first update"),
    Addition("verl.utils.tracking", _log_live_series, "no live series fspo/* are logged, and no alerts"),
)


# --- Hydra: the group without a plus ---------------------------------------------------------------------------------


def select_without_plus(group: str, around: Callable, look: Callable, ask: Callable | None = None) -> None:
    """Let ``GROUP=OPTION`` select a config group on configs whose defaults do not name it, too.

    Hydra (1.3) asks for a plus there. The form without it is the safe one: without this package stock verl refuses it,
    and takes the other one for a value that nothing reads. Lost where this fails: Hydra refuses the form without plus,
    and an old verl trains its own loss.

    Args:
        group: the name of the config group.
        around: called around Hydra's ``create_defaults_list`` once an override names the group; not before, as a wrap
            stands in each traceback of Hydra below it.
        look: called with the name of each config file of a composition.
        ask: called with the composition and the overrides of each job; returns the config.
    """
    from hydra._internal import config_loader_impl
    from hydra._internal.defaults_list import DefaultsList
    from hydra.core.override_parser.types import Override
    from hydra.types import RunMode

    def at_an_override(key_or_group="", **_kwargs):
        if key_or_group == group:
            wrap_once(config_loader_impl, "create_defaults_list", around)

    def at_a_defaults_list(defaults=(), **_kwargs):
        for default in defaults:
            look(default.config_path)

    def load_configuration(load, loader, config_name, overrides, run_mode, *args, **kwargs):
        def compose(overrides):
            return load(loader, config_name, overrides, run_mode, *args, **kwargs)

        # Each job of a --multirun comes here by itself.
        return ask(compose, overrides) if ask and run_mode == RunMode.RUN else compose(overrides)

    def compute_defaults_list(compute, loader, config_name, overrides, run_mode):  # of --info defaults
        used = loader.load_configuration(config_name, overrides, run_mode).hydra.overrides
        return compute(loader, config_name, [*used.hydra, *used.task], run_mode)

    if ask is not None:
        wrap_once(config_loader_impl.ConfigLoaderImpl, "load_configuration", load_configuration)
        wrap_once(config_loader_impl.ConfigLoaderImpl, "compute_defaults_list", compute_defaults_list)

    look_when_built(Override, at_an_override)
    look_when_built(DefaultsList, at_a_defaults_list)
