# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
import io
import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from omegaconf import OmegaConf

# Timed limits have no place in a shared CI; `HYPOTHESIS_PROFILE=long` runs many more generated cases.
settings.register_profile("ci", max_examples=150, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# An sdist has no studies, and runs none of the tests that name their folder.
ROOT, collect_ignore = Path(__file__).parent, []
if not (ROOT / "scripts/studies").exists():
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("scripts/**/test_*.py")]
    collect_ignore = [str(file) for file in files if "scripts/studies" in file.read_text()]

# Files with the longest runs start first, so that no process is left with one of them when the others have ended.
_LONGEST = ("launch_scripts", "cpu_training", "cluster", "fsdp", "doctor", "install")


def pytest_collection_modifyitems(items):
    """Sort by file, and within a file not at all."""
    places = {f"test_{name}.py": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True)
def default_log_level():
    """Ray and verl set the root logger's level for all that follow: no test is to see which ran before it."""
    logging.getLogger("fspo_verl").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def warnings_are_given_anew(monkeypatch):
    """A warning that is given once a process is given once a test."""
    from fspo_verl import output

    monkeypatch.setattr(output.ONCE, "_causes", set())


@pytest.fixture(scope="session", autouse=True)
def config_files_are_read_once():
    """A launch is composed from thirty files of verl, and reading them is half of it; tests compose hundreds."""
    load, read = OmegaConf.load, {}

    def load_once(file):
        text = file.read() if hasattr(file, "read") else Path(file).read_text()
        if text not in read:
            read[text] = pickle.dumps(load(io.StringIO(text)))  # which is a fifth of the time of making a config
        return pickle.loads(read[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def tested_verl():
    """The installed verl counts as tested: these tests are what it takes (scripts/test_versions.sh)."""
    from fspo_verl import versions
    from fspo_verl.launch import installation

    version = versions.installed("verl")
    if version and version not in installation.TESTED["verl"]:
        installation.TESTED["verl"] += (version,)


@pytest.fixture(scope="session")
def untrained_model(tmp_path_factory):
    """A folder with the quickstart's small Qwen3 model, not yet trained, and its tokenizer."""
    import ledger
    import warm_start

    folder = tmp_path_factory.mktemp("untrained") / "model"
    torch.manual_seed(0)
    warm_start.small_qwen3().save_pretrained(folder)
    ledger.tokenizer().save_pretrained(folder)
    return folder
