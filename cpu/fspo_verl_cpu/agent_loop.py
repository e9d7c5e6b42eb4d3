# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Single-turn rollouts a batch at a time (``rollout.agent.agent_loop_manager_class``).

verl runs one agent loop per response: a Hydra instantiation, three Ray calls and a Ray call for the reward each. On a
model that a CPU can train this takes several times longer than the generation itself.
"""

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.reward_score import default_compute_score
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tokenizer.chat_template import apply_chat_template

from fspo_verl_cpu.rollout import server_name


class BatchAgentLoopManager:
    """Generates and scores whole batches with the ``hf`` rollout, in the trainer's process.

    Takes the place of verl's ``AgentLoopManagerTQ`` for single-turn chats with a rule-based reward: the same prompts
    in, the same rows in TransferQueue out. Generation ends before :meth:`generate_sequences` returns, so an error in
    it, or in the reward function, stops the run at once; verl's ``timing_s/gen`` covers only picking up the result.
    """

    @classmethod
    def create(cls, config, llm_client, teacher_client=None, reward_loop_worker_handles=None):
        """The constructor that verl's task runner calls. Servers are found by name; rewards are computed here."""
        return cls(config)

    def __init__(self, config):
        self.rollout = config.actor_rollout_ref.rollout
        if self.rollout.name != "hf":
            raise ValueError(
                f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={type(self).__module__}."
                f"{type(self).__name__} works with actor_rollout_ref.rollout.name=hf, not {self.rollout.name!r}; "
                "set it to null"
            )
        if config.trainer.v1.trainer_mode == "separate_async":  # its weight syncs do not reach these servers
            raise ValueError(
                f"{type(self).__name__} generates in the trainer's turn: with trainer.v1.trainer_mode=separate_async "
                "set actor_rollout_ref.rollout.agent.agent_loop_manager_class to null"
            )
        if config.reward.reward_model.enable or config.reward.reward_manager.name != "naive":
            raise ValueError(f"{type(self).__name__} scores with a function: reward models need verl's own agent loop")
        self.compute_score = get_custom_reward_fn(config) or default_compute_score

        self.tokenizer = omega_conf_to_dataclass(config.actor_rollout_ref.model).tokenizer
        self.template_arguments = config.data.get("apply_chat_template_kwargs", {})
        ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
        self.servers = [ray.get_actor(server_name(rank)) for rank in range(ranks)]
        tq.init()

    def generate_sequences(self, batch: TensorDict) -> None:
        """Generate ``rollout.n`` responses for each prompt, score them, and put all of it into TransferQueue."""
        prompts = [_unwrap(batch, row) for row in range(len(batch))]
        validate = prompts[0].pop("validate", False)
        settings = self.rollout.val_kwargs if validate else self.rollout
        partition = "val" if validate else "train"
        others = {prompt.get("agent_name", "single_turn_agent") for prompt in prompts} - {"single_turn_agent"}
        if others:
            raise ValueError(f"{type(self).__name__} runs single-turn chats; the data asks for {sorted(others)}")

        samples = [(prompt, session) for prompt in prompts for session in range(settings.n)]
        prompt_ids = [ids for prompt in prompts for ids in [self._prompt_ids(prompt)] * settings.n]
        responses, global_steps = self._generate(
            prompt_ids, dict(temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
        )
        texts = self.tokenizer.batch_decode([response.token_ids for response in responses], skip_special_tokens=True)

        fields, tags = [], []
        for (prompt, session), ids, response, text in zip(samples, prompt_ids, responses, texts, strict=True):
            reward, details = self._score(prompt, text)
            versions = {"min_global_steps": global_steps, "max_global_steps": global_steps}
            output = AgentLoopOutput(
                prompt_ids=ids,
                response_ids=response.token_ids,
                response_mask=[1] * len(response.token_ids),
                response_logprobs=response.log_probs if self.rollout.calculate_log_probs else None,
                reward_score=reward,
                num_turns=2,
                metrics={},
                extra_fields={"reward_extra_info": details, "turn_scores": [], "tool_rewards": [], **versions},
            )
            row = output.as_dict() | prompt | {"session_id": session, "multi_modal_inputs": {}}
            row["loss_mask"] = row["response_mask"]
            row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
            row["position_ids"] = torch.arange(len(row["input_ids"]))
            fields.append(row)
            lengths = {"prompt_len": len(row["prompts"]), "response_len": len(row["responses"])}
            tag = {"status": "success", "seq_len": len(row["input_ids"]), "global_steps": prompt["global_steps"]}
            tags.append(tag | lengths | versions)
        keys = [f"{prompt['uid']}_{session}_0" for prompt, session in samples]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)
        # The replay buffer hands a prompt to the trainer once its own entry says so.
        finished = [{"is_prompt": True, "status": "finished", "global_steps": p["global_steps"]} for p in prompts]
        tq.kv_batch_put(keys=[prompt["uid"] for prompt in prompts], partition_id=partition, tags=finished)

    def _prompt_ids(self, prompt: dict) -> list[int]:
        ids = apply_chat_template(self.tokenizer, list(prompt["raw_prompt"]), **self.template_arguments)
        if len(ids) > self.rollout.prompt_length:
            raise ValueError(
                f"a prompt has {len(ids)} tokens, more than data.max_prompt_length={self.rollout.prompt_length}; "
                "raise it or set data.filter_overlong_prompts=True"
            )
        return ids

    def _generate(self, prompt_ids: list[list[int]], sampling_params: dict) -> tuple[list, int]:
        """Share the prompts out among the servers; return the responses and the trainer step of the weights."""
        shares = np.array_split(np.arange(len(prompt_ids)), len(self.servers))
        results = ray.get(
            [
                server.generate_batch.remote([prompt_ids[i] for i in share], sampling_params)
                for server, share in zip(self.servers, shares, strict=True)
                if len(share)
            ]
        )
        return [response for responses, _ in results for response in responses], results[0][1]

    def _score(self, prompt: dict, response: str) -> tuple[float, dict]:
        """Return the reward and what the reward function says about it, as verl's naive reward manager does."""
        result = self.compute_score(
            data_source=prompt["data_source"],
            solution_str=response,
            ground_truth=prompt["reward_model"]["ground_truth"],
            extra_info=prompt.get("extra_info", {}),
        )
        return (result["score"], dict(result)) if isinstance(result, dict) else (result, {"acc": result})


def _unwrap(batch: TensorDict, row: int) -> dict:
    """One prompt of the batch as a plain dict; non-tensor values are stacked per row or shared by all rows."""
    return {
        key: value.data if isinstance(value, NonTensorData) else getattr(value[row], "data", value[row])
        for key, value in batch.items()
    }
