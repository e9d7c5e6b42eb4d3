# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""In a Ray worker that never imported this package, the loss is there as soon as verl is."""

import pytest
import ray


@ray.remote
def policy_loss_in_a_worker():
    import sys

    import torch

    imported_before = "fspo_verl" in sys.modules
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    zeros = torch.zeros(2, 3, requires_grad=True)
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode="fspo")
    )
    loss, _ = get_policy_loss_fn("fspo")(
        old_log_prob=torch.zeros(2, 3),
        log_prob=zeros,
        advantages=torch.ones(2, 3),
        response_mask=torch.ones(2, 3),
        loss_agg_mode="token-mean",
        config=config,
    )
    return imported_before, loss.item()


@pytest.mark.long
def test_a_worker_finds_the_loss_by_importing_verl():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        imported_before, loss = ray.get(policy_loss_in_a_worker.remote())
    finally:
        ray.shutdown()
    assert imported_before is False and loss == -1.0
