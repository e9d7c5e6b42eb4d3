#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/test.sh [--all | --real] [pytest arguments]
#
# Installs what the tests need (once) and runs them: this package's, with a real training run of each way to select the
# loss, and those of verl's own tests that a new policy loss could break. Needs Python 3.10 to 3.12, no GPU.
# --all adds what takes long: FSDP ranks, every launch script, vLLM in an environment of its own.
# --real also adds training steps of a real model (scripts/real_model.sh), which need a C compiler and minutes.
# VENV (default .venv) and VENV_VLLM (default .venv-vllm) name the virtual environments, WORKERS (default 2) says how many
# files of tests run at a time: each may start Ray and several workers.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
VENV_VLLM=${VENV_VLLM:-.venv-vllm}
WORKERS=${WORKERS:-2}
unset PYTHONDONTWRITEBYTECODE # set in many containers: each process of a training would then compile all that it imports
tier=${1:-}
case $tier in
    --all | --real) shift ;;
    *) tier='' ;;
esac
[[ $tier ]] && selection='not real' || selection='not real and not long'

# Cores are shared out: threads of one process that wait for a core hold up all others of it.
threads=$(($(nproc) / WORKERS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

bash scripts/install.sh "$VENV" requirements/cpu.txt report,test,docs
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/python" -m mypy
"$VENV/bin/python" -m pytest -n "$WORKERS" --dist loadfile --no-loadscope-reorder --durations=25 -m "$selection" "$@"

# verl's wheel holds its own tests; with this package installed they must pass as they stand.
verl_tests=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests/trainer/ppo
"$VENV/bin/python" -m pytest -q -p no:cacheprovider "$verl_tests"/test_{core_algos,loss_aggregation,dynamic_policy_losses}_on_cpu.py

[[ $tier ]] || exit 0
# vLLM pins its dependencies, so it has an environment of its own.
bash scripts/install.sh "$VENV_VLLM" requirements/cpu-vllm.txt test
"$VENV_VLLM/bin/python" -m pytest --durations=25 -k vllm cpu/tests/test_vllm.py tests/training/test_cpu_training.py

[[ $tier == --real ]] || exit 0
bash scripts/install.sh "$VENV" "requirements/cpu.txt requirements/real.txt" report,real,test
"$VENV/bin/python" -m pytest --durations=25 -m real scripts/tests/test_real_model.py
