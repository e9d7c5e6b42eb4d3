# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Every form in which Hydra takes an option of the group: what is asked for trains, or is refused with a working fix.

The config is a small stand-in of verl's, so that hundreds of launches are composed.
"""

import math
import os
import re
import subprocess
import sys

import pytest
from composed import composed, mended
from hydra.errors import HydraException
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from fspo_verl.findings import Finding
from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS
from fspo_verl.launch import selection
from fspo_verl.launch.asked import Refused
from fspo_verl.launch.view import Launch

STOCK = """
algorithm: {adv_estimator: grpo}
data: {max_response_length: 10}
actor_rollout_ref:
  rollout: {response_length: 10}
  actor:
    _target_: verl.workers.config.ActorConfig
    policy_loss: {_target_: verl.workers.config.PolicyLossConfig, loss_mode: vanilla}
    loss_agg_mode: token-mean
    loss_scale_factor: null
    clip_ratio_low: 0.2
    clip_ratio_high: 0.2
    clip_ratio_c: 3.0
"""
OWN = "defaults: [stock, {group}, _self_]\n"
CONFIGS = {  # name, text, the option that it selects by itself
    "stock": (STOCK, None),
    "selects": (OWN.format(group=f"{GROUP}: fspo"), "fspo"),
    "leftover": (
        OWN.format(group=f"{GROUP}: gspo") + "actor_rollout_ref: {actor: {policy_loss: {loss_mode: vanilla}}}",
        "gspo",
    ),
    "elsewhere": (OWN.format(group=f"{GROUP}@foo: fspo"), "fspo"),
    "as_value": ("defaults: [stock, _self_]\nalgorithm: {policy_loss: fspo}\n", "fspo"),
    "as_other_value": ("defaults: [stock, _self_]\nalgorithm: {policy_loss: clipped}\n", None),
    "value_beside_it": (OWN.format(group=f"{GROUP}: fspo") + "algorithm: {policy_loss: fspo}\n", "fspo"),
}
OWN_KEY = ("as_value", "as_other_value")
PREFIXES = ("", "+", "++")
OPTIONS = ("fspo", "gspo", "no_clip", "[gspo]", "[fspo,gspo]", "gspo.yaml", "'fspo'", "${oc.env:LOSS}", "${choice}")
NAMED = {
    "[gspo]": "gspo",
    "[fspo,gspo]": "gspo",
    "gspo.yaml": "gspo",
    "'fspo'": "fspo",
    "${oc.env:LOSS}": "gspo",
    "${choice}": "no_clip",
}
SELECTIONS = [
    f"{prefix}{GROUP}{package}={option}"
    for prefix in PREFIXES
    for package in ("", "@foo", "@_global_")
    for option in OPTIONS
]
OTHERS = [
    *(f"~{GROUP}", f"~{GROUP}=fspo", f"~{GROUP}=gspo", f"~{POLICY_LOSS}", f"~{POLICY_LOSS}.loss_mode"),
    *(f"{POLICY_LOSS}.loss_mode=vanilla", f"++{POLICY_LOSS}._target_=verl.workers.config.PolicyLossConfig"),
    f"++{POLICY_LOSS}={{loss_mode:vanilla}}",
    *("++algorithm={policy_loss:fspo}", f"{GROUP}=null", "+algorithm.policy_lost=fspo", f"{POLICY_LOSS}=fspo"),
    f"{ACTOR}.clip_ratio_low=0.1",
]
IDENTITY = ("_target_", "loss_mode", "length_bins", "eps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the configs, and a group by whose choice an option of ours can be named."""
    folder = tmp_path_factory.mktemp("configs")
    for name, (text, _) in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "choice").mkdir()
    (folder / "choice" / "no_clip.yaml").write_text("{}")
    return folder


def outcome(folder, name: str, overrides: list[str]) -> tuple[dict, Finding | None]:
    """The values by which the composed policy loss is known, or the finding with which the launch is refused."""

    def look(config):
        launch = Launch(config)
        errors = [one for one in selection.lost_selections(launch) if one.severity == "error"]
        policy_loss = launch.get(POLICY_LOSS) or {}
        return ({key: policy_loss.get(key) for key in IDENTITY}, None) if not errors else ({}, errors[0])

    try:
        return composed(["--config-path", str(folder), "--config-name", name, *overrides, "+choice=no_clip"], look)
    except Refused as refused:
        return {}, refused.finding
    except HydraException:  # it refuses by itself what takes away an option or a key that is not there
        assume(False)


def asked(name: str, overrides: list[str]) -> str | None:
    """The option that the last of the overrides names, or else the config."""
    option = CONFIGS[name][1]
    selections = [text for text in overrides if text in SELECTIONS]
    if name in OWN_KEY and not any("@" in text or re.match(r"\+[^+]", text) for text in selections):
        # What has no package, and no plus or two, is a value of the user's own key. It means the group only as fspo.
        typed = (text.partition("=")[2] for text in overrides if re.match(rf"(\+\+)?{GROUP}=", text))
        values = [NAMED.get(value, value) for value in typed]
        return "fspo" if [option, *values][-1] == "fspo" else None
    if not selections and name != "elsewhere" and {f"~{GROUP}", f"~{GROUP}={option}"} & {*overrides}:
        return None
    for text in selections:
        value = text.partition("=")[2]
        option = NAMED.get(value, value)
    return option


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(st.sampled_from([*CONFIGS]), st.lists(st.sampled_from([*SELECTIONS, *OTHERS]), max_size=3, unique=True))
@example("stock", [f"{GROUP}=[gspo]", f"{POLICY_LOSS}.loss_mode=vanilla"])
@example("stock", [f"{GROUP}=gspo.yaml", f"{POLICY_LOSS}.loss_mode=vanilla"])
@example("stock", [f"{GROUP}=fspo", f"~{POLICY_LOSS}"])
@example("stock", [f"+{GROUP}@foo=fspo"])
@example("stock", [f"~{GROUP}", f"{GROUP}=fspo"])
@example("stock", [f"{GROUP}=fspo", f"{GROUP}=gspo"])
@example("stock", [f"{GROUP}=fspo", f"+{GROUP}=gspo"])
@example("selects", [f"+{GROUP}=fspo"])
@example("as_value", [])
@example("as_value", [f"{GROUP}=fspo"])
@example("elsewhere", [])
def test_what_is_asked_for_trains_or_is_refused_with_a_fix_that_works(folder, monkeypatch, name, overrides):
    monkeypatch.setenv("LOSS", "gspo")
    is_one_fault = len(overrides) + (name not in ("stock", "selects")) <= 1
    # Hydra's composition is judged before keys that select nothing: a remedy may bring the next fault to light.
    for _ in range(1 if is_one_fault else 2 * len(overrides) + 2):
        trains, fix = outcome(folder, name, overrides)
        if not fix:
            break
        overrides = mended(fix, overrides)
    trains, fix = outcome(folder, name, overrides)
    assert not fix
    option = asked(name, overrides)
    assert (trains["length_bins"] is not None) == (option is not None)
    if option is not None:
        assert trains["loss_mode"] == {"no_clip": "fspo"}.get(option, option)
        assert trains["loss_mode"] != "fspo" or (trains["eps"] == math.inf) == (option == "no_clip")


OWN_FSPO = f"# @package _global_\n{POLICY_LOSS.replace('.', ': {')}: {{loss_mode: mine}}}}}}\n"


@pytest.mark.parametrize("names_it", ["on the command line", "in the config"])
def test_files_of_the_group_on_the_users_search_path_come_before_ours(names_it, folder, tmp_path):
    (tmp_path / GROUP).mkdir()
    (tmp_path / GROUP / "fspo.yaml").write_text(OWN_FSPO)
    path, name = f"hydra.searchpath=[file://{tmp_path}]", "stock"
    if names_it == "in the config":
        path, name = "data.max_response_length=1", "searches"
        (folder / "searches.yaml").write_text(
            f"hydra: {{searchpath: ['file://{tmp_path}']}}\ndefaults: [stock, _self_]\n"
        )
    for option, trains in (("fspo", "mine"), ("gspo", "gspo")):
        arguments = ["--config-path", str(folder), "--config-name", name, path, f"{GROUP}={option}"]
        assert composed(arguments, lambda config: config.actor_rollout_ref.actor.policy_loss.loss_mode) == trains


SHOWS = """
import sys
import verl
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

folder, output, *words = sys.argv[1:]
for info in ("config", "searchpath", "defaults", "defaults-tree", "all", "plugins"):
    with initialize_config_dir(folder, version_base=None):
        print("info", info, flush=True)
        GlobalHydra.instance().hydra.show_info(info, "stock", words)
with initialize_config_dir(folder, version_base=None):
    words += ["hydra.verbose=true", f"hydra.run.dir={output}"]
    print("info verbose", flush=True)
    GlobalHydra.instance().hydra.run("stock", lambda config: print("trains", config.actor_rollout_ref.actor), words)
"""


@pytest.mark.parametrize("asks", ["by the command line", "by the environment"])
def test_what_hydra_shows_of_a_launch_is_what_it_composes(asks, folder, tmp_path):
    """Each ``--info`` shows it, and ``hydra.verbose=true``."""
    words = [f"{GROUP}=fspo"]
    env = os.environ | ({} if asks == "by the command line" else {OVERRIDES: words[0]})
    command = [sys.executable, "-c", SHOWS, folder, tmp_path / "out", *(words if asks == "by the command line" else [])]
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    shown = {part.split("\n")[0]: part for part in run.stdout.split("info ")[1:]}
    for info in ("defaults", "defaults-tree", "all", "verbose"):
        assert re.search(rf"{GROUP}(/|: )fspo", shown[info]), info
    assert "'loss_mode': 'fspo'" in shown["verbose"].partition("trains")[2]
