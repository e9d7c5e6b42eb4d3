# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""What the loss costs: waits of the host for the device, memory, and time beside other losses and beside a copy."""

import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import pandas as pd
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import trange

from fspo_verl import token_sums, versions
from fspo_verl.band import Band
from fspo_verl.gpu.exact import Loss
from fspo_verl.gpu.lines import Line, judged
from fspo_verl.loss import SequenceLoss
from fspo_verl.observe import columns

AGG_MODE = {"fspo": "seq-mean-token-sum-norm", "gspo": "seq-mean-token-mean", "vanilla": "token-mean"}
SIZES = {"cuda": ((512, 8192), (64, 32768)), "cpu": ((64, 1024), (16, 4096))}
# Of a batch on a device. On a GPU the batch is four of the loss's blocks of rows, so that what is as large as a batch
# can be told from what is as large as a block.
_MEMORY_SIZE = {"cuda": (2048, 32768), "cpu": (64, 8192)}
# Bytes that the loss holds at a time besides the gradient, per token of a block of rows (fspo_verl/loss.py: padding,
# log-ratio, two copies of the advantages), and, between forward and backward, per row: some thirty numbers.
_BYTES_PER_BLOCK_TOKEN = 16
_BYTES_PER_ROW = 512


def make_batch(rows: int, width: int, device: str) -> dict[str, Tensor]:
    """Inputs as verl's ``ppo_loss`` hands them to a loss: float32, bool mask, constant advantages, mixed lengths."""
    generator = torch.Generator(device).manual_seed(0)
    old = -torch.rand(rows, width, generator=generator, device=device)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator, device=device)
    noise = torch.randn(rows, width, generator=generator, device=device)
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.02 * noise).requires_grad_(),
        "advantages": torch.randn(rows, 1, generator=generator, device=device).expand(rows, width).contiguous(),
        "response_mask": torch.arange(width, device=device) < lengths,
    }


def forward(batch: dict[str, Tensor], loss: Loss) -> SequenceLoss:
    """The loss of the batch."""
    return loss(*(batch[name] for name in ("log_prob", "old_log_prob", "advantages", "response_mask")), Band())


def one_call(batch: dict[str, Tensor], loss: Loss) -> None:
    """What training does with the loss, verl's part left out: forward, its columns to the host, backward."""
    sequences = forward(batch, loss)
    columns.to_numpy(columns.loss_columns(sequences))
    sequences.loss.sum().backward()


# --- synchronisations and allocations --------------------------------------------------------------------------------

# Reads of a tensor's value that torch dispatches; tensors on a CPU are read without by the methods below.
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}  # by a mask: its size is read
_READING_METHODS = ("cpu", "tolist")


class Meter:
    """Counts, inside its block, how often the host waits for the device, and the bytes of tensors that are allocated.

    ``kept`` are the bytes of what is made in the block and there at its end, ``peak`` the most at any time. On a GPU
    torch tells both. On a CPU they are counted from the operations that torch dispatches: what one allocates and frees
    within itself is not seen.
    """

    synchronizations = kept = peak = 0

    def __init__(self, device: str):
        self._device = device
        self._stack = ExitStack()

    def __enter__(self) -> "Meter":
        gc.collect()
        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            self._warnings = self._stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            self._stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
            return self
        self._operations = self._stack.enter_context(_Operations())
        for name in _READING_METHODS:
            self._stack.enter_context(mock.patch.object(torch.Tensor, name, self._counted(getattr(torch.Tensor, name))))
        return self

    def __exit__(self, *error) -> None:
        if self._device == "cuda":
            self._stack.close()
            said = [str(warning.message) for warning in self._warnings]
            self.synchronizations = sum("synchronizing CUDA operation" in text for text in said)
            self.kept = torch.cuda.memory_allocated() - self._start
            self.peak = torch.cuda.max_memory_allocated() - self._start
            return
        self._stack.close()
        gc.collect()
        self.synchronizations += self._operations.reads
        self.kept, self.peak = self._operations.live(), self._operations.peak

    def _counted(self, method):
        def counted(tensor, *args, **kwargs):
            self.synchronizations += 1
            return method(tensor, *args, **kwargs)

        return counted


class _Operations(TorchDispatchMode):
    """Reads, and the storages that operations made and that are still there."""

    def __init__(self):
        super().__init__()
        self.reads = self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def live(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function in _READS or (function in _INDEXING and any(_is_mask(index) for index in args[1]))
        result = function(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._made:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live())
        return result


def _is_mask(index) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _storages(tree) -> list:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def meter_lines(loss: Loss, device: str) -> Iterator[Line]:
    """One wait per call; nothing as large as the batch but the gradient, and between the passes not even that."""
    rows, width = _MEMORY_SIZE[device]
    batch = make_batch(rows, width, device)
    one_call(make_batch(2, 16, device), loss)  # whatever is set up once
    with Meter(device) as call:
        one_call(batch, loss)
    batch["log_prob"].grad = None
    with Meter(device) as meter:
        sequences = forward(batch, loss)
    kept = meter.kept
    del sequences

    what = f"{call.synchronizations} waits for the device in a call of the loss, forward and backward"
    how = "torch.cuda.set_sync_debug_mode" if device == "cuda" else "counted from the operations, as on a GPU"
    figures = {"synchronizations": call.synchronizations}
    good = call.synchronizations == 1
    what += f": that of its metrics ({how})" if good else f" ({how})"
    why = "each stalls the pipeline of kernels; one, for the metrics, is needed"
    yield judged(good, "sync", what, why, "remove .item(), .cpu() and bool() of tensors", figures)

    gradient = rows * width * batch["log_prob"].element_size()
    block = next(token_sums.row_blocks(batch["log_prob"]))
    allowed_kept = _BYTES_PER_ROW * rows
    allowed_peak = gradient + _BYTES_PER_BLOCK_TOKEN * min(rows, block.stop) * width + allowed_kept
    what = (
        f"{rows} x {width}: {kept / rows:,.0f} bytes per response kept for the backward pass; at most "
        f"{call.peak / gradient:.2f} times the gradient's {gradient / 2**20:,.0f} MiB at a time"
    )
    good = kept <= allowed_kept and call.peak <= allowed_peak
    what += ", a block of temporaries included" if good else ""
    why = f"allowed are {_BYTES_PER_ROW:,} bytes and {allowed_peak / gradient:.2f} times"
    figures = {"kept": kept, "peak": call.peak, "gradient": gradient}
    yield judged(good, "memory", what, why, "keep no [responses, tokens] tensor but the gradient", figures)


# --- time beside other losses ----------------------------------------------------------------------------------------


def verl_call(name: str, rows: int, width: int) -> Callable[[dict[str, Tensor]], None]:
    """One call, forward and backward, of a loss that verl has registered, under its contract."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    from fspo_verl.config import FSPOPolicyLossConfig

    policy_loss = FSPOPolicyLossConfig() if name == "fspo" else PolicyLossConfig(loss_mode=name)
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=rows * width // 2,
        global_batch_size=rows,
        loss_scale_factor=width if name == "fspo" else None,
    )
    function = get_policy_loss_fn(name)

    def call(batch):
        loss, _ = function(**batch, loss_agg_mode=AGG_MODE[name], config=config)
        loss.backward()

    return call


def seconds(function: Callable[[], None], device: str) -> float:
    """Time of a call: of the device between two events, or of the host."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def extra_memory(function: Callable[[], None], device: str) -> int:
    """Bytes above the start at the highest point of a call; on a CPU the resident set, sampled every 0.2 ms."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - start
    import psutil

    process, ended = psutil.Process(), threading.Event()
    resident = [process.memory_info().rss]

    def watch():
        while not ended.wait(0.0002):
            resident.append(process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        function()
    finally:
        ended.set()
        thread.join()
    return max(resident) - resident[0]


def measure(rows: int, width: int, calls: dict[str, Callable], rounds: int, device: str, what: str) -> list[dict]:
    """Time and memory of several losses on one batch: every round runs each of them once, in turn.

    Args:
        rows, width: size of the batch.
        calls: name to a function that takes a batch and runs forward and backward; the first is the unit of ratios.
        rounds: of timed calls.
        device: ``cuda`` or ``cpu``.
        what: of the progress bar.
    """
    batch = make_batch(rows, width, device)
    # What a fused loss must move: three float32 and one bool read forward, one float32 and one bool read backward and
    # one float32 written. A copy of n bytes moves 2n.
    must_move = rows * width * ((3 * 4 + 1) + (4 + 1) + 4)
    source = torch.ones(must_move // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def step(name):
        calls[name](batch)
        batch["log_prob"].grad = None

    memory = {}
    for name in calls:
        step(name)  # warms up
        memory[name] = extra_memory(functools.partial(step, name), device)
    target.copy_(source)
    timed = {"floor": lambda: target.copy_(source)} | {name: functools.partial(step, name) for name in calls}
    bar = trange(rounds, desc=f"{what} {rows} x {width}", leave=False)
    times = pd.DataFrame([{name: seconds(call, device) for name, call in timed.items()} for _ in bar])
    median, first = times.median(), next(iter(calls))
    return [
        {
            "rows x length": f"{rows} x {width}",
            "Mtokens": rows * width / 1e6,
            "loss": name,
            "ms": median[name] * 1e3,
            "ms q25-q75": "-".join(f"{quartile * 1e3:.3g}" for quartile in times[name].quantile([0.25, 0.75])),
            f"time / {first}": median[name] / median[first],
            "time / floor": median[name] / median["floor"],
            "extra MB": memory[name] / 1e6,
            f"memory / {first}": memory[name] / memory[first] if memory[first] else float("nan"),
        }
        for name in calls
    ]


def time_lines(loss: Loss, device: str, rounds: int) -> Iterator[Line]:
    """Time and peak memory beside verl's gspo and vanilla, and beside a copy of the bytes that a loss must move."""
    has_verl = versions.installed("verl") is not None
    for rows, width in SIZES[device]:
        calls = {"fspo": functools.partial(one_call, loss=loss)}
        if has_verl:
            calls = {name: verl_call(name, rows, width) for name in AGG_MODE}
        table = measure(rows, width, calls, rounds, device, "time")
        own, *others = table
        what = (
            f"{rows} x {width}: {own['ms']:.3g} ms forward and backward ({own['ms q25-q75']}, {rounds} rounds), "
            f"{own['time / floor']:.2g} times a copy of the same bytes"
        )
        what += "".join(f"; {other['loss']} {other['time / fspo']:.2g} times as long" for other in others)
        if device == "cuda":  # the resident set of a process tells little of a single call
            what += f"; {own['extra MB']:,.0f} MB at most"
            what += "".join(f", {other['loss']} {other['memory / fspo']:.2g} times that" for other in others)
        why = "no overhead to a step that takes minutes" if others else ""
        if slower := [other["loss"] for other in others if other["time / fspo"] < 1]:
            why = f"slower than {' and '.join(slower)} here"
        yield Line("warning" if slower else "ok", "time", what, why, figures={"rows": table})
    if not has_verl:
        yield Line("skipped", "time_verl", "verl is not installed: no gspo and vanilla to compare with")


def compile_line(loss: Loss, device: str, size: tuple[int, int], rounds: int, backend: str = "inductor") -> Line:
    """The loss under ``torch.compile`` beside itself without: whether it is the same loss, and its time."""
    rows, width = size
    compiled = torch.compile(loss, backend=backend)
    calls = {name: functools.partial(one_call, loss=f) for name, f in (("eager", loss), ("compiled", compiled))}
    batch = make_batch(rows, width, device)
    gradients = []
    for call in calls.values():
        call(batch)
        gradients.append(batch["log_prob"].grad)
        batch["log_prob"].grad = None
    scale = gradients[0].abs().max().item()
    difference = (gradients[0] - gradients[1]).abs().max().item() / scale if scale > 0 else float("nan")
    del batch, gradients
    table = measure(rows, width, calls, rounds, device, "compile")
    what = (
        f"{rows} x {width}: with torch.compile {table[1]['time / eager']:.2g} times as long as without; gradients "
        f"differ by {difference:.0e} of the largest"
    )
    why, fix = "torch.compile makes another loss of it", "do not compile the loss"
    return judged(difference < 1e-5, "compile", what, why, fix, {"rows": table}, "verl does not compile its losses")
