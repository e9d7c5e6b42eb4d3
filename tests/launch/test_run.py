# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl run` and FSPO_VERL_OVERRIDES: what a launch trains below them, and what becomes of the command."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from composed import composed
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fspo_verl import cli
from fspo_verl.keys import ACTOR, GROUP, OVERRIDES, POLICY_LOSS, RECORDS_DIR
from fspo_verl.launch import asked, hook, run, starts
from fspo_verl.launch.hydra_files import leaves, option

# verl's keys that a launch is about, in one small file: it composes ten times as fast as verl's own.
CONFIG = """
algorithm: {adv_estimator: grpo}
actor_rollout_ref:
  actor:
    policy_loss: {_target_: verl.workers.config.PolicyLossConfig, loss_mode: vanilla, clip_cov_ratio: 0.0002}
    loss_agg_mode: token-mean
    loss_scale_factor: null
    clip_ratio: 0.2
    clip_ratio_low: 0.2
    clip_ratio_high: 0.2
    clip_ratio_c: 3.0
  rollout: {response_length: 512}
trainer:
  val_only: false
  project_name: project
  experiment_name: experiment
  default_local_dir: checkpoints/${trainer.project_name}/${trainer.experiment_name}
  resume_mode: auto
  resume_from_path: null
  save_freq: 10
  total_training_steps: 100
"""
FILES = {  # of a user's own, over this config
    "gspo_with_own_values": f"defaults: [trainer, {GROUP}: gspo, _self_]\n"
    "actor_rollout_ref: {actor: {loss_agg_mode: token-mean, clip_ratio_high: 0.5}}",
    "fspo_with_own_eps": f"defaults: [trainer, {GROUP}: fspo, _self_]\n"
    "actor_rollout_ref: {actor: {policy_loss: {eps: 0.5}}}",
    "own_values": "defaults: [trainer, _self_]\n"
    "actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-mean, clip_ratio_high: 0.28}}",
}
OWN_KEY = {"own_key": "defaults: [trainer, _self_]\nalgorithm: {policy_loss: mine}"}
OTHERS = {  # that train no policy
    "generation": "defaults: [trainer, _self_]\nhydra: {job: {name: main_generation_server}}",
    "supervised": "model: {path: x}\ntrainer: {default_local_dir: checkpoints}",
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A folder with the config and the user's own files."""
    folder = tmp_path_factory.mktemp("configs")
    for name, text in {"trainer": CONFIG, **FILES, **OWN_KEY, **OTHERS}.items():
        (folder / f"{name}.yaml").write_text(f"{text}\n")
    return folder


@pytest.fixture
def launch(configs, monkeypatch, tmp_path):
    """Compose a launch, in an empty folder, below a value of the variable."""
    monkeypatch.chdir(tmp_path)

    def launched(value, overrides=(), name="trainer"):
        monkeypatch.setenv(OVERRIDES, value)
        with initialize_config_dir(str(configs), version_base=None):
            return compose(name, [*overrides], return_hydra_config=True)

    return launched


def task(config):
    """The config that a main gets, with interpolations as they are written."""
    return leaves({key: value for key, value in OmegaConf.to_container(config).items() if key != "hydra"})


LAUNCHES = {  # overrides of the launch, and its config
    "none": "",
    "DAPO's range": f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio_c=10",
    "GSPO": f"{POLICY_LOSS}.loss_mode=gspo ++{ACTOR}.clip_ratio_high=4e-4 {ACTOR}.loss_agg_mode=seq-mean-token-mean",
    "another loss's settings": f"{POLICY_LOSS}.loss_mode=clip_cov {POLICY_LOSS}.clip_cov_ratio=0.1 "
    f"+{POLICY_LOSS}.new=1 trainer.experiment_name=x",
    "a section at once": f"{ACTOR}={{loss_agg_mode:token-mean,loss_scale_factor:3}} {POLICY_LOSS}={{loss_mode:gspo}}",
    "FSPO already": f"{GROUP}=fspo {POLICY_LOSS}.eps=0.5 {POLICY_LOSS}.length_bins=[7,9] {ACTOR}.clip_ratio=0.1",
    "a baseline already": f"+{GROUP}=gspo {ACTOR}.clip_ratio_low=1e-3 {POLICY_LOSS}.records_freq=3",
    "a section that is taken away": f"~{POLICY_LOSS}.clip_cov_ratio",
    **dict.fromkeys(FILES, ""),
}
MORE = {"fspo": f" {POLICY_LOSS}.eps=0.02", "gspo": f" {ACTOR}.clip_ratio_low=0.002", "observed": ""}


ALL_LOSSES = ("FSPO already", "a baseline already", "GSPO", "own_values", "gspo_with_own_values")
CASES = [(name, "fspo") for name in LAUNCHES] + [(name, loss) for name in ALL_LOSSES for loss in ("gspo", "observed")]


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_a_launch_trains_what_is_asked_and_the_line_says_how(name, loss, launch, capsys):
    """All that the option and the variable set holds, nothing else changes, and the line can be pasted."""
    words, file = shlex.split(LAUNCHES[name]), name if name in FILES else "trainer"
    plain = task(launch("", words, file))
    config = launch(f"{GROUP}={loss}{MORE[loss]}", words, file)
    (line,) = (text for text in capsys.readouterr().err.splitlines() if text.startswith("fspo_verl: "))
    added, _, out = line.removeprefix(f"fspo_verl: {OVERRIDES}: added ").partition("; left out ")
    added, out = shlex.split(added), shlex.split(out)
    assert set(out) <= set(words)
    pasted = [*(word for word in words if word not in out), *added]
    if name == "own_values" and loss != "observed":  # which the variable replaces, and nobody by hand without a word
        with pytest.raises(asked.Refused, match="a config file sets"):
            launch("", pasted, file)
    else:
        by_hand = launch("", pasted, file)
        assert task(by_hand) == task(config) and [*by_hand.hydra.overrides.task] == [*config.hydra.overrides.task]

    final, more = task(config), dict(word.split("=") for word in MORE[loss].split())
    assert {key: str(final[key]) for key in more} == more
    records = OmegaConf.select(config, RECORDS_DIR)
    assert records.startswith(f"{Path.cwd()}/checkpoints/project/{final['trainer.experiment_name']}/")
    changed = {key for key in plain.keys() | final.keys() if plain.get(key) != final.get(key)} - {RECORDS_DIR, *more}
    has_it = loss == plain[f"{POLICY_LOSS}.loss_mode"] and RECORDS_DIR in plain
    if has_it or (loss == "observed" and RECORDS_DIR in plain):
        assert not changed and not out
    elif loss == "observed":
        assert not out and {key for key in changed if key in plain} == {f"{POLICY_LOSS}._target_"}
    else:
        kept = {key for word in words if (key := word.split("=")[0]) in option("observed")}
        wanted = {key: value for key, value in option(loss).items() if key not in {RECORDS_DIR, *more, *kept}}
        assert {key: final[key] for key in wanted} == wanted
        assert all(key.startswith((POLICY_LOSS, f"{ACTOR}.clip_ratio", f"{ACTOR}.loss_")) for key in changed)


@pytest.mark.parametrize(("name", "overrides"), [("trainer", ["trainer.val_only=true"]), *((of, []) for of in OTHERS)])
def test_what_trains_no_policy_is_left_alone(name, overrides, launch, capsys):
    plain, config = launch("", overrides, name), launch("no list of overrides", overrides, name)
    assert OmegaConf.to_container(config) == OmegaConf.to_container(plain) and capsys.readouterr().err == ""


BAD = {  # values of the variable, and what the sentence names
    "algorithm.policy_loss=fpso": "fpso",
    f"{POLICY_LOSS}.eps=0.1": "none",
    f"{GROUP}=fspo {GROUP}=gspo": "fspo and gspo",
    f"{GROUP}=fspo trainer.nnodes=2": "trainer.nnodes",
    f"{GROUP}=fspo {POLICY_LOSS}.esp=0.1": "esp",
    f"{GROUP}=gspo {POLICY_LOSS}.eps=0.1": "eps",
    f"{GROUP}=fspo {POLICY_LOSS}._target_=x": "_target_",
    f"{GROUP}=fspo,gspo": "gives no value",
    f"~{GROUP}": "gives no value",
    f"{GROUP}=fspo 'a": "No closing quotation",
    f"{GROUP}=fspo eps": "missing EQUAL",
}


@pytest.mark.parametrize("value", BAD)
def test_a_bad_value_is_one_sentence_and_the_command_does_not_start(value, launch, capsys):
    with pytest.raises(HydraException) as refused:
        launch(value)
    assert BAD[value] in str(refused.value) and len(str(refused.value).splitlines()) == 1
    if value.startswith(f"{GROUP}=fspo ") and value.count(GROUP) == 1:
        code = cli.main(["run", value.partition(" ")[2], "--", "touch", "started"])
        assert code == 2 and len(capsys.readouterr().err.splitlines()) == 1 and not Path("started").exists()


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_lie_beside_the_checkpoints_unless_a_folder_is_named(launch):
    folder = Path.cwd() / "checkpoints/project/experiment/fspo_records"
    assert OmegaConf.select(launch(f"{GROUP}=fspo"), RECORDS_DIR) == str(folder)
    named = [f"{RECORDS_DIR}=/mine"]
    assert OmegaConf.select(launch(f"{GROUP}=fspo {named[0]}"), RECORDS_DIR) == "/mine"
    assert OmegaConf.select(launch(f"{GROUP}=fspo", [f"{GROUP}=gspo", *named]), RECORDS_DIR) == "/mine"
    assert OmegaConf.select(launch(f"{GROUP}=fspo {RECORDS_DIR}=null"), RECORDS_DIR) is None
    config = launch(f"{GROUP}=fspo", ["hydra.job.chdir=true", "trainer.experiment_name='a (b)'"])
    folder = Path.cwd() / config.hydra.run.dir / "checkpoints/project/a (b)/fspo_records"
    assert OmegaConf.select(config, RECORDS_DIR) == str(folder)


def test_records_follow_the_checkpoints_that_a_main_moves(launch):
    content = OmegaConf.to_container(launch(f"{GROUP}=fspo"))
    content["trainer"]["experiment_name"] = "phase 2"
    moved = Path.cwd() / "checkpoints/project/phase 2/fspo_records"
    assert OmegaConf.select(OmegaConf.create(content), RECORDS_DIR) == str(moved)


def test_a_folder_that_is_named_by_the_overrides_keeps_its_name(launch):
    overrides = [f"{ACTOR}.clip_ratio=0.1", "hydra.run.dir=out/${hydra.job.override_dirname}"]
    assert launch(f"{GROUP}=fspo", overrides).hydra.run.dir == f"out/{ACTOR}.clip_ratio=0.1"


def test_without_a_folder_for_checkpoints_the_loss_is_taken_and_nothing_is_recorded(launch):
    config = launch(f"{GROUP}=fspo", ["~trainer.default_local_dir"])
    assert OmegaConf.select(config, f"{POLICY_LOSS}.loss_mode") == "fspo"
    assert OmegaConf.select(config, RECORDS_DIR) is None


# --- launches that do not train what is asked ------------------------------------------------------------------------


def test_a_launch_whose_main_makes_its_config_itself_is_refused(launch, monkeypatch):
    plain, config = launch(""), launch(f"{GROUP}=fspo {POLICY_LOSS}.eps=0.02")
    hook.begin("main", config)
    OmegaConf.update(config, f"{POLICY_LOSS}.eps", 0.03)
    for wrong in (plain, config):
        with pytest.raises(ValueError, match=f"{OVERRIDES} asks for {GROUP}=fspo"):
            hook.begin("main", wrong)
        with pytest.raises(ValueError, match=f"{OVERRIDES} asks for {GROUP}=fspo"):
            hook.at_the_logger(OmegaConf.to_container(wrong))
    OmegaConf.update(plain, "trainer.val_only", True)
    hook.begin("main", plain)


def begin(config):
    hook.begin(hook.FIRST, config)


SIZES = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2"]
SIZES += ["data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=128"]
VERL = "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: [ppo_trainer, _self_]\n"


def test_the_checks_of_a_launch_judge_what_it_trains_now(tmp_path, monkeypatch, caplog):
    """A file with another loss's settings is a warning, where verl's own config is composed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OVERRIDES, f"{GROUP}=fspo")
    (tmp_path / "mine.yaml").write_text(f"{VERL}actor_rollout_ref: {{actor: {{loss_agg_mode: seq-mean-token-mean}}}}\n")
    mine = ["--config-path", str(tmp_path), "--config-name", "mine", *SIZES]
    with caplog.at_level("INFO", logger="fspo_verl"):
        composed(mine, begin)
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == 1 and "a config file sets" in said[0]
        distillation = ["distillation.enabled=true", "distillation.distillation_loss.use_task_rewards=false"]
        with pytest.raises(ValueError, match="drops the policy loss fspo"):
            composed([*mine, *distillation, "distillation.n_gpus_per_node=1"], begin)


def test_a_file_that_replaces_the_packaged_one_is_a_refusal_that_says_so(launch, configs):
    (configs / GROUP).mkdir()
    (configs / GROUP / "no_clip.yaml").write_text("{}\n")
    with pytest.raises(HydraException, match=f"{OVERRIDES} asks for {GROUP}=no_clip.* files of yours set another one"):
        launch(f"{GROUP}=no_clip")
    shutil.rmtree(configs / GROUP)


def test_a_key_of_the_users_with_the_name_of_the_group_does_not_hide_it(launch):
    assert asked.problem(launch(f"{GROUP}=fspo", name="own_key")) is None


# --- the command -----------------------------------------------------------------------------------------------------

# In place of a main of verl: what Hydra hands it is what is asked of `run`, and no second is spent on verl's import.
MAIN = """
import pathlib, sys, time
import hydra
from omegaconf import OmegaConf
from fspo_verl.launch import hook, installation

@hydra.main(config_path=sys.argv.pop(1), config_name="trainer", version_base=None)
def main(config):
    hook.check = hook._name_attempt = lambda config, is_alone=False: None
    if installation.left_out() is None:  # as the plugin does
        name = config.trainer.experiment_name
        if name != "at the logger":
            hook.begin(hook.FIRST, config)
        if "logger" in name:  # which a worker of Ray builds
            hook._start = hook.Start()
            hook.at_the_logger(OmegaConf.to_container(config, resolve=True))
    if config.trainer.experiment_name == "goes on":
        pathlib.Path("began").touch()
        while not pathlib.Path("stop").exists():
            time.sleep(0.1)
    if config.trainer.experiment_name.startswith("records"):
        folder = pathlib.Path(config.actor_rollout_ref.actor.policy_loss.records_dir)
        folder.mkdir(parents=True)
        (folder / "step-000001-rank-0000.parquet").touch()

main()
"""


@pytest.fixture
def command(configs, tmp_path, monkeypatch):
    """Run `fspo-verl run` on a script of bash, in which `train` stands for a main; exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(OVERRIDES, raising=False)
    (tmp_path / "main.py").write_text(MAIN)
    train = f'train() {{ {sys.executable} {tmp_path}/main.py {configs} "$@" hydra.run.dir=out; }}\nexport -f train\n'

    def ran(script, *options):
        Path("my_script.sh").write_text(train + script)
        words = [sys.executable, "-m", "fspo_verl.cli", "run", *options, "--", "bash", "my_script.sh"]
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
        return done.returncode, done.stdout, done.stderr

    return ran


def test_every_way_to_start_a_training_takes_the_loss_and_an_inner_run_counts(command):
    script = f"""
for seed in 1 2; do
  train "trainer.experiment_name='records ($seed)'" +data.seed=$seed {ACTOR}.clip_ratio_high=0.28
done
eval "train +data.file=a"
bash <<'EOF'
train trainer.experiment_name=vanilla {ACTOR}.clip_ratio_high=0.28
EOF
ARM="train trainer.experiment_name=gspo {POLICY_LOSS}.loss_mode=gspo"
python3 -c 'import subprocess, sys; subprocess.run(["bash", "-c", sys.argv[1]])' "$ARM"
{sys.executable} -m fspo_verl.cli run --loss observed -- bash -c 'train -m {POLICY_LOSS}.loss_mode=gspo,vanilla'
env -i bash -c 'echo "variable: ${{FSPO_VERL_OVERRIDES-none}}"'
train --cfg job
train --info defaults
exit 7
"""
    code, out, err = command(script)
    assert code == 7 and "loss_mode: fspo" in out and f"| {GROUP}/fspo " in out and "variable: none" in out
    said = [line for line in err.splitlines() if line.startswith("fspo-verl run: ")]
    inner, recorded, ended, printed = (line for line in said if re.search(" launch(es)? (took|printed) ", line))
    assert "2 launches took observed, and ended before a first record" in inner
    assert "2 launches took fspo, and recorded it" in recorded
    assert "5 launches took fspo and observed, and ended before a first record" in ended
    assert "2 launches printed a config with fspo" in printed
    assert err.count("the same training as launch 4") == 1
    assert sum(f"{OVERRIDES}: added" in line for line in err.splitlines()) == 9  # of each launch, --cfg and --info
    folders = shlex.split([*(line for line in err.splitlines() if "next: " in line)][-1].partition("report ")[2])
    assert len({*folders[:2]}) == 2 and all("records (" in folder for folder in folders[:2])
    assert folders[2:] == ["-o", "report"]


# verl's main, stopped where it starts Ray.
STOPPED = """
import runpy, sys
import ray

def stop(*_, **__):
    raise SystemExit(5)

ray.init = stop
runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""


def test_a_script_of_scripts_trains_fspo_by_verls_own_main(command, tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)
    inner = f'{sys.executable} stopped.py algorithm.adv_estimator=grpo {" ".join(SIZES)} "$@"'
    (tmp_path / "inner.sh").write_text(inner)
    code, out, err = command(
        f"bash inner.sh trainer.nnodes=1 {POLICY_LOSS}.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean"
    )
    assert code == 5 and "policy loss fspo: log-ratio range" in out and "1 launch took fspo, and ended before" in err
    (line,) = (line for line in err.splitlines() if f"{OVERRIDES}: added" in line)
    assert line.endswith(f"left out {POLICY_LOSS}.loss_mode=gspo {ACTOR}.loss_agg_mode=token-mean")


def test_where_no_launch_took_the_loss_that_is_said(command):
    """One that does not see the variable, one that leaves the package out, and one that trains no policy."""
    blind = "env -i BASH_FUNC_train%%=\"$(declare -f train | tail -n +2)\" bash -c 'train'"
    off = "VERL_USE_EXTERNAL_PLUGINS=none train"
    code, _, err = command(f"{blind}\n{off}\ntrain trainer.val_only=true\nexit 0")
    assert code == 0 and err.count("no launch took fspo") == 1 and "Traceback" not in err


def test_a_launch_is_counted_once_whether_its_main_or_the_trainers_logger_is_seen(command):
    both, alone = (f"trainer.experiment_name='at the {more}logger'" for more in ("main and the ", ""))
    code, _, err = command(f'train "{both}"; train "{alone}"')
    assert code == 0 and "2 launches took fspo" in err and err.count(" launches ") == 1


def test_a_config_that_is_launched_again_is_another_launch(launch, monkeypatch, tmp_path):
    """Each calls two functions of verl; a change of the config is checked wherever it is seen first."""
    (tmp_path / "receipt").touch()
    monkeypatch.setenv(starts.RECEIPT, str(tmp_path / "receipt"))
    config = launch(f"{GROUP}=fspo")
    for place in 2 * (hook.FIRST, "get_ppo_ray_runtime_env"):
        hook.begin(place, config)
    assert [one.state for one in starts.receipts()] == [starts.TAKEN] * 2
    OmegaConf.update(config, f"{POLICY_LOSS}.loss_mode", "gspo")
    for place in ("get_ppo_ray_runtime_env", hook.FIRST, "get_ppo_ray_runtime_env"):
        with pytest.raises(ValueError, match=f"{OVERRIDES} asks for {GROUP}=fspo"):
            hook.begin(place, config)


def test_a_training_that_the_script_leaves_in_the_background_is_said_to_go_on(command):
    script = "train \"trainer.experiment_name='goes on'\" > log 2>&1 &\nuntil [ -e began ]; do sleep 0.1; done\n"
    code, _, err = command(script)
    Path("stop").touch()
    assert code == 0 and "1 launch took fspo, and goes on in the background" in err and "ended" not in err


def test_a_launch_that_is_refused_is_said_to_be(command):
    code, _, err = command(f"train {POLICY_LOSS}.nonsense=1\nexit 3")
    assert code == 3 and "1 launch refused, see above" in err and "no launch took" not in err


@pytest.mark.parametrize("damage", ["truncate -s 0", "rm", "chmod 0", "printf cut >>", "printf '{}' >>", "printf 3 >>"])
def test_what_becomes_of_the_file_that_run_reads_changes_no_exit_code(damage, command):
    code, _, err = command(f'{damage} "${starts.RECEIPT}"; train; exit 6')
    assert code == 6 and "Traceback" not in err and ("1 launch took fspo" in err or damage in ("rm", "chmod 0"))


def test_where_nothing_of_run_can_be_written_the_command_runs_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    words = [sys.executable, "-m", "fspo_verl.cli", "run", "--", "bash", "-c", "trap '' TERM; sleep 0.2; exit 5"]
    ignore = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)  # as a daemon may start it
    with open("/dev/full", "w") as full:
        assert subprocess.run(words, stderr=full, preexec_fn=ignore, timeout=300).returncode == 5


@pytest.mark.parametrize("policy", ["none", "another,third"])
def test_run_is_refused_where_the_package_is_left_out(policy, monkeypatch, capsys):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    assert run_main("--", "touch", "started") == 2 and not Path("started").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"VERL_USE_EXTERNAL_PLUGINS={policy}" in line
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine,fspo_verl.plugin")
    assert run_main("--", "true") == 0


def test_a_field_without_its_section_is_named_in_full(capsys):
    assert run_main("eps_low=0.02", "--", "true") == 2
    assert f"did you mean {POLICY_LOSS}.eps_low?" in capsys.readouterr().err


def test_a_launch_with_a_class_of_its_own_is_not_observed_and_that_override_is_named(launch):
    own = f"{POLICY_LOSS}._target_=mine.Loss"
    with pytest.raises(asked.Refused) as refused:
        launch(f"{GROUP}=observed", [own])
    assert refused.value.finding.remove == (own,)


def run_main(*words):
    return cli.main(["run", *words])


def test_a_command_that_is_missing_or_not_there_is_a_sentence(capsys):
    assert run_main("--", "sh", "-c", "exit 255") == 255
    capsys.readouterr()
    assert run_main("--", "no-such-command") == run_main() == run_main("--") == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
    with pytest.raises(SystemExit) as ended:
        run_main("--loss", "fpso", "--", "true")
    assert ended.value.code == 2


SIGNS = st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from(
    " \t\n'\"\\$`*?[]{}()|&;#~!=,-"
)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.text(SIGNS, max_size=12), min_size=20, max_size=20))
def test_arguments_reach_the_command_as_they_are(words, capfd):
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['FSPO_VERL_OVERRIDES']]))"
    folder = f"{RECORDS_DIR}='/a b/\\'c\\''"
    assert run_main(folder, "--", sys.executable, "-c", show, *words, "--", "x") == 0
    told, value = json.loads(capfd.readouterr().out)
    assert told == [*words, "--", "x"] and shlex.split(value) == [f"{GROUP}=fspo", folder]


SIGNALS = "trap 'echo got; exit 9' INT TERM USR1 HUP; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_run_is_one_to_the_command(number):
    words = [sys.executable, "-m", "fspo_verl.cli", "run", "--", "bash", "-c", SIGNALS]
    heard = partial(signal.signal, number, signal.SIG_DFL)  # a shell's background job ignores SIGINT
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate()
        assert process.returncode == 9 and out == "got\n" and "Traceback" not in err


def test_ctrl_c_reaches_the_command_once_and_its_end_is_told():
    """The keys of a terminal go to the command and to `run` alike."""
    script = """
import os, signal, time
count = []
signal.signal(2, lambda *_: count.append(1))
print("ready", flush=True)
while not count:
    time.sleep(0.1)
time.sleep(0.3)
print("got", len(count), flush=True)
os.kill(os.getpid(), 15)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
        os.execv(sys.executable, [sys.executable, "-m", "fspo_verl.cli", "run", "--", sys.executable, "-c", script])
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while more := os.read(terminal, 1000):
            shown += more
    except OSError:  # the terminal's end
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
    assert b"got 1" in shown and b"no launch took" in shown and b"Traceback" not in shown


def test_after_a_while_without_a_launch_there_is_one_warning(monkeypatch, capfd):
    monkeypatch.setattr(run, "_PATIENCE", 0.2)
    assert run_main("--", "sleep", "1") == 0
    assert [line.split(",")[0] for line in capfd.readouterr().err.splitlines()] == [
        "fspo-verl run: after 0.2 s",
        "fspo-verl run: no launch took fspo: the command started no policy training of verl",
    ]


# How each hands the variable on, by its documentation: from the environment, unless an option keeps it out, or by one.
HAND_ON = {
    "sbatch": r"{told} sbatch (--export=FSPO_VERL_OVERRIDES )?job.sh",
    "docker": r"docker run -e {told} IMAGE bash job.sh",
    "apptainer": r"({told} apptainer exec|apptainer exec --cleanenv --env {told}) IMAGE bash job.sh",
    "ray": r"""ray job submit --runtime-env-json='{{"env_vars": {{"{key}": "{value}"}}}}' -- bash job.sh""",
    "tmux": r"tmux new-session -e {told} bash job.sh",
    "sudo": r"{told} sudo -E bash job.sh",
}


def test_what_the_page_says_to_type_elsewhere_brings_the_variable_there():
    page = (Path(__file__).parents[2] / "docs/install.md").read_text()
    block = page.partition("### Elsewhere")[2].partition("```bash\n")[2].partition("```")[0]
    value = f"{GROUP}=fspo"
    ways = {name: way.format(key=OVERRIDES, value=value, told=f"{OVERRIDES}={value}") for name, way in HAND_ON.items()}
    lines = [line for line in block.splitlines() if not line.startswith("#")]
    assert {name for name, way in ways.items() for line in lines if re.fullmatch(way, line)} == {*HAND_ON}
    assert all(any(re.fullmatch(way, line) for way in ways.values()) for line in lines)
