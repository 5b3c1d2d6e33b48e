"""Loading images from tars: clipmill compared with open_clip's loader and webdataset, on the same tars.

    python -m benchmarks.images [TARS] [--images N] [--short-side PX] [--batch N] [--rounds N] [--json FILE]

TARS is a pattern of tars with JPEG files and `txt` captions. Without TARS, images are generated: smooth noise at
several scales, 4:3, JPEG quality 95 as img2dataset writes it. The loaders take turns in this process, and load an epoch
in each turn: batches of captions as CLIP's tokens, and of random crops of 0.9 to 1.0 of an image at 224 px, as in
open_clip's training. CPU time is the time of the complete process; `/ open_clip` is the median over the rounds of the
ratio of CPU times. The target is at least 1.

clipmill: the batches that `train dual-encoder` loads: uint8 planes, which are converted to the model's input on the
device.
clipmill, normalised: the same with the conversion on the CPU: float32 RGB, like the other loaders.
open_clip: `open_clip_train.data.get_wds_dataset` with open_clip's training transform, and without a worker process,
whose communication would add to the time. It needs pandas and, for open_clip 3.3, webdataset 0.2.86. Without them, this
row is omitted, and ratios are relative to webdataset.
webdataset: its documented pipeline (shuffle, decode to PIL, map, batched) with torchvision's RandomResizedCrop.
"""

import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch

from benchmarks.report import parser_for, print_report
from benchmarks.timing import turns
from clipmill.train.augment.model_input import to_model_input
from clipmill.train.data.clip_frames import ClipShape
from clipmill.train.data.frame_sampling import Sampling
from clipmill.train.data.image_tars import ImageQuery
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.prefetch import prefetch
from clipmill.train.data.producers.tar_images import open_tar_images
from clipmill.train.data.samples import Samples
from clipmill.train.models.text import load_tokenizer
from clipmill.train.weights.conversion import CLIP_MEAN, CLIP_STD

SIZE_PX, MIN_AREA, WORKERS, QUALITY = 224, 0.9, 2, 95
NUM_TARS, NUM_DIFFERENT = 4, 40
NOISE_SCALES = (4, 16, 64, 256)

Epoch = Callable[[], int]  # loads an epoch, and returns the number of images


def main() -> None:
    """Run the benchmark and print its table."""
    parser = parser_for(__doc__ or "")
    parser.add_argument("tars", nargs="?", help="pattern of tars (default: generated tars)")
    parser.add_argument("--images", type=int, default=1000, help="number of generated images (default 1000)")
    parser.add_argument("--short-side", type=int, default=256, help="their short side in pixels (default 256)")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pattern = arguments.tars or make_tars(Path(scratch), num_images=arguments.images, side_px=arguments.short_side)
        ways = _ways(pattern, arguments.batch)
        rows = _measure(ways, num_rounds=arguments.rounds)
        began_s = time.process_time()
        num_images = len(_open_samples(pattern, arguments.batch))
        index_us = (time.process_time() - began_s) / num_images * 1e6
    title = f"{num_images:,} images, batches of {arguments.batch}, median of {arguments.rounds} rounds"
    notes = [f"Indexing, once for all runs: {index_us:.0f} us of CPU time per image."]
    print_report(title, rows, notes=notes, json_path=arguments.json, figures={"index_us_per_image": index_us})


def make_tars(folder: Path, *, num_images: int, side_px: int) -> str:
    """Write tars of generated images, and return their pattern."""
    rng = np.random.default_rng(0)
    files = [_image(rng, width=side_px * 4 // 3, height=side_px) for _ in range(min(NUM_DIFFERENT, num_images))]
    for number in range(NUM_TARS):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for one in range(number, num_images, NUM_TARS):
                caption = f"a made-up image, number {one} of {num_images}".encode()
                for extension, content in (("jpg", files[one % len(files)]), ("txt", caption)):
                    member = tarfile.TarInfo(f"{one:09d}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return str(folder / f"{{00000..{NUM_TARS - 1:05d}}}.tar")


def _image(rng: np.random.Generator, *, width: int, height: int) -> bytes:
    total = np.zeros((height, width, 3), np.float32)
    for scale in NOISE_SCALES:
        noise = rng.random((max(2, height // scale), max(2, width // scale), 3)).astype(np.float32)
        total += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC) * scale**0.5
    pixels = (total - total.min()) / (total.max() - total.min()) * 255
    return cv2.imencode(".jpg", pixels.astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()


def _open_samples(pattern: str, batch: int) -> Samples[Any]:
    shape = ClipShape(sampling=Sampling(num_frames=1), size_px=SIZE_PX, min_crop_area=MIN_AREA)
    loading = LoaderSettings(batch=batch, num_threads=WORKERS)
    return open_tar_images(ImageQuery(pattern, shape, loading), has_captions=True, tokenize=load_tokenizer())


def _ways(pattern: str, batch: int) -> dict[str, Epoch]:
    samples = _open_samples(pattern, batch)
    num_batches = len(samples) // batch
    ways = {
        "clipmill": _clipmill(samples, num_batches, finish=lambda loaded: loaded["video"]),
        "clipmill, normalised": _clipmill(samples, num_batches, finish=_normalised),
    }
    tars = [str(path) for path in sorted(Path(pattern).parent.glob("*.tar"))]
    if find_spec("pandas") is not None and version("webdataset").startswith("0."):
        ways["open_clip"] = _open_clip(pattern, num_batches * batch, batch)
    return ways | {"webdataset": _webdataset(tars, num_batches, batch)}


def _clipmill(samples: Samples[Any], num_batches: int, *, finish: Callable[[Any], torch.Tensor]) -> Epoch:
    def epoch() -> int:
        loaded = prefetch(samples.batches(max_failures=0), torch.device("cpu"))
        with closing(loaded):
            return sum(len(finish(one.batch)) for one in islice(loaded, num_batches))

    return epoch


def _normalised(batch: Any) -> torch.Tensor:
    return to_model_input(batch["video"], batch["colour"], size_px=SIZE_PX, mean=CLIP_MEAN, std=CLIP_STD)


def _open_clip(pattern: str, num_images: int, batch: int) -> Epoch:
    import open_clip
    from open_clip_train.data import get_wds_dataset  # type: ignore[import-untyped]

    asked = SimpleNamespace(
        train_data=pattern,
        train_num_samples=num_images,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        batch_size=batch,
        workers=0,
        world_size=1,
    )
    transform = open_clip.image_transform(SIZE_PX, is_train=True)
    tokenizer = open_clip.get_tokenizer("ViT-B-16")
    dataloader = get_wds_dataset(asked, transform, is_train=True, tokenizer=tokenizer).dataloader
    return lambda: sum(len(images) for images, _ in dataloader)


def _webdataset(tars: Sequence[str], num_batches: int, batch: int) -> Epoch:
    import open_clip
    import webdataset as wds
    from torchvision.transforms import Compose, InterpolationMode, Normalize, RandomResizedCrop, ToTensor

    crop = RandomResizedCrop(SIZE_PX, scale=(MIN_AREA, 1.0), interpolation=InterpolationMode.BICUBIC)
    transform = Compose([crop, ToTensor(), Normalize(CLIP_MEAN, CLIP_STD)])
    tokenizer = open_clip.get_tokenizer("ViT-B-16")
    dataset: Iterable[Any] = (
        wds.WebDataset(list(tars), shardshuffle=len(tars))
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "txt")
        .map_tuple(transform, lambda text: tokenizer(text)[0])
        .batched(batch)
    )
    return lambda: sum(len(images) for images, _ in islice(dataset, num_batches))


def _measure(ways: dict[str, Epoch], *, num_rounds: int) -> list[dict[str, object]]:
    num_images = {way: epoch() for way, epoch in ways.items()}  # the page cache, and memory
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _, way in turns(list(ways), num_rounds):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        found = ways[way]()
        taken[way].append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
        assert found == num_images[way], f"{way} loaded {found} images, but {num_images[way]} in the first epoch"
    other = taken.get("open_clip", taken["webdataset"])
    return [
        {
            "way": way,
            "images/CPU s": num_images[way] / statistics.median(cpu_s for cpu_s, _ in its),
            "images/s": num_images[way] / statistics.median(wall_s for _, wall_s in its),
            f"/ {'open_clip' if 'open_clip' in taken else 'webdataset'}": statistics.median(
                theirs[0] / ours[0] for theirs, ours in zip(other, its, strict=True)
            ),
        }
        for way, its in taken.items()
    ]


if __name__ == "__main__":
    main()
