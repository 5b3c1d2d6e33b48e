"""Select a run's attention backend, and report the kernels that the backend uses.

On a GPU, `--attention auto` selects xformers if it is installed and the model is not compiled. torch's
scaled_dot_product_attention (SDPA) takes over for head widths and precisions that xformers does not support. Results of
different kernels differ in the last digits, so a run keeps the backend that it started with. run.json records the
backend for commands that open the run later.

Kernels are not inferred from version numbers: `torch._fused_sdp_choice`, which SDPA itself calls, reports the kernel
that SDPA chooses, and xformers' dispatcher reports the operators that xformers chooses.

Shape suffixes: B batch, M tokens, H heads, K width of a head.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipmill.manifests.errors import UserError, first_line
from clipmill.train.config.clips import ClipSettings
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import (
    SDPA_KERNELS,
    AttentionBackend,
    AttentionChoice,
    HasHeads,
    Packing,
    attend_with_xformers,
    open_attention,
    pack,
    xformers_operators,
)
from clipmill.train.models.dual_encoder import size_of

_SDPA_NAMES = {
    SDPBackend.MATH: "math (all scores in memory)",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient (CUTLASS)",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.OVERRIDEABLE: "kernel of the device backend",
}


@dataclass(frozen=True)
class Kernel:
    """Attention kernel, with the library that contains it (torch, cuDNN, xformers, flash-attn, flash-attn-3)."""

    library: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.library}"


@dataclass(frozen=True)
class Kernels:
    """Kernels that a call uses; `backward` is None if no input requires a gradient."""

    forward: Kernel
    backward: Kernel | None

    def __str__(self) -> str:
        if self.backward is None or self.backward == self.forward:
            return str(self.forward)
        if self.backward.library == self.forward.library:
            return f"{self.forward.name} and {self.backward.name} of {self.forward.library}"
        return f"{self.forward}, backward {self.backward}"


def kernels_of(
    attention: str,
    q_BMHK: Tensor,
    k_BMHK: Tensor,
    v_BMHK: Tensor,
    *,
    causal: bool = False,
    packing: Packing | None = None,
) -> Kernels:
    """Return the kernels that an attention implementation uses for arguments of `Attend`.

    Args:
        attention: Name of the implementation: xformers, sdpa, flash, cudnn or naive.

    Raises:
        NotImplementedError: The implementation has no kernel for these arguments.
    """
    needs_gradient = any(x.requires_grad for x in (q_BMHK, k_BMHK, v_BMHK))
    if attention == "naive":
        kernel = Kernel("torch", "matrix products and softmax")
        return Kernels(kernel, kernel if needs_gradient else None)
    if attention == "xformers":
        forward, backward = xformers_operators(q_BMHK, k_BMHK, v_BMHK, causal=causal, packing=packing)
        return Kernels(xformers_kernel(forward), None if backward is None else xformers_kernel(backward))
    if packing is not None:
        # SDPA gets the packed sequences as a padded batch or, on a CPU, as one batch per length.
        shape = (packing.num_sequences, packing.longest, *q_BMHK.shape[2:])
        q_BMHK, k_BMHK, v_BMHK = (x.new_zeros(shape).requires_grad_(x.requires_grad) for x in (q_BMHK, k_BMHK, v_BMHK))
    q_BHMK, k_BHMK, v_BHMK = (x.transpose(1, 2) for x in (q_BMHK, k_BMHK, v_BMHK))
    with sdpa_kernel(SDPA_KERNELS[attention], set_priority=True) if attention in SDPA_KERNELS else nullcontext():
        choice = torch._fused_sdp_choice(q_BHMK, k_BHMK, v_BHMK, is_causal=causal or packing is not None)
    backend = SDPBackend(choice)
    if backend == SDPBackend.ERROR:
        raise NotImplementedError(f"SDPA has no kernel for {tuple(q_BHMK.shape)} of {q_BHMK.dtype}")
    if backend == SDPBackend.FLASH_ATTENTION:
        kernel = Kernel("torch", _flash_name(q_BHMK.device))
    elif backend == SDPBackend.CUDNN_ATTENTION:
        kernel = Kernel(f"cuDNN {cudnn_version()}", "fused attention")
    else:
        kernel = Kernel("torch", _SDPA_NAMES[backend])
    return Kernels(kernel, kernel if needs_gradient else None)


def xformers_kernel(operator: str) -> Kernel:
    """Return the kernel for the NAME of an operator (xformers 0.0.35), such as "fa2F@2.5.7-pt" or "cutlassB-pt"."""
    library = "xformers"
    if operator.endswith("-pt"):
        library = "torch"
    elif operator.startswith("fa2"):
        library = "flash-attn"
    elif operator.startswith("fa3"):
        library = "flash-attn-3"
    return Kernel(library, operator.removesuffix("-pt"))


def operator_reasons(error: NotImplementedError) -> str:
    """Return, on one line, why xformers' dispatcher rejected each operator, or the first line of another error."""
    reasons: dict[str, str] = {}
    operator = ""
    for line in str(error).splitlines():
        if match := re.match(r"`(.+)` is not supported because:", line):
            operator = match[1]
        elif operator:
            # Remove the set of supported values, whose order is not deterministic.
            reasons.setdefault(operator, re.sub(r" \(supported: .*", "", line.strip()))
    # Omit operators whose library is missing, because this reason does not help the user.
    parts = [f"{name}: {reason}" for name, reason in reasons.items() if "wasn't built" not in reason]
    return "; ".join(["No operator found", *parts]) if reasons else first_line(error)


def _flash_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "flash (CPU)"
    # torch 2.11 and later can register a different implementation under the same name.
    implementation = getattr(nn.attention, "current_flash_attention_impl", lambda: None)()
    version = getattr(nn.attention, "_get_flash_version", lambda: "2")()
    return f"FlashAttention {re.sub('^FA', '', implementation) if implementation else version}"


def cudnn_version() -> str:
    """Return the version of cuDNN, such as 9.26.0 (torch reports 92600), or "(missing)"."""
    number = torch.backends.cudnn.version()
    if number is None:
        return "(missing)"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


# Choice of a run's backend.

CHOICE_FACT = "attention_choice"
_AUTO_BACKENDS = ("xformers", "sdpa", "flash", "cudnn")
# Fastest backend by compute capability of the GPU, such as {(9, 0): "cudnn"}, as measured by `python -m
# benchmarks.gpu --first`. The table is empty until a GPU has been measured.
FASTEST_BACKENDS: dict[tuple[int, int], AttentionChoice] = {}
# Tokens of a frame (ViT-B/16 at 224 px) and lengths of packed captions, for which kernels are looked up.
_NUM_TOKENS, _CAPTION_LENGTHS = 197, (12, 9, 17, 26)


def choose_attention(
    settings: ClipSettings,
    *,
    device: torch.device,
    products: torch.dtype | None,
    world: World = World(),  # noqa: B008 - frozen
    facts: dict[str, Any] | None = None,
) -> tuple[AttentionBackend, dict[str, Any]]:
    """Open the attention backend of a run. All ranks must call this function, and get the same backend.

    Args:
        settings: Settings of the run.
        device: Device of this rank.
        products: Dtype of matrix products (clipmill.train.device.precision); None for float32.
        world: Ranks of the run.
        facts: Content of run.json if the run is resumed.

    Returns:
        The backend, and the entry for run.json that records the choice; empty if there was nothing to choose.

    Raises:
        UserError: The requested backend is not available.
    """
    recorded_choice = {CHOICE_FACT: facts[CHOICE_FACT]} if facts and CHOICE_FACT in facts else {}
    if not needs_choice(settings, device=device):
        return open_attention(settings.attention, device_type=device.type, compiles=settings.compile), recorded_choice
    if (attention := previous_backend(facts or {}, device_type=device.type)) is not None:
        return attention, recorded_choice
    name, reason = world.first(lambda: _find_backend(settings, device=device, products=products))
    attention = world.each(lambda: _open_choice(name, device_type=device.type))
    return replace(attention, reason=reason), {CHOICE_FACT: name}


def needs_choice(settings: ClipSettings, *, device: torch.device) -> bool:
    """Return True if the settings do not select a backend, and the device supports several."""
    return settings.attention == "auto" and device.type == "cuda" and not settings.compile


def previous_backend(facts: dict[str, Any], *, device_type: str) -> AttentionBackend | None:
    """Return the backend that a run on a GPU started with; None if run.json does not record a usable backend."""
    if (name := facts.get(CHOICE_FACT)) not in _AUTO_BACKENDS:
        return None
    try:
        attention = _open_choice(name, device_type=device_type)
    except UserError:
        return None
    return replace(attention, reason="the same as when the run started") if attention.name == name else None


def _open_choice(name: AttentionChoice, *, device_type: str) -> AttentionBackend:
    """Open the backend that `auto` has selected.

    If the backend is xformers, SDPA takes over for heads that xformers does not support.
    """
    return open_attention("auto" if name == "xformers" else name, device_type=device_type)


def kernels_fact(
    attention: AttentionBackend, settings: ClipSettings, *, device: torch.device, products: torch.dtype | None
) -> str:
    """Describe the kernels that compute a run's attention for clips and for packed captions, with their libraries."""
    try:
        clips = _kernels(attention.name, settings, device=device, products=products)
        captions = _kernels(
            attention.name, settings, device=device, products=products, packing=pack(_CAPTION_LENGTHS, device=device)
        )
    except NotImplementedError as error:
        return f"none ({first_line(error)})"
    return f"{clips} (clips); {captions} (packed captions)"


def describe_fallback(
    attention: AttentionBackend, model: nn.Module | None, *, device: torch.device, products: torch.dtype | None
) -> Iterator[str]:
    """Yield a line for each head width of a model that xformers does not support.

    Args:
        attention: Backend of the run.
        model: Model or its outline (clipmill.train.engine.task); None if the task has no model.
        device: Device of this rank.
        products: Dtype of matrix products; None for float32.

    Raises:
        UserError: xformers was requested by name, but has no kernel for one of the widths.
    """
    if attention.name != "xformers" or model is None:
        return
    for width in sorted({part.head_width for part in model.modules() if isinstance(part, HasHeads)}):
        try:
            _kernels_of_heads("xformers", (1, width), device=device, products=products)
        except NotImplementedError as error:
            problem = f"xformers has no kernel for heads of width {width}: {operator_reasons(error)}"
            if attention.attend is attend_with_xformers:
                raise UserError(
                    f"{problem} (requested by --attention xformers)",
                    hint="use --attention auto, or a different number of heads",
                    flags=("--attention",),
                ) from error
            yield f"attention of heads of width {width}: sdpa ({problem})"


def _find_backend(
    settings: ClipSettings, *, device: torch.device, products: torch.dtype | None
) -> tuple[AttentionChoice, str]:
    """Return the backend that `--attention auto` uses on a GPU, and the reason."""
    capability = torch.cuda.get_device_capability(device)
    if (fastest := FASTEST_BACKENDS.get(capability)) is not None:
        return fastest, f"the fastest on GPUs of compute capability {'.'.join(map(str, capability))}"
    attention = open_attention("auto", device_type=device.type)
    try:
        _kernels(attention.name, settings, device=device, products=products)
    except NotImplementedError as error:
        return "sdpa", f"{attention.name} has no kernel for this precision, GPU and model: {operator_reasons(error)}"
    return cast(AttentionChoice, attention.name), attention.reason


def _kernels(
    name: str,
    settings: ClipSettings,
    *,
    device: torch.device,
    products: torch.dtype | None,
    packing: Packing | None = None,
) -> Kernels:
    """Return the kernels that a backend uses for clips or, with a `packing`, for captions."""
    size = size_of(settings.model, settings.towers)
    trunk = size.video.trunk if packing is None else size.text.trunk
    heads = (trunk.num_heads, trunk.width // trunk.num_heads)
    return _kernels_of_heads(name, heads, device=device, products=products, packing=packing)


def _kernels_of_heads(
    name: str,
    heads: tuple[int, int],
    *,
    device: torch.device,
    products: torch.dtype | None,
    packing: Packing | None = None,
) -> Kernels:
    """Return the kernels that a backend uses for `heads` (number, width); raise NotImplementedError if none exist."""
    num_tokens = _NUM_TOKENS if packing is None else sum(packing.lengths)
    qkv = torch.zeros((1, num_tokens, 3, *heads), dtype=products or torch.float32, device=device, requires_grad=True)
    return kernels_of(name, *qkv.unbind(2), causal=packing is not None, packing=packing)
