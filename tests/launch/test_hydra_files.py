# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Paths reach verl as they are, whatever characters they hold: through Hydra's own parser, and from every script."""

import subprocess
from pathlib import Path

import launch
import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from ledger_experiment import LedgerExperiment
from real_experiment import RealExperiment

from fspo_verl.launch import override

QUOTED = Path(__file__).parents[2] / "scripts/launch/functions.sh"
NASTY = "ö ( ) = { } [ ' # & ~ , \" : + $x % ! ; \\ 漢"
PATHS = [
    NASTY,
    *NASTY.split(),
    "\\",
    "\\\\",
    "a\\'b",
    "a\\\\'",
    "'",
    "''",
    "",
    "null",
    "1e3",
    "true",
    "a b ",
    "~a",
    "?",
]


def read(text: str) -> str:
    """The value of an override, as Hydra reads it."""
    return OverridesParser.create().parse_override(text).value()


@given(st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" \\'"), max_size=20))
def test_any_text_is_read_as_it_is(text):
    value = read(override("a.b", text))
    assert (value if isinstance(value, str) else value.text) == text


def test_bash_quotes_alike():
    script = f'source "{QUOTED}"; for text in "$@"; do quoted "$text"; done'
    run = subprocess.run(["bash", "-c", script, "bash", *PATHS], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [override("", text).removeprefix("=") for text in PATHS]


@pytest.mark.parametrize(
    ("experiment", "model", "problems"),
    [(LedgerExperiment, "warm-start-seed0/model", "warm-start-seed0"), (RealExperiment, "model", "fspo-hf-seed0")],
)
def test_scripts_that_train_give_their_paths_to_verl(experiment, model, problems):
    output = Path("/runs") / NASTY
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("fspo_cpu", overrides=launch.overrides(experiment(output)), return_hydra_config=True)
    run = output / "fspo-hf-seed0"
    assert config.hydra.run.dir == f"{run}/hydra"
    assert config.trainer.default_local_dir == f"{run}/checkpoints"
    assert config.actor_rollout_ref.actor.policy_loss.records_dir == f"{run}/records"
    assert config.actor_rollout_ref.model.path == f"{output}/{model}"
    assert config.data.train_files == f"{output}/{problems}/train.parquet"
    assert config.data.val_files == f"{output}/{problems}/validation.parquet"
