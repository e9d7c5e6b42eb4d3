# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""`fspo-verl switch`: nothing that a script starts runs, and the command it prints trains fspo."""

import sys

import pytest

from fspo_verl import cli
from fspo_verl.launch import doctor, switch

LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
SCRIPT = """
set -e
ulimit -n 1
mkdir -p work && cd work
export TOKENS="a b"
{python} -m pip install nothing > installed.txt
ray start --head
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$(python3 -c 'print(2+2)') \\
    'data.train_files=["a.parquet", "b.parquet"]' {arguments} "$@"
touch after.txt
"""


@pytest.fixture
def script(tmp_path):
    def written(arguments="", python="python", text=SCRIPT):
        file = tmp_path / "run.sh"
        file.write_text(text.format(arguments=arguments, python=python))
        return ["bash", str(file)]

    return written


@pytest.mark.parametrize("python", ["python", sys.executable], ids=["found", "by its path"])
def test_a_script_runs_and_nothing_that_it_starts(script, tmp_path, python):
    command = switch.command_of([*script(python=python), "trainer.nnodes=2"], tmp_path)
    assert command.words == ["python3", "-m", "verl.trainer.main_ppo"] and command.environment == {"TOKENS": "a b"}
    assert command.folder == str(tmp_path / "work") and (tmp_path / "work/after.txt").exists()
    assert (tmp_path / "work/installed.txt").read_text() == ""
    files = 'data.train_files=["a.parquet", "b.parquet"]'
    rollouts = "actor_rollout_ref.rollout.n=4"
    assert command.arguments == ["algorithm.adv_estimator=grpo", rollouts, files, "trainer.nnodes=2"]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        f"{LOSS_MODE}=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4 "
        "actor_rollout_ref.actor.loss_agg_mode=token-mean",
        f"{LOSS_MODE}=sapo +actor_rollout_ref.actor.policy_loss.tau_pos=1.0",
        "+algorithm.policy_loss=gspo",
        "+algorithm.policy_loss=fspo actor_rollout_ref.actor.policy_loss.eps=0.05",
    ],
)
def test_the_printed_command_trains_fspo(script, tmp_path, monkeypatch, capsys, arguments):
    from verl.utils.config import omega_conf_to_dataclass

    from fspo_verl.config import FSPOPolicyLossConfig

    monkeypatch.chdir(tmp_path)
    assert cli.main(["switch", "--", *script(arguments)]) == 0
    (tmp_path / "printed.sh").write_text(capsys.readouterr().out.split("\n\n")[1])
    # The printed text is run through the shell once more, as a user would who pastes it.
    pasted = switch.command_of(["bash", "printed.sh"])
    config, found = doctor.compose(pasted.module, pasted.arguments)
    assert not [finding for finding in found if finding.severity == "error"]
    loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert isinstance(loss, FSPOPolicyLossConfig) and loss.loss_mode == "fspo"
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert loss.eps == (0.05 if "eps=0.05" in arguments else FSPOPolicyLossConfig().eps)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sbatch job.sh\n", "submits a job (sbatch)"),
        ("echo no model given >&2; exit 1\n", "no model given"),
        ("true\n", "starts no `python -m` of verl"),
    ],
)
def test_a_script_that_starts_nothing_is_one_line(script, tmp_path, monkeypatch, capsys, text, said):
    assert cli.main(["switch", "--", *script(text=text)]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_what_only_the_user_can_mend_is_said_and_is_exit_code_1(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["switch", "--", *script("actor_rollout_ref.rollout.no_such_key=1")]) == 1
    shown = capsys.readouterr().out
    assert "no_such_key" in shown and "Traceback" not in shown
