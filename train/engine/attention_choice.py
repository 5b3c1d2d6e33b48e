"""The attention backend of a run, and the kernels that it runs.

On a GPU, `--attention auto` is xformers, or SDPA where xformers has no kernel for the precision and the heads of
the run. Kernels differ in the last digits, so a run keeps the backend that it started with: run.json records it for
whoever opens the run again.
"""

from dataclasses import replace
from typing import Any, cast

import torch

from clipmill.manifests.errors import UserError, first_line
from clipmill.train.config.clips import ClipSettings
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import AttentionBackend, AttentionChoice, Packing, open_attention, pack
from clipmill.train.models.attention_kernels import Kernels, kernels_of
from clipmill.train.models.dual_encoder import size_of

CHOICE_FACT = "attention_choice"
_OF_AUTO = ("xformers", "sdpa")
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
    if (attention := as_before(facts or {}, device_type=device.type)) is not None:
        return attention, kept
    name, reason = world.first(lambda: _first_that_works(settings, device=device, products=products))
    attention = world.each(lambda: open_attention(name, device_type=device.type))
    return replace(attention, reason=reason), {CHOICE_FACT: name}


def is_chosen(settings: ClipSettings, *, device: torch.device) -> bool:
    """Whether the backend is neither named by the settings, nor the only one of the device."""
    return settings.attention == "auto" and device.type == "cuda" and not settings.compile


def as_before(facts: dict[str, Any], *, device_type: str) -> AttentionBackend | None:
    """The backend that a run on a GPU started with, by its run.json; None if it names none that is available here."""
    if (name := facts.get(CHOICE_FACT)) not in _OF_AUTO:
        return None
    try:
        return replace(open_attention(name, device_type=device_type), reason="as when the run began")
    except UserError:
        return None


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


def _first_that_works(
    settings: ClipSettings, *, device: torch.device, products: torch.dtype | None
) -> tuple[AttentionChoice, str]:
    """The name of the backend of `--attention auto` on a GPU, and the reason."""
    attention = open_attention("auto", device_type=device.type)
    try:
        _kernels(attention.name, settings, device=device, products=products)
    except NotImplementedError as error:
        return "sdpa", f"{attention.name} has no kernel for this precision, GPU and model: {first_line(error)}"
    return cast(AttentionChoice, attention.name), attention.reason


def _kernels(
    name: str,
    settings: ClipSettings,
    *,
    device: torch.device,
    products: torch.dtype | None,
    packing: Packing | None = None,
) -> Kernels:
    """The kernels of a backend; raises NotImplementedError if it has none for heads of this width and dtype."""
    trunk = size_of(settings.model, settings.towers).video.trunk
    num_tokens = _NUM_TOKENS if packing is None else sum(packing.lengths)
    shape = (1, num_tokens, 3, trunk.num_heads, trunk.width // trunk.num_heads)
    qkv = torch.zeros(shape, dtype=products or torch.float32, device=device, requires_grad=True)
    return kernels_of(name, *qkv.unbind(2), causal=packing is not None, packing=packing)
