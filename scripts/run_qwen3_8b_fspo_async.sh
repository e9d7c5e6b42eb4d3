#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-8B-Base | mathematics | vLLM rollouts | FSDP2 | asynchronous, 4 GPUs train and 4 generate
#
#   bash scripts/run_qwen3_8b_fspo_async.sh [Hydra overrides]
#
# verl's v1 trainer, trainer_mode=separate_async: a training step is what lies between two weight syncs, TRAIN_BATCH_SIZE
# prompts in mini-batches that train as soon as they are generated. The log-probs that the range refers to are computed
# by the trainer, with the weights of the last sync: the range then holds the optimiser steps since, and neither the
# rollout engine's rounding nor the age of a response. For both of these verl weighs each token by its importance ratio,
# capped at 2. In validations, and before the first step, the GPUs that train generate as well.
# POLICY_LOSS, DRY_RUN and the rest as in run_qwen3_8b_fspo.sh.
set -euo pipefail

NGPUS_PER_NODE=${NGPUS_PER_NODE:-4}                   # GPUs that train, per node
ROLLOUT_NNODES=${ROLLOUT_NNODES:-${NNODES:-1}}        # nodes with GPUs that generate
ROLLOUT_NGPUS_PER_NODE=${ROLLOUT_NGPUS_PER_NODE:-4}   # GPUs that generate, per node
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-512}             # prompts between two weight syncs; whole mini-batches
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-128}       # prompts per optimiser step; from the second step on a clip can act
NUM_WARMUP_BATCHES=${NUM_WARMUP_BATCHES:-1}           # times TRAIN_BATCH_SIZE prompts that are generated ahead
OFFLOAD=${OFFLOAD:-False}                             # keep weights in host memory: verl would lose updates here
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3-8b-async-${POLICY_LOSS:-fspo}} # for the loggers, and the folder of the run

EXTRA=(
    trainer.v1.trainer_mode=separate_async
    trainer.v1.separate_async.parameter_sync_step=$((TRAIN_BATCH_SIZE / PPO_MINI_BATCH_SIZE))
    trainer.v1.separate_async.num_warmup_batches="$NUM_WARMUP_BATCHES"
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.rollout.nnodes="$ROLLOUT_NNODES"
    actor_rollout_ref.rollout.n_gpus_per_node="$ROLLOUT_NGPUS_PER_NODE"
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
    algorithm.rollout_correction.rollout_is=token
    algorithm.rollout_correction.rollout_is_threshold=2.0
)
source "$(dirname "$0")/launch/body.sh"
