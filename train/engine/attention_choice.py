"""Which implementation of attention `--attention auto` is, in a run on a GPU: the fastest there, by measurement.

A chip's fastest kernel depends on chip, torch and shape, so no table is kept: the first rank measures the candidates at
the shapes of the run's own towers, forward and backward, in about a second, and tells the others. Kernels differ in the
last digits, so a run stays with what it began with: run.json has the choice, and whoever opens the run again takes it
from there. On a CPU and with --compile nothing is measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from manifests.errors import UserError
from train.config.model import Kind, kind_of, tubelet_of
from train.config.training import ClipSettings
from train.distributed.world import World
from train.models.attention import Attend, AttentionBackend, AttentionChoice, open_attention
from train.models.attention_kernels import Workload, fastest, kernels_of, measure
from train.models.dual_encoder import size_of
from train.models.packing import pack
from train.models.video_vit import VideoViTSize

Workloads = Callable[[Any, int], tuple[Workload, ...]]
# Where two are equally fast the earlier one is taken.
_CANDIDATES: tuple[AttentionChoice, ...] = ("xformers", "sdpa", "cudnn", "flash")
_FACT = "attention_choice"
_MOST_TOKENS = 16_384


@dataclass(frozen=True)
class Choice:
    """What was measured: the fastest candidate, milliseconds of each, what could not be measured, and why."""

    name: str
    milliseconds: dict[str, float]
    failed: dict[str, str]

    @property
    def reason(self) -> str:
        """The measurement in words, for the log."""
        times = ", ".join(f"{name} {its:.2f} ms" for name, its in self.milliseconds.items())
        failed = "".join(f"; not {name}: {why}" for name, why in self.failed.items())
        return f"the fastest here: {times}{failed}"


def choose_attention(
    settings: ClipSettings,
    *,
    workloads: Workloads,
    device: torch.device,
    products: torch.dtype | None,
    world: World = World(),  # noqa: B008 - frozen
    facts: dict[str, Any] | None = None,
) -> tuple[AttentionBackend, dict[str, Any]]:
    """Opens the attention of a run; all ranks call it, and all get the same.

    Args:
        workloads: (settings, number of clips) -> the attention that a step computes.
        products: what matrix products are computed in (train.device.precision), None for float32.
        facts: of the run that goes on, as in its run.json.

    Returns:
        The implementation, and what run.json keeps of how it was chosen.

    Raises:
        UserError: what was asked for cannot be had here.
    """
    kept = {_FACT: facts[_FACT]} if facts and _FACT in facts else {}
    is_measured = settings.attention == "auto" and device.type == "cuda" and not settings.compile
    if not is_measured:
        return open_attention(settings.attention, device_type=device.type, compiles=settings.compile), kept
    if (attention := as_before(facts or {}, device_type=device.type)) is not None:
        return attention, kept
    choice = world.first(lambda: _measure(workloads(settings, _share(settings, world)), device=device, dtype=products))
    attention = world.each(lambda: open_attention(cast(AttentionChoice, choice.name), device_type=device.type))
    return replace(attention, reason=choice.reason), {_FACT: asdict(choice)}


def as_before(facts: dict[str, Any], *, device_type: str) -> AttentionBackend | None:
    """What `auto` was on a GPU when a run began, by its run.json; None where that says nothing, or it is not here."""
    name = facts.get(_FACT, {}).get("name")
    if name is None and str(facts.get("attention", "")).startswith("xformers ("):
        name = "xformers"  # which auto was on every GPU before there was a measurement
    if name not in _CANDIDATES:
        return None
    try:
        return replace(open_attention(name, device_type=device_type), reason="as when the run began")
    except UserError:
        return None


def kernels_fact(
    attention: AttentionBackend,
    settings: ClipSettings,
    *,
    workloads: Workloads,
    device: torch.device,
    products: torch.dtype | None,
) -> str:
    """Which kernels of which library a run's attention is computed by, in words, for each kind of tower."""
    found = []
    for workload in workloads(settings, 1):
        shape = (workload.num_items, workload.num_tokens, 3, workload.num_heads, workload.head_width)
        qkv = torch.zeros(shape, dtype=products or torch.float32, device=device, requires_grad=True)
        packing = pack(workload.lengths, device=device) if workload.lengths else None
        try:
            kernels = str(kernels_of(attention.name, *qkv.unbind(2), causal=packing is not None, packing=packing))
        except NotImplementedError as error:
            kernels = f"none ({str(error).strip().splitlines()[0]})"
        found.append(f"{kernels} ({'captions' if packing else f'{workload.num_tokens} tokens'})")
    return "; ".join(found)


def video_workloads(
    settings: ClipSettings,
    num_clips: int,
    *,
    size: VideoViTSize | None = None,
    kind: Kind | None = None,
    share_seen: float = 1.0,
) -> tuple[Workload, ...]:
    """The attention of a run's video tower, as far as its settings tell; latents count as the pictures they were.

    Args:
        size: of the tower, where `--model` does not tell it.
        kind: of the tower where `--towers.kind` is left out.
        share_seen: of the tokens of a moment, that the tower sees.
    """
    size = size or size_of(settings.model, settings.towers).video
    times = settings.num_frames // tubelet_of(settings.towers)
    places = (settings.size_px // size.patch_px) ** 2
    kind = settings.towers.kind or kind or kind_of(settings.towers)
    heads, width, depth = size.trunk.num_heads, size.trunk.width // size.trunk.num_heads, size.trunk.depth

    def workload(items: int, tokens: int, num_heads: int = heads) -> Workload:
        # Enough of a batch to be busy with, and no more: what is measured is the order of the candidates.
        items = max(1, min(items, _MOST_TOKENS * heads // (tokens * num_heads)))
        return Workload(num_items=items, num_tokens=tokens, num_heads=num_heads, head_width=width, num_blocks=depth)

    if kind == "timesformer":
        # Attention over time has every place of every head as a head of its own (train.models.timesformer).
        return workload(num_clips, times, places * heads), workload(num_clips * times, places + 1)
    seen = places if share_seen == 1 else max(1, round(places * share_seen))
    return (workload(num_clips, times * seen + (kind == "clip")),)


def _share(settings: ClipSettings, world: World) -> int:
    """Samples that a process computes at once."""
    share = settings.batch // world.replicas.size
    return max(1, min(share, settings.microbatch or share))


def _measure(workloads: Sequence[Workload], *, device: torch.device, dtype: torch.dtype | None) -> Choice:
    candidates: dict[str, Attend] = {}
    failed: dict[str, str] = {}
    for candidate in _CANDIDATES:
        try:
            candidates[candidate] = open_attention(candidate, device_type=device.type).attend
        except UserError as error:
            failed[candidate] = str(error)
    speeds = measure(candidates, workloads, dtype=dtype or torch.float32, device=device)
    if not speeds.milliseconds:
        raise UserError(
            f"no implementation of attention works on {device}: {speeds.failed}", hint="see what train doctor says"
        )
    name = fastest(speeds.milliseconds)
    return Choice(name, speeds.milliseconds, {**failed, **speeds.failed})
