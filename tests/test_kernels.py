# Copyright 2026 The fspo_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels, on a GPU where there is one; else run by Triton's interpreter, and compiled.

scripts/test.sh --all runs this file with TRITON_INTERPRET=1. The loss then takes its kernels on a CPU, so that its
other tests try them, too. On a GPU: python -m pytest tests/test_kernels.py
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fspo_verl import loss
from fspo_verl.band import Band

pytest.importorskip("triton", reason="scripts/test.sh --all installs Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run without a GPU where TRITON_INTERPRET=1", allow_module_level=True)

from fspo_verl import kernels  # noqa: E402

SOURCE = Path(kernels.__file__)


def test_the_loss_takes_them():
    one = torch.ones(1, 1, device=DEVICE)
    assert loss._kernels_for(one, one) is kernels
    assert loss._kernels_for(one, one.double()) is None


def laid_out(values, layout):
    """The same values with other strides."""
    return {
        "rows": lambda: values.contiguous(),
        "columns": lambda: values.T.contiguous().T,
        "part of a wider tensor": lambda: torch.cat([values, values], 1)[:, : values.shape[1]],
        "every second token": lambda: values.repeat_interleave(2, 1)[:, ::2],
    }[layout]()


layouts = st.sampled_from(["rows", "columns", "part of a wider tensor", "every second token"])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def batches(draw):
    """What the passes get: any layout and dtype, NaN and inf in the padding and, in some rows, in a token."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.integers(0, 5)), draw(st.sampled_from([1, 7, 1023, 1024, 1025, 2500]))
    new, old, advantages = (torch.randn(shape, generator=random) for _ in range(3))
    advantages = draw(st.sampled_from([advantages, advantages.sign(), advantages.clamp(min=0), 0 * advantages]))
    mask = torch.rand(shape, generator=random) < torch.rand((shape[0], 1), generator=random)
    for values in (new, old, advantages):
        values[~mask] = draw(st.sampled_from([0.0, torch.nan, torch.inf]))
        if mask.any() and draw(st.booleans()):
            row, token = mask.nonzero()[0]
            values[row, token] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    new, old = (laid_out(values.to(DEVICE, draw(dtypes)), draw(layouts)) for values in (new, old))
    return new, old, *(laid_out(values.to(DEVICE), draw(layouts)) for values in (advantages, mask))


@given(batch=batches())
def test_sums_are_those_in_float64(batch):
    new, old, advantages, mask = batch
    found, true = kernels.token_sums(*batch), loss._token_sums(new.double(), old.double(), advantages, mask)
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-3, equal_nan=True)
    assert torch.equal(found[[0]], true[[0]].float())


@given(batch=batches(), dtype=dtypes)
def test_the_gradient_is_that_of_operations_of_torch(batch, dtype):
    new, old, advantages, mask = batch
    finite = loss._token_sums(*batch)[1:5].sum(0).abs() < torch.inf
    weights, keep = torch.randn(2, len(new)).to(DEVICE), loss._bits(finite, torch.float32)
    arguments = advantages, mask, weights, keep, dtype
    assert torch.equal(kernels.token_gradient(*arguments), loss._token_gradient(*arguments))


def test_rows_of_65536_tokens():
    random = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 65536, generator=random).to(DEVICE)
    new = (old + 1e-3 * torch.randn(old.shape, generator=random).to(DEVICE)).requires_grad_()
    advantages = torch.tensor([[1.0], [-1.0], [0.5]], device=DEVICE).expand(old.shape)
    band = Band(eps=5e-4)
    found = loss.fspo_loss(new, old, advantages, torch.ones_like(old), band)
    found.loss.sum().backward()
    exact = new.detach().double().requires_grad_()
    true = loss.fspo_loss(exact, old.double(), advantages, torch.ones_like(old), band)
    true.loss.sum().backward()
    assert torch.equal(found.clipped, true.clipped) and 0 < true.clipped.sum() < 3
    torch.testing.assert_close(found.loss.double(), true.loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(new.grad.double(), exact.grad, rtol=1e-4, atol=0)


FAULTS = {  # sound code and fault
    "a mask that is not read": (
        "token < width, other=0) != 0\n        new",
        "token < width, other=0) >= 0\n        new",
    ),
    "the last block left out": ("range(0, width, BLOCK)", "range(0, width - BLOCK, BLOCK)"),
    "|d| for its square": ("(new - old) * (new - old)", "tl.abs(new - old)"),
    "NaN that is no advantage": ("tl.where(a <= 0, 0.0, a)", "tl.where(a > 0, a, 0.0)"),
    "an advantage of 0 counted": ("(up != 0).to", "is_token.to"),
    "sums of the next row": ("sums += row\n", "sums += (row + 1) % rows\n"),
    "a gradient of a broken response": (" & (tl.load(keep + row) != 0)", ""),
    "one weight for both signs": ("weights + rows + row", "weights + row"),
    "a gradient of padding": ("other=0) != 0) & (", "other=0) >= 0) & ("),
    "a block in the place of the first": ("tl.program_id(1) * BLOCK + ", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_keeps_a_process_from_taking_them(fault, tmp_path):
    sound, wrong = FAULTS[fault]
    text = SOURCE.read_text()
    assert text.count(sound) == 1
    (file := tmp_path / "faulty.py").write_text(text.replace(sound, wrong))
    spec = importlib.util.spec_from_file_location("faulty", file)
    spec.loader.exec_module(faulty := importlib.util.module_from_spec(spec))
    loss._assert_alike(kernels, DEVICE)
    with pytest.raises(AssertionError):
        loss._assert_alike(faulty, DEVICE)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fspo_verl import kernels

for kernel in (kernels._sum, kernels._write_gradient):
    for dtype in ("fp32", "bf16"):
        types = {"mask": "*u8", "keep": "*i32", "log_prob": f"*{dtype}", "old_log_prob": f"*{dtype}"}
        types |= dict.fromkeys(("advantages", "weights", "sums", "gradient"), "*fp32") | {"BLOCK": "constexpr"}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        for capability in (80, 90):
            compiled = triton.compile(
                ASTSource(kernel, signature, {"BLOCK": kernels.BLOCK}), target=GPUTarget("cuda", capability, 32)
            )
            print(f"sm_{capability}", len(compiled.asm["cubin"]) > 0, compiled.metadata.shared)
"""


def test_they_compile_for_gpus(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 8 and "False" not in run.stdout
