"""The attention backend of a run, and the kernels that it runs.

On a GPU, `--attention auto` is xformers, and SDPA for heads and precisions that xformers has no kernel for. Kernels
differ in the last digits, so a run keeps the backend that it started with: run.json records it for whoever opens the
run again.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from clipmill.manifests.errors import UserError, first_line
from clipmill.train.config.clips import ClipSettings
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import (
    AttentionBackend,
    AttentionChoice,
    HasHeads,
    Packing,
    attend_with_xformers,
    open_attention,
    pack,
)
from clipmill.train.models.attention_kernels import Kernels, kernels_of, why_no_operator
from clipmill.train.models.dual_encoder import size_of

CHOICE_FACT = "attention_choice"
_OF_AUTO = ("xformers", "sdpa", "flash", "cudnn")
# The fastest backend of GPUs by compute capability, such as {(9, 0): "cudnn"}, from the file of `python -m
# benchmarks.gpu --first`. Empty until a GPU has been measured.
FASTEST: dict[tuple[int, int], AttentionChoice] = {}
_NUM_TOKENS, _CAPTION_LENGTHS = 197, (12, 9, 17, 26)


def choose_attention(
    settings: ClipSettings,
    *,
    device: torch.device,
    products: torch.dtype | None,
    world: World = World(),  # noqa: B008 - frozen
    facts: dict[str, Any] | None = None,
) -> tuple[AttentionBackend, dict[str, Any]]:
    """Open the attention backend of a run; all ranks call it and get the same one.

    Args:
        products: dtype of matrix products (clipmill.train.device.precision); None for float32.
        facts: run.json of the run that is resumed.

    Returns:
        The backend, and an entry of run.json about the choice.

    Raises:
        UserError: the requested backend is not available.
    """
    kept = {CHOICE_FACT: facts[CHOICE_FACT]} if facts and CHOICE_FACT in facts else {}
    if not is_chosen(settings, device=device):
        return open_attention(settings.attention, device_type=device.type, compiles=settings.compile), kept
    if (attention := previous_backend(facts or {}, device_type=device.type)) is not None:
        return attention, kept
    name, reason = world.first(lambda: _first_that_works(settings, device=device, products=products))
    attention = world.each(lambda: _open_chosen(name, device_type=device.type))
    return replace(attention, reason=reason), {CHOICE_FACT: name}


def is_chosen(settings: ClipSettings, *, device: torch.device) -> bool:
    """Whether the backend is neither named by the settings, nor the only one of the device."""
    return settings.attention == "auto" and device.type == "cuda" and not settings.compile


def previous_backend(facts: dict[str, Any], *, device_type: str) -> AttentionBackend | None:
    """The backend that a run on a GPU started with, by its run.json; None if it names none that is available here."""
    if (name := facts.get(CHOICE_FACT)) not in _OF_AUTO:
        return None
    try:
        attention = _open_chosen(name, device_type=device_type)
    except UserError:
        return None
    return replace(attention, reason="as when the run began") if attention.name == name else None


def _open_chosen(name: AttentionChoice, *, device_type: str) -> AttentionBackend:
    """Open a backend that `auto` has chosen: with xformers, heads that it has no kernel for are computed by SDPA."""
    return open_attention("auto" if name == "xformers" else name, device_type=device_type)


def kernels_fact(
    attention: AttentionBackend, settings: ClipSettings, *, device: torch.device, products: torch.dtype | None
) -> str:
    """Describe the kernels and library that compute a run's attention, of clips and of packed captions."""
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
    """A line for each width of a model's heads that xformers has no kernel for.

    Args:
        model: may be an outline (clipmill.train.engine.clip_task); None if the task has none.

    Raises:
        UserError: there is such a width, and xformers was asked for by name.
    """
    if attention.name != "xformers" or model is None:
        return
    for width in sorted({part.head_width for part in model.modules() if isinstance(part, HasHeads)}):
        try:
            _kernels_of_heads("xformers", (1, width), device=device, products=products)
        except NotImplementedError as error:
            what = f"xformers has no kernel for heads of width {width} here: {why_no_operator(error)}"
            if attention.attend is attend_with_xformers:
                raise UserError(
                    f"{what} (asked for by --attention xformers)",
                    hint="use --attention auto, or other heads",
                    flags=("--attention",),
                ) from error
            yield f"attention of heads of width {width}: sdpa ({what})"


def _first_that_works(
    settings: ClipSettings, *, device: torch.device, products: torch.dtype | None
) -> tuple[AttentionChoice, str]:
    """The name of the backend of `--attention auto` on a GPU, and the reason."""
    capability = torch.cuda.get_device_capability(device)
    if (measured := FASTEST.get(capability)) is not None:
        return measured, f"the fastest on GPUs of compute capability {'.'.join(map(str, capability))}"
    attention = open_attention("auto", device_type=device.type)
    try:
        _kernels(attention.name, settings, device=device, products=products)
    except NotImplementedError as error:
        return "sdpa", f"{attention.name} has no kernel for this precision, GPU and model: {why_no_operator(error)}"
    return cast(AttentionChoice, attention.name), attention.reason


def _kernels(
    name: str,
    settings: ClipSettings,
    *,
    device: torch.device,
    products: torch.dtype | None,
    packing: Packing | None = None,
) -> Kernels:
    """The kernels of a backend for clips or, with `packing`, for captions."""
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
    """The kernels of a backend for heads (number, width); NotImplementedError if it has none for them and the dtype."""
    num_tokens = _NUM_TOKENS if packing is None else sum(packing.lengths)
    qkv = torch.zeros((1, num_tokens, 3, *heads), dtype=products or torch.float32, device=device, requires_grad=True)
    return kernels_of(name, *qkv.unbind(2), causal=packing is not None, packing=packing)
