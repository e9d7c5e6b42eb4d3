#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
#   MODEL_PATH=FOLDER bash scripts/studies/on_a_gpu/run.sh fspo [Hydra overrides]
#
# The 8B launch script with a small model on one GPU: vLLM rollouts of up to 2,048 tokens, FSDP with float32 log-probs, as the noise
# of bfloat16 fills the band, and four optimiser steps to a rollout.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export POLICY_LOSS=$1 DATA_DIR=${DATA_DIR:-runs/on_a_gpu/data} RUN_DIR=${RUN_DIR:-runs/on_a_gpu/$1}
export TRAIN_FILE=$DATA_DIR/train.parquet TEST_FILES=$DATA_DIR/test.parquet
export NGPUS_PER_NODE=1 ROLLOUT_TP=1 ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.12} OFFLOAD=False
export TRAIN_BATCH_SIZE=16 PPO_MINI_BATCH_SIZE=4 ROLLOUT_N=8 MAX_PROMPT_LENGTH=256 MAX_RESPONSE_LENGTH=2048
# Without flash attention the sequences of a micro-batch are masked from each other, not skipped: small ones cost less.
export PPO_MAX_TOKEN_LEN_PER_GPU=4096 ACTOR_LR=1e-5 TOTAL_STEPS=${TOTAL_STEPS:-20} SAVE_FREQ=-1 TEST_FREQ=-1
[[ -f $TRAIN_FILE ]] || "${PYTHON:-python3}" "$here/task.py" "$DATA_DIR"
exec bash "$here/../../run_qwen3_8b_fspo.sh" \
    reward.custom_reward_function.path="$here/task.py" \
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32}" \
    trainer.val_before_train=False "${@:2}"
