"""Names of attention kernels: xformers' dispatcher is asked about absent GPUs, with tensors that have no memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from clipmill.train.models.attention import (
    SDPA_KERNELS,
    attend_with_kernel,
    attend_with_sdpa,
    load_xformers,
    open_attention,
    pack,
)
from clipmill.train.models.attention_choice import Kernel, Kernels, kernels_of, xformers_kernel
from tests.forks import Forks

CPU = torch.device("cpu")
FLASH, CUTLASS = "fa2F@2.5.7 and fa2B@2.5.7 of torch", "cutlassF and cutlassB of torch"
with_xformers = pytest.mark.skipif(
    torch.version.cuda is None or sys.platform != "linux", reason="xformers dispatches by a torch with CUDA"
)


def qkv_of(dtype: torch.dtype, *, device: str = "cpu", needs_gradient: bool = True) -> list[torch.Tensor]:
    shape = (2, 197, 4, 64)
    return [torch.zeros(shape, dtype=dtype, device=device, requires_grad=needs_gradient) for _ in range(3)]


@with_xformers
@pytest.mark.parametrize(
    ("capability", "dtype", "kernels"),
    [
        ((8, 0), torch.bfloat16, FLASH),
        ((9, 0), torch.bfloat16, FLASH),  # no FlashAttention 3, because no wheel of xformers 0.0.35 contains it
        ((9, 0), torch.float16, FLASH),
        ((12, 0), torch.bfloat16, FLASH),
        ((9, 0), torch.float32, CUTLASS),
        ((7, 5), torch.float16, CUTLASS),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_xformers_runs_torchs_kernels_though_its_library_does_not_load(
    capability: tuple[int, int], dtype: torch.dtype, kernels: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xformers.ops")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with FakeTensorMode():
        result = kernels_of("xformers", *qkv_of(dtype, device="cuda"), causal=causal)
        forward_only = kernels_of("xformers", *qkv_of(dtype, device="cuda", needs_gradient=False), causal=causal)
    assert str(result) == kernels
    assert forward_only == Kernels(result.forward, None)


@with_xformers
def test_what_xformers_does_not_support_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xformers.ops")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="No operator found"):
        kernels_of("xformers", *qkv_of(torch.bfloat16, device="cuda"))


def test_xformers_is_loaded_without_a_warning(forks: Forks) -> None:
    pytest.importorskip("xformers")
    code = "from clipmill.train.models.attention import load_xformers; print(load_xformers())"
    ran = subprocess.run([forks.python(), "-m", "tests.fresh", code], check=True, capture_output=True, text=True)
    assert ran.stderr == ""
    assert load_xformers() == (None if ran.stdout.strip() == "None" else ran.stdout.strip())


@pytest.mark.parametrize("attention", ["sdpa", "flash", "cudnn"])
def test_sdpa_on_a_cpu_is_torchs_flash(attention: str) -> None:
    qkv = qkv_of(torch.float32)
    kernel = Kernel("torch", "flash (CPU)")
    assert kernels_of(attention, *qkv) == Kernels(kernel, kernel)
    rows = [x[:1, :5] for x in qkv]
    assert kernels_of(attention, *rows, packing=pack((2, 3), device=CPU)).forward == kernel


def test_the_kernel_is_the_one_that_runs() -> None:
    # This compares the kernel with the profiler's record of a call. torch's flash kernel for CPUs also rejects, for
    # example, grouped queries, integer tensors and three-dimensional tensors.
    qkv = qkv_of(torch.float32)
    with torch.profiler.profile() as seen:
        attend_with_sdpa(*qkv)
    names = {event.name for event in seen.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    with torch.profiler.profile() as seen, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        kernels = kernels_of("sdpa", *qkv)
        attend_with_sdpa(*qkv)
    assert str(kernels) == "math (all scores in memory) of torch"
    assert "aten::_scaled_dot_product_attention_math" in {event.name for event in seen.events()}


@pytest.mark.parametrize("kernel", SDPA_KERNELS)
def test_a_preferred_kernel_comes_first_when_torch_is_asked(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[int]] = []
    ask = torch._fused_sdp_choice

    def note_order(*args: Any, **flags: Any) -> int:
        orders.append(torch._C._get_sdp_priority_order())
        return ask(*args, **flags)

    monkeypatch.setattr(torch, "_fused_sdp_choice", note_order)
    kernels_of(kernel, *qkv_of(torch.float32))
    expected = [backend.value for backend in SDPA_KERNELS[kernel]]
    assert orders[0][: len(expected)] == expected


@pytest.mark.parametrize("kernel", SDPA_KERNELS)
def test_a_preferred_kernel_changes_nothing_but_speed(kernel: str) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 17, 3, 16) for _ in range(3)]
    before = torch._C._get_sdp_priority_order()
    torch.testing.assert_close(attend_with_kernel(kernel)(*qkv, causal=True), attend_with_sdpa(*qkv, causal=True))
    assert torch._C._get_sdp_priority_order() == before
    assert open_attention("flash", device_type="cuda").name == "flash"


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("fa2F@2.5.7-pt", "fa2F@2.5.7 of torch"),
        ("cutlassB-pt", "cutlassB of torch"),
        ("fa2F@2.8.3", "fa2F@2.8.3 of flash-attn"),
        ("fa3F@pip_pkg", "fa3F@pip_pkg of flash-attn-3"),
        ("triton_splitKF", "triton_splitKF of xformers"),
    ],
)
def test_an_operator_of_xformers_is_told_by_the_library_it_is_in(operator: str, words: str) -> None:
    assert str(xformers_kernel(operator)) == words
