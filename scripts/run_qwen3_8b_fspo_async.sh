#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-8B-Base | mathematics | vLLM rollouts | FSDP | fully asynchronous, 4 GPUs train and 4 generate
#
#   bash scripts/run_qwen3_8b_fspo_async.sh [Hydra overrides]
#
# The log-probs that the band refers to are computed by the trainer, with the weights of the last sync: the band then
# holds the optimiser steps since, and neither the rollout engine's rounding nor the age of a response. For both of these
# verl weighs each token by its importance ratio, capped at 2.
# POLICY_LOSS, DRY_RUN and the rest as in run_qwen3_8b_fspo.sh; TOTAL_EPOCHS bounds the run, TOTAL_STEPS does not.
set -euo pipefail

NGPUS_PER_NODE=${NGPUS_PER_NODE:-4}                   # GPUs that train, per node
ROLLOUT_NNODES=${ROLLOUT_NNODES:-${NNODES:-1}}        # nodes with GPUs that generate
ROLLOUT_NGPUS_PER_NODE=${ROLLOUT_NGPUS_PER_NODE:-4}   # GPUs that generate, per node
SYNC_STEPS=${SYNC_STEPS:-4}                           # optimiser steps between two weight syncs
STALENESS=${STALENESS:-0.5}                           # share of the responses that may be older than the last sync
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-0}               # not used: SYNC_STEPS mini-batches make a step
OFFLOAD=${OFFLOAD:-False}                             # keep weights and optimiser state in host memory during rollouts
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.8}     # share of the GPU memory for rollout weights and KV cache
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3-8b-async-${POLICY_LOSS:-fspo}} # for the loggers, and the folder of the run

MAIN=verl.experimental.fully_async_policy.fully_async_main
EXTRA=(
    actor_rollout_ref.hybrid_engine=False
    rollout.nnodes="$ROLLOUT_NNODES"
    rollout.n_gpus_per_node="$ROLLOUT_NGPUS_PER_NODE"
    rollout.total_rollout_steps=null
    async_training.trigger_parameter_sync_step="$SYNC_STEPS"
    async_training.staleness_threshold="$STALENESS"
    algorithm.rollout_correction.bypass_mode=False
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0
)
source "$(dirname "$0")/launch/body.sh"
