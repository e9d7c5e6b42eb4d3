# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What this package takes for granted of verl, line by line, and whether the installed verl keeps it.

verl promises none of it: a plugin of a training framework leans on more than a public interface. :data:`LINES` is the
whole list, the table of docs/verl_internals.md is written from it, and :func:`broken` tells in seconds, without Ray,
which lines an installed verl does not keep. ``fspo-verl doctor`` runs it always, a launch on a verl that was never
tested (:mod:`fspo_verl.preflight.hook`).

Where a line says "read", it is the source of verl that is looked at, as running it would take workers.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf

from fspo_verl import terminal, versions
from fspo_verl.preflight import sources
from fspo_verl.preflight.launch import Finding
from fspo_verl.preflight.loss_history import TRACKER

PARTS = {
    "loss": "the policy loss and its metrics, in every worker",
    "launch": "the checks before Ray starts, the doctor and the plan",
    "records": "records per response",
    "live": "live series for TensorBoard, W&B and the metrics file",
    "cpu": "runs without a GPU (`VERL_PLATFORM=cpu`)",
    "selftest": "`fspo-verl selftest` and the benchmarks",
    "scripts": "scripts/ of the repository",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One thing taken for granted."""

    part: str
    """Key of :data:`PARTS`: whoever does not use that part loses nothing."""

    symbols: tuple[str, ...]
    """Names in verl, each of which must be there."""

    reason: str
    lost: str
    """What a verl that does not keep the line takes away."""

    holds: Callable[[], Iterator[str]] | None = None
    """Yields what is wrong beyond a missing name."""

    expects: str = ""
    """What ``holds`` makes sure of."""

    def problems(self) -> list[str]:
        """What is wrong; empty if the line holds."""
        missing = [f"{symbol} is not there: {why}" for symbol in self.symbols if (why := _missing(symbol))]
        if missing or self.holds is None:
            return missing
        try:
            return list(self.holds())
        except Exception as error:  # another signature, type or return value: whatever verl made of it
            return [f"{self.symbols[0]}: {type(error).__name__}: {error}"]


def broken(*parts: str) -> list[tuple[Line, str]]:
    """The lines of these parts (default: all) that the installed verl does not keep, each with what is wrong."""
    with terminal.reserved():  # verl prints, and warns about each engine that is not installed
        found = [(line, line.problems()) for line in LINES if line.part in (parts or PARTS)]
    return [(line, "; ".join(problems)) for line, problems in found if problems]


def findings(*parts: str, here: tuple[str, ...] = tuple(PARTS)) -> Iterator[Finding]:
    """The broken lines of these parts as findings: errors for what this run needs, warnings for the rest.

    Args:
        here: the parts whose lines are errors.
    """
    for line, problem in broken(*parts):
        what = f"verl {versions.installed('verl')} is not what fspo_verl takes it for ({PARTS[line.part]}): {problem}"
        fix = f"a newer fspo_verl, or pip install verl=={versions.TESTED['verl'][-1]}"
        yield Finding("error" if line.part in here else "warning", "contract", what, line.lost, fix)


def _missing(symbol: str) -> str | None:
    """Why a dotted name cannot be had; a module is only looked for, as importing it may take what is not installed."""
    try:
        sources.source(symbol) or _get(symbol)
    except (ImportError, AttributeError) as error:
        return str(error)


def _get(symbol: str):
    """The module, class or function of a dotted name."""
    try:
        return importlib.import_module(symbol)
    except ModuleNotFoundError as error:
        if "." not in symbol or not f"{symbol}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
    owner, name = symbol.rsplit(".", 1)
    return getattr(_get(owner), name)


def _nodes(tree: ast.AST, kind: type) -> list:
    """The nodes of a kind in a syntax tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _lacks(names, known, what: str) -> Iterator[str]:
    if missing := set(names) - set(known):
        yield f"{what} lacks {', '.join(sorted(missing))}"


def _takes(symbol: str, *names: str) -> Iterator[str]:
    """Whether a function or class takes these parameters."""
    parameters = inspect.signature(_get(symbol)).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield from _lacks(names, parameters, f"{symbol}({', '.join(parameters)})")


# --- the loss --------------------------------------------------------------------------------------------------------

LOSS_ARGUMENTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
)
BATCH_INFO = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
_ACTOR_FIELDS = (
    *("policy_loss", "loss_agg_mode", "loss_scale_factor", "global_batch_info"),
    *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
)
_PROBE = "fspo_verl_contract"


def _registered() -> Iterator[str]:
    import fspo_verl.register

    for name in ("fspo", "observed"):
        registered = _get("verl.trainer.ppo.core_algos.get_policy_loss_fn")(name)
        if registered is not getattr(fspo_verl.register, f"compute_policy_loss_{name}"):
            yield f"loss_mode={name} is {registered}"


def _calls_the_loss() -> Iterator[str]:
    """One row through verl's ``ppo_loss``, with a loss that notes what it is handed."""
    core_algos, seen = _get("verl.trainer.ppo.core_algos"), {}

    def probe(**arguments):
        seen.update(arguments)
        return arguments["log_prob"].sum() * 1.0, {"actor/probe": _metric([1.0, 2.0])}

    config = _get("verl.workers.config.FSDPActorConfig")(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="token-mean",
        policy_loss=_get("verl.workers.config.PolicyLossConfig")(loss_mode=_PROBE),
    )
    core_algos.POLICY_LOSS_REGISTRY[_PROBE] = probe
    try:
        output = _get("verl.workers.utils.losses.ppo_loss")(config, *_micro_batch())
    finally:
        del core_algos.POLICY_LOSS_REGISTRY[_PROBE]
    if seen.keys() != set(LOSS_ARGUMENTS):
        yield f"a policy loss is called with {', '.join(seen)}"
        return
    yield from _lacks(BATCH_INFO, config.global_batch_info, "global_batch_info")
    if seen["config"] is not config:
        yield "a policy loss is not handed the ActorConfig"
    if not torch.equal(seen["log_prob"], torch.tensor([[-1.0, -2.0]])) or seen["response_mask"].shape != (1, 2):
        yield "a policy loss is not handed padded responses [B, T]"
    if output[1]["actor/probe"].aggregate() != 1.5:
        yield "a metric of several values is not averaged over them"


def _micro_batch():
    """(model_output, data) of one response of two tokens to a prompt of two, as verl's engines make them."""
    nest = lambda row: torch.nested.as_nested_tensor([torch.tensor(row)], layout=torch.jagged)  # noqa: E731
    data = _get("verl.utils.tensordict_utils.get_tensordict")(
        {
            "prompts": nest([0, 0]),
            "responses": nest([0, 0]),
            "response_mask": nest([1, 1]),
            "old_log_probs": nest([-1.0, -2.0]),
            "advantages": nest([1.0, 1.0]),
        },
        {"dp_size": 1, "batch_num_tokens": 2, "global_batch_size": 1},
    )
    return {"log_probs": nest([0.0, -1.0, -2.0, 0.0])}, data


def _aggregates() -> Iterator[str]:
    """A row is read through its sum over the mask only, so that one column can stand for it."""
    agg_loss = _get("verl.trainer.ppo.core_algos.agg_loss")
    compared = _nodes(ast.parse(inspect.getsource(agg_loss)), ast.Compare)
    constants = [constant.value for compare in compared for constant in _nodes(compare, ast.Constant)]
    modes = [constant for constant in constants if isinstance(constant, str)]
    yield from _lacks(AGG_MODES, modes, "agg_loss")
    matrix, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    length = mask.sum(-1, keepdim=True)
    column = (matrix * mask).sum(-1, keepdim=True) / length
    info = {"dp_size": 2, "batch_num_tokens": 8, "global_batch_size": 4, "loss_scale_factor": 5}
    expected = dict(zip(AGG_MODES, (10 / 8, 10, 10 / 4, 10 / 4 / 5, 6 / 4), strict=True))
    for mode in modes:
        whole = agg_loss(loss_mat=matrix, loss_mask=mask, loss_agg_mode=mode, **info).item()
        one = agg_loss(loss_mat=column, loss_mask=length, loss_agg_mode=mode, **info).item()
        if abs(whole - one) > 1e-5:
            yield f"agg_loss in mode {mode!r} reads more of a row than its sum"
        elif abs(whole - 2 * expected.get(mode, whole / 2)) > 1e-5:
            yield f"agg_loss in mode {mode!r} gives {whole:g} instead of {2 * expected[mode]:g}"


def _schema() -> Iterator[str]:
    """The schema is built from its ``_target_`` and refuses what it does not know; no field of ours is verl's too."""
    import fspo_verl.config as config

    schemas = (config.Band, config.Observation, config.ObservedPolicyLossConfig)
    own = {name for schema in schemas for name in schema.__annotations__}
    verls = {field.name for field in dataclasses.fields(_get("verl.workers.config.PolicyLossConfig"))}
    if clash := own & verls:
        yield f"PolicyLossConfig has {', '.join(sorted(clash))}, which this package adds"
    yield from _lacks(("loss_mode",), verls, "PolicyLossConfig")
    build = _get("verl.utils.config.omega_conf_to_dataclass")
    target = {"_target_": "fspo_verl.config.FSPOPolicyLossConfig"}
    if build(OmegaConf.create(target | {"eps_high": 0.04})).get("eps_high") != 0.04:
        yield "the schema does not keep its fields"
    try:
        build(OmegaConf.create(target | {"no_such_field": 1}))
    except Exception:
        pass
    else:
        yield "a field that the schema does not have is accepted"
    observed = build(OmegaConf.create({"_target_": "fspo_verl.config.ObservedPolicyLossConfig", "loss_mode": "gspo"}))
    if (observed.loss_mode, observed.inner) != ("observed", "gspo"):
        yield "a schema cannot set its own fields (_mutable_fields)"


def _actor_fields() -> Iterator[str]:
    yield from _lacks(_ACTOR_FIELDS, _get("verl.workers.config.FSDPActorConfig").__dataclass_fields__, "ActorConfig")


def _metric(values: list[float]):
    metric = _get("verl.utils.metric.Metric")("mean")
    metric.values = values  # as fspo_verl.observe.metrics does
    return metric


def _averages() -> Iterator[str]:
    """Means over all values of all micro-batches and ranks, however many values a micro-batch holds."""
    merged = _metric([])
    merged.extend(_metric([1.0]))
    merged.extend(_metric([2.0, 6.0]))
    if merged.aggregate() != 3:
        yield f"the mean of 1 and of 2, 6 is {merged.aggregate()}"
    if (mean := _get("verl.utils.metric.Metric").aggregate_dp([_metric([1.0, 2.0]), _metric([3.0, 6.0])])) != 3:
        yield f"the mean of two ranks with 1, 2 and 3, 6 is {mean}"


# --- the launch ------------------------------------------------------------------------------------------------------

# Programs of verl that train no policy with a policy loss.
_OTHER_MAINS = ("main_eval", "main_generation_server", "sft_trainer", "sft_trainer_ray")
# What checks, plan, resume and doctor read of a config; a key that is gone would switch its check off.
CONFIG_KEYS = {
    "actor_rollout_ref.actor": (
        *("policy_loss.loss_mode", "loss_agg_mode", "loss_scale_factor", "strategy", "optim.lr", "optim.clip_grad"),
        *("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "grad_clip", "entropy_coeff"),
        *("use_kl_loss", "kl_loss_coef", "kl_loss_type", "ppo_mini_batch_size", "ppo_epochs", "use_dynamic_bsz"),
        *("ppo_max_token_len_per_gpu", "fsdp_config.param_offload", "fsdp_config.optimizer_offload"),
        *("fsdp_config.model_dtype", "fsdp_config.fsdp_size", "fsdp_config.ulysses_sequence_parallel_size"),
    ),
    "actor_rollout_ref.model": ("path", "lora_rank", "trust_remote_code", "use_fused_kernels"),
    "actor_rollout_ref.rollout": ("name", "n", "dtype", "tensor_model_parallel_size"),
    "data": ("train_files", "val_files", "train_batch_size", "max_prompt_length", "max_response_length"),
    "trainer": (
        *("nnodes", "n_gpus_per_node", "save_freq", "resume_mode", "resume_from_path", "default_local_dir"),
        *("v1.trainer_mode", "v1.separate_async.parameter_sync_step"),
    ),
    "algorithm": ("adv_estimator", "rollout_correction.bypass_mode"),
}


def _loads_plugins() -> Iterator[str]:
    """``import verl`` imported the entry point, unless the environment says otherwise."""
    asked = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto") == "auto"
    installed = any(point.value == "fspo_verl.plugin" for point in metadata.entry_points(group="verl.plugins"))
    if asked and installed and "fspo_verl.plugin" not in sys.modules:
        yield "import verl loads no plugin of the group verl.plugins"


def _mains_pass_by() -> Iterator[str]:
    """Every main hands its config to ``auto_set_device``, by the name that this package wraps (read)."""
    if not hasattr(_get("verl.utils.device.auto_set_device"), "__wrapped__"):
        yield "verl.utils.device.auto_set_device is not wrapped"
    for main, text in sources.modules("@hydra.main("):
        tree = ast.parse(text)
        wrapped = "auto_set_device" in sources.imported(tree, "verl.utils.device")
        calls = {ast.unparse(call) for call in _nodes(tree, ast.Call)}
        passes_by = wrapped and "auto_set_device(config)" in calls
        if not passes_by and main.removeprefix("verl.trainer.") not in _OTHER_MAINS:
            yield f"{main} does not call auto_set_device(config) of verl.utils.device"


def _config_keys() -> Iterator[str]:
    folder = Path(_get("verl").__file__).parent / "trainer" / "config"
    config = OmegaConf.load(folder / "_generated_ppo_trainer.yaml")
    for section, keys in CONFIG_KEYS.items():
        if gone := [key for key in (f"{section}.{key}" for key in keys) if not _has(config, key)]:
            yield f"the config lacks {', '.join(gone)}"


def _has(config, key: str) -> bool:
    parent, last = key.rsplit(".", 1)
    # `in` the config itself would not count a value that is to be given.
    return last in (OmegaConf.select(config, parent) or {}).keys()


def _refuses_bad_batches() -> Iterator[str]:
    """The arithmetic of the plan for separate_async: one update per mini-batch, a sync after all of them (read)."""
    asserted = "assert train_batch_size == parameter_sync_step * ppo_mini_batch_size"
    if asserted not in sources.source("verl.trainer.ppo.v1.trainer_separate_async"):
        yield "separate_async does not assert train_batch_size == parameter_sync_step * ppo_mini_batch_size"


def _finds_checkpoints() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, TRACKER).write_text("7")
        Path(folder, "global_step_7").mkdir()
        found = _get("verl.utils.checkpoint.checkpoint_manager.find_latest_ckpt_path")(folder)
        if found != str(Path(folder, "global_step_7")):
            yield f"of {TRACKER} with 7 verl makes {found}"


def _validates() -> Iterator[str]:
    yield from _takes("verl.utils.config.validate_config", "config", "use_reference_policy", "use_critic")
    if "validate_config" not in sources.source("verl.trainer.main_ppo"):
        yield "main_ppo does not call validate_config (read)"


# --- records ---------------------------------------------------------------------------------------------------------

# The modules that take ppo_loss out of verl.workers.utils.losses, each a name of its own that has to be wrapped.
_BIND_PPO_LOSS = ("verl.workers.engine_workers", "verl.trainer.distillation.losses")
# Key of a micro-batch, and a module that puts it there.
BATCH_KEYS = {
    "dp_size": "verl.workers.engine.fsdp.transformer_impl",
    "global_batch_size": "verl.trainer.ppo.v1.trainer_base",
    "update_lr_scheduler": "verl.workers.engine_workers",
    "global_steps": "verl.trainer.ppo.v1.trainer_base",
    "uid": "verl.trainer.ppo.v1.trainer_base",
    "_dcp_sample_ids": "verl.utils.dynamic_cp_scheduler",
}


def _binds_ppo_loss() -> Iterator[str]:
    for module in _BIND_PPO_LOSS:
        parameters = [*inspect.signature(_get(f"{module}.ppo_loss")).parameters]
        if parameters != ["config", "model_output", "data", "dp_group"]:
            yield f"{module}.ppo_loss takes {', '.join(parameters)}"
    if "partial(ppo_loss, config=actor_config)" not in sources.source("verl.workers.engine_workers"):
        yield "engine_workers does not take the loss from its name ppo_loss (read)"
    binders = {m for m, text in sources.modules("ppo_loss")
               if "ppo_loss" in sources.imported(ast.parse(text), "verl.workers.utils.losses")}  # fmt: skip
    if others := binders - set(_BIND_PPO_LOSS):
        yield f"{', '.join(sorted(others))} binds ppo_loss as well: its responses would not be recorded (read)"


def _tells_step_and_prompt() -> Iterator[str]:
    """Each key is put in where it was (read), and ``get`` gives a default for one that is missing."""
    for key, module in BATCH_KEYS.items():
        if f'"{key}"' not in (source := sources.source(module)) and f"{key}=" not in source:
            yield f"{module} does not put {key} into a batch"
    tensordict_utils, (_, data) = _get("verl.utils.tensordict_utils"), _micro_batch()
    if tensordict_utils.get(data, "dp_size") != 1 or tensordict_utils.get(data, "uid", ["p"]) != ["p"]:
        yield "tensordict_utils.get does not give a value or the default"


# --- live series -----------------------------------------------------------------------------------------------------

# The modules whose trainers log what a policy loss has measured.
_TRAINERS = (
    "verl.trainer.ppo.v1.trainer_base",
    "verl.trainer.ppo.ray_trainer",
    "verl.experimental.separation.ray_trainer",
    "verl.experimental.one_step_off_policy.ray_trainer",
    "verl.experimental.fully_async_policy.fully_async_trainer",
)


class _Backend:
    """A logger that keeps what it is handed last."""

    def log(self, data, step):
        self.logged = data, step


def _logs_series() -> Iterator[str]:
    """A step through verl's ``Tracking``, and every trainer goes through it as well (read)."""
    tracking, backend = _get("verl.utils.tracking.Tracking")("contract", "contract", []), _Backend()
    tracking.logger[_PROBE] = backend
    sums = {f"actor/fspo/length_1_up/{name}": share for name, share in (("responses", 0.5), ("clipped", 0.25))}
    tracking.log(data=sums, step=3)
    data, step = backend.logged
    if step != 3 or data.get("fspo/clip_rate/all") != 0.5 or not sums.items() <= data.items():
        yield f"Tracking.log makes {data} of {sums}"
    for module in _TRAINERS:
        tree = ast.parse(sources.source(module))
        logs = any(ast.unparse(call.func) in ("logger.log", "self.logger.log") for call in _nodes(tree, ast.Call))
        if "Tracking" not in sources.imported(tree, "verl.utils.tracking") or not logs:
            yield f"{module} does not log by Tracking.log (read)"


# --- a machine without a GPU -----------------------------------------------------------------------------------------


def _concrete(name: str) -> Iterator[str]:
    """Whether a class of this package implements all that verl's base asks for."""
    yield from _lacks(getattr(_get(f"fspo_verl.cpu.{name}"), "__abstractmethods__", ()), (), f"fspo_verl.cpu.{name}")


def _cpu_engine() -> Iterator[str]:
    yield from _takes("verl.workers.engine.base.EngineRegistry.register", "model_type", "backend", "device")
    yield from _takes("verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead._build_fsdp_module", "module")
    if "fsdp2_sharded_save_to_cpu" not in sources.source("verl.experimental.separation.engine_workers"):
        yield "the asynchronous trainers take their snapshots elsewhere (read)"


def _cpu_rollout() -> Iterator[str]:
    yield from _concrete("rollout.HFReplica")
    yield from _concrete("rollout.HFServerAdapter")
    fields = _get("verl.workers.rollout.replica.TokenOutput").model_fields
    yield from _lacks(("token_ids", "log_probs", "stop_reason", "extra_fields"), fields, "TokenOutput")
    if ("vllm", "async") not in _get("verl.workers.rollout.base._ROLLOUT_REGISTRY"):
        yield "_ROLLOUT_REGISTRY does not go by (name, mode)"


def _cpu_agent_loop() -> Iterator[str]:
    fields = _get("verl.experimental.agent_loop.agent_loop.AgentLoopOutput").model_fields
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "num_turns", "metrics")
    yield from _lacks((*names, "extra_fields"), fields, "AgentLoopOutput")
    yield from _takes("verl.trainer.ppo.v1.replay_buffer.ReplayBuffer", "poll_interval")


LINES = (
    Line(
        "loss",
        (
            "verl.trainer.ppo.core_algos.register_policy_loss",
            "verl.trainer.ppo.core_algos.get_policy_loss_fn",
            "verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY",
        ),
        "the losses `fspo` and `observed` are registered here, and what `observed` wraps is looked up",
        "a run stops at its first actor update, after a whole rollout: the loss is not known",
        _registered,
        "both names lead to this package's functions",
    ),
    Line(
        "loss",
        ("verl.workers.utils.losses.ppo_loss", "verl.utils.tensordict_utils.get_tensordict"),
        "calls a registered loss, in every engine",
        "the loss is called with other arguments, without the totals of the mini-batch, or not on whole responses: a "
        "wrong loss, or none",
        _calls_the_loss,
        f"keyword arguments {', '.join(LOSS_ARGUMENTS)}; `config.global_batch_info` holds {', '.join(BATCH_INFO)}; "
        "responses are padded to `[B, T]`; a metric of several values counts them all",
    ),
    Line(
        "loss",
        ("verl.trainer.ppo.core_algos.agg_loss",),
        "makes one number of the losses of a micro-batch; called with a column per response in place of the tokens",
        "the loss is scaled otherwise than the mode says, or depends on how the batch is cut",
        _aggregates,
        f"modes {', '.join(AGG_MODES)}, each with its value; a mode reads no more of a row than its sum and its length",
    ),
    Line(
        "loss",
        ("verl.workers.config.PolicyLossConfig", "verl.utils.config.omega_conf_to_dataclass"),
        "the schemas of this package extend it, and verl builds them from `_target_`",
        "the band of the config is not the one that trains, or typos pass",
        _schema,
        "no field is verl's and this package's at once; an unknown field is refused; `_mutable_fields` count",
    ),
    Line(
        "loss",
        ("verl.workers.config.FSDPActorConfig", "verl.workers.config.ActorConfig"),
        "the `config` of a loss; all engines' extend `ActorConfig`",
        "aggregation or clip range of the config do not reach the loss",
        _actor_fields,
        f"fields {', '.join(_ACTOR_FIELDS)}",
    ),
    Line(
        "loss",
        ("verl.utils.metric.Metric",),
        "carries one value per response into verl's metric stream",
        "rates depend on how the batch was cut, or a run stops at its first metric",
        _averages,
        "`values`, `extend`, `aggregate`, `aggregate_dp`: means over all values of all micro-batches and ranks",
    ),
    Line(
        "launch",
        ("verl.__version__",),
        "imports the entry point of the group `verl.plugins` in every process; `__version__` goes into records",
        "workers do not know the loss unless the config's schema brings it, baselines are not observed, and no launch "
        "is checked",
        _loads_plugins,
        "`import verl` has imported `fspo_verl.plugin`",
    ),
    Line(
        "launch",
        ("verl.utils.device.auto_set_device",),
        "the first function of verl that a main hands its config to; wrapped, as no hook stands between composition "
        "and `ray.init`",
        "a launch by that main is not checked: a setting that trains another loss passes unnoticed, and "
        "`fspo-verl doctor` cannot examine it",
        _mains_pass_by,
        "every main of verl that trains a policy calls `auto_set_device(config)`, imported from there (read)",
    ),
    Line(
        "launch",
        ("verl.trainer.config",),
        "the config that checks, plan and doctor read",
        "the check of a key that is gone is off, or its number wrong",
        _config_keys,
        "; ".join(f"`{section}`: {', '.join(keys)}" for section, keys in CONFIG_KEYS.items()),
    ),
    Line(
        "launch",
        (
            "verl.utils.config.validate_config",
            "verl.trainer.ppo.utils.need_critic",
            "verl.trainer.ppo.utils.need_reference_policy",
        ),
        "verl's own checks, which the doctor runs as main_ppo does; they build the schema",
        "a bad band stops a run in its workers, not before Ray starts",
        _validates,
        "arguments config, use_reference_policy, use_critic; main_ppo calls it (read)",
    ),
    Line(
        "launch",
        ("verl.utils.checkpoint.checkpoint_manager.find_latest_ckpt_path",),
        "where a run goes on; this package reads the same two names",
        "a loss that changes at a resume is not noticed, and a fresh run may be told to resume",
        _finds_checkpoints,
        "latest_checkpointed_iteration.txt names the folder global_step_N",
    ),
    Line(
        "launch",
        ("verl.trainer.ppo.v1.trainer_separate_async",),
        "the arithmetic of optimiser steps per rollout for `trainer.v1.trainer_mode=separate_async`",
        "the plan's optimiser steps, and the advice on mini-batches, are wrong there",
        _refuses_bad_batches,
        "asserts train_batch_size == parameter_sync_step * ppo_mini_batch_size (read)",
    ),
    Line(
        "records",
        (
            "verl.workers.engine_workers.ppo_loss",
            "verl.trainer.distillation.losses.ppo_loss",
            "verl.workers.engine_workers.ActorRolloutRefWorker",
            "verl.workers.engine_workers.ActorRolloutRefWorker.update_weights",
        ),
        "wrapped, to learn of which step and prompts a call of the loss is",
        "records are not written, lack those of a module that binds `ppo_loss` itself, or name wrong steps",
        _binds_ppo_loss,
        "parameters config, model_output, data, dp_group; no other module binds it (read)",
    ),
    Line(
        "records",
        ("verl.utils.tensordict_utils.get",),
        "step, mini-batch, rank and prompt of a micro-batch",
        "steps or prompts of the records are wrong, and with them every figure of `fspo-verl report`",
        _tells_step_and_prompt,
        "; ".join(f"{key} from {module} (read)" for key, module in BATCH_KEYS.items()),
    ),
    Line(
        "live",
        ("verl.utils.tracking.Tracking", "verl.utils.tracking.Tracking.log"),
        "every trainer hands the metrics of a step to it; wrapped, to add quotients of means, which verl's reduction "
        "cannot give",
        "the series `fspo/*` are not logged; their raw sums `actor/fspo/*`, the report and training are as ever",
        _logs_series,
        "`Tracking.log(data, step)` hands `data` and the series to its backends; it is called by "
        f"{', '.join(module.removeprefix('verl.') for module in _TRAINERS)} (read)",
    ),
    Line(
        "cpu",
        (
            "verl.plugin.platform.platform_manager.PlatformRegistry.register",
            "verl.plugin.platform.platform_base.PlatformBase",
        ),
        "the CPU as a platform",
        "verl does not start",
        functools.partial(_concrete, "platform.PlatformCPU"),
        "`PlatformCPU` implements all of `PlatformBase`",
    ),
    Line(
        "cpu",
        (
            "verl.workers.engine.base.EngineRegistry",
            "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead",
            "verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu",
        ),
        "FSDP2 on a CPU; a snapshot of weights that is a copy",
        "workers find no engine, or an asynchronous run never clips: its old policy follows the new one",
        _cpu_engine,
        "`register(model_type, backend, device)`, `_build_fsdp_module(module)`; snapshots go by that name (read)",
    ),
    Line(
        "cpu",
        (
            "verl.workers.rollout.base.BaseRollout",
            "verl.workers.rollout.base._ROLLOUT_REGISTRY",
            "verl.workers.rollout.replica.RolloutReplica",
            "verl.workers.rollout.replica.RolloutReplicaRegistry.register",
            "verl.workers.rollout.replica.TokenOutput",
            "verl.workers.rollout.utils.ensure_async_iterator",
        ),
        "`actor_rollout_ref.rollout.name=hf`",
        "no rollout, or one with stale weights",
        _cpu_rollout,
        "replica and adapter implement all that is asked for; fields of `TokenOutput`; the registry goes by name and "
        "mode",
    ),
    Line(
        "cpu",
        (
            "verl.experimental.agent_loop.agent_loop.AgentLoopOutput",
            "verl.trainer.ppo.reward.get_custom_reward_fn",
            "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer",
            "verl.utils.config.omega_conf_to_dataclass",
            "verl.utils.reward_score.default_compute_score",
            "verl.utils.tensordict_utils.list_of_dict_to_tensordict",
            "verl.utils.tokenizer.chat_template.apply_chat_template",
        ),
        "rollouts a batch at a time",
        "the quickstart and other runs of packaged CPU configs stop at their first batch",
        _cpu_agent_loop,
        "fields of `AgentLoopOutput`; `poll_interval` of `ReplayBuffer`",
    ),
    Line(
        "cpu",
        ("verl.checkpoint_engine.base.CheckpointEngine", "verl.checkpoint_engine.base.CheckpointEngineRegistry"),
        "weights to a rollout in another process, for verl's asynchronous trainers",
        "an asynchronous run stops at its first weight sync",
        functools.partial(_concrete, "checkpoint_engine.TCPCheckpointEngine"),
        "`TCPCheckpointEngine` implements all of `CheckpointEngine`",
    ),
    Line(
        "selftest",
        (
            "verl.trainer.config.CheckpointConfig",
            "verl.utils.device.get_platform",
            "verl.utils.metric.reduce_metrics",
            "verl.utils.tensordict_utils.assign_non_tensor",
            "verl.workers.config.FSDPEngineConfig",
            "verl.workers.config.FSDPOptimizerConfig",
            "verl.workers.config.HFModelConfig",
            "verl.workers.config.TrainingWorkerConfig",
            "verl.workers.engine_workers.TrainingWorker",
        ),
        "build a worker without Ray, and let it infer and update",
        "the step of `fspo-verl selftest` and the benchmarks do not run; training is not touched",
    ),
    Line(
        "scripts",
        ("verl.utils.reward_score.default_compute_score", "verl.model_merger"),
        "prepare_data.py scores reference answers with it; evaluate.sh merges a checkpoint's shards",
        "the script stops with an error; training is not touched",
    ),
)
