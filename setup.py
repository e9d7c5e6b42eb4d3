# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packaging of fspo_verl: a plugin that adds the FSPO policy loss to verl."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# Address of the public repository, such as https://github.com/OWNER/NAME; empty while there is none. Relative links and
# pictures of README get it on the package index; `python scripts/docs/generate.py` writes it into files of its own.
REPOSITORY = ""


def long_description() -> str:
    """README.md for the package index, where a relative link leads nowhere: absolute, or its text alone."""
    relative = r"\((?!https?:|#|mailto:)([^)\s]+)\)"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(rf"!\[([^]]*)\]{relative}", rf"![\1]({REPOSITORY}/raw/main/\2)" if REPOSITORY else r"*(\1)*", text)
    return re.sub(rf"(?<!!)\[([^]]*)\]{relative}", rf"[\1]({REPOSITORY}/blob/main/\2)" if REPOSITORY else r"\1", text)


setup(
    name="fspo-verl",
    version="0.1.0",
    description="FSPO (Fair Sequence Policy Optimization, arXiv 2509.09177) for verl: length-fair clipping",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The fspo_verl Authors",
    project_urls={
        **({"Source": REPOSITORY, "Issues": f"{REPOSITORY}/issues"} if REPOSITORY else {}),
        "Paper": "https://arxiv.org/abs/2509.09177",
        "verl": "https://github.com/verl-project/verl",
    },
    keywords=["reinforcement learning", "LLM", "RLHF", "RLVR", "policy optimization", "importance sampling", "verl"],
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    # The explicit root keeps `hydra_plugins` importable from an editable install: without it setuptools maps only
    # `fspo_verl`, Hydra never sees the search-path plugin, and `+algorithm.policy_loss=fspo` trains vanilla PPO.
    package_dir={"": "."},
    packages=[*find_packages(include=["fspo_verl", "fspo_verl.*"]), "hydra_plugins.fspo_verl_searchpath"],
    package_data={
        "fspo_verl": ["py.typed", "report/*.jinja", "demo/report.*", "configs/*.yaml", "configs/*/*.yaml"],
    },
    install_requires=[
        "verl>=0.9.0",
        "torch>=2.6",
        "hydra-core>=1.3,<1.4",
        "omegaconf>=2.3",
        "packaging",
        "pandas>=2",
        "pyarrow>=15",
        "rich>=13",
        "pyyaml>=6",
        "wrapt>=1.16",
    ],
    extras_require={
        # `fspo-verl calibrate` and `report`.
        "report": ["jinja2>=3", "matplotlib>=3.8", "scipy>=1.11", "tqdm"],
        # The rollout engine, in the version that verl pins.
        "vllm": ["verl[vllm]>=0.9.0"],
        # The documentation site: `mkdocs build --strict`.
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5"],
        # scripts/real_model.sh; the model itself is in requirements/real.txt.
        "real": ["gguf>=0.17", "reasoning-gym>=0.1.25"],
        "test": [
            *("pytest>=8", "pytest-timeout>=2", "pytest-xdist>=3", "hypothesis>=6", "mypy>=2", "ruff>=0.6"),
            *("gguf>=0.17", "setuptools>=68", "wheel"),
        ],
    },
    entry_points={
        "console_scripts": ["fspo-verl = fspo_verl.cli:main"],
        # verl imports this module in every process that imports verl; importing it registers the loss.
        "verl.plugins": ["fspo_verl = fspo_verl.plugin"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
