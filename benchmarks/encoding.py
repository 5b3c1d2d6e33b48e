"""Encoding latents and text: `prep latents` and `prep text` compared with plain loops at the same batch size.

    python -m benchmarks.encoding [VIDEOS] [--rounds 3] [--json FILE]

Three VAEs encode the chunks of a folder of videos on one thread: `tiny`, for which the overhead outside the model
matters most; a VAE with Stable Diffusion's architecture (84 M parameters) and random weights, at a size and frame rate
that a CPU can handle; and a narrow VAE with Wan's architecture, which encodes one segment at a time. A text tower with
ViT-B-32's architecture and random weights encodes captions of 5 to 20 words, and of 90 words.

The plain loops (benchmarks.plain_loops) are minimal scripts with the same weights: decode each complete chunk with
PyAV, select frames, crop, resize, collect a batch, encode, save; or tokenise a batch with open_clip, encode, normalise,
save. They verify nothing. Both variants are complete commands, including imports. Figures are CPU seconds of all
processes. The variants take turns; figures are medians, and ratios are medians of the ratios within each round. Target:
at least 0.95 times the rate of the plain loop.
"""

import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import prep_command, run_measured
from benchmarks.report import parser_for, print_report
from clipmill.manifests.publish import publish_checked_json, read_checked_json
from clipmill.shards.reader import Variant

BATCH = 16
TEXT_BATCH = 32
CLIP = "ViT-B-32"
TINY = "tiny"
ENGINE = ("--engine", "processes", "--workers", "1", "--num-gpus", "0")
# Description, size in pixels, frames per second and length of a segment.
LATENTS = {
    TINY: ("tiny, 256 px, 4 a second", 256, "4", "5s"),
    "sd": ("Stable Diffusion's shape, 64 px, one in 4 s", 64, "1/4", "4s"),
    "wan": ("Wan's shape with a sixth of its width, 64 px, segments of 9 frames at 8 a second", 64, "8", "9f"),
}
TEXTS = {"short": ("5 to 20 words", (5, 20), 600), "long": ("90 words", (90, 90), 600)}
_WORDS = ("a", "the", "person", "dog", "opens", "cuts", "onion", "door", "red", "small", "slowly", "kitchen", "onto")


def make_vae() -> Any:
    """Create a VAE with Stable Diffusion's architecture and random weights."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
    )


def make_wan() -> Any:
    """Create a narrow VAE with Wan's architecture and random weights."""
    import torch
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=16)


def save_vae(folder: Path, case: str) -> Path:
    """Save the VAE of a case."""
    model = make_wan() if case == "wan" else make_vae()
    model.save_pretrained(folder / f"{case}-shaped")
    return folder / f"{case}-shaped"


def save_clip(folder: Path) -> Path:
    """Save random weights for the open_clip model `CLIP`."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    path = folder / "random.safetensors"
    save_file(open_clip.create_model(CLIP).state_dict(), path)
    return path


def words_of(rng: np.random.Generator, lengths: tuple[int, int]) -> str:
    """Draw a text whose number of words is between the two lengths."""
    return " ".join(rng.choice(_WORDS, rng.integers(lengths[0], lengths[1] + 1)))


def write_captions(folder: Path, *, name: str, lengths: tuple[int, int], count: int) -> Path:
    """Write a data folder whose manifest has `count` distinct captions with the given range of words."""
    rng = np.random.default_rng(0)
    videos = folder / f"{name}-videos"
    videos.mkdir()
    lines = ["video,text,begin_s,end_s"]
    for number in range(count):
        lines.append(f"v{number % 10},{words_of(rng, lengths)} {number},0,1")
    for number in range(10):
        (videos / f"v{number}.mp4").write_bytes(b"no chunk is made of it")
    captions = folder / f"{name}.csv"
    captions.write_text("\n".join(lines) + "\n")
    data = folder / name
    run_measured(prep_command("manifest", "folder", videos, "--captions", captions, "--data", data))
    return data


def compare(
    what: str,
    ours: list[str],
    plain: list[str],
    *,
    count: Callable[[], int],
    num_rounds: int,
    forget: Callable[[], None],
) -> list[dict[str, object]]:
    """Time both variants in turns, and return a table row for each.

    Args:
        ours, plain: Command lines of `prep` and of the plain loop.
        count: Function that returns the number of encoded items.
        forget: Function that removes the output of `prep` before each round.
    """
    seconds: dict[str, list[float]] = {"prep": [], "plain loop": []}
    for number in range(num_rounds):
        forget()
        for name, command in sorted([("prep", ours), ("plain loop", plain)], reverse=bool(number % 2)):
            seconds[name].append(run_measured(command).cpu_s)
            print(f"{what}, round {number + 1}, {name}: {seconds[name][-1]:.1f} CPU s", file=sys.stderr, flush=True)
    ratios = [other / own for own, other in zip(seconds["prep"], seconds["plain loop"], strict=True)]
    return [
        {
            "what": what,
            "way": name,
            "number": count(),
            "CPU s": statistics.median(taken),
            "a CPU s": count() / statistics.median(taken),
            "/ plain loop": statistics.median(ratios) if name == "prep" else 1.0,
        }
        for name, taken in seconds.items()
    ]


def forget_column(data: Path, column: str) -> None:
    """Remove the column that the last round made."""
    shutil.rmtree(data / column, ignore_errors=True)
    path = data / "dataset.json"
    if path.exists():
        content = read_checked_json(path)
        content["columns"].pop(column, None)
        publish_checked_json(path, content)


def latents_rows(folder: Path, videos: Path | None, *, case: str, num_rounds: int) -> list[dict[str, object]]:
    """Return the table rows of a VAE, for the chunks of `videos` or of a short synthetic video."""
    what, size, fps, segment = LATENTS[case]
    vae = TINY if case == TINY else str(save_vae(folder, case))
    data = folder / f"{case}-data"
    minutes = "0.25" if case == "wan" else "0.05"
    made = ("synthetic", "--videos", "1", "--minutes", minutes) if videos is None else ("folder", videos.resolve())
    run_measured(prep_command("manifest", *made, "--data", data))
    run_measured(prep_command("chunk", "--len", "15s", "--data", data, "--engine", "processes"))
    settings = ("--vae", vae, "--size", str(size), "--fps", fps, "--segment", segment, "--batch", str(BATCH))
    ours = prep_command("latents", *settings, "--data", data, *ENGINE)

    def count() -> int:
        shards = Variant.open(data, column="latents").shards()
        return sum(int(shard.index["num_frames"].to_numpy().sum()) for shard in shards)

    return compare(
        f"latents: {what}",
        ours,
        _plain("latents", str(data), vae, str(size), fps, str(BATCH), str(folder / "plain.npy")),
        count=count,
        num_rounds=num_rounds,
        forget=lambda: forget_column(data, "latents"),
    )


def text_rows(folder: Path, *, case: str, num_rounds: int) -> list[dict[str, object]]:
    """Return the table rows of the text tower, for captions of one range of lengths."""
    what, lengths, count = TEXTS[case]
    weights = save_clip(folder)
    data = write_captions(folder, name=case, lengths=lengths, count=count)
    words = ("--clip", f"{CLIP}:{weights}", "--batch", str(TEXT_BATCH), "--data", data)
    return compare(
        f"text: {what}",
        prep_command("text", *words, *ENGINE),
        _plain("text", str(data), str(weights), str(TEXT_BATCH), str(folder / "plain.npy")),
        count=lambda: count,
        num_rounds=num_rounds,
        forget=lambda: forget_column(data, "text"),
    )


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("videos", type=Path, nargs="?", help="folder of videos (default: a short synthetic video)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[*LATENTS, *TEXTS], default=[*LATENTS, *TEXTS])
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        for case in arguments.cases:
            if case in LATENTS:
                rows += latents_rows(Path(name), arguments.videos, case=case, num_rounds=arguments.rounds)
            else:
                rows += text_rows(Path(name), case=case, num_rounds=arguments.rounds)
    print_report(
        "Encoding latents and text",
        rows,
        notes=["Target: at least 0.95 times the plain loop's rate. Times include imports, a few seconds per command."],
        json_path=arguments.json,
    )


def _plain(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.plain_loops", *words]


if __name__ == "__main__":
    main()
