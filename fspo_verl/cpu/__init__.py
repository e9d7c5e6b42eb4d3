# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""verl on a machine without a GPU: importing this package registers everything, under ``VERL_PLATFORM=cpu`` only.

The condition stands here because vLLM imports the package on every machine, to find its plugin in
:mod:`fspo_verl.cpu.vllm`. Runs while ``import verl`` is in progress, hence no ``from verl import ...``.
"""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from fspo_verl.cpu.vllm import alias_vllm_metadata

    alias_vllm_metadata()  # first: verl asks for vLLM's version where it imports it

    import fspo_verl.cpu.platform  # registers the platform; it brings in the engines, in workers only
    import fspo_verl.cpu.rollout  # noqa: F401  registers `rollout.name=hf`

    # Ray lowers the priority of its workers. Where the cores are shared, a run would then get what is left over.
    os.environ.setdefault("RAY_worker_niceness", "0")
