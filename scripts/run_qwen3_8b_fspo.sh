#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3-8B-Base | mathematics | vLLM rollouts | FSDP | colocated on 8 GPUs of 80 GB
# Run so far: these arguments, with model, lengths and batch made small, on a CPU (scripts/tests/test_launch_scripts.py), and one
# step on a GPU.
#
#   bash scripts/run_qwen3_8b_fspo.sh [Hydra overrides]
#   POLICY_LOSS=gspo bash scripts/run_qwen3_8b_fspo.sh        a baseline, everything else equal
#   DRY_RUN=1 bash scripts/run_qwen3_8b_fspo.sh               what would run, without a GPU
#
# The same command again resumes from the last checkpoint. Overrides come last and win, for example
#   actor_rollout_ref.actor.policy_loss.eps=0.02
set -euo pipefail

EXTRA=()
source "$(dirname "$0")/launch/body.sh"
