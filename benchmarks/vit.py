"""Training steps of the video tower: throughput and the largest batch, with and without memory-saving options.

    python -m benchmarks.vit [--device cuda|cpu] [--memory-gb 24] [--rounds N] [--json FILE]

On a GPU, a step is a forward and backward pass of ViT-B/16 and a fused AdamW step, under bfloat16 autocast, on clips of
4 frames of 224 px that are already on the GPU. The variants differ in the attention and in the activations that are
kept for the backward pass:

    naive                   all attention scores in memory, all activations kept
    fused                   attention by xformers, all activations kept
    fused, checkpointed     the same, each block computed twice (--towers.activation-checkpointing)
    fused, compiled         --compile: attention by SDPA, blocks by torch.compile
    fused, half dropped     half of the patches dropped (--towers.patch-dropout 0.5)
    divided                 fused, attention over time and space in turn (--towers.attention divided: TimeSformer)
    one frame               fused, four times as many clips of one frame
    open_clip               open_clip's ViT-B-16 on single frames, four times as many as clips
    open_clip, checkpointed  the same with open_clip's checkpointing

Memory is limited to --memory-gb (24: the GPUs in AVION's paper) or to the memory of the GPU. The largest batch is found
to within 5 %, starting from an extrapolation of two small batches. `frames/s` is the median with three quarters of the
largest batch that all variants support, and `at its largest` the median with three quarters of the variant's largest
batch. `/ naive` compares frames/s, and `batch / naive` the largest batches. Targets: fused 1.7 times the frames/s and 3
times the batch of naive, checkpointed 13.8 times the batch of naive (AVION, section 4.2), and 1.0 times open_clip's
frames/s. `kept MB a clip` is the memory that is kept for the backward pass, without parameters and duplicates. A second
table divides it among layer norms, attention and MLPs (AVION, figure 3).

On a CPU, the same variants run with a tiny tower, and without a search for the largest batch, to test the program. The
targets do not apply, and times are CPU times.
"""

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.allocated import peak_bytes
from benchmarks.report import parser_for, print_report
from benchmarks.vit_steps import NAIVE, OPEN_CLIP, PARTS, VARIANTS, Setup, Steps, TowerVariant, wait_for
from clipmill.train.models.attention import open_attention

GB, MB = 1024**3, 1024**2
WARM_STEPS = 3
GPU_SETUP = {"model": "b16", "image_px": 224, "num_frames": 4}
CPU_SETUP = {"model": "tiny", "image_px": 64, "num_frames": 4}
CPU_CLIPS = 4
KEPT = (*PARTS, "other")


def main() -> None:
    """Run the benchmark and print the results."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory-gb", type=float, default=24.0, help="limit of the GPU memory in GiB (default 24)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=[*VARIANTS])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    setup = Setup(**(GPU_SETUP if is_cuda else CPU_SETUP), device=device)  # type: ignore[arg-type]
    if is_cuda:
        limit_memory(arguments.memory_gb, device)
    limit_bytes = int(arguments.memory_gb * GB)
    largest = {
        name: largest_batch(VARIANTS[name], setup, limit_bytes=limit_bytes) for name in arguments.variants if is_cuda
    }
    shared = max(1, min(largest.values()) * 3 // 4) if largest else CPU_CLIPS
    at_shared = seconds_in_turn(arguments.variants, setup, dict.fromkeys(arguments.variants, shared), arguments.rounds)
    own = {name: max(1, batch * 3 // 4) for name, batch in largest.items()}
    at_own = seconds_in_turn(arguments.variants, setup, own, arguments.rounds) if is_cuda else {}
    kept = {name: kept_mb(VARIANTS[name], setup) for name in arguments.variants if not VARIANTS[name].compiles}
    rows = []
    for name in arguments.variants:
        row = row_of(name, at_shared=at_shared, at_own=at_own, largest=largest, shared=shared, own=own, setup=setup)
        rows.append({**row, "kept MB a clip": sum(kept[name].values()) if name in kept else None})
    where = torch.cuda.get_device_name(device) if is_cuda else f"cpu ({torch.get_num_threads()} threads)"
    print_report(
        f"video tower {setup.model}, T = {setup.num_frames}, {setup.image_px} px, on {where}",
        rows,
        notes=notes_of(setup, shared=shared, memory_gb=arguments.memory_gb),
        json_path=arguments.json,
        further={
            "kept MB a clip, by part": [{"part": part} | {name: kept[name][part] for name in kept} for part in KEPT]
        },
    )


def kept_mb(variant: TowerVariant, setup: Setup) -> dict[str, float]:
    """Return the memory in MB that the forward pass of a clip keeps for the backward pass, by part."""
    kept = Steps(variant, setup).kept_bytes(2)
    return {part: num_bytes / 2 / MB for part, num_bytes in kept.items()}


def limit_memory(memory_gb: float, device: torch.device) -> None:
    """Limit the allocations on a GPU to `memory_gb` GiB, or to its total memory if that is less."""
    share = memory_gb * GB / torch.cuda.get_device_properties(device).total_memory
    with torch.cuda.device(device):  # the function rejects a device without an index
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def largest_batch(variant: TowerVariant, setup: Setup, *, limit_bytes: int) -> int:
    """Find the largest number of clips, to within 5 %, whose step fits into the limit of `limit_memory`."""
    steps = Steps(variant, setup)
    guess = largest_by_line({count: _peak_bytes(steps, count) for count in (2, 8)}, limit_bytes=limit_bytes)
    found = largest_fitting(partial(_fits, steps), guess=guess)
    del steps
    _release()
    return found


def largest_by_line(peaks: dict[int, int], *, limit_bytes: int) -> int:
    """Extrapolate the largest batch that fits, assuming that memory is linear in the batch size."""
    (small, small_bytes), (large, large_bytes) = sorted(peaks.items())
    bytes_each = max(1, (large_bytes - small_bytes) // (large - small))
    return max(1, (limit_bytes - small_bytes) // bytes_each + small)


def largest_fitting(fits: Callable[[int], bool], *, guess: int, tolerance: float = 0.05) -> int:
    """Find the largest number that fits, to within a tolerance; 0 if 1 does not fit. A close guess saves calls."""
    fitting, too_many, stride = 0, None, max(1, int(guess * tolerance))
    tried = guess
    while too_many is None or too_many - fitting > max(1, int(fitting * tolerance)):
        if fits(tried):
            fitting = tried
        else:
            too_many = tried
        if too_many is None:
            tried, stride = fitting + stride, stride * 2
        elif not fitting:
            tried, stride = max(1, too_many - stride), stride * 2
        else:
            tried = (fitting + too_many) // 2
    return fitting


def _peak_bytes(steps: Steps, num_clips: int) -> int:
    clips = steps.clips(num_clips)
    steps.take(clips)  # the first step allocates the optimizer's state
    steps.model.zero_grad(set_to_none=True)
    resident = torch.cuda.memory_allocated(steps.setup.device)
    return resident + peak_bytes(lambda: steps.take(clips), device=steps.setup.device)


def _fits(steps: Steps, num_clips: int) -> bool:
    try:
        for _ in range(2):  # the first step allocates the optimizer's state
            steps.take(steps.clips(num_clips))
        wait_for(steps.setup.device)
    except torch.OutOfMemoryError:
        fits = False
    else:
        fits = True
    steps.model.zero_grad(set_to_none=True)
    _release()
    return fits


def seconds_in_turn(names: list[str], setup: Setup, batches: dict[str, int], num_rounds: int) -> dict[str, list[float]]:
    """Return the times of a step in seconds by variant, one per round. Only one variant is in memory at a time."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(num_rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            steps = Steps(VARIANTS[name], setup)
            clips = steps.clips(batches[name])
            for _ in range(WARM_STEPS):
                steps.take(clips)
            times[name].append(steps.seconds(clips))
            del steps, clips
            _release()
    return times


def row_of(
    name: str,
    *,
    at_shared: dict[str, list[float]],
    at_own: dict[str, list[float]],
    largest: dict[str, int],
    shared: int,
    own: dict[str, int],
    setup: Setup,
) -> dict[str, Any]:
    """Return the table row of a variant."""
    frames = shared * setup.num_frames
    seconds = statistics.median(at_shared[name])

    def faster_than(other: str) -> float | None:
        pairs = zip(at_shared.get(other, []), at_shared[name], strict=False)
        ratios = [theirs / ours for theirs, ours in pairs]
        return statistics.median(ratios) if ratios else None

    return {
        "way": name,
        "frames/s": round(frames / seconds),
        "/ naive": faster_than(NAIVE),
        "/ open_clip": faster_than(OPEN_CLIP),
        "largest batch": largest.get(name),
        "batch / naive": largest[name] / largest[NAIVE] if name in largest and NAIVE in largest else None,
        "frames/s at its largest": (
            round(own[name] * setup.num_frames / statistics.median(at_own[name])) if name in at_own else None
        ),
    }


def notes_of(setup: Setup, *, shared: int, memory_gb: float) -> list[str]:
    """Return the notes below the table."""
    if not setup.is_cuda:
        return [
            f"torch {torch.__version__}, float32, {shared} clips per step.",
            "A tiny tower on a CPU: the targets apply to ViT-B/16 on a GPU.",
        ]
    attention = open_attention("auto", device_type="cuda")
    return [
        f"torch {torch.__version__}, bfloat16, fused attention: {attention.name}; {shared} clips per step, "
        f"{memory_gb:g} GB.",
        "Targets, at least: fused 1.7 times the frames/s and 3 times the batch of naive; checkpointed 13.8 times the",
        "batch of naive; fused 1.0 times the frames/s of open_clip.",
    ]


def _release() -> None:
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
