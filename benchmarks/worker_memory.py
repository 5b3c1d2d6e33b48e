"""Peak memory of one worker of each column, for what `--task-memory` reserves on a Ray cluster by default.

    python -m benchmarks.worker_memory --video FILE [--heights H ...] [--seconds S] [--json FILE]

`--video` is scaled to each height and cut to a few seconds. The commands run with the processes engine and one worker;
`worker MB` is the largest Python process that makes shards, `ffmpeg MB` its largest encoder pass (there is one at a
time), and `together MB` their sum, with shared libraries counted in both. The VAE has the architecture of Stable
Diffusion's and the text encoder is that of CLIP ViT-B-32, both with random weights; they run on the CPU.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import prep_command, run_measured
from benchmarks.memory import role_of
from benchmarks.report import parser_for, print_report
from benchmarks.tree import run_watched
from prep.video.ffmpeg import find_ffmpeg

VAE_CONFIG = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "scaling_factor": 0.18215,
}
ONE_WORKER = ("--engine", "processes", "--workers", "1")


def peaks_of(*arguments: str | Path) -> dict[str, object]:
    """Run `prep` with one worker, and return the peaks of its processes."""
    peaks = {"worker": 0, "ffmpeg": 0}
    for process in run_watched(prep_command(*arguments, *ONE_WORKER)).processes:
        role = role_of(process)
        if role in peaks:
            peaks[role] = max(peaks[role], process.peak_bytes)
    return {**{f"{role} MB": peak / 1e6 for role, peak in peaks.items()}, "together MB": sum(peaks.values()) / 1e6}


def scaled(video: Path, folder: Path, *, height: int, seconds: float) -> Path:
    """Write the first seconds of a video at another height."""
    folder.mkdir(parents=True)
    target = folder / f"{height}.mp4"
    options = ["-t", str(seconds), "-vf", f"scale=-2:{height}", "-preset", "ultrafast", "-an", "-y"]
    program = find_ffmpeg().path
    subprocess.run([program, "-v", "error", "-i", os.fspath(video), *options, os.fspath(target)], check=True)
    return target


def chunk_rows(video: Path, folder: Path, *, heights: list[int], seconds: float) -> Iterator[dict[str, object]]:
    """Measure `prep chunk` for sources of each height, and `prep scores` of the chunks."""
    for height in heights:
        videos, data = folder / f"videos-{height}", folder / f"data-{height}"
        scaled(video, videos, height=height, seconds=seconds)
        run_measured(prep_command("manifest", "folder", videos, "--data", data))
        for recipe in ("balanced", "small"):
            peaks = peaks_of("chunk", "--data", data, "--recipe", recipe, "--len", "5s")
            yield {"column": "video", "what": f"{recipe}, source of {height} lines", **peaks}
    yield {"column": "scores", "what": "chunks of 288 lines", **peaks_of("scores", "--data", data)}


def latents_row(data: Path, folder: Path, *, batch: int) -> dict[str, object]:
    """Measure `prep latents` with a VAE of Stable Diffusion's size."""
    import diffusers

    kind: Any = diffusers.AutoencoderKL
    vae = folder / "vae"
    if not vae.exists():
        kind(**VAE_CONFIG).save_pretrained(vae)
    fps = "2" if batch > 1 else "1"
    settings = ("--vae", vae, "--fps", fps, "--batch", str(batch), "--num-gpus", "0", "--size", "256")
    return {
        "column": "latents",
        "what": f"batch of {batch} frames, 256 x 256, CPU",
        **peaks_of("latents", "--data", data, *settings),
    }


def text_row(data: Path, folder: Path) -> dict[str, object]:
    """Measure `prep text` with the text encoder of CLIP ViT-B-32."""
    import open_clip
    import torch

    weights = folder / "clip.pt"
    torch.save(open_clip.create_model("ViT-B-32").state_dict(), weights)
    return {
        "column": "text",
        "what": "ViT-B-32, batch of 32, CPU",
        **peaks_of("text", "--data", data, "--clip", f"ViT-B-32:{weights}", "--num-gpus", "0"),
    }


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("--video", type=Path, required=True, help="video with natural content")
    parser.add_argument("--heights", type=int, nargs="+", default=[720, 1080, 2160], help="default 720 1080 2160")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of it to encode (default 8)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = list(chunk_rows(arguments.video, folder, heights=arguments.heights, seconds=arguments.seconds))
        data = folder / f"data-{arguments.heights[0]}"
        rows += [latents_row(data, folder, batch=batch) for batch in (1, 16)]
        captioned = folder / "captioned"
        run_measured(prep_command("manifest", "synthetic", "--videos", "64", "--minutes", "0.1", "--data", captioned))
        rows.append(text_row(captioned, folder))
    print_report("Peak memory of a worker by column", rows, notes=["One run each."], json_path=arguments.json)


if __name__ == "__main__":
    main()
