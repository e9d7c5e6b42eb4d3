#!/usr/bin/env bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# [VARIABLE=...] bash scripts/evaluate.sh MODEL [--cpu] [Hydra overrides]
#
# Evaluates MODEL through verl's own validation (main_ppo with trainer.val_only=True) and prints mean@k for each data
# set, with a 95% interval over its questions. MODEL is
#   - a checkpoint of verl's FSDP trainer, .../global_step_N or .../global_step_N/actor; if it holds no model in Hugging
#     Face's format (checkpoint.save_contents=[...,hf_model]), verl's merger makes one in bfloat16, in OUTPUT/model;
#   - a folder in Hugging Face's format;
#   - a name on the Hugging Face hub.
# OUTPUT gets results.json, every response with its score (generations/) and the composed configuration (hydra/).
# `python scripts/evaluate.py OUTPUT` prints the table again.
#
# --cpu evaluates without a GPU, through fspo_verl's fspo_cpu.yaml; for small models. Overrides come last and win.
#
# The quickstart's last checkpoint, on its own validation set:
#   PYTHON=.venv/bin/python TEST_FILES=runs/quickstart/warm-start-seed0/validation.parquet VAL_N=1 TEMPERATURE=0 \
#     MAX_PROMPT_LENGTH=43 MAX_RESPONSE_LENGTH=81 bash scripts/evaluate.sh --cpu \
#     runs/quickstart/fspo-hf-seed0/checkpoints/global_step_30 \
#     reward.custom_reward_function.path=scripts/quickstart/ledger.py
set -euo pipefail
source "$(dirname "$0")/launch/functions.sh"

device=gpu help='' model=''
while (($#)); do
    case $1 in
        --help | -h) help=1; shift ;;
        --cpu) device=cpu; shift ;;
        --*) fail "unknown option $1, see --help" ;;
        *) [[ -z $model ]] || break; model=$1; shift ;;
    esac
done

########################### user-adjustable ###########################
# Every variable can be set in the environment; `--help` prints this block.
DATA_DIR=${DATA_DIR:-data}                            # where scripts/prepare_data.py wrote to
TEST_FILES=${TEST_FILES:-$DATA_DIR/math500.parquet $DATA_DIR/aime24.parquet $DATA_DIR/aime25.parquet} # separated by spaces
VAL_N=${VAL_N:-32}                                    # k, responses per question
TEMPERATURE=${TEMPERATURE:-1.0}                       # as in verl's DAPO recipe, like top_p; the FSPO paper's is not known
TOP_P=${TOP_P:-0.7}                                   # of sampling
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}          # tokens
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}      # tokens; longer responses are cut
NNODES=${NNODES:-1}                                   # nodes; more than one needs a Ray cluster
NGPUS_PER_NODE=${NGPUS_PER_NODE:-$([[ $device == cpu ]] && echo 1 || echo 8)} # GPUs per node; with --cpu, processes
ROLLOUT_TP=${ROLLOUT_TP:-2}                           # GPUs per rollout replica
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.6}     # share of the GPU memory for rollout weights and KV cache
OUTPUT=${OUTPUT:-runs/evaluate/$(date +%Y%m%d-%H%M%S)} # a folder that does not exist yet, on a disk that all nodes share
PYTHON=${PYTHON:-python3}                             # of the environment with verl and fspo_verl
DRY_RUN=${DRY_RUN:-0}                                 # 1: print the composed configuration, and the commands on stderr
########################### end user-adjustable #######################

if [[ -n $help ]]; then
    show_help "$0"
    exit
fi
[[ -n $model ]] || fail "which model? See --help"
OUTPUT=$(realpath -m "$OUTPUT")
[[ ! -e $OUTPUT ]] || fail "$OUTPUT exists; choose another OUTPUT"
[[ $VAL_N == 1 || ! $TEMPERATURE =~ ^0*\.?0*$ ]] || fail "VAL_N=$VAL_N responses at TEMPERATURE=0 are $VAL_N times the same"
val_files=''
for file in $TEST_FILES; do
    [[ -f $file ]] || fail "no file $file; python scripts/prepare_data.py makes the default ones, TEST_FILES names others"
    val_files+="${val_files:+,}$(quoted "$(realpath "$file")")"
done

has_weights() { compgen -G "$1/*.safetensors" >/dev/null || compgen -G "$1/*.bin" >/dev/null; }

[[ ! -d $model/actor ]] || model=$model/actor
merge=()
if [[ -f $model/fsdp_config.json ]]; then
    if has_weights "$model/huggingface"; then
        model_path=$(realpath "$model/huggingface")
    else
        model_path=$OUTPUT/model
        merge=("$PYTHON" -m verl.model_merger merge --backend fsdp --local_dir "$model" --target_dir "$model_path")
    fi
elif [[ -f $model/config.json ]] && has_weights "$model"; then
    model_path=$(realpath "$model")
elif [[ ! -e $model && $model =~ ^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$ ]]; then
    model_path=$model # a name on the hub
else
    fail "$model is no checkpoint of verl's FSDP trainer (fsdp_config.json), no model folder (config.json and weights)" \
        "and no name on the hub"
fi

# Validation alone trains nothing, but verl wants a training set and batch sizes that fit its ranks.
ranks=$((NNODES * NGPUS_PER_NODE))
DATA=(
    data.train_files="[$val_files]"
    data.val_files="[$val_files]"
    data.train_batch_size=$ranks
    data.max_prompt_length=$MAX_PROMPT_LENGTH
    data.max_response_length=$MAX_RESPONSE_LENGTH
)
ACTOR=(
    actor_rollout_ref.model.path="$(quoted "$model_path")"
    actor_rollout_ref.actor.ppo_mini_batch_size=$ranks
    actor_rollout_ref.actor.use_dynamic_bsz=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
    actor_rollout_ref.rollout.val_kwargs.n=$VAL_N
    actor_rollout_ref.rollout.val_kwargs.temperature=$TEMPERATURE
    actor_rollout_ref.rollout.val_kwargs.top_p=$TOP_P
)
TRAINER=(
    trainer.val_only=True
    trainer.val_before_train=True
    trainer.resume_mode=disable
    trainer.validation_data_dir="$(quoted "$OUTPUT/generations")"
    trainer.logger=[console]
    trainer.project_name=evaluate
    trainer.experiment_name="$(quoted "$(basename "$OUTPUT")")"
    trainer.nnodes=$NNODES
    trainer.n_gpus_per_node=$NGPUS_PER_NODE
    hydra.run.dir="$(quoted "$OUTPUT/hydra")"
)
if [[ $device == cpu ]]; then
    export VERL_PLATFORM=cpu
    DEVICE=(--config-name fspo_cpu algorithm.policy_loss=grpo) # any loss: it is not used
else
    DEVICE=(
        algorithm.adv_estimator=grpo # without a critic
        actor_rollout_ref.actor.fsdp_config.param_offload=True
        actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.tensor_model_parallel_size=$ROLLOUT_TP
        actor_rollout_ref.rollout.gpu_memory_utilization=$ROLLOUT_GPU_MEM_UTIL
    )
fi
command=(
    "$PYTHON" -m verl.trainer.main_ppo "${DEVICE[@]}" "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
)

if [[ $DRY_RUN != 0 ]]; then
    "${command[@]}" --cfg job
    ((${#merge[@]} == 0)) || echo "${merge[@]@Q}" >&2
    echo "${command[@]@Q}" >&2
    exit
fi
((${#merge[@]} == 0)) || "${merge[@]}"
"${command[@]}"
exec "$PYTHON" "$(dirname "$0")/evaluate.py" "$OUTPUT"
