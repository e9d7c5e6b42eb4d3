#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-1.7B-Base | mathematics | vLLM rollouts | FSDP | colocated on 8 GPUs of 80 GB
# Run so far: these arguments, with model, lengths and batch made small, on a CPU (scripts/tests/test_launch_scripts.py); on GPUs
# not yet.
#
#   bash scripts/run_qwen3_1.7b_fspo.sh [Hydra overrides]
#
# POLICY_LOSS, DRY_RUN and the rest as in run_qwen3_8b_fspo.sh.
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-1.7B-Base}        # folder of a model, or its name on the hub
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3-1.7b-${POLICY_LOSS:-fspo}} # for the loggers, and the folder of the run
MICRO_BATCH_SIZE_PER_GPU=${MICRO_BATCH_SIZE_PER_GPU:-4} # responses per micro-batch; the same of old log-probs and of updates, which keeps S free of noise
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-40960} # tokens per dynamic micro-batch; at least prompt + response
OFFLOAD=${OFFLOAD:-False}                             # keep weights and optimiser state in host memory during rollouts
ROLLOUT_TP=${ROLLOUT_TP:-1}                           # GPUs per rollout replica

EXTRA=()
source "$(dirname "$0")/launch/body.sh"
