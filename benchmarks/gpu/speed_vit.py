"""Training steps of ViT-B/16 on clips of 4 frames: by attention backend, checkpointed, compiled, and with open_clip.

`benchmarks.vit_steps` has the steps: forward and backward pass under bf16 autocast, and fused AdamW, on clips that are
already on the GPU.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.implementations import GIB, Implementation, Opening, faster_than, release, rows_of, take_turns
from benchmarks.gpu.measurements import Result, Setup, Target, one_line
from benchmarks.gpu.speed_attention import attentions
from benchmarks.vit import CPU_SETUP, GPU_SETUP, largest_batch, limit_memory
from benchmarks.vit_steps import NAIVE, OPEN_CLIP, Steps, TowerVariant
from benchmarks.vit_steps import Setup as Tower
from clipmill.train.models.attention import open_attention

AUTO, CHECKPOINTED, OPEN_CLIP_CHECKPOINTED = "auto", "auto, checkpointed", "open_clip, checkpointed"
_MEMORY_GB = 24.0  # the GPUs in AVION's paper
_CLIPS, _FEW_CLIPS, _ROOMY_GB = 32, 8, 64
_OTHERS = {
    CHECKPOINTED: TowerVariant(checkpoints=True),
    OPEN_CLIP: TowerVariant(is_open_clip=True, takes_frames=True),
    OPEN_CLIP_CHECKPOINTED: TowerVariant(is_open_clip=True, takes_frames=True, checkpoints=True),
}


def measure_steps(setup: Setup) -> Result:
    """Compare every attention backend and open_clip with the same batch size."""
    tower, num_clips = _tower(setup), _num_clips(setup)
    openings: dict[str, Opening] = {
        name: partial(_open_with, opens, tower, num_clips) for name, opens in attentions(setup).items()
    }
    openings |= {name: partial(_open, variant, tower, num_clips) for name, variant in _OTHERS.items()}
    taken = take_turns(openings, setup)
    frames = num_clips * tower.num_frames
    return Result(
        rows=rows_of(taken, setup, items=frames, unit="frames", beside=[NAIVE, OPEN_CLIP]),
        notes=[
            f"{num_clips} clips of {tower.num_frames} frames per step; open_clip takes the same frames as images.",
            f"auto selected {open_attention('auto', device_type=setup.device.type).name}.",
        ],
        targets=[
            Target(what="throughput of auto / naive", figure=faster_than(taken, AUTO, NAIVE), goal=1.7),
            Target(what="throughput of auto / open_clip", figure=faster_than(taken, AUTO, OPEN_CLIP), goal=1.0),
        ],
    )


def measure_compiled(setup: Setup) -> Result:
    """Compare compiled and eager models."""
    tower, num_clips = _tower(setup), _num_clips(setup)
    variants = {
        "sdpa, compiled": TowerVariant(compiles=True),
        "sdpa": TowerVariant(attention="sdpa"),
        OPEN_CLIP: _OTHERS[OPEN_CLIP],
    }
    taken = take_turns({name: partial(_open, variant, tower, num_clips) for name, variant in variants.items()}, setup)
    return Result(
        rows=rows_of(taken, setup, items=num_clips * tower.num_frames, unit="frames", beside=["sdpa", OPEN_CLIP]),
        notes=["Compiled block by block, as with --compile. Compilation time is not included."],
    )


def measure_largest(setup: Setup) -> Result:
    """Measure the largest batch in 24 GB and the throughput with three quarters of it, one variant at a time."""
    tower = _tower(setup)
    variants = {NAIVE: TowerVariant(attention="naive"), AUTO: TowerVariant(), **_OTHERS}
    largest: dict[str, int] = {}
    rows = []
    is_cuda = setup.device.type == "cuda"
    if is_cuda:
        limit_memory(_MEMORY_GB, setup.device)
    try:
        for name, variant in variants.items():
            rows.append(_row_of_largest(name, variant, tower, setup, largest=largest))
            release()
    finally:
        if is_cuda:
            limit_memory(math.inf, setup.device)
    for row in rows:
        if row["way"] in largest and NAIVE in largest:
            row["batch / naive"] = largest[row["way"]] / largest[NAIVE]
    notes = [
        f"Clips of {tower.num_frames} frames; batches are the largest that fit in {_MEMORY_GB:g} GiB, to within 5 %."
    ]
    if not is_cuda:
        notes.append("On a CPU, all variants have the same batch size: there is no memory limit to search for.")

    def ratio(name: str) -> float | None:
        return largest[name] / largest[NAIVE] if is_cuda and name in largest and NAIVE in largest else None

    return Result(
        rows=rows,
        notes=notes,
        targets=[
            Target(what="batch in 24 GB of auto / naive", figure=ratio(AUTO), goal=3.0),
            Target(what="batch in 24 GB of auto, checkpointed / naive", figure=ratio(CHECKPOINTED), goal=13.8),
        ],
    )


def _row_of_largest(
    name: str, variant: TowerVariant, tower: Tower, setup: Setup, *, largest: dict[str, int]
) -> dict[str, Any]:
    try:
        batch = 2
        if setup.device.type == "cuda":
            batch = largest_batch(variant, tower, limit_bytes=int(_MEMORY_GB * GIB))
        if not batch:
            raise MemoryError("a batch of one clip does not fit in memory")
        largest[name] = batch
        own = max(1, batch * 3 // 4)
        taken = take_turns({name: partial(_open, variant, tower, own)}, setup, num_rounds=3, num_steps=3)
        (row,) = rows_of(taken, setup, items=own * tower.num_frames, unit="frames", beside=[])
    except Exception as error:  # noqa: BLE001  the other variants are measured all the same
        return {"way": name, "error": one_line(error)}
    return {"way": name, "largest batch": batch, "batch / naive": None, "measured with": own, **row}


def _open(variant: TowerVariant, tower: Tower, num_clips: int) -> Implementation:
    steps = Steps(variant, tower)
    clips = steps.clips(num_clips)
    return Implementation(step=lambda: steps.take(clips), model=steps.model)


def _open_with(opens: Callable[[], Any], tower: Tower, num_clips: int) -> Implementation:
    return _open(TowerVariant(attend=opens()), tower, num_clips)


def _tower(setup: Setup) -> Tower:
    if setup.is_dry_run:
        return Tower(**{**CPU_SETUP, "image_px": 32}, device=setup.device)  # type: ignore[arg-type]
    return Tower(**GPU_SETUP, device=setup.device)  # type: ignore[arg-type]


def _num_clips(setup: Setup) -> int:
    if setup.device.type != "cuda":
        return 1
    total = torch.cuda.get_device_properties(setup.device).total_memory
    return _CLIPS if total >= _ROOMY_GB * GIB else _FEW_CLIPS
