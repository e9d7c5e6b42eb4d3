#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-8B-Base, LoRA | mathematics | vLLM rollouts | FSDP | colocated on 8 GPUs of 80 GB
# Run so far: these arguments, with model, lengths and batch made small, on a CPU (scripts/tests/test_launch_scripts.py); on GPUs
# not yet.
#
#   bash scripts/run_qwen3_8b_fspo_lora.sh [Hydra overrides]
#
# Trains adapters on all linear layers, and merges them into the weights that go to the rollout engine.
# POLICY_LOSS, DRY_RUN and the rest as in run_qwen3_8b_fspo.sh.
set -euo pipefail

LORA_RANK=${LORA_RANK:-32}                            # rank of the adapters
LORA_ALPHA=${LORA_ALPHA:-64}                          # their scale is LORA_ALPHA / LORA_RANK
ACTOR_LR=${ACTOR_LR:-1e-5}                            # learning rate
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3-8b-lora-${POLICY_LOSS:-fspo}} # for the loggers, and the folder of the run

EXTRA=(
    actor_rollout_ref.model.lora_rank="$LORA_RANK"
    actor_rollout_ref.model.lora_alpha="$LORA_ALPHA"
    actor_rollout_ref.model.lora.merge=True
)
source "$(dirname "$0")/launch/body.sh"
