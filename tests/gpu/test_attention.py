"""Every implementation of attention on the device against the formula in float64; which kernel ran, by name."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipmill.manifests.errors import UserError
from clipmill.train.models.attention import Attend, Packing, attend_naively, attend_with_sdpa, open_attention, pack
from tests.gpu.kernels import kernels_of, xformers_operators
from tests.train.models.test_attention import formula, masks, own_past

pytestmark = pytest.mark.gpu

# Relative error of outputs and of gradients, in the norm of the whole tensor, against float64 of the same inputs.
# float32 kernels of mem_efficient make each product of three in TF32, with an error of 1e-6 or so, where one in TF32
# would have 5e-4. A half-precision kernel rounds probabilities and results once (bfloat16: 2^-9), and attention that is
# written out rounds the scores as well.
BOUNDS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
HALVES = (torch.float16, torch.bfloat16)
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF_ONLY = ("flash", "cudnn")  # on a GPU
GPU_ONLY = ("cudnn", "efficient", "xformers")
VARIANTS = ("naive", "sdpa", *SDPA, "xformers")
KINDS = ("all", "causal", "packed")
# (tokens, heads, width of a head): tiny's towers at an odd length; 4 frames of a ViT-B/16 with the class token, and a
# few of its heads; one token; a caption of GPT-2's heads.
SHAPES = ((51, 4, 32), (785, 3, 64), (1, 2, 64), (77, 2, 64))
LENGTHS = {51: (3, 1, 7, 13, 2, 25), 785: (77, 1, 300, 5, 402), 1: (1,), 77: (8, 9, 60)}


def variant(name: str) -> tuple[Attend, AbstractContextManager[Any]]:
    """An implementation, and a context that forces a backend of SDPA."""
    if name == "naive":
        return attend_naively, nullcontext()
    if name == "xformers":
        try:
            return open_attention("xformers", device_type="cuda").attend, nullcontext()
        except UserError as error:
            pytest.skip(str(error))
    return attend_with_sdpa, sdpa_kernel(SDPA[name]) if name in SDPA else nullcontext()


def draw_tensors(
    shape: tuple[int, int, int], dtype: torch.dtype, kind: str, device: torch.device
) -> tuple[list[torch.Tensor], Packing | None]:
    """Queries, keys and values that lie in one tensor, as those of a tower do."""
    num_tokens, num_heads, width = shape
    generator = torch.Generator().manual_seed(num_tokens)
    num_items = 1 if kind == "packed" else 2
    packed = torch.randn(num_items, num_tokens, 3, num_heads, width, generator=generator).to(device, dtype)
    packing = pack(LENGTHS[num_tokens], device=device) if kind == "packed" else None
    return list(packed.unbind(2)), packing


def both_passes(
    attend: Callable[..., torch.Tensor], qkv: list[torch.Tensor], *, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output, and gradients by queries, keys and values; the one by the output is of numbers that `dtype` has."""
    given = [tensor.detach().requires_grad_() for tensor in qkv]
    out = attend(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(out)
    return [out.detach(), *torch.autograd.grad(out, given, weights)]


def skip_without_such_a_kernel(name: str, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu" and name in GPU_ONLY:
        pytest.skip(f"{name} needs CUDA by nature: not in the dry run")
    if device.type == "cuda" and name in HALF_ONLY and dtype not in HALVES:
        pytest.skip(f"{name} has half precision only")


def run_or_skip(name: str, attend: Callable[..., torch.Tensor], qkv: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both passes; skipped where torch or xformers says that this machine has no such kernel."""
    try:
        return both_passes(attend, qkv, dtype=qkv[0].dtype)
    except NotImplementedError as error:
        if name != "xformers":
            raise
        pytest.skip(f"xformers has no operator for it: {' '.join(str(error).split())[:600]}")
    except RuntimeError as error:
        is_refused = "No available kernel" in str(error) or (name == "cudnn" and "cudnn" in str(error).lower())
        if name not in SDPA or not is_refused:
            raise
        # Those are promised on every GPU that this project is for.
        if qkv[0].is_cuda and name in ("efficient", "math"):
            raise
        pytest.skip(f"SDPA has no kernel of {name} for it: {str(error)[:200]}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_computes_the_formula(
    name: str,
    dtype: torch.dtype,
    kind: str,
    shape: tuple[int, int, int],
    device: torch.device,
    record_property: Callable[[str, object], None],
) -> None:
    skip_without_such_a_kernel(name, dtype, device)
    if device.type == "cpu" and shape[0] > 100:
        pytest.skip("a length for GPUs: not in the dry run")
    qkv, packing = draw_tensors(shape, dtype, kind, device)
    attend, forced = variant(name)
    with forced:
        outputs = run_or_skip(name, partial(attend, causal=kind != "all", packing=packing), qkv)
    may_see = own_past(LENGTHS[shape[0]]) if kind == "packed" else masks(shape[0])[kind == "causal"]
    exact = both_passes(partial(formula, may_see=may_see.to(device)), [tensor.double() for tensor in qkv], dtype=dtype)
    errors = {}
    for what, tensor, other in zip(("out", "dq", "dk", "dv"), outputs, exact, strict=True):
        assert tensor.dtype == dtype and tensor.shape == other.shape
        norm = torch.linalg.vector_norm(other)
        # One token attends to itself alone: queries and keys have no gradient then, and rounding is all there is.
        errors[what] = (torch.linalg.vector_norm(tensor.double() - other) / (norm if norm > 1e-6 else 1)).item()
    record_property("relative_error", {what: float(f"{error:.2g}") for what, error in errors.items()})
    # Said so that NaN, too, fails.
    assert all(error <= BOUNDS[dtype] for error in errors.values()), errors


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", VARIANTS)
def test_the_kernel_that_ran_has_a_name(
    name: str, dtype: torch.dtype, kind: str, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    shape = SHAPES[0] if device.type == "cpu" else SHAPES[1]
    skip_without_such_a_kernel(name, dtype, device)
    if device.type == "cpu" and dtype != torch.float32:
        pytest.skip("the names of a GPU's kernels: once in the dry run")
    qkv, packing = draw_tensors(shape, dtype, kind, device)
    attend, forced = variant(name)
    chosen = partial(attend, causal=kind != "all", packing=packing)
    with forced:
        run_or_skip(name, chosen, qkv)
        seen = kernels_of(lambda: both_passes(chosen, qkv, dtype=dtype), device=device)
    names = [*seen.kernels, *seen.operators]
    record_property("attention", f"{name} {str(dtype).removeprefix('torch.')} {kind}")
    record_property("kernels", " | ".join(seen.kernels))
    record_property("operators", " | ".join(seen.operators))
    if name == "xformers":
        lengths = LENGTHS[shape[0]] if kind == "packed" else None
        record_property("xformers", " | ".join(xformers_operators(qkv[0], causal=kind != "all", lengths=lengths)))
    assert names, "neither a kernel nor an operator of attention was seen"
    words = {"flash": "flash", "cudnn": "cudnn", "efficient": "efficient"}
    if name in words and device.type == "cuda":
        assert any(words[name] in kernel.lower() for kernel in names), names


@pytest.mark.timeout(60)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compile"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_what_attention_auto_chooses_works_on_this_machine(
    dtype: torch.dtype,
    kind: str,
    compiles: bool,
    device: torch.device,
    record_property: Callable[[str, object], None],
) -> None:
    attention = open_attention("auto", device_type=device.type, compiles=compiles)
    record_property("auto", f"{attention.name}: {attention.reason}")
    qkv, packing = draw_tensors(SHAPES[0], dtype, kind, device)
    outputs = both_passes(partial(attention.attend, causal=kind != "all", packing=packing), qkv, dtype=dtype)
    assert all(bool(tensor.isfinite().all()) for tensor in outputs)
