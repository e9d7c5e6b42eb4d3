# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""One optimiser step of verl's FSDP engine with FSPO on a small model, on the GPU and on the CPU: the same metrics.

    python -m fspo_verl.gpu.step MODEL OUTPUT     one step in this process, metrics as JSON to OUTPUT

A process of its own for each device, as verl chooses its platform once, where it is imported.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fspo_verl import versions
from fspo_verl.gpu.lines import Line, judged

PROMPT, RESPONSES, STEP = 5, [1, 3, 60, 17, 30, 90, 8, 2], 12
_SECONDS = 300
_TOLERANCE = 1e-3  # relative: other kernels, in float32
_FIX = "run `python -m fspo_verl.gpu.step MODEL OUTPUT` for the whole traceback"


def mini_batch(vocabulary: int):
    """Eight sequences of 1 to 90 response tokens, one fully masked and one with a hole, and made-up old log-probs."""
    import torch

    from fspo_verl.gpu import worker

    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, vocabulary, (PROMPT + n,), generator=generator) for n in RESPONSES]
    mask = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    mask[1][:] = 0
    mask[2][10:20] = 0
    old = [-3 + 0.2 * torch.randn(n, generator=generator) for n in RESPONSES]
    batch = worker.batch_of(
        [x[:PROMPT] for x in ids],
        [x[PROMPT:] for x in ids],
        torch.randn(len(RESPONSES), generator=generator).tolist(),
        [f"prompt {i // 2}" for i in range(len(RESPONSES))],
        mask,
        STEP,
    )
    worker.set_old_log_probs(batch, old)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder of a model")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="JSON file")
    args = parser.parse_args()

    import torch

    from fspo_verl.config import FSPOPolicyLossConfig
    from fspo_verl.gpu import worker

    worker.join()
    cut = worker.Cut(rows=4)
    trainer = worker.training_worker(args.model, cut, lr=1e-4)
    batch = mini_batch(trainer.engine.module.config.vocab_size)
    # As if the policy had moved by 0.1 per token, of which this band leaves a part of the responses inside.
    generator = torch.Generator().manual_seed(1)
    new = worker.log_probs(trainer, batch, cut)
    worker.set_old_log_probs(batch, [x.cpu() + 0.1 * torch.randn(len(x), generator=generator) for x in new])
    loss = FSPOPolicyLossConfig(eps=0.1)
    metrics = worker.update(trainer, batch, loss, len(RESPONSES), scale=1)
    args.output.write_text(json.dumps(metrics))


def step(model: Path, device: str) -> dict[str, float]:
    """The metrics of a step on ``cpu``, or on the GPU that verl finds (``cuda``), in a process of its own.

    Raises:
        RuntimeError: it failed; with the last line of what it said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "metrics.json"
        # Without a launcher's ranks, which would make this process one of many.
        inherited = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "VERL_PLATFORM")
        env = {name: value for name, value in os.environ.items() if name not in inherited}
        env |= {"VERL_PLATFORM": "cpu"} if device == "cpu" else {}
        command = [sys.executable, "-m", "fspo_verl.gpu.step", str(model), str(output)]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SECONDS)
        if run.returncode:
            raise RuntimeError((run.stderr.strip() or "it ended without output").splitlines()[-1])
        return json.loads(output.read_text())


def line(device: str, model: Path) -> Line:
    """The step on this machine's GPU beside that on its CPU; on a CPU alone, that it runs."""
    if versions.installed("verl") is None:
        return Line("skipped", "step", "verl is not installed: no optimiser step of its FSDP engine")
    try:
        on_cpu = step(model, "cpu")
        found = step(model, "cuda") if device == "cuda" else on_cpu
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Line("error", "step", f"verl's FSDP engine takes no step with FSPO: {error}", fix=_FIX)
    compared = sorted(name for name in on_cpu if name.startswith("actor/") or name in ("grad_norm", "loss"))
    differences = {name: _difference(found.get(name, math.nan), on_cpu[name]) for name in compared}
    worst = max(differences, key=differences.get)
    figures = {"cpu": on_cpu, device: found}
    learns = found["grad_norm"] > 0 and 0 < found["actor/fspo/clip_fraction"] < 1
    what = (
        f"one step of verl's FSDP engine in float32: gradient norm {found['grad_norm']:.4g}, clip fraction "
        f"{found['actor/fspo/clip_fraction']:.3g}"
    )
    if device == "cuda":
        what += f"; {len(compared)} metrics as on the CPU, the most different {worst} by {differences[worst]:.1e}"
    why = "the same step on the CPU has other metrics: what trains here is not what the tests have tested"
    note = "" if device == "cuda" else "no GPU to compare with"
    return judged(learns and differences[worst] <= _TOLERANCE, "step", what, why, _FIX, figures, note)


def _difference(value: float, expected: float) -> float:
    """Relative, and absolute where the numbers are small; inf for what is not a number."""
    difference = abs(value - expected) / max(abs(expected), 1e-2)
    return difference if math.isfinite(difference) else math.inf


if __name__ == "__main__":
    main()
