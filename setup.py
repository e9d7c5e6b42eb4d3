# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packaging of fspo_verl: a plugin that adds the FSPO policy loss to verl."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="fspo-verl",
    version="0.1.0",
    description="FSPO (Fair Sequence Policy Optimization, arXiv 2509.09177) for verl: length-fair clipping",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    # The explicit root keeps `hydra_plugins` importable from an editable install: without it setuptools maps only
    # `fspo_verl`, Hydra never sees the search-path plugin, and `+algorithm.policy_loss=fspo` trains vanilla PPO.
    package_dir={"": "."},
    packages=[*find_packages(include=["fspo_verl", "fspo_verl.*"]), "hydra_plugins.fspo_verl_searchpath"],
    package_data={"fspo_verl": ["*.jinja"], "fspo_verl.configs": ["*.yaml", "*/*.yaml"]},
    install_requires=[
        "verl>=0.9.0,<0.10",
        "torch>=2.6",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "packaging",
        "pandas>=2",
        "pyarrow>=15",
    ],
    extras_require={
        # What a run without a GPU needs beyond verl's own requirements; requirements/ pins tested versions.
        "cpu": ["TransferQueue>=0.1.10", "cachetools", "fastapi", "uvicorn", "psutil"],
        # `fspo-verl calibrate`, `report` and `compare`.
        "report": ["jinja2>=3", "matplotlib>=3.8", "scipy>=1.11", "tensorboard", "tqdm"],
        "test": ["pytest>=8", "hypothesis>=6", "ruff>=0.6", "setuptools>=68", "wheel"],
    },
    entry_points={
        "console_scripts": ["fspo-verl = fspo_verl.cli:main"],
        # verl imports this module in every process that imports verl; importing it registers the loss.
        "verl.plugins": ["fspo_verl = fspo_verl.plugin"],
        # vLLM calls this in each of its processes; it acts only when VERL_PLATFORM=cpu.
        "vllm.general_plugins": ["fspo_verl_cpu = fspo_verl.cpu.vllm:register"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
