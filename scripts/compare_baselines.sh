#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# bash scripts/compare_baselines.sh [--help] [options]
#
# Trains fspo, gspo, grpo, a fixed range and no clip with stock verl from the same warm starts on the same prompts, and
# compares them, on a machine with nothing but Python 3.10 to 3.12. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # set in many containers: each process of a training would then compile all that it imports

venv=.venv options=() run=scripts/compare/baselines.py
while (($#)); do
    case $1 in
        --help | -h) exec python3 "$run" --help ;;
        --venv) venv=${2:?--venv needs a folder}; shift 2 ;;
        --) options+=("$@"); break ;;
        *) options+=("$1"); shift ;;
    esac
done

# Before the installation, as far as there is a Python: a wrong call need not cost half a minute.
! command -v python3 >/dev/null || python3 "$run" --parse-only ${options[@]+"${options[@]}"}
bash scripts/install.sh "$venv" requirements/cpu.txt report
exec "$venv/bin/python" "$run" ${options[@]+"${options[@]}"}
