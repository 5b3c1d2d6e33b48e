"""Golden sample orders for each kind of data: samples, their order, captions and images.

The values were reviewed before they were stored. An intended change stores new values
(`python -m tests.train.test_golden_orders`) and gives the reason in its commit. Its changelog entry says that resumed
runs continue with different samples.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import pytest

from clipmill import open_clips, open_latents
from tests.tiers import nightly_beyond
from tests.train.classify.moving import write_moving
from tests.train.images.tars import write_tar, write_tars
from tests.train.latents.columns import write_columns
from tests.train.tiny_data import CHUNK_FRAMES, Caption, chunks_of, encode_chunk, write_captions, write_shard

GOLDEN = Path(__file__).with_name("golden_orders.json")
_VIDEOS = dict.fromkeys("abcdef", "train")
_SMALL: dict[str, Any] = {"batch": 2, "num_frames": 2, "size_px": 32, "workers": 2, "seed": 5}
_NUM_EPOCHS = 3
EVERY_DAY = ("captions", "stream", "mixture", "latents")
_Open = Callable[..., Any]


def write_captioned(folder: Path) -> Path:
    """Write six videos of 2.5 chunks with overlapping captions from two sources."""
    for shard_id, names in enumerate(("abc", "def")):
        samples = [sample for name in names for sample in chunks_of(name, 5 * CHUNK_FRAMES // 2)]
        write_shard(folder, shard_id, samples, split="train")
    captions = [
        Caption(name, begin, end, f"{name} {text}", source=source)
        for name in _VIDEOS
        for begin, end, text, source in (
            (0.0, 1.5, "begins", "people"),
            (0.0, 1.5, "starts", "model"),
            (1.2, 3.4, "goes on", "people"),
            (3.0, float("inf"), "ends", "model"),
        )
    ]
    write_captions(folder, _VIDEOS, captions)
    return folder


def producers(folder: Path) -> dict[str, tuple[_Open, dict[str, Any]]]:
    """Return the function that opens each kind of data, and its arguments."""
    captioned, labelled, latents = folder / "captioned", folder / "labelled", folder / "latents"
    write_captioned(captioned)
    write_moving(labelled, num_videos=4)
    write_columns(latents)
    images = write_tars(folder / "images")
    videos = [(f"{n:03d}", {"mp4": encode_chunk(100 * n, 12), "txt": f"video {n}".encode()}) for n in range(7)]
    (folder / "streamed").mkdir()
    write_tar(folder / "streamed" / "000.tar", videos[:4])
    write_tar(folder / "streamed" / "001.tar", videos[4:])
    streamed = str(folder / "streamed" / "{000..001}.tar")
    return {
        "captions": (open_clips, {"data": captioned, **_SMALL}),
        "captions by source": (open_clips, {"data": captioned, "sources": {"people": 3.0, "model": 1.0}, **_SMALL}),
        "captions where": (open_clips, {"data": captioned, "where": "words > 1 and begin_s < 2", **_SMALL}),
        "labels": (open_clips, {"data": labelled, "label": "class", **_SMALL}),
        "images": (open_clips, {"data": images, **_SMALL}),
        "stream": (open_clips, {"data": streamed, **_SMALL}),
        "mixture": (open_clips, {"data": [captioned, images, labelled], "mix": [2, 1, 1], **_SMALL}),
        "latents": (open_latents, {"data": latents, "segment": "2s", "batch": 2, "seed": 5}),
        "latents with labels": (open_latents, {"data": latents, "segment": "2s", "label": "pattern", "batch": 2}),
        "latents with embeddings": (
            open_latents,
            {"data": latents, "segment": "1s", "captions": "embedding", "tails": "pad", "batch": 2},
        ),
    }


def record_orders(open_data: _Open, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return digests of the orders on one, two and three ranks and of an evaluation, and mean pixel values.

    The orders cover three epochs.
    """
    digests: dict[str, Any] = {}
    for world in (1, 2, 3):
        lines: list[str] = []
        means: list[float] = []
        for rank in range(world):
            with open_data(**arguments, rank=rank, world=world) as batches:
                # A stream has no epochs, so it continues until it is closed.
                epochs = [batches] * _NUM_EPOCHS if batches.num_samples else [islice(batches, 10)]
                for line, mean in chain.from_iterable(map(_samples, epochs)):
                    lines.append(line)
                    means.append(mean)
        digests[f"{world} ranks"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        if world == 1:
            digests["samples"], digests["means"] = lines[:6], [round(mean, 2) for mean in means[:24]]
    with open_data(**arguments, shuffle=False, rank=0, world=1) as batches:
        order = "\n".join(line for line, _ in _samples(batches))
    return {**digests, "evaluation": hashlib.sha256(order.encode()).hexdigest()[:16]}


def _samples(batches: Any) -> Iterator[tuple[str, float]]:
    """Yield the name, times and text of each sample, and the mean of its pixels or latents."""
    for batch in batches:
        pictures = batch["video"] if "video" in batch else batch["latents"]
        for number, key in enumerate(batch["key"]):
            facts = [key]
            for name in ("begin_s", "end_s", "caption", "label", "folder", "clip_id", "caption_id"):
                if name in batch and batch[name] is not None:
                    value = batch[name][number]
                    facts.append(f"{name}={value if isinstance(value, str) else float(value)}")
            if "text" in batch:
                facts.append(f"text={float(batch['text'][number].float().sum()):.4f}")
            yield " ".join(facts), float(pictures[number].float().mean())


@pytest.fixture(scope="module")
def kinds_of_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[_Open, dict[str, Any]]]:
    return producers(tmp_path_factory.mktemp("orders"))


KINDS = cast(dict[str, Any], json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else dict.fromkeys(EVERY_DAY))


@pytest.mark.parametrize("name", nightly_beyond(EVERY_DAY, KINDS))
def test_a_kind_of_data_has_its_golden_order(kinds_of_data: dict[str, tuple[_Open, dict[str, Any]]], name: str) -> None:
    values, golden = record_orders(*kinds_of_data[name]), json.loads(GOLDEN.read_bytes())[name]
    # A different version of OpenCV may round pixels differently, but a different crop or frame changes a mean by more.
    assert values.pop("means") == pytest.approx(golden.pop("means"), abs=0.05)
    assert values == golden


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        values = {name: record_orders(*producer) for name, producer in producers(Path(folder)).items()}
    GOLDEN.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
