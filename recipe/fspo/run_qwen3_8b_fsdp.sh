#!/usr/bin/env bash
# FSPO | text | vLLM rollout | FSDP training | 8 GPUs of 80 GB; needs the plugin fspo-verl

set -xeuo pipefail

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
TRAIN_FILES=${TRAIN_FILES:-"['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"}
VAL_FILES=${VAL_FILES:-"['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"}
RUN_DIR=${RUN_DIR:-$PWD/runs/fspo}
EPS=${EPS:-0.03} # nats per sqrt(token); `fspo-verl calibrate $RUN_DIR` prints the one that clips 10%
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-512}
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-128} # four updates per rollout: a clip acts from the second on
MICRO_BATCH_SIZE_PER_GPU=${MICRO_BATCH_SIZE_PER_GPU:-2} # the same for old log-probs and updates: no numerical noise
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
ROLLOUT_N=${ROLLOUT_N:-16}
ROLLOUT_TP=${ROLLOUT_TP:-2}
TOTAL_EPOCHS=${TOTAL_EPOCHS:-10}
# ---- end user-adjustable ----

# policy_loss=fspo selects loss, range and aggregation. Without the plugin verl knows neither it nor records_dir, and stops.
python3 -m verl.trainer.main_ppo \
    algorithm.policy_loss=fspo \
    actor_rollout_ref.actor.policy_loss.eps="$EPS" \
    actor_rollout_ref.actor.policy_loss.records_dir="$RUN_DIR/records" \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size="$TRAIN_BATCH_SIZE" \
    data.max_prompt_length="$MAX_PROMPT_LENGTH" \
    data.max_response_length="$MAX_RESPONSE_LENGTH" \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE_PER_GPU" \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE_PER_GPU" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP" \
    actor_rollout_ref.rollout.n="$ROLLOUT_N" \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    trainer.logger='["console","file"]' \
    trainer.experiment_name=qwen3_8b_fspo \
    trainer.default_local_dir="$RUN_DIR/checkpoints" \
    trainer.n_gpus_per_node="$NGPUS_PER_NODE" \
    trainer.nnodes="$NNODES" \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.total_epochs="$TOTAL_EPOCHS" \
    "$@"
