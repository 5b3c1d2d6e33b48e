"""Masked autoencoders: ViT-B steps compared with Hugging Face, the cost of loading, and pixels compared with latents.

    python -m benchmarks.mae [VIDEOS] [--parts model data latents] [--device cuda|cpu] [--rounds N] [--json FILE]

model: forward and backward pass of VideoMAE (16 frames of 224 px, 1408 of 1568 cubes hidden, decoder of 4 blocks):
clipmill's MaskedAutoencoder with targets and loss, compared with VideoMAEForPreTraining of transformers with SDPA. Both
have the same weights, clips and masks, and their losses are compared before the timing. On a CPU: float32, CPU seconds,
and the memory that torch allocates; on a GPU: bfloat16 autocast, and the allocator's peak. Memory is the peak of a
pass, without weights, clips and masks. Targets: at least 1.0 times the speed, at most 1.0 times the memory.

data: steps of `train mae` (16 frames, 4 apart, multi-scale crop, flip, masks, optimizer), in turns on batches from the
loader and on a batch in memory. The chunks are pieces of 15 s of VIDEOS (generated without VIDEOS), encoded by plain
ffmpeg calls (x264 default) or by `prep chunk` (own), and decoded through the container (plain) or by packets.
`data / step` is the fraction of a step's wall time that is saved if the batch is in memory, `waits` the fraction of the
time that a step waits for its batch, and `data / CPU` the fraction of CPU time spent on loading. `speed / first`
compares wall times with the first row, which is the conventional pipeline; the last row is the pipeline of `train mae`.
Target on a GPU: 5 % with packets. On a CPU, the model is `tiny`, so that the time of loading is significant, and shares
the cores with the loader.

latents: `train mae` with batches from the loader, on pixels and on latents with the same number of cubes (28 x 28, the
VAE output for 224 px), in samples per CPU second; on a GPU, per second.

benchmarks/decode.py compares only the decoding (16 frames with a stride of 4) with decord and other libraries.

The variants take turns in every round, in rotating order. Figures are medians over the rounds, and ratios are medians
of the ratios within each round.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_peers.chunk_sets import OWN, X264_DEFAULT
from benchmarks.decode_peers.clip_set import data_folder
from benchmarks.mae_data import LATENT_PX, LATENT_SEGMENT, DataSteps, make_folders
from benchmarks.mae_steps import HF, NUM_FRAMES, OURS, HfSteps, OurSteps, Steps, peak_bytes_of_pass, seconds, take
from benchmarks.report import Rows, parser_for, print_report
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.train.config.clips import Augment
from clipmill.train.tasks.mae.spec import MaeSettings

MB = 1024**2
MODEL, DATA, LATENTS = "model", "data", "latents"
# Encoding of the chunks, and decoding path.
VARIANTS = ((X264_DEFAULT, "plain"), (OWN, "plain"), (OWN, "packets"))
_CLOSE = 1e-3  # tolerance of the losses in bfloat16


def data_settings(size_px: int, *, device: torch.device) -> dict[str, Any]:
    """Return the settings of `train mae` that affect the loading of data."""
    cores = len(os.sched_getaffinity(0))
    shared = {"size_px": size_px, "device": device.type, "augment": Augment(flip=0.5)}
    if device.type == "cuda":
        return {**shared, "model": "b16", "batch": 64, "workers": cores}
    return {**shared, "model": "tiny", "batch": 8, "workers": 1}


def model_rows(
    name: str, *, image_px: int, batch: int, device: torch.device, num_rounds: int, num_steps: int
) -> list[dict[str, Any]]:
    """Return a table row for each implementation of the model.

    Raises:
        RuntimeError: The losses of the implementations differ.
    """
    ours = OurSteps(name, image_px=image_px, decoder_depth=4, device=device)  # type: ignore[arg-type]
    variants: dict[str, Steps] = {OURS: ours, HF: HfSteps(ours.model, device=device)}
    clips = torch.randn(batch, 3, NUM_FRAMES, image_px, image_px, device=device)
    masks = ours.masks(batch, device=device)
    losses = {variant: take(steps, clips, masks) for variant, steps in variants.items()}
    if abs(losses[OURS] - losses[HF]) > _CLOSE * losses[HF]:
        raise RuntimeError(f"the losses with the same weights differ: {losses}")
    memory = {variant: peak_bytes_of_pass(steps, clips, masks) for variant, steps in variants.items()}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(num_rounds):
        for variant in sorted(variants, reverse=bool(number % 2)):
            times[variant].append(seconds(variants[variant], clips, masks, count=num_steps))
            _progress(f"model, round {number + 1}, {variant}: {times[variant][-1]:.3f} s")
    return [
        {
            "way": variant,
            "loss": f"{losses[variant]:.6f}",
            "s a step": round(statistics.median(times[variant]), 3),
            "lowest": min(times[variant]),
            "highest": max(times[variant]),
            "speed / transformers": _ratio(times[HF], times[variant]),
            "peak MB": round(memory[variant] / MB),
            "memory / transformers": memory[variant] / memory[HF],
        }
        for variant in variants
    ]


def data_rows(
    folder: Path, settings: dict[str, Any], *, device: torch.device, num_rounds: int, num_steps: int
) -> list[dict[str, Any]]:
    """Return a table row for each encoding of the chunks and each decoding path."""
    variants = {}
    for name, decode in VARIANTS:
        chosen = MaeSettings(shards=str(data_folder(folder, name)), decode=decode, **settings)  # type: ignore[arg-type]
        variants[name, decode] = DataSteps(chosen, device=device)
    memory: dict[Any, list[tuple[float, float]]] = {variant: [] for variant in variants}
    loaded: dict[Any, list[tuple[float, float, float]]] = {variant: [] for variant in variants}
    for number in range(num_rounds):
        turn = number % len(VARIANTS)
        for variant in VARIANTS[turn:] + VARIANTS[:turn]:
            memory[variant].append(variants[variant].from_memory(num_steps))
            loaded[variant].append(variants[variant].from_loader(num_steps))
            _progress(f"data, round {number + 1}, {' '.join(variant)}: {loaded[variant][-1][0]:.3f} s a step")
    return [
        {
            "chunks": name,
            "path": decode,
            "s a step": round(statistics.median(step[0] for step in loaded[name, decode]), 3),
            "s in memory": round(statistics.median(step[0] for step in memory[name, decode]), 3),
            "data / step": _share(memory[name, decode], loaded[name, decode], 0),
            "waits": statistics.median(step[2] / step[0] for step in loaded[name, decode]),
            "data / CPU": _share(memory[name, decode], loaded[name, decode], 1),
            "speed / first": _ratio(
                [step[0] for step in loaded[VARIANTS[0]]], [step[0] for step in loaded[name, decode]]
            ),
        }
        for name, decode in VARIANTS
    ]


def latent_rows(
    folder: Path, settings: dict[str, Any], *, device: torch.device, num_rounds: int, num_steps: int
) -> list[dict[str, Any]]:
    """Return a table row for pixels and a row for latents."""
    shards = str(data_folder(folder, OWN))
    inputs: dict[str, dict[str, Any]] = {
        "pixels": {"size_px": LATENT_PX},
        "latents": {"input": "latents", "segment": LATENT_SEGMENT, "augment": Augment()},
    }
    chosen = {name: MaeSettings(shards=shards, **(settings | extra)) for name, extra in inputs.items()}
    variants = {name: DataSteps(one, device=device) for name, one in chosen.items()}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(num_rounds):
        for name in sorted(variants, reverse=bool(number % 2)):
            wall_s, cpu_s, _ = variants[name].from_loader(num_steps)
            rates[name].append(chosen[name].batch / (wall_s if device.type == "cuda" else cpu_s))
            _progress(f"latents, round {number + 1}, {name}: {rates[name][-1]:.2f} samples/s")
    return [
        {
            "input": name,
            "samples/s": statistics.median(found),
            "lowest": min(found),
            "highest": max(found),
            "/ pixels": _ratio(found, rates["pixels"]),
        }
        for name, found in rates.items()
    ]


def main() -> None:
    """Run the benchmark and print the results."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", type=Path, nargs="?", help="folder of videos (default: synthetic videos)")
    parser.add_argument("--parts", nargs="+", choices=(MODEL, DATA, LATENTS), default=[MODEL, DATA, LATENTS])
    parser.add_argument("--model", default="b16", help="model size for `model` (default b16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="batch size for `model` (default 2 on a CPU, 32 on a GPU)")
    parser.add_argument("--size-px", type=int, default=224)
    parser.add_argument("--pieces", type=int, default=12, help="number of pieces of 15 s (default 12)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="number of timed steps per turn (default 2 on a CPU, 10 on a GPU)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    if not is_cuda:
        torch.set_num_threads(1)
    race = {
        "device": device,
        "num_rounds": arguments.rounds,
        "num_steps": arguments.steps or (10 if is_cuda else 2),
    }
    tables: dict[str, Rows] = {}
    if MODEL in arguments.parts:
        batch = arguments.batch or (32 if is_cuda else 2)
        rows = model_rows(arguments.model, image_px=arguments.size_px, batch=batch, **race)
        tables[f"{arguments.model}, forward and backward, {batch} clips of 16 x {arguments.size_px} px"] = rows
    names: list[str] = []
    if {DATA, LATENTS} & set(arguments.parts):
        settings = data_settings(arguments.size_px, device=device)
        with tempfile.TemporaryDirectory() as name:
            names = make_folders(
                Path(name),
                videos=arguments.videos,
                num_pieces=arguments.pieces,
                program=find_ffmpeg().path,
                has_latents=LATENTS in arguments.parts,
            )
            what = f"{settings['model']}, batch {settings['batch']}"
            if DATA in arguments.parts:
                tables[f"{what}: share of data loading in a step"] = data_rows(Path(name), settings, **race)
            if LATENTS in arguments.parts:
                tables[f"{what}: pixels and latents"] = latent_rows(Path(name), settings, **race)
    (title, first), *others = tables.items()
    where = torch.cuda.get_device_name(device) if is_cuda else f"cpu (torch threads: {torch.get_num_threads()})"
    print_report(
        f"Masked autoencoders, on {where}: {title}",
        first,
        notes=[
            f"torch {torch.__version__}, {arguments.rounds} rounds; pieces: {', '.join(names) or 'none'}.",
            "Targets: at least 1.0 times the speed of transformers, at most 1.0 times its memory; at most 5 % of a",
            "step on a GPU spent waiting for data. benchmarks/decode.py compares decoding with decord.",
        ],
        json_path=arguments.json,
        further=dict(others),
    )


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _share(memory: list[tuple[float, float]], loaded: list[tuple[float, float, float]], which: int) -> float:
    return statistics.median(1 - a[which] / b[which] for a, b in zip(memory, loaded, strict=True))


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
