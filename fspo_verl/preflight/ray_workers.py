# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Ask Ray workers what they see of verl and of this package, for ``fspo-verl doctor``."""

import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fspo_verl.preflight.launch import Finding, Launch

INSTALL = "pip install . in a clone of fspo_verl"
_START = "start the cluster and bring its token (RAY_AUTH_MODE=token), or unset RAY_ADDRESS"
_WORKER_SECONDS = 60


class Workers:
    """A question to Ray workers, one on each node, put when this is made and answered by :meth:`answers`.

    Where it cannot be put, ``problem`` is what is wrong, and what mends it.
    """

    def __init__(self):
        import ray

        self.where, self.gpus, self._nodes = "a local Ray", 0, []
        self.problem = too_long_for_ray() or _unreachable(os.environ.get("RAY_ADDRESS", ""))
        if self.problem:
            return
        options = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
        try:
            # As verl calls it, this finds the same cluster; without one it starts Ray here, and needs only one CPU.
            ray.init(num_cpus=1, **options)
        except ValueError:  # what Ray says to num_cpus where there is a cluster
            self.where = "the running cluster"
            try:
                ray.init(**options)
            except ConnectionError as error:  # its cause names the token that a cluster may ask for
                said = str(error.__cause__ or error).strip().splitlines()[-1]
                self.problem = f"{self.where} refuses: {said}", _START
                return
        except Exception as error:  # Ray raises a plain one where its own processes do not come up
            self.problem = f"{self.where} does not start: {error}", "look into /tmp/ray/session_latest/logs"
            return
        self.gpus = int(ray.cluster_resources().get("GPU", 0))
        self._nodes = [node for node in ray.nodes() if node["Alive"]]
        self._answers = [self._ask(node["NodeID"]) for node in self._nodes]

    @staticmethod
    def _ask(node: str):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Defined here, so that it travels by value: a worker may lack this package.
        def sees() -> dict:
            import importlib.util

            try:
                import verl
                from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

                answer = {"verl": verl.__version__, "losses": sorted(POLICY_LOSS_REGISTRY)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            return answer | {name: importlib.util.find_spec(name) is not None for name in ("fspo_verl", "vllm")}

        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(sees).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote()

    def answers(self) -> list[tuple[str, dict | None]]:
        """Address of each node, and what a worker there sees, or an ``error``; None without an answer in time."""
        import ray

        ray.wait(self._answers, num_returns=len(self._answers), timeout=_WORKER_SECONDS)
        found = []
        for node, answer in zip(self._nodes, self._answers, strict=True):
            try:
                sees = ray.get(answer, timeout=0)
            except ray.exceptions.GetTimeoutError:
                sees = None
            except ray.exceptions.RayError as error:
                sees = {"error": f"{type(error).__name__}: {error}"}
            found.append((node["NodeManagerAddress"], sees))
        return found

    def close(self) -> None:
        """Leave the cluster, or stop the local Ray."""
        import ray

        ray.shutdown()


def too_long_for_ray() -> tuple[str, str] | None:
    """What is wrong with a folder for temporary files in which Ray cannot open its sockets, and what mends it."""
    if "RAY_ADDRESS" in os.environ:
        return None  # a cluster that runs elsewhere
    # The longest of its sockets, with a number of seven digits for the process.
    place = _temporary()
    socket_file = f"{place}/ray/session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    limit = 107 if sys.platform == "linux" else 103
    beyond = len(os.fsencode(socket_file)) - limit
    if beyond <= 0:
        return None
    what = f"Ray cannot open its sockets in {place}/ray, whose name is {beyond} bytes too long for them"
    return what, "export RAY_TMPDIR=/tmp, or another short path"


def joins_a_cluster(config: DictConfig) -> bool:
    """Whether a launch goes to a running cluster, found as ``ray.init`` finds it, and does not start Ray itself."""
    address = os.environ.get("RAY_ADDRESS") or OmegaConf.select(config, "ray_kwargs.ray_init.address")
    return address != "local" if address else Path(_temporary(), "ray/ray_current_cluster").exists()


def _temporary() -> str:
    """Where Ray has its folder for temporary files, as Ray looks it up."""
    return os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp") if sys.platform == "linux" else "/tmp")


def _unreachable(address: str) -> tuple[str, str] | None:
    """What is wrong with a cluster's address where nobody listens, and what mends it; Ray itself tries for minutes."""
    if not (found := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)):
        return None
    try:
        socket.create_connection((found[1], int(found[2])), timeout=5).close()
    except OSError as error:
        return f"RAY_ADDRESS={address} does not answer: {error}", _START


def findings(workers: Workers, config: DictConfig | None) -> Iterator[Finding]:
    """What the workers lack of what a launch needs.

    Args:
        config: None where no launch was given, or none composed.
    """
    if workers.problem:
        what, fix = workers.problem
        yield Finding("error", "worker", what, fix=fix)
        return
    good = 0
    for node, sees in workers.answers():
        place = f"a worker of {workers.where} on {node}"
        if sees is None:
            what = f"{place} did not answer within {_WORKER_SECONDS} s"
            yield Finding("warning", "worker", what, "it is not checked")
            continue
        lacks, fix = missing(sees, config)
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
    if "error" in sees:
        return f"cannot import verl: {sees['error']}", "install verl"
    if sees["verl"] != verl.__version__:
        return f"has verl {sees['verl']}, here it is {verl.__version__}", f"pip install verl=={verl.__version__}"
    # A schema of this package registers the loss by itself, where verl was told to load no plugins.
    if mode not in sees["losses"] and not (launch and launch.is_ours and sees["fspo_verl"]):
        return f"does not know loss_mode={mode}: the run would fail at its first actor update", INSTALL
    if launch and launch.config.actor_rollout_ref.rollout.get("name") == "vllm" and not sees["vllm"]:
        return "cannot import vllm, which actor_rollout_ref.rollout.name=vllm needs", "pip install verl[vllm]"
    return "", ""


def gpus(workers: Workers, config: DictConfig) -> Iterator[Finding]:
    """Fewer GPUs than the launch books; verl would wait for them or fail minutes later."""
    launch = Launch(config)
    rollout = launch.rollout_pool
    pools = [config.trainer] if rollout is None else [config.trainer, rollout]
    needed = sum(pool.nnodes * pool.n_gpus_per_node for pool in pools)
    there = launch.get("ray_kwargs.ray_init.num_gpus") or workers.gpus
    if there < needed:
        what = f"the launch books {needed} GPUs, {workers.where} has {there}"
        fix = f"trainer.n_gpus_per_node={there}" if there else "run it with GPUs"
        if there and rollout is not None:
            fix = f"{there} in all: trainer.n_gpus_per_node, and n_gpus_per_node of the pool that generates"
        yield Finding("error", "gpus", what, fix=fix)
