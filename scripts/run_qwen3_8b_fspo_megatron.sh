#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-8B-Base | mathematics | vLLM rollouts | Megatron | colocated on 8 GPUs of 80 GB
# Run so far: composed and checked only; the Megatron engine needs GPUs.
#
#   bash scripts/run_qwen3_8b_fspo_megatron.sh [Hydra overrides]
#
# Needs Megatron-Core and Megatron-Bridge: pip install 'verl[megatron]'.
# POLICY_LOSS, DRY_RUN and the rest as in run_qwen3_8b_fspo.sh.
set -euo pipefail

ACTOR_TP=${ACTOR_TP:-2}                               # tensor-parallel GPUs of the training engine
ACTOR_PP=${ACTOR_PP:-1}                               # pipeline stages
ACTOR_CP=${ACTOR_CP:-1}                               # context-parallel GPUs
OFFLOAD=${OFFLOAD:-True}                              # keep weights and optimiser state in host memory during rollouts
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3-8b-megatron-${POLICY_LOSS:-fspo}} # for the loggers, and the folder of the run

megatron=actor_rollout_ref.actor.megatron
ENGINE=(
    model_engine=megatron
    $megatron.tensor_model_parallel_size="$ACTOR_TP"
    $megatron.pipeline_model_parallel_size="$ACTOR_PP"
    $megatron.context_parallel_size="$ACTOR_CP"
    $megatron.param_offload="$OFFLOAD"
    $megatron.optimizer_offload="$OFFLOAD"
    # Recompute every layer's activations, as FSDP's gradient checkpointing does.
    $megatron.override_transformer_config.recompute_granularity=full
    $megatron.override_transformer_config.recompute_method=uniform
    $megatron.override_transformer_config.recompute_num_layers=1
)
EXTRA=()
source "$(dirname "$0")/launch/body.sh"
