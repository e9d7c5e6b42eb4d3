#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/quickstart.sh [--help] [options]
#
# Trains a small model with FSPO on stock verl, on a machine with nothing but Python 3.10 to 3.12. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."

venv='' rollout=hf options=()
while (($#)); do
    case $1 in
        --help | -h) exec python3 scripts/quickstart/run.py --help ;;
        --venv) venv=${2:?--venv needs a folder}; shift 2 ;;
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

start=$SECONDS
echo "[install] $venv (half a minute the first time)"
bash scripts/install.sh "$venv" "$requirements" cpu,report
exec "$venv/bin/python" scripts/quickstart/run.py --install-seconds $((SECONDS - start)) --rollout "$rollout" \
    ${options[@]+"${options[@]}"}
