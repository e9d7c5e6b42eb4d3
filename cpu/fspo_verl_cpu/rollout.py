# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.rollout.name=hf``: rollouts from a transformers model in its own Ray actor, for a CPU.

Three parts, as for every rollout engine of verl: :class:`HFServer` generates, :class:`HFReplica` launches it next to a
trainer rank, and :class:`HFServerAdapter` lives in that rank and sends it the weights.
"""

import asyncio
import os

import ray
import torch
import verl.workers.rollout.base
import verl.workers.rollout.replica

from fspo_verl_cpu.decode import Response, Sampling, eos_token_ids, sample

# How long the first request waits for others to share its batch, in seconds.
_GATHER_SECONDS = 0.02


def server_name(replica_rank: int) -> str:
    """The Ray name of the server of one trainer rank."""
    return f"fspo_verl_hf_server_{replica_rank}"


def _threads() -> int:
    """All processors, or as many as OMP_THREAD_LIMIT allows: above it bfloat16 products of oneDNN are NaN."""
    processors = os.cpu_count() or 1
    return min(processors, int(os.environ.get("OMP_THREAD_LIMIT", processors)))


class HFServer:
    """Token-in, token-out generation from a copy of the policy."""

    def __init__(self, path: str, dtype: str, seed: int, max_num_seqs: int, response_length: int):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(_threads())  # Ray gives an actor one; the trainer is idle while this one works
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.eos_token_ids = eos_token_ids(self.model, tokenizer)
        self.vocab_size = len(tokenizer)
        self.max_num_seqs, self.response_length = max_num_seqs, response_length
        self.global_steps: int | None = None  # the trainer step whose weights are loaded
        self.lock = asyncio.Lock()  # weights never change under a batch that is being generated
        self.waiting: list[tuple[list[int], Sampling, asyncio.Future]] = []

    async def ready(self) -> None:
        """Return once the model is loaded."""

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Replace every parameter; a parameter left out would silently keep generating from an old policy."""
        async with self.lock:
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            unexpected = weights.keys() - parameters.keys()
            # Tied parameters share storage: either name will do.
            updated = {parameters[name].data_ptr() for name in weights.keys() & parameters.keys()}
            missing = {name for name, parameter in parameters.items() if parameter.data_ptr() not in updated}
            if unexpected or missing:
                raise RuntimeError(f"hf rollout: weight sync left out {sorted(missing)}, brought {sorted(unexpected)}")
            with torch.no_grad():
                for name, weight in weights.items():
                    parameters[name].copy_(weight)
            self.global_steps = global_steps

    async def generate_batch(
        self, prompts: list[list[int]], sampling_params: dict
    ) -> tuple[list[Response], int | None]:
        """Generate one response per prompt; return them and the trainer step of the weights, None before any."""
        sampling = self._sampling(sampling_params)
        async with self.lock:
            return await asyncio.to_thread(self._sample, prompts, [sampling] * len(prompts)), self.global_steps

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict, request_id: str, image_data=None, video_data=None, **_
    ) -> verl.workers.rollout.replica.TokenOutput:
        """verl's per-request interface. Requests that arrive together are generated together."""
        if image_data or video_data:
            raise NotImplementedError("hf rollout: text only")
        response = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, self._sampling(sampling_params), response))
        if len(self.waiting) == 1:
            await self._serve_waiting()
        (token_ids, log_probs), global_steps = await response
        return verl.workers.rollout.replica.TokenOutput(
            token_ids=token_ids,
            log_probs=log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": global_steps},
        )

    async def _serve_waiting(self) -> None:
        await asyncio.sleep(_GATHER_SECONDS)
        async with self.lock:
            (prompts, sampling, futures), self.waiting = zip(*self.waiting, strict=True), []
            try:
                responses = await asyncio.to_thread(self._sample, prompts, sampling)
            except Exception as error:
                for future in futures:
                    future.set_exception(error)
            else:
                for future, response in zip(futures, responses, strict=True):
                    future.set_result((response, self.global_steps))  # before the next weight sync can come

    def _sample(self, prompts: list[list[int]], sampling: list[Sampling]) -> list[Response]:
        responses = []
        for start in range(0, len(prompts), self.max_num_seqs):
            rows = slice(start, start + self.max_num_seqs)
            responses += sample(self.model, prompts[rows], sampling[rows], self.eos_token_ids, self.vocab_size)
        return responses

    def _sampling(self, params: dict) -> Sampling:
        """Translate verl's sampling parameters; refuse what this engine would have to ignore."""
        params = {key: value for key, value in params.items() if key != "logprobs"}
        if params.pop("repetition_penalty", 1.0) != 1.0:
            raise NotImplementedError("hf rollout: repetition_penalty must be 1.0")
        return Sampling(max_tokens=params.pop("max_tokens", self.response_length), **params)


class HFReplica(verl.workers.rollout.replica.RolloutReplica):
    """One :class:`HFServer` per trainer rank."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                "hf rollout: set actor_rollout_ref.rollout.{tensor,data,pipeline}_model_parallel_size to 1, "
                f"their product is {self.world_size}"
            )
        server = (
            ray.remote(HFServer)
            .options(name=server_name(self.replica_rank), num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                path=self.model_config.path,
                dtype=self.config.dtype,
                seed=self.config.seed + self.replica_rank,
                max_num_seqs=self.config.max_num_seqs,
                response_length=self.config.response_length,
            )
        )
        await server.ready.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = server_name(self.replica_rank)

    async def _nothing(self, *_args, **_kwargs) -> None:
        """There is no device memory to free, and a weight sync waits for the batch that is being generated."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing


class HFServerAdapter(verl.workers.rollout.base.BaseRollout):
    """The trainer rank's side of the weight sync."""

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1, **_):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """There is no device memory to free."""

    async def update_weights(self, weights, global_steps: int | None = None, wire_format="named_tensors", **_) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        if wire_format != "named_tensors":
            raise NotImplementedError(f"hf rollout: weights arrive as named tensors, not as {wire_format!r}")
        # Every rank walks through all weights: gathering a sharded one is a collective.
        full = {name: weight.detach().cpu() async for name, weight in ensure_async_iterator(weights)}
        await ray.get_actor(server_name(self.replica_rank)).load_weights.remote(full, global_steps)


verl.workers.rollout.base._ROLLOUT_REGISTRY["hf", "async"] = f"{__name__}.{HFServerAdapter.__name__}"
verl.workers.rollout.replica.RolloutReplicaRegistry.register("hf", lambda: HFReplica)
