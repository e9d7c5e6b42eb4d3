# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether what is installed can train the losses: on this machine, and in the workers of a Ray cluster.

A verl that was never tested is tried: whether the loss trains what it says. Whatever else could break in silence is in
tests/verl_contract; what fails with an error of its own is not tried here.
"""

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Iterator
from importlib import metadata

from omegaconf import DictConfig
from packaging.specifiers import SpecifierSet

from fspo_verl import output
from fspo_verl.launch.view import Finding, Launch

# No upper bound: a newer verl is tried, not told by its number.
SUPPORTED_VERL = ">=0.9.0"
# What `bash scripts/test.sh` and `bash scripts/test_versions.sh` run.
TESTED = {
    "verl": ("0.9.0", "0.9.1"),
    "torch": ("2.13.0",),
    "transformers": ("5.10.4",),
    "vllm": ("0.27.1",),
    "ray": ("2.60.0",),
}
INSTALL = "pip install . in a clone of fspo_verl"
_WORKER_SECONDS = 60
# Where verl's trainers keep their batches: a named actor, so one for all runs on a cluster.
_TRANSFER_QUEUE = {"name": "TransferQueueController", "namespace": "transfer_queue"}


def findings() -> Iterator[Finding]:
    """Versions, and whether verl and Hydra find this package here."""
    found = {package: output.installed(package) for package in TESTED}
    text = ", ".join(f"{package} {version or 'not installed'}" for package, version in found.items())
    tested = "; ".join(f"{package} {', '.join(known)}" for package, known in TESTED.items())
    yield Finding("note", "versions", f"{text}, Python {sys.version.split()[0]}", f"tested are {tested}")
    yield from verl_version()
    if not any(point.value == "fspo_verl.plugin" for point in metadata.entry_points(group="verl.plugins")):
        why = "the package is imported, not installed"
        yield Finding("error", "entry_point", "verl finds no plugin fspo_verl", why, INSTALL)
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins is None or importlib.util.find_spec("hydra_plugins.fspo_verl_searchpath") is None:
        why = "Hydra does not see the packaged configs, and +algorithm.policy_loss=fspo would be a dead value"
        yield Finding("error", "search_path", "hydra_plugins.fspo_verl_searchpath is missing", why, INSTALL)


# --- a verl that is too old, or was never tested ---------------------------------------------------------------------


def verl_version() -> Iterator[Finding]:
    """An error where the installed verl is too old; at most two warnings where it was never tested.

    A development version counts as never tested, as it names no certain sources.
    """
    version = output.installed("verl")
    if version is None or version in TESTED["verl"]:
        return
    if not SpecifierSet(SUPPORTED_VERL).contains(version, prereleases=True):
        what = f"verl {version} is not supported by fspo_verl, which needs {SUPPORTED_VERL}"
        why = "verl's workers load no plugins, so that the loss may be missing"
        yield Finding("error", "verl_version", what, why, f"pip install 'verl{SUPPORTED_VERL}'")
        return
    what = f"verl {version} was not tested with fspo_verl"
    yield Finding("warning", "untested_verl", what, f"tested are {', '.join(TESTED['verl'])}")
    if wrong := problems():
        what = f"verl {version} does not do what fspo_verl needs of it: {'; '.join(wrong)}"
        fix = f"a newer fspo_verl, or pip install verl=={TESTED['verl'][-1]}"
        yield Finding("warning", "probe", what, "the loss would fail, or train something else than it says", fix)


def problems() -> list[str]:
    """What the installed verl does otherwise than the losses need. Takes about a second, without Ray."""
    try:
        with output.reserved():
            return [*_loss()]
    except Exception as error:  # another signature, type or name: whatever verl made of it
        return [f"the loss cannot be called: {type(error).__name__}: {error}"]


def _loss() -> Iterator[str]:
    """Two responses inside the band, a micro-batch each, through verl's ``ppo_loss``: value and gradient."""
    import torch
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from fspo_verl.config import FSPOPolicyLossConfig

    config = FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=FSPOPolicyLossConfig(),
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=8,
    )
    totals = {"dp_size": 1, "batch_num_tokens": 5, "global_batch_size": 2}
    for length, advantage in ((2, 1.0), (3, -1.0)):
        # What a model puts out at one position scores the next token; -3 scores none of the response.
        log_prob = torch.tensor([-3.0, *[-1.0] * length, -3.0], requires_grad=True)
        rows = {
            "prompts": torch.zeros(2, dtype=torch.long),
            "responses": torch.zeros(length, dtype=torch.long),
            "response_mask": torch.ones(length, dtype=torch.long),
            "old_log_probs": torch.full((length,), -1.01),
            "advantages": torch.full((length,), advantage),
        }
        data = get_tensordict({key: _nested(row) for key, row in rows.items()}, totals)
        loss, _ = ppo_loss(config, {"log_probs": _nested(log_prob)}, data)
        loss.backward()
        ratio = torch.tensor(0.01 * length).exp()
        gradient = -advantage * ratio / totals["global_batch_size"] / config.loss_scale_factor
        expected = torch.cat([torch.zeros(1), gradient.expand(length), torch.zeros(1)])
        found = log_prob.grad
        if found is None or not (torch.allclose(loss, gradient * length) and torch.allclose(found, expected)):
            yield f"loss_mode=fspo gives {loss.item():.4g} on {length} tokens, not {gradient.item() * length:.4g}"


def _nested(row):
    """One row as verl's engines hand over tokens without padding."""
    import torch

    return torch.nested.as_nested_tensor([row], layout=torch.jagged)


# --- the workers of a cluster ----------------------------------------------------------------------------------------


class Workers:
    """A question to a Ray worker on each node, put when this is made and answered by :func:`worker_findings`.

    Where it cannot be put, ``problem`` is what is wrong, and what mends it.
    """

    def __init__(self):
        import ray

        self.where, self.shares_queue = "a local Ray", False
        self.answers: list[tuple] = []
        self.problem: tuple[str, str] | None = None
        if (problem := _unreachable(os.environ.get("RAY_ADDRESS", ""))) is not None:
            self.problem = problem, "start the cluster, or unset RAY_ADDRESS"
            return
        options = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
        try:
            # As verl calls it, this finds the same cluster; without one it starts Ray here, and needs only one CPU.
            try:
                ray.init(num_cpus=1, **options)
            except ValueError:  # what Ray says to num_cpus where there is a cluster
                self.where = "the running cluster"
                ray.init(**options)
        except Exception as error:  # Ray raises a plain one where its own processes do not come up
            said = str(error.__cause__ or error).strip().splitlines()[-1]  # the cause names a token that is asked for
            fix = "RAY_AUTH_MODE=token for a cluster with a token, RAY_TMPDIR=/tmp for a long path, or see Ray's logs"
            self.problem = f"{self.where} cannot be used: {said}", fix
            return
        self.shares_queue = _TRANSFER_QUEUE in ray.util.list_named_actors(all_namespaces=True)
        # By node: several may run at one address.
        alive = [node for node in ray.nodes() if node["Alive"]]
        self.answers = [(node["NodeManagerAddress"], _ask(node["NodeID"])) for node in alive]

    def close(self) -> None:
        """Leave the cluster, or stop the local Ray."""
        import ray

        ray.shutdown()


def _unreachable(address: str) -> str | None:
    """What is wrong with a cluster's address where nobody listens; Ray itself tries for minutes."""
    if found := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address):
        try:
            socket.create_connection((found[1], int(found[2])), timeout=5).close()
        except OSError as error:
            return f"RAY_ADDRESS={address} does not answer: {error}"
    return None


def _ask(node: str):
    """Reference to what a worker on a node sees."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Defined here, so that it travels by value: a worker may lack this package.
    def sees() -> dict:
        from importlib.util import find_spec

        import verl
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        here = {name: find_spec(name) is not None for name in ("fspo_verl", "vllm")}
        return {"verl": verl.__version__, "losses": sorted(POLICY_LOSS_REGISTRY)} | here

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(sees).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote()


def worker_findings(workers: Workers, config: DictConfig | None) -> Iterator[Finding]:
    """What the workers lack of what a launch needs, and another run whose end would stop this one.

    Args:
        config: None where no launch was given, or none composed.
    """
    import ray

    if workers.problem:
        what, fix = workers.problem
        yield Finding("error", "worker", what, fix=fix)
        return
    if workers.shares_queue:
        why = "both would use one TransferQueue, and the end of one run closes it for the other, which then hangs"
        what = f"another run of verl is on {workers.where}"
        yield Finding("warning", "shared_queue", what, why, "wait for its end, or start a Ray cluster for each run")
    ray.wait([answer for _, answer in workers.answers], num_returns=len(workers.answers), timeout=_WORKER_SECONDS)
    good = 0
    for node, answer in workers.answers:
        place = f"a worker of {workers.where} on {node}"
        try:
            lacks, fix = missing(ray.get(answer, timeout=0), config)
        except ray.exceptions.GetTimeoutError:
            what = f"{place} gave no answer within {_WORKER_SECONDS} s"
            yield Finding("warning", "worker", what, "it is not checked")
            continue
        except ray.exceptions.RayError as error:
            lacks, fix = f"cannot import verl: {getattr(error, 'cause', error)!r}", "pip install verl"
        if lacks:
            yield Finding("error", "worker", f"{place} {lacks}", fix=f"there: {fix}")
        good += not lacks
    if good:
        yield Finding("note", "worker", f"{good} worker(s) of {workers.where} import verl and have the loss")


def missing(sees: dict, config: DictConfig | None) -> tuple[str, str]:
    """What a worker lacks, and what mends it; two empty strings if nothing."""
    import verl

    launch = config and Launch(config)
    mode = str(launch.loss_mode) if launch else "fspo"
    if sees["verl"] != verl.__version__:
        return f"has verl {sees['verl']}, here it is {verl.__version__}", f"pip install verl=={verl.__version__}"
    # A schema of this package registers the loss by itself, where verl was told to load no plugins.
    if mode not in sees["losses"] and not (launch and launch.is_ours and sees["fspo_verl"]):
        return f"does not know loss_mode={mode}: the run would fail at its first actor update", INSTALL
    if launch and launch.config.actor_rollout_ref.rollout.get("name") == "vllm" and not sees["vllm"]:
        return "cannot import vllm, which actor_rollout_ref.rollout.name=vllm needs", "pip install verl[vllm]"
    return "", ""
