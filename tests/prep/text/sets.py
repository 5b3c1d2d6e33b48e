"""Small sets of captions, and functions that run `prep text` on them in this process."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import webdataset

from clipmill.manifests.store import read_captions
from clipmill.manifests.write import write_manifest
from clipmill.prep.core.run import Summary
from clipmill.prep.engines import Check, Outcome, R, T
from clipmill.prep.text.bank import Block, TextEncoderOptions
from clipmill.prep.text.plan import TextPlan, make_text_plan
from clipmill.prep.text.recipe import TextSettings
from clipmill.prep.text.tower import resolve
from clipmill.prep.text.work import run_text
from tests.prep.here import Here

# Three videos in two splits: repeated texts within a video and between videos, and a video without captions.
CAPTIONS = {
    "long": ["a dog runs", "a cat", "a dog runs", "a dog runs", ""],
    "short": ["a cat", "the end"],
    "silent": [],
    "other": ["a bird", "a dog runs"],
}
SPLITS = {"long": "train", "short": "train", "silent": "train", "other": "val"}


def write_captions(data: Path, captions: dict[str, list[str]], *, splits: dict[str, str] | None = None) -> None:
    """Write a manifest with these captions; caption n of a video starts at n seconds."""
    splits = splits or {}
    names = list(captions)
    rows = [(name, n, text) for name, texts in captions.items() for n, text in enumerate(texts)]
    videos = {
        "video_id": names,
        "source_id": names,
        "path": [f"/nowhere/{name}.mp4" for name in names],
        "split": [splits.get(name, "train") for name in names],
    }
    table = {
        "video_id": pa.array([name for name, _, _ in rows], pa.string()).dictionary_encode(),
        "begin_s": pa.array([float(n) for _, n, _ in rows], pa.float64()),
        "end_s": pa.array([n + 1.0 for _, n, _ in rows], pa.float64()),
        "text": pa.array([text for _, _, text in rows], pa.string()),
        "source": pa.array(["human"] * len(rows), pa.string()).dictionary_encode(),
    }
    data.mkdir(parents=True, exist_ok=True)
    write_manifest(data, "made", pa.table(videos), pa.table(table))


@dataclass
class Encoding(Here):
    """Engine in this process that records the texts it was given."""

    texts: list[str] = field(default_factory=list)
    max_blocks: int | None = None  # after this number, the engine stops as if the driver had been killed

    def run(
        self, function: Callable[[T], R], tasks: Iterable[T], *, check: Check | None = None, **named: object
    ) -> Iterator[Outcome[T, R] | None]:
        def note_tasks() -> Iterator[T]:
            for number, task in enumerate(tasks):
                if number == self.max_blocks:
                    raise KeyboardInterrupt
                assert isinstance(task, Block)
                self.texts.extend(task.texts)
                yield task

        return super().run(function, note_tasks(), check=check)


def plan_of(data: Path, clip: str = "tiny") -> TextPlan:
    return make_text_plan(data, resolve(TextSettings(clip=clip)))


def encode(data: Path, clip: str = "tiny", *, engine: Encoding | None = None, batch: int = 8) -> Summary:
    """Run `prep text` on the CPU."""
    plan = plan_of(data, clip)
    use = TextEncoderOptions(plan.recipe, batch=batch, device="cpu")
    return run_text(plan, use, engine or Encoding())


def samples(variant_dir: Path) -> dict[str, dict[str, Any]]:
    """Read all tars with webdataset; return `text.npy` and `json` by key, decoded."""
    tars = [str(variant_dir / name) for name in (variant_dir / "shards.txt").read_text().split()]
    read = webdataset.WebDataset(tars, shardshuffle=False, nodesplitter=None).decode()
    return {sample["__key__"]: sample for sample in read}


def embedding_of_captions(variant_dir: Path) -> dict[int, np.ndarray]:
    """Return the stored row of every caption, by caption ID."""
    samples_by_key = {}
    for sample in samples(variant_dir).values():
        told = sample["json"]
        for caption_id, row in zip(told["caption_id"], told["caption_row"], strict=True):
            samples_by_key[caption_id] = sample["text.npy"][row]
    return samples_by_key


def texts_of_captions(data: Path) -> dict[int, str]:
    return {row["caption_id"]: row["text"] for row in read_captions(data).to_pylist()}


def recipe_in(variant_dir: Path) -> dict[str, Any]:
    return dict(json.loads((variant_dir / "recipe.json").read_bytes()))
