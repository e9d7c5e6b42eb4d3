# shellcheck shell=bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# What the scripts that train share: sourced by them, with RUN (the Python script) and EXTRAS (of this package, to
# install) set. MORE_REQUIREMENTS may name requirement files beside the rollout engine's own.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # set in many containers: each process of a training would then compile all that it imports

venv='' python='' rollout=hf options=()
while (($#)); do
    case $1 in
        --help | -h) exec python3 "$RUN" --help ;;
        --venv) venv=${2:?--venv needs a folder}; shift 2 ;;
        --python) python=${2:?--python needs an interpreter}; shift 2 ;;
        --rollout) rollout=${2:?--rollout needs hf or vllm}; shift 2 ;;
        --) options+=("$@"); break ;;
        *) options+=("$1"); shift ;;
    esac
done
if [[ $rollout == vllm ]]; then # vLLM pins its dependencies, so it has an environment of its own.
    venv=${venv:-.venv-vllm} requirements=requirements/cpu-vllm.txt
else
    venv=${venv:-.venv} requirements=requirements/cpu.txt
fi

# Before the installation, as far as there is a Python: a wrong call need not cost half a minute.
! command -v python3 >/dev/null || python3 "$RUN" --parse-only --rollout "$rollout" ${options[@]+"${options[@]}"}

start=$SECONDS
if [[ -z $python ]]; then
    echo "[install] $venv (half a minute the first time)"
    bash scripts/install.sh "$venv" "$requirements${MORE_REQUIREMENTS:+ $MORE_REQUIREMENTS}" "$EXTRAS"
    python=$venv/bin/python
fi
exec "$python" "$RUN" --install-seconds $((SECONDS - start)) --rollout "$rollout" ${options[@]+"${options[@]}"}
