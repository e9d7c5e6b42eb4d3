# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Keys of verl 0.4 to 0.8 that verl 0.9 does not read, each with the key that took its place.

A key stands for all keys below it, too. A text after ``-`` says why there is no new key. Found by comparing the
composed configs of verl's releases with that of 0.9.1.
"""

_WORKERS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
_CORRECTION = "algorithm.rollout_correction"
_NSYS = "global_profiler.global_tool_config.nsys"
_ROLLOUT = "actor_rollout_ref.rollout"
_SERVED = "- the reward model runs in a rollout engine, reward.reward_model.rollout"

RENAMED: dict[str, str] = {
    **{f"{worker}.megatron.grad_offload": "- param_offload moves the gradients, too" for worker in _WORKERS},
    **{f"{worker}.fsdp_config.grad_offload": "- FSDP has no such setting" for worker in _WORKERS},
    **{f"{worker}.load_weight": "- weights are always loaded" for worker in _WORKERS},
    **{f"{worker}.checkpoint.contents": f"{worker}.checkpoint.save_contents" for worker in _WORKERS},
    **{f"{worker}.optim.warmup_style": f"{worker}.optim.lr_decay_style" for worker in _WORKERS},
    **{f"{worker}.optim.min_lr_ratio": f"{worker}.optim.min_lr" for worker in _WORKERS},
    **{f"{worker}.profiler.discrete": f"{worker}.profiler.tool_config.nsys.discrete" for worker in _WORKERS},
    "critic.model.fsdp_config": "critic.fsdp",
    "reward_model.overlong_buffer": "+reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "reward_model.launch_reward_fn_async": "- rewards are always computed asynchronously",
    "reward_model.use_reward_loop": "- rewards always take the reward loop",
    "reward_model.model.input_tokenizer": _SERVED,
    "reward_model.model.fsdp_config": _SERVED,
    "reward_model.model.use_remove_padding": _SERVED,
    "reward_model.model.use_shm": _SERVED,
    "reward_model.model.use_fused_kernels": _SERVED,
    "reward_model.forward_max_token_len_per_gpu": _SERVED,
    "reward_model.max_length": _SERVED,
    "reward_model.megatron": _SERVED,
    "reward_model.micro_batch_size": _SERVED,
    "reward_model.micro_batch_size_per_gpu": _SERVED,
    "reward_model.profiler": _SERVED,
    "reward_model.strategy": _SERVED,
    "reward_model.ulysses_sequence_parallel_size": _SERVED,
    "reward_model.use_dynamic_bsz": _SERVED,
    "reward_manager": "reward.reward_manager",
    "algorithm.rollout_is": f"{_CORRECTION}.rollout_is",
    "algorithm.rollout_is_level": f"{_CORRECTION}.rollout_is",
    "algorithm.rollout_is_mode": f"{_CORRECTION}.rollout_rs",
    "algorithm.rollout_is_threshold": f"{_CORRECTION}.rollout_is_threshold",
    "algorithm.rollout_is_threshold_lower": f"{_CORRECTION}.rollout_rs_threshold",
    "algorithm.rollout_is_veto_threshold": f"{_CORRECTION}.rollout_rs_threshold",
    f"{_CORRECTION}.rollout_rs_threshold_lower": f"{_CORRECTION}.rollout_rs_threshold",
    f"{_CORRECTION}.rollout_token_veto_threshold": f"{_CORRECTION}.rollout_rs_threshold",
    f"{_ROLLOUT}.chat_scheduler": f"{_ROLLOUT}.agent",
    f"{_ROLLOUT}.layer_name_map": "- the model's bridge converts the weights",
    f"{_ROLLOUT}.multi_turn.max_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    f"{_ROLLOUT}.skip_dump_dir": "skip.rollout.dump_dir",
    f"{_ROLLOUT}.skip_rollout": "skip.rollout.enable",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{_ROLLOUT}.use_fire_sampling": "- there is no such sampling",
    "actor_rollout_ref.profiler": "actor_rollout_ref.actor.profiler",
    "ray_init": "ray_kwargs.ray_init",
    "trainer.controller_nsight_options": f"{_NSYS}.controller_nsight_options",
    "trainer.npu_profile": "actor_rollout_ref.actor.profiler.tool_config.npu",
    "trainer.profile_steps": "global_profiler.steps",
    "trainer.use_legacy_worker_impl": "- verl has one implementation of the workers",
    "trainer.worker_nsight_options": f"{_NSYS}.worker_nsight_options",
}
