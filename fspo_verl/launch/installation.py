# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Whether what is installed on this machine can train the losses.

An untested verl gets a smoke test of the loss and its gradient. What else could break in silence is tested in
tests/verl_contract; what fails with an error of its own is not tested here.
"""

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata

from packaging.specifiers import SpecifierSet

from fspo_verl import output, versions
from fspo_verl.findings import Finding
from fspo_verl.launch.view import error, note, warning

# No upper bound: a newer verl is tried, not told by its number.
SUPPORTED_VERL = ">=0.9.0"
# What `bash scripts/test.sh` and `bash scripts/test_versions.sh` run.
TESTED = {
    "verl": ("0.9.0", "0.9.1"),
    "torch": ("2.13.0",),
    "transformers": ("5.10.4",),
    "vllm": ("0.27.1",),
    "ray": ("2.60.0",),
}
INSTALL = "pip install . in a clone of fspo_verl"


def findings() -> Iterator[Finding]:
    """Versions, and whether verl and Hydra find this package here."""
    present = {package: versions.installed(package) for package in TESTED}
    text = ", ".join(f"{package} {version or 'not installed'}" for package, version in present.items())
    tested = "; ".join(f"{package} {', '.join(known)}" for package, known in TESTED.items())
    yield note(f"{text}, Python {sys.version.split()[0]}", f"tested are {tested}", id="versions")
    yield from verl_version()
    yield from filter(None, [left_out()])
    if not any(point.value == "fspo_verl.plugin" for point in metadata.entry_points(group="verl.plugins")):
        why = "the package is imported, not installed"
        yield error("verl finds no plugin fspo_verl", why, INSTALL, id="entry_point")
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins is None or importlib.util.find_spec("hydra_plugins.fspo_verl_searchpath") is None:
        why = "Hydra does not see the packaged configs, and algorithm.policy_loss=fspo selects nothing"
        yield error("hydra_plugins.fspo_verl_searchpath is missing", why, INSTALL, id="search_path")


# --- a verl that is too old, or was never tested ---------------------------------------------------------------------


def verl_version() -> Iterator[Finding]:
    """This verl was never tested, and the loss is tried first. Read what that says, or install a tested one.

    A development version counts as never tested, as it names no certain sources.
    """
    version = versions.installed("verl")
    if version is None or version in TESTED["verl"]:
        return
    if (finding := too_old()) is not None:
        yield finding
        return
    what = f"verl {version} was not tested with fspo_verl"
    fix = f"read the report of a first run, or pip install verl=={TESTED['verl'][-1]}"
    yield warning(what, f"tested are {', '.join(TESTED['verl'])}", fix, id="untested_verl")
    if (wrong := problem()) is not None:
        what = f"verl {version} does not do what fspo_verl needs of it: {wrong}"
        fix = f"a newer fspo_verl, or pip install verl=={TESTED['verl'][-1]}"
        yield warning(what, "the loss would fail, or train something else than it says", fix, id="probe")


def too_old() -> Finding | None:
    """The verl that Python imports is older than 0.9, or a copy in a folder. Install 0.9 or newer."""
    version, folder = versions.installed("verl"), versions.verl_folder()
    if version is None or SpecifierSet(SUPPORTED_VERL).contains(version, prereleases=True):
        return None
    what = f"Python imports verl {version} from {folder}, and fspo_verl needs verl {SUPPORTED_VERL}"
    why = "the workers of an old verl load no plugins, and would train another loss"
    fix = f"pip install 'verl{SUPPORTED_VERL}'"
    if folder and not folder.is_relative_to(sysconfig.get_path("purelib")):
        fix += f", and start where {folder} does not come before it; or select no loss of fspo_verl"
    return error(what, why, fix, id="verl_version")


def left_out() -> Finding | None:
    """``VERL_USE_EXTERNAL_PLUGINS`` leaves this package out. Unset it, or name ``fspo_verl`` in it."""
    plugins = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    if plugins == "auto" or "fspo_verl" in map(str.strip, plugins.split(",")) or "fspo_verl.plugin" in modules:
        return None
    what = f"VERL_USE_EXTERNAL_PLUGINS={plugins} leaves fspo_verl out"
    return error(what, "verl and Hydra are as without it", "unset it, or add fspo_verl to it", id="left_out")


def problem() -> str | None:
    """Return where the installed verl differs from what the losses need. Takes about a second, without Ray."""
    try:
        with output.reserved():
            return _wrong_loss()
    except Exception as error:  # another signature, type or name: whatever verl made of it
        return f"the loss cannot be called: {type(error).__name__}: {error}"


def _wrong_loss() -> str | None:
    """One of two responses of a batch, inside the range, through verl's ``ppo_loss``: value and gradient."""
    import torch
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from fspo_verl.config import FSPOPolicyLossConfig

    def nested(row):  # as verl's engines hand over tokens without padding
        return torch.nested.as_nested_tensor([torch.as_tensor(row)], layout=torch.jagged)

    responses, length, divisor = 2, 3, 8
    config = FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=FSPOPolicyLossConfig(),
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=divisor,
    )
    rows: dict[str, list] = {"prompts": [0, 0], "responses": [0] * length, "response_mask": [1] * length}
    rows |= {"old_log_probs": [-1.01] * length, "advantages": [-1.0] * length}
    totals = {"dp_size": 1, "batch_num_tokens": 5, "global_batch_size": responses}
    # What a model puts out at one position scores the next token; -3 scores none of the response.
    log_prob = torch.tensor([-3.0, *[-1.0] * length, -3.0], requires_grad=True)
    data = get_tensordict({key: nested(row) for key, row in rows.items()}, totals)
    loss, _ = ppo_loss(config, {"log_probs": nested(log_prob)}, data)
    loss.backward()
    gradient = torch.tensor(0.01 * length).exp() / responses / divisor  # of each token
    expected = torch.cat([torch.zeros(1), gradient.expand(length), torch.zeros(1)])
    grad = log_prob.grad
    if grad is not None and torch.allclose(loss, gradient * length) and torch.allclose(grad, expected):
        return None
    return f"loss_mode=fspo gives {loss.item():.4g} on {length} tokens, not {gradient.item() * length:.4g}"
