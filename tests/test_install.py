# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The installed package in environments of its own: wheel, sdist, editable, none, and after an uninstall."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

from fspo_verl.demo.command import SAID

ROOT = Path(__file__).parents[1]


class Environment:
    """A virtual environment that sees every installed package of this one but fspo_verl."""

    def __init__(self, path: Path):
        venv.create(path, with_pip=True)
        self.python = str(path / "bin" / "python")
        site = Path(self.output("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        view = path / "dependencies"
        view.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not any(word in entry.name.lower() for word in ("fspo", "__pycache__", ".pth", "__editable__")):
                (view / entry.name).symlink_to(entry)
        (site / "dependencies.pth").write_text(f"{view}\n")

    def output(self, *args, cwd="/", **env):
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [self.python, *args]
        run = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def pip(self, *args):
        return self.output("-m", "pip", "--quiet", "--disable-pip-version-check", *args)


def copy_sources(copy: Path) -> Path:
    """A copy of the sources, of a checkout or of an unpacked sdist, so that building leaves nothing there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout if listed.returncode == 0 else (ROOT / "fspo_verl.egg-info/SOURCES.txt").read_text()
    for name in names.splitlines():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    return copy


def build(source: Path, kind: str) -> Path:
    """Build a ``bdist_wheel`` or an ``sdist`` from the sources with this interpreter's setuptools; returns the file."""
    command = [sys.executable, "setup.py", "--quiet", kind, "--dist-dir", f"dist-{kind}"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next((source / f"dist-{kind}").iterdir())


# One process per question: what verl and Hydra make of this environment.
PROBE = """
import json, sys, logging
import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from hydra import compose, initialize_config_module
answer = {"registered": "fspo" in POLICY_LOSS_REGISTRY}
with initialize_config_module("verl.trainer.config", version_base=None):
    override, with_plus = ["algorithm.policy_loss=fspo"], ["+algorithm.policy_loss=fspo"]
    telling = [*override, "actor_rollout_ref.actor.policy_loss.records_dir=/run/records"]  # a field of this package's
    asked = *(("ppo_trainer", words) for words in (override, with_plus, telling, [])), ("fspo_trainer", [])
    for name, overrides in asked:
        try:
            config = compose(name, overrides)
            answer[" ".join([name, *overrides])] = config.actor_rollout_ref.actor.policy_loss.loss_mode
        except Exception as error:
            answer[" ".join([name, *overrides])] = type(error).__name__
        if "fspo" in sys.argv and name == "ppo_trainer" and overrides:
            from verl.utils.config import omega_conf_to_dataclass
            config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
            answer["schema"] = type(omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss).__name__
answer["registered with a schema"] = "fspo" in POLICY_LOSS_REGISTRY
print(json.dumps(answer))
"""
TELLING = "ppo_trainer algorithm.policy_loss=fspo actor_rollout_ref.actor.policy_loss.records_dir=/run/records"
WITH = {
    "registered": True,
    "ppo_trainer algorithm.policy_loss=fspo": "fspo",
    "ppo_trainer +algorithm.policy_loss=fspo": "fspo",
    TELLING: "fspo",
    "fspo_trainer": "fspo",
    "ppo_trainer": "vanilla",
    "schema": "FSPOPolicyLossConfig",
    "registered with a schema": True,
}
WITHOUT = {
    "registered": False,
    "ppo_trainer algorithm.policy_loss=fspo": "ConfigCompositionException",
    "ppo_trainer +algorithm.policy_loss=fspo": "vanilla",  # stock verl takes it for a value that nothing reads
    TELLING: "ConfigCompositionException",  # and refuses a field that it does not know
    "fspo_trainer": "MissingConfigException",
    "ppo_trainer": "vanilla",
    "registered with a schema": False,
}


def probe(environment, *args, **env):
    return json.loads(environment.output("-c", PROBE, *args, **env).splitlines()[-1])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return copy_sources(tmp_path_factory.mktemp("source") / "fspo_verl")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture(scope="module")
def wheel(source):
    return build(source, "bdist_wheel")


def test_wheel_and_its_removal(environment, wheel):
    tops = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    assert tops == {"fspo_verl", "hydra_plugins"}  # `tests` or `scripts` would overwrite verl's
    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    assert probe(environment, "fspo") == WITH
    # Where verl is told to load no plugins, a launch is composed as without this package.
    assert probe(environment, VERL_USE_EXTERNAL_PLUGINS="none") == WITHOUT
    _other_hydra_programs_see_no_change(environment)
    _demo_needs_neither_verl_nor_an_extra(environment)

    environment.pip("uninstall", "--yes", "fspo-verl")
    assert probe(environment) == WITHOUT


def test_the_wheel_needs_no_other_package_of_this_repository(wheel):
    assert not [name for name, content in contents(wheel).items() if b"fspo_verl_cpu" in content]


def _demo_needs_neither_verl_nor_an_extra(environment):
    absent = ("verl", "torch", "pandas", "scipy", "matplotlib", "jinja2")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({absent})\nfrom fspo_verl import cli; sys.exit(cli.main(['demo']))"
    )
    shown = environment.output("-c", code).splitlines()
    (page,) = [Path(line.split()[1]) for line in shown if line.startswith("page ")]
    assert shown[:1] == SAID.read_text().splitlines()[:1] and page.is_relative_to(Path(environment.python).parents[1])
    assert sum(file.stat().st_size for file in page.parent.iterdir() if file.is_file()) <= 400_000


def _other_hydra_programs_see_no_change(environment):
    program = textwrap.dedent("""
        import hydra
        from hydra.core.hydra_config import HydraConfig
        @hydra.main(config_path=None, version_base=None)
        def main(config):
            print([source.path for source in HydraConfig.get().runtime.config_sources], dict(config))
        main()
    """)
    path = Path(environment.python).parent / "other_program.py"
    path.write_text(program)
    output = environment.output(str(path), cwd=str(path.parent))
    assert "hydra.conf" in output and "fspo" not in output
    assert "Traceback" not in output


@pytest.mark.long
def test_editable(environment, source):
    # --no-build-isolation: the build takes setuptools from this environment, so that nothing is downloaded.
    environment.pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(source))
    assert probe(environment, "fspo") == WITH
    environment.pip("uninstall", "--yes", "fspo-verl")


def contents(wheel: Path) -> dict[str, bytes]:
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


@pytest.mark.long
def test_an_sdist_makes_the_same_wheel_and_holds_no_study_and_tests_that_need_none(source, wheel, tmp_path):
    with tarfile.open(build(source, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert contents(build(unpacked, "bdist_wheel")) == contents(wheel)
    assert (unpacked / "scripts/quickstart.sh").exists() and not (unpacked / "scripts/studies").exists()
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/analysis", "scripts/tests"]
    collected = subprocess.run(command, cwd=unpacked, capture_output=True, text=True)
    assert collected.returncode == 0 and "test_compare.py" in collected.stdout, collected.stdout
