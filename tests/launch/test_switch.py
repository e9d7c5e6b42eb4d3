# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl switch` runs nothing, changes nothing but what it says, and claims nothing that is not so."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fspo_verl import cli
from fspo_verl.keys import GROUP, RECORDS_DIR
from fspo_verl.launch import own_yaml, stock, trainings
from fspo_verl.launch.hydra_files import leaves, option
from fspo_verl.launch.renamed import RENAMED
from fspo_verl.launch.script import Script

ROOT = Path(__file__).parents[2]
CASES = sorted((Path(__file__).parent / "switch_cases").glob("*.sh"))
ACTOR = "actor_rollout_ref.actor"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
SIZES = f"{ACTOR}.use_dynamic_bsz=True algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4"
MAIN = f"python3 -m verl.trainer.main_ppo {SIZES}"


@pytest.fixture
def switch(tmp_path, capsys, monkeypatch):
    """Switch a script; its exit code, what was printed, and the new script."""
    monkeypatch.chdir(tmp_path)

    def switched(text, *arguments, name="run.sh", new="new.sh"):
        Path(name).write_text(text)
        code = cli.main(["switch", name, "-o", new, *arguments])
        shown = capsys.readouterr()
        return code, shown.out or shown.err, Path(new).read_text() if Path(new).exists() else ""

    return switched


# --- nothing runs ----------------------------------------------------------------------------------------------------

AUDIT = """
import sys, pathlib
watched = ("subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "os.system", "socket.", "os.remove",
           "os.rename", "os.kill", "os.chmod", "shutil.", "urllib.", "pty.")
folder = sys.argv[1]
def hook(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3 and arguments[0] != "/dev/null"
    if event.startswith(watched) or writes:
        if not str(arguments[0]).endswith(".pyc") and "__pycache__" not in str(arguments[0]):
            print("AUDIT", event, arguments, file=sys.__stderr__)
sys.addaudithook(hook)
from fspo_verl import cli
for script in sys.argv[2:]:
    for loss in ("fspo", "observed"):
        cli.main(["switch", script, "--loss", loss])
mine = [name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(folder)]
if mine or "verl" in sys.modules:
    print("AUDIT imported", mine, file=sys.__stderr__)
"""


def test_it_starts_opens_imports_and_writes_nothing(tmp_path):
    trap = "raise SystemExit('imported')\n"
    for name in ("verl", "recipe", "yaml", "hydra_plugins"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text(trap)
    (tmp_path / "project/verl/version").mkdir()
    (tmp_path / "project/verl/version/version").write_text("0.9.1")
    (tmp_path / "project/recipe/main_own.py").write_text(
        f"{trap}@hydra.main(config_path='.', config_name='own')\ndef main(config): ...\n"
    )
    (tmp_path / "project/own.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    (tmp_path / "project/own.sh").write_text(f"python3 -m recipe.main_own {SIZES}\n")
    scripts = [*CASES, *ROOT.glob("scripts/run_*.sh"), *(tmp_path / "project").glob("own.*")]
    (tmp_path / "audit.py").write_text(AUDIT)
    command = [sys.executable, str(tmp_path / "audit.py"), str(tmp_path / "project"), *map(str, scripts)]
    run = subprocess.run(command, cwd=tmp_path / "project", capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "AUDIT" not in run.stderr, run.stderr[-3000:]
    assert run.stdout.count("next: ") >= 2 * len(scripts)


# --- the cases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_case_becomes_the_script_beside_it_and_the_diff_applies(case, switch, tmp_path):
    text, expected = case.read_text(), case.with_suffix(".switched").read_text()
    _, shown, new = switch(text, name=case.name)
    assert new == expected
    assert subprocess.run(["bash", "-n", "new.sh"], check=False).returncode == 0
    (tmp_path / "printed.diff").write_text(shown)
    patched = subprocess.run(["patch", case.name, "printed.diff"], check=False, capture_output=True, text=True)
    assert patched.returncode == 0 and (tmp_path / case.name).read_text() == expected, patched.stdout


def test_nothing_beside_a_change_is_printed(switch):
    secrets = "export KEY=sk-secret\n"
    _, shown, new = switch(f"{secrets}{MAIN}\n{secrets}")
    assert "secret" not in shown and new.startswith(secrets) and new.endswith(secrets)


# --- what the new script starts --------------------------------------------------------------------------------------

# Every script hands OLD to the main, then the user's own words if it takes any; the loop starts it twice.
OLD = f"{SIZES} {LOSS_MODE}=gspo {ACTOR}.clip_ratio_low=3e-4"
LINES = OLD.replace(" ", " \\\n    ")
SHAPES = {
    "a line": f"python3 -m verl.trainer.main_ppo {OLD}\n",
    "lines": f"python3 -m verl.trainer.main_ppo \\\n    {LINES} 2>&1 | tee out.txt\n",
    "lines that end in a backslash": f"python3 -m verl.trainer.main_ppo \\\n    {LINES} \\\n\necho done\n",
    "own arguments": f'python3 -m verl.trainer.main_ppo \\\n    {LINES} \\\n    "$@"\n',
    "an array": "ARGS=(\n  # which\n  "
    + OLD.replace(" ", "  # why\n  ")
    + '\n)\npython3 -m verl.trainer.main_ppo "${ARGS[@]}" $@\n',
    "an array of the command": f'CMD=(python3 -m verl.trainer.main_ppo)\nCMD+=({OLD})\nexec "${{CMD[@]}}"\n',
    "a text": f'CMD="python3 -m verl.trainer.main_ppo {OLD}"\n$CMD "$@"\n',
    "a text in lines": f'ARGS="\n  {LINES}"\nARGS="$ARGS trainer.nnodes=1"\npython3 -m verl.trainer.main_ppo $ARGS\n',
    "eval": f'CMD="python3 -m verl.trainer.main_ppo {OLD}"\neval $CMD\n',
    "eval of one text": f'CMD="python3 -m verl.trainer.main_ppo {OLD}"\neval "$CMD"\n',
    "eval with a redirection": f'CMD="python3 -m verl.trainer.main_ppo {OLD} > out.txt"\neval "$CMD"\n',
    "bash -c": f'bash -c "cd $PWD && python3 -m verl.trainer.main_ppo {OLD}"\n',
    "bash -c, single quotes": f"srun bash -c 'python3 -m verl.trainer.main_ppo {OLD}'\n",
    "bash -c of a variable": f'CMD="python3 -m verl.trainer.main_ppo {OLD}"\nbash -c "$CMD"\n',
    "bash -c, arguments": "bash -c 'python3 -m verl.trainer.main_ppo trainer.experiment_name=$1 "
    f'"${{@:2}}"\' bash x {OLD}\n',
    "bash -c in a function": f'f() {{ bash -c "python3 -m verl.trainer.main_ppo $*"; }}\nf {OLD}\n',
    "a text in a function": f'f() {{\n  local all="$@"\n  python3 -m verl.trainer.main_ppo $all\n}}\nf {OLD}\n',
    "a function in a heredoc": f"bash <<'EOF'\nf() {{ python3 -m verl.trainer.main_ppo \"$@\"; }}\nf {OLD}\nEOF\n",
    "a heredoc": f"NAME=x\nbash <<EOF\npython3 -m verl.trainer.main_ppo trainer.experiment_name=$NAME {OLD}\nEOF\n",
    "a quoted heredoc": f"bash <<'EOF'\npython3 -m verl.trainer.main_ppo \\\n  {LINES}\nEOF\n",
    "a function": f'train() {{\n  python3 -m verl.trainer.main_ppo "$@"\n}}\ntrain {OLD}\n',
    "a function with names": "launch() {\n  local name=$1 clip=$2\n  shift 2\n  python3 -m verl.trainer.main_ppo "
    f'trainer.experiment_name=$name "$@"\n}}\nlaunch exp {ACTOR}.clip_ratio=0.2 {OLD}\n',
    "a function in a function": 'inner() {\n  python3 -m verl.trainer.main_ppo "$@"\n}\nouter() {\n'
    f'  echo "$1"\n  inner trainer.experiment_name=$1 "${{@:2}}"\n}}\nouter exp {OLD}\n',
    "a log of its command": f'log() {{ echo "$@"; "$@"; }}\nlog python3 -m verl.trainer.main_ppo {OLD}\n',
    "a function of its command": f'run() {{ "$@"; }}\nrun python3 -m verl.trainer.main_ppo {OLD}\n',
    "branches": f'A=({SIZES})\nif [ -n "${{X:-}}" ]; then\n  A+=({LOSS_MODE}=gspo)\nelse\n  A+=({LOSS_MODE}=sapo)\nfi\n'
    'python3 -m verl.trainer.main_ppo "${A[@]}"\n',
    "a loop": f"for seed in 1 2; do\n  python3 -m verl.trainer.main_ppo data.seed=$seed {OLD} &\ndone\nwait\n",
    "ray job submit": f"ray job submit --address=x -- python3 -m verl.trainer.main_ppo {OLD}\n",
    "torchrun": f"FOO=1 nohup torchrun --nnodes 1 -m verl.trainer.main_ppo {OLD} > out.txt 2>&1 &\nwait\n",
    "uv run": f"uv run --frozen python3 -m verl.trainer.main_ppo {OLD}\n",
    "a file": f"python3 verl/trainer/main_ppo.py {OLD}\n",
    "options after an array": f'A=({OLD})\npython3 -m verl.trainer.main_ppo "${{A[@]}}" --config-name ppo_trainer\n',
    "words behind a redirection": f"true && python3 -m verl.trainer.main_ppo {SIZES} > out.txt 2>&1 "
    f'{LOSS_MODE}=gspo {ACTOR}.clip_ratio_low=3e-4 "$@"\n',
    "a brace that is a text": f"A={ACTOR}\npython3 -m verl.trainer.main_ppo ${{A}}.clip_ratio=0.1 {OLD} "
    "'++data.x={a:1,b:2}' ++data.y=\\{a:1,b:2\\}\n",
    "messages": f"say() {{ echo \"{MAIN}\"; }}\n{{ say; echo '{MAIN}'; }} 2>&1 | tee -a all.log >&2\n"
    f"python3 -m verl.trainer.main_ppo {OLD}\n",
    "an empty array": f'set -u\nX=()\npython3 -m verl.trainer.main_ppo {OLD} ${{X[@]+"${{X[@]}}"}}\n',
    "options of Hydra": f"python3 -m verl.trainer.main_ppo --config-name=ppo_trainer {OLD} --config-path ./config\n",
    "a value of its own for the loss": f"L={LOSS_MODE}=gspo\npython3 -m verl.trainer.main_ppo {SIZES} $L\n",
    "a quoted value": f'L={LOSS_MODE}=gspo\npython3 -m verl.trainer.main_ppo {SIZES} "$L"\n',
}
STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" > {noted}/$BASHPID
while [ $# -gt 0 ] && [ "$1" != -- ] && [ "$1" != bash ]; do shift; done
[ "$1" = -- ] && shift
[ $# -gt 0 ] && exec "$@"
exit 0
"""


def started(script: Path, folder: Path, *arguments: str) -> list[list[str]]:
    """The words of each main that a script starts, with stand-ins for all programs that it knows."""
    programs, noted = folder / "bin", folder / f"noted {script.name}"
    programs.mkdir(exist_ok=True)
    noted.mkdir()
    for name in ("python3", "ray", "srun", "torchrun", "uv"):
        (programs / name).write_text(STAND_IN.format(noted=f"'{noted}'"))
        (programs / name).chmod(0o755)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-u", str(script), *arguments], cwd=folder, env=env, check=True, timeout=60)
    calls = [file.read_text().split("\n")[:-1] for file in sorted(noted.iterdir())]
    return [
        [word for word in words if "=" in word and word[0] != "-"] for words in calls if f"{SIZES.split()[0]}" in words
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_launch_is_given_the_loss_and_a_folder_of_its_own(shape, switch, tmp_path):
    text = SHAPES[shape]
    _, shown, new = switch(text)
    assert shown.startswith("run.sh trains FSPO after "), shown
    assert subprocess.run(["bash", "-n", "new.sh"], check=False).returncode == 0
    own = ["trainer.nnodes=2"] if re.search(r"\$@", text) and "() {" not in text else []
    before, after = (started(tmp_path / name, tmp_path, *own) for name in ("run.sh", "new.sh"))
    folders = [word for words in after for word in words if word.startswith(f"{RECORDS_DIR}=")]
    assert len(after) == len(before) == len(folders) == len(set(folders)), (before, after)
    for old, words in zip(before, after, strict=True):
        hindering = [word for word in old if re.match(rf"{LOSS_MODE}|{ACTOR}\.clip_ratio", word)]
        stays = [word for word in old if word not in hindering and word not in own]
        folder = next(word for word in words if word.startswith(RECORDS_DIR))
        assert re.fullmatch(rf"{RECORDS_DIR}='?{tmp_path}/fspo_records/run/\d{{8}}-\d{{6}}-\d{{9}}'?", folder)
        over = [f"{LOSS_MODE}=gspo", f"{LOSS_MODE}=fspo"] if " $L" in text else []
        assert sorted(words) == sorted([*stays, *over, "algorithm.policy_loss=fspo", folder, *own])
        assert words[len(words) - len(own) :] == own and (not over or words.index(over[0]) < words.index(over[1]))


@pytest.mark.parametrize(
    ("text", "wins"),
    [
        (f'{MAIN} "$@"\n', True),
        (f'main() {{ {MAIN} "${{@}}" 2>&1; }}\nmain "$@"\n', True),
        (f'A=({SIZES})\nA+=("$@")\npython3 -m verl.trainer.main_ppo "${{A[@]}}"\n', False),
        (f'C=({MAIN} "$@")\n"${{C[@]}}"\n', False),
        (f'X="$@"\n{MAIN} $X\n', False),
        (f'{MAIN} "$@" trainer.nnodes=1\n', False),
    ],
)
def test_it_says_whether_arguments_of_the_user_win_over_what_is_added(text, wins, switch, tmp_path):
    _, shown, _ = switch(text)
    ((*_, last),) = (
        [w for w in words if w.startswith(RECORDS_DIR)]
        for words in started(tmp_path / "new.sh", tmp_path, f"{RECORDS_DIR}=/own")
    )
    assert (last == f"{RECORDS_DIR}=/own") == wins
    assert ("after what is added, and win" in shown, "before what is added, and lose" in shown) == (wins, not wins)


def test_two_trainings_have_two_folders_and_any_working_directory_will_do(switch, tmp_path, monkeypatch):
    odd = tmp_path / "a run, lr=1 (2)"
    odd.mkdir()
    monkeypatch.chdir(odd)
    _, shown, _ = switch(f"{MAIN} data.seed=1\npython3 -m verl.model_merger merge\n{MAIN} data.seed=2\n")
    assert shown.startswith("run.sh, in all of its 2 trainings, trains FSPO") and "verl.model_merger" in shown
    from hydra.core.override_parser.overrides_parser import OverridesParser

    calls = started(odd / "new.sh", odd)
    folders = [word for words in calls for word in words if word.startswith(RECORDS_DIR)]
    values = [OverridesParser.create().parse_override(word).value() for word in folders]
    assert len(values) == 2 and {Path(str(value)).parent for value in values} == {
        odd / "fspo_records/run",
        odd / "fspo_records/run-2",
    }


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("runs", "$PWD/runs"),
        ("/shared/x/", "/shared/x"),
        ("$SCRATCH/x", "$SCRATCH/x"),
        ("~/x", "$HOME/x"),
        ("/", ""),
        ("a b", "$PWD/a b"),
    ],
)
def test_the_folder_for_records_may_be_the_users(given, made, switch):
    _, _, new = switch(f"{MAIN}\n", "--records", given)
    assert f"records_dir=\"'{made}/run/$(date" in new


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_folder_with_blanks_is_refused_where_the_command_stands_between_quotes(quote, switch):
    code, shown, new = switch(f"bash -c {quote}{MAIN}{quote}\n", "--records", "a b")
    assert code == 2 and "--records a b: " in shown and not new


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root():
    return stock.installed_root()


def composed(text: str, root: Path, of_switch: bool):
    """The config of the only training in a script."""
    ((training,), _) = trainings.find(Script(text.encode()))
    overrides = [word.text for word in training.overrides]
    if of_switch:
        overrides = [re.sub(r"^(?=algorithm.policy_loss=)", "+", word) for word in overrides]
        overrides = [f"{RECORDS_DIR}=/records" if word.startswith(RECORDS_DIR) else word for word in overrides]
    return stock.compose(stock.find_main(training.main, [root]), root, tuple(overrides))


INNER = [
    "",
    f"{LOSS_MODE}=gspo {ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4 "
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    f"{LOSS_MODE}=clip_cov {ACTOR}.policy_loss.clip_cov_ratio=0.1 {ACTOR}.loss_scale_factor=7",
    f"{ACTOR}.clip_ratio=0.3 {ACTOR}.clip_ratio_c=10 {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
]


@pytest.mark.parametrize("settings", INNER)
def test_observed_leaves_loss_range_and_aggregation_as_they_are(settings, switch, root):
    text = f"{MAIN} {settings}\n"
    code, _, new = switch(text, "--loss", "observed")
    old, now = composed(text, root, False), composed(new, root, True)
    assert code == 0 and "Observed" in now.actor_rollout_ref.actor.policy_loss._target_
    changed = ("policy_loss",)
    assert {k: v for k, v in old.actor_rollout_ref.actor.items_ex(resolve=False) if k not in changed} == {
        k: v for k, v in now.actor_rollout_ref.actor.items_ex(resolve=False) if k not in changed
    }
    inner = OmegaConf.to_container(old.actor_rollout_ref.actor.policy_loss)
    assert {**inner, "_target_": None}.items() <= {**now.actor_rollout_ref.actor.policy_loss, "_target_": None}.items()


@pytest.mark.parametrize("loss", ["fspo", "fixed_band", "no_clip", "gspo", "grpo"])
@pytest.mark.parametrize("settings", [INNER[1], f"+algorithm.policy_loss=gspo {ACTOR}.policy_loss.records_freq=2"])
def test_the_new_script_trains_the_loss_that_was_asked_for(loss, settings, switch, root):
    code, shown, new = switch(f"{MAIN} {settings}\n", "--loss", loss)
    actor = composed(new, root, True).actor_rollout_ref.actor
    sets = option(loss)
    assert code == 0 and actor.policy_loss.loss_mode == sets[LOSS_MODE]
    if loss in trainings.FSPO:
        assert actor.loss_agg_mode == sets[f"{ACTOR}.loss_agg_mode"] and actor.clip_ratio == 0.2
        assert OmegaConf.to_container(actor)["loss_scale_factor"] == sets[f"{ACTOR}.loss_scale_factor"]
    else:  # what stays of the user's is said
        own = re.findall(rf"{ACTOR}\.(?:clip_ratio|loss_)\w*=\S+", settings)
        assert all(setting in shown.split("left alone:")[-1] for setting in own)


def test_a_script_that_trains_it_already_is_left_as_it_is(switch):
    text = f"{MAIN} +algorithm.policy_loss=fspo {RECORDS_DIR}=$PWD/x\n"
    code, shown, new = switch(text)
    assert code == 0 and shown.startswith("run.sh trains FSPO as it is.") and not new


# --- what it does not claim ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{MAIN} $EXTRA\n", "is up to $EXTRA"),
        (f"{MAIN} trainer.val_only=$EVAL\n", "is up to trainer.val_only=$EVAL"),
        (f"{MAIN} --config-name $CONFIG\n", "is up to $CONFIG"),
        ("X=$(cat words.txt)\npython3 -m verl.trainer.main_ppo $X data.seed=1\n", "is up to $X"),
        ("read -r X < words.txt\npython3 -m verl.trainer.main_ppo $X data.seed=1\n", "is up to $X"),
        (f"X=+{ACTOR}.policy_loss.foo=1\n{MAIN} $X\n", f"does not know the key {ACTOR}.policy_loss.foo"),
        (f"X=+algorithm.policy_loss=gspo\n{MAIN} $X\n", "does not compose: Multiple values for algorithm.policy_loss"),
        (f"{MAIN} {LOSS_MODE[:-4]}{{mode,}}=gspo\n", f"is up to {LOSS_MODE[:-4]}{{mode,}}=gspo"),
        (f"{MAIN} {ACTOR}.{{clip_ratio=0.2,loss_agg_mode=token-mean}}\n", f"is up to {ACTOR}.{{clip_ratio=0.2,"),
        (f"{MAIN} {ACTOR}.policy_loss.$K=gspo\n", f"is up to {ACTOR}.policy_loss.$K=gspo"),
        (f"{MAIN} +${{SECTION}}.loss_mode=gspo\n", "is up to +$SECTION.loss_mode=gspo"),
        (f'set -eux -o pipefail\nset -- {LOSS_MODE}=gspo "$@"\n{MAIN} "$@"\n', 'is up to "$@", which line 2 sets'),
        (f"A=''\nIFS= read -r -d '' A <<'EOF'\n{LOSS_MODE}=gspo\nEOF\n{MAIN} $A\n", "is up to $A"),
        (f'A=()\nmapfile -t A < words.txt\n{MAIN} "${{A[@]}}"\n', "is up to $A"),
        (f"A=''\nprintf -v A '%s=gspo' {LOSS_MODE}\n{MAIN} $A\n", "is up to $A"),
        (f'A=({SIZES})\nA[10]={LOSS_MODE}=gspo\npython3 -m verl.trainer.main_ppo "${{A[@]}}"\n', "is up to $A"),
        (f'f() {{ {MAIN} "$@" data.seed=$2; }}\nf {LOSS_MODE}=gspo 1\n', 'is up to "$@" of f'),
        (f'f() {{ while [ $1 = x ]; do shift; done; {MAIN} "$@"; }}\nf x {LOSS_MODE}=gspo\n', 'is up to "$@" of f'),
        (f"f() {{ {MAIN} ${{1:-}}; }}\nf {LOSS_MODE}=gspo\n", "is up to $1"),
        (f'{MAIN} distillation.enabled="$D"\n', "is up to distillation.enabled=$D"),
        (
            f"{MAIN} distillation.enabled=True distillation.distillation_loss.use_task_rewards=False\n",
            "drops the policy",
        ),
        (f"{MAIN} trainer.no_such_key=1 trainer.nnodez=2\n", "does not know 2 of its keys"),
        (f"{MAIN} +{ACTOR}.no_such_field=1\n", "does not know the key"),
        (f"{MAIN} +trainer.nnodes=1\n", "does not know the key +trainer.nnodes"),
        (f"{MAIN} model_engine=none\n", "does not compose"),
        (
            "python3 -m recipe.dapo.main_dapo actor_rollout_ref.rollout.n=4\n",
            "is up to recipe.dapo.main_dapo, which is not there",
        ),
        (f"python3 -m verl.trainer.main_ppo {ACTOR}.ppo_mini_batch_size=8\n", "verl wants "),
        ("python3 -m verl.trainer.sft_trainer trainer.nnodes=1\n", "no training launch"),
        (f"{MAIN} trainer.val_only=True\n", "no training launch"),
        ("python3 -m verl.trainer.main_eval data.path=x\n", "no training launch"),
        ("python3 -m verl.trainer.main_generation_server actor_rollout_ref.rollout.n=1\n", "no training launch"),
        (f"# {MAIN}\necho {MAIN}\n", "no training launch"),
        ("python3 train_agent.py --config x\n", "no training launch"),
    ],
)
def test_it_says_train_only_where_it_is_so(text, said, switch):
    own = "@hydra.main(config_path='.', config_name='own')\ndef main(config): ...\n"
    Path("own_main.py").write_text(f"raise SystemExit\n{own}")
    Path("own.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    code, shown, _ = switch(text)
    first = shown.splitlines()[0]
    assert code == 1 and said in first and not re.match(r"run.sh trains", first), first


@pytest.mark.parametrize(
    "text",
    [
        f'ssh host "bash -c \\"{MAIN}\\""',
        f'echo "{MAIN}" > job.sh',
        f"printf '%s\\n' '{MAIN}' | tee job.sh",
        f"{{ echo cd /x; echo {MAIN}; }} > job.sh",
        f"say() {{ echo {MAIN}; }}; say | bash",
        f'CMD=$(echo "{MAIN}")',
        f"log {MAIN}",
        f"echo {LOSS_MODE}=gspo | xargs {MAIN}",
        f"parallel {MAIN} {{}} ::: {LOSS_MODE}=gspo",
    ],
)
def test_a_text_that_cannot_be_read_is_named_with_the_lines_to_add(text, switch):
    code, shown, _ = switch(f"{text}\n{MAIN}\n")
    assert code == 1 and shown.startswith("run.sh may start a training in a text that is not read, in line 1.")
    assert "line 1: " in shown and f"algorithm.policy_loss=fspo {RECORDS_DIR}=" in shown


def test_all_unknown_keys_are_named_at_once_each_with_its_new_name(switch):
    old = (
        "critic.model.fsdp_config.param_offload",
        f"{ACTOR}.fsdp_config.grad_offload",
        "trainer.use_legacy_worker_impl",
    )
    near = {
        "trainer.nnodez": "trainer.nnodes",
        "rollout.free_cache_engine": "actor_rollout_ref.rollout.free_cache_engine",
    }
    code, shown, _ = switch(f"{MAIN} {' '.join(f'{key}=1' for key in (*old, *near))}\n")
    assert code == 1 and "does not know 5 of its keys" in shown
    assert "critic.model.fsdp_config.param_offload -> critic.fsdp.param_offload" in shown
    assert all(f"{key} -> " in shown for key in old)
    assert all(f"{key} -> {new}\n" in shown for key, new in near.items())


def test_every_new_name_of_the_table_is_a_key_of_verl_and_no_old_one_is(root):
    configs = [
        stock.compose(stock.find_main("verl.trainer.main_ppo", [root]), root, (f"model_engine={engine}",))
        for engine in ("dp", "megatron")
    ]
    has = lambda key: any(stock._holds(config, key) for config in configs)  # noqa: E731
    unknown = [new for new in RENAMED.values() if new[0] not in "-+" and not has(new)]
    assert not [new for new in unknown if ".ref." not in new and not new.startswith("critic.optim")]
    assert not [old for old in RENAMED if all(stock._holds(config, old) for config in configs)]


# --- which verl ------------------------------------------------------------------------------------------------------


def test_a_config_that_a_launch_would_refuse_is_named_with_what_mends_it(switch):
    Path("own.yaml").write_text(
        f"defaults: [ppo_trainer, _self_]\n{ACTOR.split('.')[0]}: {{actor: {{loss_agg_mode: token-mean}}}}\n"
    )
    code, shown, _ = switch(f"{MAIN} --config-path=$PWD --config-name=own\n")
    assert code == 1 and f"own.yaml sets {ACTOR}.loss_agg_mode=token-mean" in shown and "switch " in shown
    code, shown, _ = switch(f"{MAIN} --config-path=$PWD --config-name=own\n", "--loss", "observed", new="other.sh")
    assert code == 0 and shown.startswith("run.sh trains its own loss")


@pytest.mark.parametrize("where", ["", "cd sub/..\n", "cd project\n", "export PYTHONPATH=$PWD/project:$PYTHONPATH\n"])
def test_a_verl_of_the_scripts_own_is_the_one_that_runs(where, switch, tmp_path):
    own = tmp_path / ("project" if "project" in where else ".") / "verl"
    (own / "version").mkdir(parents=True)
    (own / "__init__.py").touch()
    (own / "version/version").write_text("0.4.1.dev\n")
    code, shown, new = switch(f"{where}{MAIN}\n")
    assert code == 1 and shown.startswith(f"run.sh runs the verl 0.4.1.dev0 of {own.parent.resolve()}: ") and not new


def test_the_environment_of_a_script_gets_the_line_that_checks_it(switch):
    _, shown, _ = switch(f"source ~/venv/bin/activate\nuv run --frozen {MAIN}\n")
    assert 'uv run --frozen python3 -c "import fspo_verl.plugin"' in shown
    assert 'source ~/venv/bin/activate && python3 -c "import fspo_verl.plugin"' in shown


# --- files -----------------------------------------------------------------------------------------------------------


def test_no_file_is_overwritten_but_the_script_in_place_with_its_mode(switch, tmp_path, capsys):
    Path("new.sh").write_text("mine\n")
    code, shown, new = switch(f"{MAIN}\n")
    assert code == 2 and "new.sh is there already" in shown and new == "mine\n"
    Path("link.sh").symlink_to("gone.sh")
    code, shown, _ = switch(f"{MAIN}\n", new="link.sh")
    assert code == 2 and "link.sh is there already" in shown and Path("link.sh").is_symlink()
    Path("run.sh").chmod(0o750)
    assert cli.main(["switch", "run.sh", "--in-place"]) == 0
    assert Path("run.sh").stat().st_mode & 0o777 == 0o750 and "fspo" in Path("run.sh").read_text()


YAMLS = {
    "block": "# mine\ndefaults:\n  - ppo_trainer  # verl's\n  - _self_\n\ntrainer:\n  nnodes: 2  # two\n",
    "flow": "defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 2}\n",
    "no self": "defaults:\n- ppo_trainer\ntrainer:\n  nnodes: 2\n",
    "gspo": "defaults:\n  - ppo_trainer\n  - _self_\nactor_rollout_ref:\n  actor:\n    clip_ratio_low: 3e-4  # a\n"
    "    loss_agg_mode: token-mean\n    policy_loss:\n      loss_mode: gspo  # theirs\ntrainer:\n  nnodes: 2\n",
    "overrides": "defaults:\n  - ppo_trainer\n  - override hydra/job_logging: none\ntrainer:\n  nnodes: 2\n",
    "selected": "defaults:\n  - ppo_trainer\n  - algorithm.policy_loss: gspo\n  - _self_\ntrainer:\n  nnodes: 2\n",
}


@pytest.mark.parametrize("kind", YAMLS)
@pytest.mark.parametrize("loss", ["observed", "no_clip"])
def test_a_yaml_selects_the_loss_and_keeps_its_comments(kind, loss, switch, root, tmp_path):
    code, shown, new = switch(YAMLS[kind], "--loss", loss, name="own.yaml", new="new.yaml")
    config = stock.compose(stock.Main(tmp_path, "new" if new else "own", tmp_path), root, ())
    before = stock.compose(stock.Main(tmp_path, "own", tmp_path), root, ())
    policy_loss, sets = config.actor_rollout_ref.actor.policy_loss, option(loss)
    assert code == 0 and config.trainer.nnodes == 2
    assert policy_loss._target_ == sets[f"{ACTOR}.policy_loss._target_"]
    assert policy_loss.loss_mode == sets.get(LOSS_MODE, before.actor_rollout_ref.actor.policy_loss.loss_mode)
    assert bool(new) == ((kind, loss) != ("selected", "observed"))
    if loss == "no_clip":
        assert config.actor_rollout_ref.actor.loss_agg_mode == sets[f"{ACTOR}.loss_agg_mode"]
    removed = set(YAMLS[kind].splitlines()) - set((new or YAMLS[kind]).splitlines())
    assert all(
        re.search(r"defaults: \[|policy_loss: gspo|clip_ratio|loss_agg_mode|loss_mode", line) for line in removed
    )


def test_a_config_in_python_gets_the_settings_to_merge(switch):
    code, shown, new = switch("config = {}\n", name="train.py")
    text = shown[shown.index("settings = ") : shown.index("config = ")]
    merged = eval(re.sub(r"\n  ", "\n", text).removeprefix("settings = "), {"OmegaConf": OmegaConf})
    assert code == 1 and not new and stock.leaves(merged).items() >= {LOSS_MODE: "fspo"}.items()


# --- a config in YAML, in any layout ---------------------------------------------------------------------------------

SETS = option("fspo")
IN_THE_WAY = {  # and no value of the loss
    "actor": {"clip_ratio": 0.2, "clip_ratio_low": 3e-4, "loss_agg_mode": "token-mean", "loss_scale_factor": 7},
    "policy_loss": {
        "_target_": "a.Class",
        "loss_mode": "gspo",
        "clip_cov_ratio": None,
        "ppo_kl_coef": 0.1,
        "others": [1, "two"],
    },
}
BESIDE = {
    "actor": {"ppo_epochs": 2, "note": "two # words", "lists": [1, "two"], "fsdp_config": {"offload": True, "a": ".."}},
    "policy_loss": {"eps": 0.01, "records_dir": "${oc.env:HOME}/here", "rollout_correction": {"bypass_mode": True}},
}


class Layout:
    """Writes a tree as YAML in a layout that hypothesis draws, and remembers what each line is for."""

    def __init__(self, draw):
        self.draw, self.comments = draw, 0
        self.lines: list[tuple[str, str]] = []  # and its key; "=" if it holds several keys or the defaults, "-" if none
        self.anchor, self.has_comment_in_braces = "", False

    def chance(self, of=2):
        return self.draw(st.integers(1, of)) == of

    def comment(self):
        if not self.chance(3):
            return ""
        self.comments += 1
        return f"{self.draw(st.sampled_from([' ', '   ']))}# c{self.comments}: {{x, '"

    def block(self, tree, indent, path=""):
        pad = " " * indent
        for key, value in tree.items():
            name, between = f"{path}{key}", self.draw(st.sampled_from(["", "", "", "\n", "comment", "above"]))
            if between == "\n":
                self.lines.append(("", "-"))
            elif between and (comment := self.comment()):
                self.lines.append((f"{pad if between == 'comment' else ''}{comment.strip()}", "-"))
            quote = self.draw(st.sampled_from(["", "", '"', "'"]))
            start = f"{pad}{quote}{key}{quote}:" + (" &here" if name == self.anchor else "")
            if key == "defaults" or not isinstance(value, dict | list) or not value or self.chance(4):
                for line, owner in self.value(start, value, pad, key):
                    self.lines.append((line, owner or name))
                continue
            self.lines.append((f"{start}{self.comment()}", "-" if isinstance(value, dict) else name))
            deeper = indent + self.draw(st.integers(1, 4))
            if isinstance(value, dict):
                self.block(value, deeper, f"{name}.")
            else:
                self.lines += [(f"{' ' * deeper}- {self.flow(one)}", name) for one in value]

    def value(self, start, value, pad, key):
        """Lines of a key with a scalar, a value in braces or the defaults; each with "=" if it may change and stay."""
        if isinstance(value, dict | list):
            if key == "defaults" and value and self.chance():
                gap = " " * self.draw(st.integers(0, 3))
                items = [(f"{pad}{gap}- {self.flow(one).strip('{}')}{self.comment()}", "=") for one in value]
                return [(f"{start}{self.comment()}", "="), *items]
            lines = f"{start} {self.flow(value, pad)}{self.comment()}".split("\n")
            return [(line, "=" if isinstance(value, dict) or key == "defaults" else "") for line in lines]
        text, style = self.flow(value), self.draw(st.sampled_from(["", "", "next", ">-", "|-"]))
        if style == "next" and text:
            return [(f"{start}{self.comment()}", ""), (f"{pad}   {text}{self.comment()}", "")]
        if style and isinstance(value, str):
            blank = [("", "-")] * self.draw(st.integers(0, 2))
            return [(f"{start} {style}{self.comment()}", ""), (f"{pad}  {value}", ""), *blank]
        return [(f"{start} {text}".rstrip() + self.comment(), "")]

    def flow(self, value, pad=None):
        """A value in braces, or a scalar; over several lines if there is a pad."""
        if isinstance(value, dict | list):
            if isinstance(value, dict):
                parts = [f"{key}: {self.flow(one)}" for key, one in value.items()]
            else:
                parts = [self.flow(one) for one in value]
            text = ""
            for place, part in enumerate(parts):
                inside = self.comment() if pad is not None and self.chance(8) else ""
                self.has_comment_in_braces |= bool(inside) and isinstance(value, dict)
                wraps = inside or (pad is not None and self.chance(6))
                text += part + ("," if place < len(parts) - 1 else "") + (f"{inside}\n{pad}  " if wraps else " ")
            text = text if self.chance() else text.rstrip(" ")
            return f"{{{text}}}" if isinstance(value, dict) else f"[{text}]"
        if value is None:
            return self.draw(st.sampled_from(["null", "~"]))
        if isinstance(value, str):
            plain = [] if re.search(r"[#,${]", value) else [value]
            return self.draw(st.sampled_from([*plain, f"'{value}'", f'"{value}"']))
        return str(value).lower()


@st.composite
def configs(draw):
    """A config of a user's as content and text, its lines, and the keys of the actor that are in the way."""
    layout = Layout(draw)
    some = lambda tree: dict(draw(st.permutations([pair for pair in tree.items() if layout.chance()])))  # noqa: E731
    policy_loss = some(IN_THE_WAY["policy_loss"] | BESIDE["policy_loss"])
    actor = some(IN_THE_WAY["actor"] | BESIDE["actor"] | ({"policy_loss": policy_loss} if policy_loss else {}))
    entries = draw(st.permutations([one for one in ("ppo_trainer", "_self_", "mine", GROUP) if layout.chance()]))
    entries = [{GROUP: "gspo"} if one == GROUP else one for one in entries]
    if layout.chance(3):
        last = ["_self_"] * (entries[-1:] == ["_self_"] and layout.chance())  # Hydra lets this one follow an override
        entries = [*entries[: len(entries) - len(last)], {"override hydra/job_logging": "none"}, *last]
    sections = {"trainer": {"nnodes": 2, "name": "a, b"}, "data": {"files": ["x", "y"]}}
    sections |= {"actor_rollout_ref": {"actor": actor}} if actor else {}
    sections |= {"defaults": entries} if layout.chance(4) or len(entries) > 1 else {}
    content = dict(draw(st.permutations(list(sections.items()))))
    names = [f"{ACTOR}.{key}" for key in actor] + [f"{ACTOR}.policy_loss.{key}" for key in actor.get("policy_loss", {})]
    layout.anchor = draw(st.sampled_from(["", *names])) if layout.chance(6) else ""
    layout.block(content, 0)
    is_anchored = any(" &here" in line for line, _ in layout.lines)
    if is_anchored:
        inner = content
        for key in layout.anchor.split("."):
            inner = inner[key]
        content["copied"] = inner
        layout.lines.append(("copied: *here", "-"))
    used = draw(st.sampled_from(["", *names])) if layout.chance(6) else ""
    if used:
        content["taken_from"] = f"${{{used}}}"
        layout.lines.append((f"taken_from: ${{{used}}}", "-"))
    newline = draw(st.sampled_from(["\n", "\n", "\r\n"]))
    text = newline.join(line for line, _ in layout.lines) + newline * layout.chance()
    return text, content, layout, is_anchored, used


def _after(content):
    """The content without what is in the way, but of a mapping with nothing else one key; and the keys that it took."""
    content, names = copy.deepcopy(content), []
    actor = content.get("actor_rollout_ref", {}).get("actor", {})
    for section, mapping in (("policy_loss", actor.get("policy_loss", {})), ("actor", actor)):
        path = f"{ACTOR}.policy_loss." if section == "policy_loss" else f"{ACTOR}."
        gone = [key for key in mapping if key in IN_THE_WAY[section]]
        stays = [key for key in gone if f"{path}{key}" in SETS][:1] if len(gone) == len(mapping) else []
        for key in gone:
            del mapping[key]
        mapping |= {key: SETS[f"{path}{key}"] for key in stays}
        names += [f"{path}{key}" for key in gone]
    return content, names


def _is_group(entry):
    return isinstance(entry, dict) and GROUP in entry


@given(configs(), st.sampled_from(["fspo", "observed"]))
def test_a_yaml_of_any_layout_changes_in_what_is_listed_or_is_refused(config, loss):
    text, content, layout, is_anchored, used = config
    assert OmegaConf.to_container(OmegaConf.create(text)) == content, text
    expected, names = (content, []) if loss == "observed" else _after(content)
    is_bound = is_anchored and any(f"{name}.".startswith(f"{layout.anchor}.") for name in names)
    is_bound |= used in set(names) - set(SETS)
    if loss == "observed" and f"{ACTOR}.policy_loss._target_" in leaves(content):
        entries = content.get("defaults", [])  # its entry would have to follow _self_, and come before an override
        is_bound = not any(map(_is_group, entries)) and {"override hydra/job_logging": "none"} in entries[:-1]
        names = [f"{ACTOR}.policy_loss._target_"] * is_bound
    in_braces = layout.has_comment_in_braces and bool(names)
    try:
        new, changes = own_yaml.switched(text, loss)
    except ValueError as error:
        assert is_bound or in_braces, text
        assert any(name in str(error) for name in names)
        return
    assert not is_bound
    found = OmegaConf.to_container(OmegaConf.create(new))

    # The content: all changes are listed, the file has the last word, and Hydra's overrides stay at the end.
    entries, old = found.pop("defaults"), content.get("defaults", [])
    place = next(place for place, entry in enumerate(entries) if _is_group(entry))
    before, after = entries[:place], entries[place + 1 :]
    if any(map(_is_group, old)):
        selected = "gspo" if loss == "observed" else loss
        assert entries == [{GROUP: selected} if _is_group(entry) else entry for entry in old]
    else:
        added = ["_self_"] * ("_self_" not in old and (loss == "observed" or not old))
        assert [one for one in before + after if one != "_self_" or not added] == old
        is_override = [isinstance(entry, dict) for entry in after if loss == "fspo" or entry != "_self_"]
        assert entries[place] == {GROUP: loss} and not any(isinstance(entry, dict) for entry in before)
        if loss == "observed":
            assert all(is_override) and ("_self_" in before or (after[1:] == ["_self_"] and is_override))
        else:
            assert "_self_" not in before and (not after or after[0] == "_self_" or is_override[0])
    assert found == {key: value for key, value in expected.items() if key != "defaults"}
    assert sorted(change.split(": ")[0] for change in changes if change.startswith(ACTOR)) == sorted(names)
    assert len(changes) == len(names) + (entries != old)

    # The text: every line stays but those of the keys, and braces and lists that hold them; so do comments there.
    untouched = [line for line, owner in layout.lines if owner not in (*names, "=")]
    rest = iter(new.replace("\r", "").split("\n"))
    assert all(line in rest for line in untouched), (text, new)
    comments = re.findall("# c[0-9]+", "".join(line for line, owner in layout.lines if owner not in names))
    assert set(comments) <= set(re.findall("# c[0-9]+", new))
    assert own_yaml.switched(new, loss) == (new, [])
    assert "\r" not in text or new.count("\n") == new.count("\r\n")


SELF = "defaults:\n  - ppo_trainer\n  - _self_\n"
SELECTED = f"defaults:\n  - ppo_trainer\n  - {GROUP}: fspo\n  - _self_\n"
BODY = "actor_rollout_ref:\n  actor:\n"
GSPO = "    policy_loss:\n      loss_mode: gspo\n"
QUOTED = GSPO.replace("gspo", "'gspo'")
FSPO = GSPO.replace("gspo", "fspo")
DOTTED = f"{ACTOR}.clip_ratio: 0.2\n"  # a key with dots in it, which verl does not read
MINE = "  - mine\n  - b\ntrainer:\n  nnodes: 1\n"
EPOCHS = "    ppo_epochs: 1\n"
HOSTILE = {  # a config, and what it becomes, or which key the refusal names
    "defaults below the body": (
        f"{BODY}    clip_ratio: 0.2\n{EPOCHS}    loss_scale_factor: 7\n{GSPO}{SELF}{MINE}",
        f"{BODY}{EPOCHS}{FSPO}{SELECTED}{MINE}",
    ),
    "_self_ last": (
        f"{BODY}    clip_ratio: 0.2\n{EPOCHS}{SELF}trainer:\n  nnodes: 1\n",
        f"{BODY}{EPOCHS}{SELECTED}trainer:\n  nnodes: 1\n",
    ),
    "a value on the next line": (
        f"{SELF}{BODY}{EPOCHS}    loss_agg_mode:\n      token-mean\n{QUOTED}",
        f"{SELECTED}{BODY}{EPOCHS}{FSPO}",
    ),
    "a folded value": (
        f"{DOTTED}{BODY}    loss_agg_mode: >-\n      token-mean\n{QUOTED}      tau_pos: 1\n"
        "    clip_ratio: 0.1\n    clip_ratio_low:\n      0.2\n",
        f"defaults: [{GROUP}: fspo, _self_]\n{DOTTED}{BODY}{FSPO}",
    ),
    "an interpolation": (f"{SELF}{BODY}{GSPO.replace('gspo', '${oc.env:LOSS,gspo}')}", LOSS_MODE),
    "an anchor": (
        f"{SELF}{BODY}    clip_ratio: &clip 0.2\n    clip_ratio_low: *clip\n{EPOCHS}critic:\n  cliprange: *clip\n",
        f"{ACTOR}.clip_ratio",
    ),
    "a merge key": (
        f"{SELF}x: &base\n  clip_ratio: 0.2  # a\n  loss_agg_mode: token-mean\n{BODY}    <<: *base\n{GSPO}{EPOCHS}",
        f"{ACTOR}.clip_ratio",
    ),
    "a section without keys": (f"{SELF}{BODY}    policy_loss: null\n", f"{ACTOR}.policy_loss"),
    "a layout of its own": ("{actor_rollout_ref: {actor: {clip_ratio: 0.2}}}\n", f"{ACTOR}.clip_ratio"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_yaml_is_edited_where_it_stands_or_refused_with_the_key_that_something_else_uses(kind, switch):
    text, expected = HOSTILE[kind]
    code, shown, new = switch(text, name="own.yaml", new="new.yaml")
    if "\n" in expected:
        assert code == 0 and new == expected
    else:
        assert code == 2 and not new and expected in shown and "by hand" in shown and shown.count("\n") == 1


def test_a_yaml_that_would_replace_the_class_that_observes_is_refused(switch):
    override = "  - override hydra/job_logging: none\n  - _self_"
    text = f"{SELF.replace('  - _self_', override)}{BODY}    policy_loss:\n      _target_: a.Class\n"
    code, shown, new = switch(text, "--loss", "observed", name="own.yaml", new="new.yaml")
    assert code == 2 and not new and f"{ACTOR}.policy_loss._target_" in shown
