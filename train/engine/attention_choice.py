"""Choose the attention backend for `--attention auto` on a GPU: the fastest one, by measurement.

The fastest kernel depends on GPU, torch version and shape, so there is no table: the first rank measures the candidates
at the shapes of the run's own towers, forward and backward, in about a second, and broadcasts its choice. Kernels
differ in the last digits, so a run keeps the backend that it started with: run.json records it for whoever opens the
run again. Nothing is measured on a CPU or with --compile.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import Kind, kind_of, tubelet_of
from clipmill.train.config.training import ClipSettings
from clipmill.train.distributed.world import World
from clipmill.train.models.attention import Attend, AttentionBackend, AttentionChoice, open_attention, pack
from clipmill.train.models.attention_kernels import Workload, fastest, kernels_of, measure
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.video_vit import VideoViTSize

Workloads = Callable[[Any, int], tuple[Workload, ...]]
# Of two equally fast ones, the earlier one is chosen.
_CANDIDATES: tuple[AttentionChoice, ...] = ("xformers", "sdpa", "cudnn", "flash")
CHOICE_FACT = "attention_choice"
_MOST_TOKENS = 16_384


@dataclass(frozen=True)
class Choice:
    """A measurement: the fastest candidate, milliseconds of each, and why others could not be measured."""

    name: str
    milliseconds: dict[str, float]
    failed: dict[str, str]

    @property
    def reason(self) -> str:
        """The measurement as text, for the log."""
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
    """Open the attention backend of a run; all ranks call it and get the same one.

    Args:
        workloads: (settings, number of clips) -> the attention that a step computes.
        products: dtype of matrix products (clipmill.train.device.precision); None for float32.
        facts: run.json of the run that is resumed.

    Returns:
        The backend, and an entry of run.json about the choice.

    Raises:
        UserError: the requested backend is not available.
    """
    kept = {CHOICE_FACT: facts[CHOICE_FACT]} if facts and CHOICE_FACT in facts else {}
    is_measured = settings.attention == "auto" and device.type == "cuda" and not settings.compile
    if not is_measured:
        return open_attention(settings.attention, device_type=device.type, compiles=settings.compile), kept
    if (attention := as_before(facts or {}, device_type=device.type)) is not None:
        return attention, kept
    choice = world.first(lambda: _measure(workloads(settings, _share(settings, world)), device=device, dtype=products))
    attention = world.each(lambda: open_attention(cast(AttentionChoice, choice.name), device_type=device.type))
    return replace(attention, reason=choice.reason), {CHOICE_FACT: asdict(choice)}


def as_before(facts: dict[str, Any], *, device_type: str) -> AttentionBackend | None:
    """The backend that a run on a GPU started with, by its run.json; None if it names none that is available here."""
    name = facts.get(CHOICE_FACT, {}).get("name")
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
    """Describe the kernels and library that compute a run's attention, for each kind of tower."""
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
    """The attention shapes of a run's video tower, from its settings; latents count like the pictures they encode.

    Args:
        size: of the tower, if it is not that of `--model`.
        kind: of the tower if `--towers.kind` is left out.
        share_seen: fraction of the tokens of a frame that the tower sees.
    """
    size = size or size_of(settings.model, settings.towers).video
    times = settings.num_frames // tubelet_of(settings.towers)
    places = (settings.size_px // size.patch_px) ** 2
    kind = settings.towers.kind or kind or kind_of(settings.towers)
    heads, width, depth = size.trunk.num_heads, size.trunk.width // size.trunk.num_heads, size.trunk.depth

    def workload(items: int, tokens: int, num_heads: int = heads) -> Workload:
        # Enough items to fill the GPU and no more: only the order of the candidates matters.
        items = max(1, min(items, _MOST_TOKENS * heads // (tokens * num_heads)))
        return Workload(num_items=items, num_tokens=tokens, num_heads=num_heads, head_width=width, num_blocks=depth)

    if kind == "timesformer":
        # Temporal attention treats every patch of every head as a head of its own (clipmill.train.models.timesformer).
        return workload(num_clips, times, places * heads), workload(num_clips * times, places + 1)
    seen = places if share_seen == 1 else max(1, round(places * share_seen))
    return (workload(num_clips, times * seen + (kind == "clip")),)


def _share(settings: ClipSettings, world: World) -> int:
    """Samples of a microbatch on one process."""
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
        raise UserError(f"no attention backend works on {device}: {speeds.failed}", hint="run train doctor")
    name = fastest(speeds.milliseconds)
    return Choice(name, speeds.milliseconds, {**failed, **speeds.failed})
