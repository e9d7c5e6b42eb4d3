# shellcheck shell=bash
# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
#
# What all scripts/run_*.sh share: sourced by them, after they have set what is theirs.
#   defaults   variables of the block below
#   ENGINE     overrides of the training engine; FSDP's without it
#   EXTRA      more overrides

source "$(dirname "${BASH_SOURCE[0]}")/functions.sh"

########################### user-adjustable ###########################
# Every variable can be set in the environment; `--help` prints this block.
POLICY_LOSS=${POLICY_LOSS:-fspo}                      # fspo, or with all else equal: gspo, grpo, fixed_band, no_clip
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}          # folder of a model, or its name on the hub
DATA_DIR=${DATA_DIR:-data}                            # where scripts/prepare_data.py wrote to
TRAIN_FILE=${TRAIN_FILE:-$DATA_DIR/dapo.parquet}      # training prompts in verl's format
TEST_FILES=${TEST_FILES:-$DATA_DIR/math500.parquet $DATA_DIR/aime24.parquet $DATA_DIR/aime25.parquet} # separated by spaces
NNODES=${NNODES:-1}                                   # nodes; more than one needs a Ray cluster (RAY_ADDRESS, or ray start here)
NGPUS_PER_NODE=${NGPUS_PER_NODE:-${NDEVICES_PER_NODE:-8}} # GPUs that train, per node; verl's scripts call it NDEVICES_PER_NODE
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-512}             # prompts per rollout
PPO_MINI_BATCH_SIZE=${PPO_MINI_BATCH_SIZE:-128}       # prompts per optimiser step; from the second step on a clip can act
ROLLOUT_N=${ROLLOUT_N:-16}                            # responses per prompt
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2048}          # tokens; longer prompts are left out
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}      # tokens; longer responses are cut
ADV_ESTIMATOR=${ADV_ESTIMATOR:-grpo}                  # any that verl has; the same for all losses by default
ACTOR_LR=${ACTOR_LR:-1e-6}                            # learning rate
MICRO_BATCH_SIZE_PER_GPU=${MICRO_BATCH_SIZE_PER_GPU:-2} # responses per micro-batch; the same of old log-probs and of updates, which keeps S free of noise
USE_DYNAMIC_BSZ=${USE_DYNAMIC_BSZ:-False}             # True: fewer micro-batches, cut by tokens; numerical noise then clips responses
PPO_MAX_TOKEN_LEN_PER_GPU=${PPO_MAX_TOKEN_LEN_PER_GPU:-20480} # tokens per dynamic micro-batch; at least prompt + response
USE_FUSED_KERNELS=${USE_FUSED_KERNELS:-False}         # True: log-probs without the logits of a micro-batch in memory
OFFLOAD=${OFFLOAD:-True}                              # keep weights and optimiser state in host memory during rollouts
ROLLOUT_NAME=${ROLLOUT_NAME:-vllm}                    # rollout engine: vllm, sglang
ROLLOUT_TP=${ROLLOUT_TP:-2}                           # GPUs per rollout replica
ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.6}     # share of the GPU memory for rollout weights and KV cache
VAL_N=${VAL_N:-4}                                     # responses per validation problem, at temperature 1 and top_p 0.7
SEED=${SEED:-42}                                      # of the order of the prompts, and of sampling
TOTAL_EPOCHS=${TOTAL_EPOCHS:-10}                      # passes over the prompts
TOTAL_STEPS=${TOTAL_STEPS:-null}                      # training steps, where epochs are not the measure
SAVE_FREQ=${SAVE_FREQ:-20}                            # steps between checkpoints; the same command resumes from the last
TEST_FREQ=${TEST_FREQ:-10}                            # steps between validations
PROJECT_NAME=${PROJECT_NAME:-fspo}                    # for the loggers
EXPERIMENT_NAME=${EXPERIMENT_NAME:-qwen3-8b-$POLICY_LOSS} # for the loggers, and the folder of the run
RUN_DIR=${RUN_DIR:-runs/$EXPERIMENT_NAME}             # checkpoints, metrics, records; on a disk that all nodes share
RECORDS=${RECORDS:-1}                                 # 0: no records per response (fspo-verl report and calibrate read them)
WANDB=${WANDB:-${WANDB_API_KEY:+1}}                   # 1: log to Weights & Biases, too; the default where WANDB_API_KEY is set
PYTHON=${PYTHON:-python3}                             # of the environment with verl and fspo_verl
DRY_RUN=${DRY_RUN:-0}                                 # 1: compose, check and print what would run; needs neither GPU nor data
########################### end user-adjustable #######################

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    show_help "$0" "${BASH_SOURCE[0]}" # a script's own defaults come first and win
    exit
fi

as_typed() { # an argument, quoted where a shell would read it otherwise
    case $1 in
        *[\$\`\"\\!]*) printf '%q' "$1" ;;
        *[!a-zA-Z0-9_./:=+@%,-]*) printf '"%s"' "$1" ;;
        *) printf '%s' "$1" ;;
    esac
}

# Ray's workers have working directories of their own, hence absolute paths.
data_file() { # path or URL, name of the variable
    case $1 in
        *://*) echo "$1" ;;
        *) [[ -f $1 || $DRY_RUN != 0 ]] ||
            fail "no file $1: python scripts/prepare_data.py makes the default ones, $2 names others"
            realpath -m "$1" ;;
    esac
}

RUN_DIR=$(realpath -m "$RUN_DIR")
TRAIN_FILE=$(data_file "$TRAIN_FILE" TRAIN_FILE)
val_files=''
for file in $TEST_FILES; do
    file=$(data_file "$file" TEST_FILES)
    val_files+="${val_files:+,}$(quoted "$file")"
done
[[ ! -d $MODEL_PATH ]] || MODEL_PATH=$(realpath "$MODEL_PATH")
# verl truncates its metrics file, so a run that resumes gets another one.
attempts=("$RUN_DIR"/metrics-*.jsonl)
[[ -e ${attempts[0]} ]] || attempts=()
metrics=$RUN_DIR/metrics-$((${#attempts[@]} + 1)).jsonl

DATA=(
    algorithm.adv_estimator="$ADV_ESTIMATOR"
    data.train_files="[$(quoted "$TRAIN_FILE")]"
    data.val_files="[$val_files]"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    data.seed="$SEED"
)

MODEL=(
    actor_rollout_ref.model.path="$(quoted "$MODEL_PATH")"
    actor_rollout_ref.model.use_fused_kernels="$USE_FUSED_KERNELS"
)

# Loss, aggregation and clip range come with the group; no KL term and no entropy bonus, which are verl's defaults.
ACTOR=(
    algorithm.policy_loss="$POLICY_LOSS"
    actor_rollout_ref.actor.optim.lr="$ACTOR_LR"
    actor_rollout_ref.actor.ppo_mini_batch_size="$PPO_MINI_BATCH_SIZE"
    actor_rollout_ref.actor.use_dynamic_bsz="$USE_DYNAMIC_BSZ" # old and reference log-probs follow
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE_PER_GPU"
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PPO_MAX_TOKEN_LEN_PER_GPU"
)
if [[ $RECORDS != 0 ]]; then
    ACTOR+=(actor_rollout_ref.actor.policy_loss.records_dir="$(quoted "$RUN_DIR/records")")
fi

if [[ -z ${ENGINE+set} ]]; then
    ENGINE=(
        actor_rollout_ref.actor.fsdp_config.param_offload="$OFFLOAD"
        actor_rollout_ref.actor.fsdp_config.optimizer_offload="$OFFLOAD"
        actor_rollout_ref.ref.fsdp_config.param_offload="$OFFLOAD"
    )
fi

ROLLOUT=(
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE_PER_GPU"
    actor_rollout_ref.rollout.name="$ROLLOUT_NAME"
    actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP"
    actor_rollout_ref.rollout.gpu_memory_utilization="$ROLLOUT_GPU_MEM_UTIL"
    actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
    actor_rollout_ref.rollout.n="$ROLLOUT_N"
    actor_rollout_ref.rollout.seed="$SEED"
    actor_rollout_ref.rollout.calculate_log_probs=True # to measure the mismatch of trainer and rollout engine
    actor_rollout_ref.rollout.val_kwargs.n="$VAL_N"
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
)

# There is a reference model only with a KL term, which these scripts leave out: actor_rollout_ref.actor.use_kl_loss=True.
# There is a critic only with ADV_ESTIMATOR=gae.
REF_AND_CRITIC=(
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE_PER_GPU"
    critic.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE_PER_GPU"
)

TRAINER=(
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.total_epochs="$TOTAL_EPOCHS"
    trainer.total_training_steps="$TOTAL_STEPS"
    trainer.save_freq="$SAVE_FREQ"
    trainer.test_freq="$TEST_FREQ"
    trainer.max_actor_ckpt_to_keep=2
    trainer.default_local_dir="$(quoted "$RUN_DIR/checkpoints")"
    trainer.resume_mode=auto
    trainer.logger="[console,file$([[ ${WANDB:-0} == 0 ]] || echo ,wandb)]"
    trainer.project_name="$(quoted "$PROJECT_NAME")"
    trainer.experiment_name="$(quoted "$EXPERIMENT_NAME")"
    # In the config, as the environment of this shell does not reach a cluster that is running already.
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="$(quoted "$metrics")"
    hydra.run.dir="$(quoted "$RUN_DIR/hydra")"
)

command=(
    "$PYTHON" -m verl.trainer.main_ppo
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ENGINE[@]}" "${ROLLOUT[@]}" "${REF_AND_CRITIC[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "$@"
)
if [[ $DRY_RUN != 0 ]]; then
    printf '%s %s %s' "$(as_typed "${command[0]}")" "${command[@]:1:2}"
    width=999 # of the line so far
    for argument in "${command[@]:3}"; do
        argument=$(as_typed "$argument")
        if ((width + ${#argument} > 115)); then
            printf ' \\\n   '
            width=0
        fi
        printf ' %s' "$argument"
        width=$((width + ${#argument} + 1))
    done
    printf '\n\n'
    exec "$PYTHON" -m fspo_verl.cli doctor -- "${command[@]}"
fi
"$PYTHON" -m fspo_verl.cli doctor -- "${command[@]}" || fail "not started, see the errors above"
mkdir -p "$RUN_DIR"
# In the background, so that a signal to this script reaches the trainer.
set -x
"${command[@]}" &
{ set +x; } 2>/dev/null
trainer=$!
trap 'kill -TERM "$trainer"' INT TERM
status=0
wait "$trainer" || status=$?
while kill -0 "$trainer" 2>/dev/null; do # a signal has ended the wait
    status=0
    wait "$trainer" || status=$?
done
((status == 0)) || exit "$status"
"$PYTHON" -m fspo_verl.cli report "$RUN_DIR" || true # a training that has finished does not fail for its page
