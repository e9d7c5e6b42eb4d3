# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of a policy loss and of its records, planted where stock verl calls the loss; and trainings that have them.

  python scripts/tests/faults.py OUTPUT [FAULT ...]     plants each in a training by verl, and checks that it is seen
  python scripts/tests/faults.py --small OUTPUT         trains some made-up responses with each, in this process alone

A worker plants the fault that the environment variable PLANTED names.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import wrapt

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "compare")]


# --- the faults; each replaces something of fspo_verl.register, or of what it imports --------------------------------


def _other_loss_of(register, change: Callable) -> None:
    """Have ``change(found, log_prob, old_log_prob, advantages, mask, band, true)`` give the loss of each response.

    Sums and decisions, which metrics and records are made of, stay as they are.
    """
    true = register.fspo_loss

    def fspo_loss(*tokens_and_band):
        found = true(*tokens_and_band)
        return found._replace(loss=change(found, *tokens_and_band, true))

    register.fspo_loss = fspo_loss


def _keeps_the_gradient(register) -> None:
    def change(found, log_prob, old_log_prob, advantages, mask, band, true):
        free = true(log_prob, old_log_prob, advantages, mask, _unclipped(band)).loss
        return free + (found.loss - free).detach()

    _other_loss_of(register, change)


def _keeps_the_gradient_of_the_edge(register) -> None:
    def change(found, log_prob, old_log_prob, advantages, mask, band, true):
        each = advantages * mask * log_prob
        scale = found.loss.detach() / (advantages * mask).sum(-1).where(found.advantage != 0, 1.0)
        return found.loss.detach() + scale * (each - each.detach()).sum(-1)

    _other_loss_of(register, change)


def _weighs(exponent: Callable) -> Callable:
    """Return the loss with e^exponent(S, L) in place of e^S, where S is clipped."""

    def plant(register) -> None:
        def change(found, log_prob, old_log_prob, advantages, mask, band, true):
            s = ((log_prob - old_log_prob) * mask).sum(-1)
            s = s.minimum(found.high).where(found.advantage > 0, s.maximum(found.low).minimum(found.dual))
            weight = exponent(s, found.length.clamp(min=1)).detach().exp()
            # As in GSPO, the loss of a response is that of its tokens, and the gradient of a token its own.
            return -(found.positive + found.negative) * weight * (1 + (s - s.detach()) / found.length.clamp(min=1))

        _other_loss_of(register, change)

    return plant


def _ranges(change: Callable) -> Callable:
    """Return the loss with the band ``change(band)``, which decides everything."""

    def plant(register) -> None:
        true = register.fspo_loss
        register.fspo_loss = lambda *tokens_and_band: true(*tokens_and_band[:-1], change(tokens_and_band[-1]))

    return plant


def _band(band, **changes):
    from fspo_verl.band import Band

    own = Band(None, band.low, band.high, band.dual, band.length_power, band.normalization)
    return dataclasses.replace(own, **changes)


def _unclipped(band):
    return _band(band, eps_low=math.inf, eps_high=math.inf, eps_dual=math.inf)


def _clips_the_other_sign(register) -> None:
    def change(found, log_prob, old_log_prob, advantages, mask, band, true):
        return -true(log_prob, old_log_prob, -advantages, mask, band).loss

    _other_loss_of(register, change)


def _aggregates(mode: str) -> Callable:
    def plant(register) -> None:
        true = register._aggregate
        register._aggregate = lambda sequences, width, _, totals: true(sequences, width, mode, totals)

    return plant


def _is_another_loss(register) -> None:
    losses = register.core_algos.POLICY_LOSS_REGISTRY
    losses["fspo"] = losses["vanilla"]


def _records_others(register) -> None:
    true = register.observer.observe

    def observe(columns, *others):
        return true(columns | {"log_ratio": columns["log_ratio"].roll(1)}, *others)

    register.observer.observe = observe


FAULTS: dict[str, tuple[Callable, str]] = {
    "gradient-kept": (_keeps_the_gradient, r"([\d,]+) of \1 responses above the range with A > 0 keep a gradient"),
    "gradient-kept-on-the-edge": (_keeps_the_gradient_of_the_edge, r"responses above the dual clip .* keep a gradient"),
    "weight-1": (_weighs(lambda s, length: s * 0), r"its weight is e\^\(0\), not e\^\(S\)"),
    "weight-of-the-mean": (_weighs(lambda s, length: s / length), r"its weight is e\^\(S/L\), not e\^\(S\)"),
    "width-eps": (_ranges(lambda band: _band(band, length_power=0.0)), "its range is eps, not eps √L"),
    "width-eps-L": (_ranges(lambda band: _band(band, length_power=1.0)), "its range is eps L, not eps √L"),
    "sides-exchanged": (
        _ranges(lambda band: _band(band, eps_low=band.high, eps_high=band.low)),
        "its sides are exchanged",
    ),
    "signs-exchanged": (_clips_the_other_sign, r"A > 0 keep a gradient, .* inside the range have no gradient"),
    "no-dual-clip": (_ranges(lambda band: _band(band, eps_dual=math.inf)), "its dual clip is missing"),
    "no-clip": (_ranges(_unclipped), "its clip is missing"),
    "token-mean": (_aggregates("token-mean"), "its aggregation is token-mean, not seq-mean-token-sum-norm"),
    "seq-mean-token-mean": (_aggregates("seq-mean-token-mean"), "its aggregation is seq-mean-token-mean, not"),
    "another-loss": (_is_another_loss, r"inside the range have another gradient, \d+ of \d+ calls have another value"),
    "other-records": (_records_others, r"\d+% of the records are of other responses than those that were trained"),
}
"""Faults by name: what plants it, and the sentence (a regular expression) that the check says first."""
SOUND = {f"seed-{seed}": seed for seed in range(10)}
"""Small trainings without a fault: their seeds by name."""


if "PLANTED" in os.environ:
    wrapt.register_post_import_hook(FAULTS[os.environ["PLANTED"]][0], "fspo_verl.register")


# --- trainings that have them -----------------------------------------------------------------------------------------


def first_failure(text: str) -> str:
    """The first line of a report without its count."""
    return text.splitlines()[0].partition("fail: ")[2]


def trained(output: Path, names: list[str]) -> int:
    """A training by verl of the arm that each fault needs, two steps long; how many faults were not seen."""
    import subprocess

    script, seed, missed = HERE.parent / "compare/baselines.py", 10, 0
    for name in names:
        own = output / name
        if (output / "start").exists() and not own.exists():
            shutil.copytree(output / "start", own)
        env = os.environ | {"PLANTED": name, "VERL_USE_EXTERNAL_MODULES": "faults", "PYTHONPATH": str(HERE)}
        command = [sys.executable, script, "--check", "--losses", "fspo", "--seeds", str(seed), "--output", own]
        ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
        if not (output / "start").exists():  # the model to start from is the same for all
            for place in (f"warm-start-seed{seed}", f"train-seed{seed}.parquet"):
                copy = shutil.copytree if (own / place).is_dir() else shutil.copy
                (output / "start").mkdir(exist_ok=True)
                copy(own / place, output / "start" / place)
        report = ended.stdout.partition(f"\nseed {seed}: ")[2]
        seen = ended.returncode == 1 and re.search(FAULTS[name][1], first_failure(report)) is not None
        missed += not seen
        print(
            f"{'seen  ' if seen else 'MISSED'} {name}: {report.splitlines()[0] if report else ended.stdout}", flush=True
        )
    return missed


def small(output: Path) -> None:
    """Each fault, and none with several seeds, in some updates of a table of log-probs.

    Forks, so that each has verl as it was.
    """
    # What takes long to import, once for all.
    import verl.workers.engine_workers  # noqa: F401

    import fspo_verl.config
    import fspo_verl.observe.records  # noqa: F401

    for name in (*SOUND, *FAULTS):
        if (child := os.fork()) == 0:
            _small(output / name, FAULTS.get(name), SOUND.get(name, 0))
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError(f"the training with {name} failed")


def _small(folder: Path, fault: tuple | None, seed: int) -> None:
    """Two steps of four updates, each of 32 responses in two micro-batches, by the ``ppo_loss`` of verl's workers."""
    import loss_probe
    import torch
    from verl.workers import engine_workers
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils import losses

    from fspo_verl import register
    from fspo_verl.config import FSPOPolicyLossConfig
    from fspo_verl.observe import microbatch, observer

    os.environ |= {"LOSS_PROBE": str(folder / loss_probe.PLACE)}
    if fault is not None:
        fault[0](register)
    loss_probe.probe(losses)
    band = {"eps": None, "eps_low": 0.015, "eps_high": 0.02, "eps_dual": 0.03}
    actor = FSDPActorConfig(
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        policy_loss=FSPOPolicyLossConfig(**band, records_dir=str(folder / "records")),
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=64,
    )
    draw = torch.Generator().manual_seed(seed)
    table, lines = torch.zeros(40, requires_grad=True), []
    microbatch.synced(0)
    for step in (1, 2):
        start, value, updates = table.detach().clone(), 0.0, 4
        for _update in range(updates):
            lengths = torch.randint(2, 65, (32,), generator=draw).tolist()
            responses = [torch.randint(40, (length,), generator=draw) for length in lengths]
            advantages = torch.randn(32, generator=draw)
            advantages = (advantages - advantages.mean()).tolist()  # as those of a group
            for rows in (slice(12), slice(12, 32)):
                batch = _batch(responses[rows], advantages[rows], start, step, sum(lengths))
                # What a model puts out at one position scores the next token.
                ends = torch.zeros(1)
                scored = _nested([torch.cat([ends, table[tokens], ends]) for tokens in responses[rows]])
                loss, metrics = engine_workers.ppo_loss(actor, {"log_probs": scored}, batch)
                value += metrics["actor/pg_loss"].aggregate() / updates
                loss.backward()
            with torch.no_grad():
                table -= 4 * table.grad
                table.grad = None
        observer.flush_records()
        microbatch.synced(step)
        lines.append({"step": step, "data": {"actor/pg_loss": value}})
    (folder / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _batch(responses: list, advantages: list[float], start, step: int, tokens: int):
    """A micro-batch as verl's engines hand it over, of a mini-batch of 32 with so many tokens."""
    import torch
    from verl.utils.tensordict_utils import get_tensordict

    columns = {
        "prompts": _nested([torch.zeros(2, dtype=torch.long) for _ in responses]),
        "responses": _nested(responses),
        "response_mask": _nested([torch.ones_like(row) for row in responses]),
        "old_log_probs": _nested([start[row] for row in responses]),
        "advantages": _nested([torch.full((len(row),), a) for row, a in zip(responses, advantages, strict=True)]),
        "uid": [str(number // 4) for number in range(len(responses))],
        "global_steps": [step - 1] * len(responses),
    }
    return get_tensordict(columns, {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": 32})


def _nested(rows: list):
    import torch

    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--small"]:
        return small(Path(words[1]).resolve())
    sys.exit(trained(Path(words[0]).resolve(), words[1:] or list(FAULTS)) and 1)


if __name__ == "__main__":
    main()
