"""Data folder with columns of latents and text, written with the real writers, and a record of the contents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import publish_json
from clipmill.manifests.store import read_captions
from clipmill.shards.commits import Commit, write_commit
from clipmill.shards.dataset import set_current_variant
from clipmill.shards.format import LATENTS_FIELDS, TEXT_FIELDS
from clipmill.shards.npy import compress_frame, npy_bytes
from clipmill.shards.writer import Sample, ShardWriter
from tests.train.tiny_data import Caption, write_captions

LATENTS_VARIANT = "tiny-01234567"
TEXT_VARIANT = "tiny-89abcdef"
LATENTS_RECIPE = {"schema": 1, "column": "latents", "video": "h264-00000000", "crop": "centre", "segment": "5s"}


@dataclass(frozen=True)
class Chunk:
    """A chunk to write: `num_frames` frames of random numbers."""

    video_id: str
    start_ms: int
    num_frames: int
    frame: tuple[int, int, int] = (2, 4, 4)
    dtype: str = "float16"
    fps: Fraction = Fraction(4)

    @property
    def key(self) -> str:
        return chunk_key(self.video_id, self.start_ms)


@dataclass
class Written:
    """Record of the contents of a data folder."""

    data_dir: Path
    latents: dict[str, NDArray[np.uint16]] = field(default_factory=dict)  # bits, by key
    text: dict[int, NDArray[np.uint16]] = field(default_factory=dict)  # bits of the embedding by caption id

    @property
    def latents_dir(self) -> Path:
        return self.data_dir / "latents" / LATENTS_VARIANT

    @property
    def text_dir(self) -> Path:
        return self.data_dir / "text" / TEXT_VARIANT


def write_latents(
    written: Written,
    shards: list[list[Chunk]],
    *,
    values: Callable[[Chunk], NDArray[np.float16]] | None = None,
    recipe: Mapping[str, str] = MappingProxyType({}),
    is_compressed: bool = False,
) -> None:
    """Write and commit one shard for each list of chunks, with `values` or random bits."""
    extension = "latents.npy.zst" if is_compressed else "latents.npy"
    directory = written.latents_dir
    directory.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    for shard_id, chunks in enumerate(shards):
        with ShardWriter(directory, shard_id=shard_id, extensions=(extension,), fields=LATENTS_FIELDS) as writer:
            for chunk in chunks:
                bits = noise.integers(0, 0x7C00, (chunk.num_frames, *chunk.frame), dtype=np.uint16)
                if values is not None:
                    bits = values(chunk).view(np.uint16)
                array = bits.view(np.float16) if chunk.dtype == "float16" else bits
                payload = compress_frame(npy_bytes(array)) if is_compressed else npy_bytes(array)
                writer.add(Sample(chunk.key, {extension: payload}, _fields(chunk)))
                written.latents[chunk.key] = bits
            files = writer.publish("ab" * 32)
        write_commit(directory, Commit("latents", shard_id, "train", "ab" * 32, files, ()))
    publish_json(directory / "recipe.json", {**LATENTS_RECIPE, **recipe})
    set_current_variant(written.data_dir, "latents", LATENTS_VARIANT)


def write_text(
    written: Written,
    captions: list[Caption],
    *,
    width: int = 8,
    videos_per_shard: int = 2,
    without: frozenset[int] = frozenset(),
    embed: Callable[[str], NDArray[np.float16]] | None = None,
) -> None:
    """Write and commit embeddings for the captions of the manifest; equal texts of a video share a row.

    Args:
        without: Ids of captions that get no embedding.
        embed: Function that returns the embedding of a text. By default, embeddings are random bits.
    """
    table = read_captions(written.data_dir).to_pylist()
    video_ids = list(dict.fromkeys(caption.video_id for caption in captions))
    noise = np.random.default_rng(1)
    written.text_dir.mkdir(parents=True, exist_ok=True)
    for shard_id, first in enumerate(range(0, len(video_ids), videos_per_shard)):
        with ShardWriter(
            written.text_dir, shard_id=shard_id, extensions=("text.npy", "json"), fields=TEXT_FIELDS
        ) as writer:
            for video_id in video_ids[first : first + videos_per_shard]:
                of_video = [row for row in table if row["video_id"] == video_id and row["caption_id"] not in without]
                texts = list(dict.fromkeys(row["text"] for row in of_video))
                bits = noise.integers(0, 0x7C00, (len(texts), width), dtype=np.uint16)
                if embed is not None:
                    bits = np.stack([embed(text) for text in texts]).view(np.uint16)
                rows = [texts.index(row["text"]) for row in of_video]
                ids = [row["caption_id"] for row in of_video]
                fields = {
                    "video_id": video_id,
                    "num_rows": len(texts),
                    "width": width,
                    "text_digest": [blake2b(text.encode(), digest_size=16).digest() for text in texts],
                    "caption_id": ids,
                    "row_tokens": [],
                    "caption_row": rows,
                }
                writer.add(Sample(video_id, {"text.npy": npy_bytes(bits.view(np.float16)), "json": b"{}"}, fields))
                written.text.update(zip(ids, bits[rows], strict=True))
            files = writer.publish("cd" * 32)
        write_commit(written.text_dir, Commit("text", shard_id, "train", "cd" * 32, files, ()))
    publish_json(written.text_dir / "recipe.json", {"schema": 1, "column": "text", "width": width})
    set_current_variant(written.data_dir, "text", TEXT_VARIANT)


def write_all(
    data_dir: Path,
    shards: list[list[Chunk]],
    captions: list[Caption],
    *,
    width: int = 8,
    without: frozenset[int] = frozenset(),
    splits: dict[str, str] | None = None,
    **recipe: str,
) -> Written:
    """Write the manifest and both columns."""
    data_dir.mkdir(exist_ok=True)
    written = Written(data_dir)
    videos = {chunk.video_id: "train" for chunks in shards for chunk in chunks}
    write_captions(data_dir, splits or videos, captions)
    write_latents(written, shards, recipe=recipe)
    write_text(written, captions, width=width, without=without)
    return written


def _fields(chunk: Chunk) -> dict[str, object]:
    channels, height, width = chunk.frame
    return {
        "video_id": chunk.video_id,
        "start_ms": chunk.start_ms,
        "num_frames": chunk.num_frames,
        "fps_num": chunk.fps.numerator,
        "fps_den": chunk.fps.denominator,
        "channels": channels,
        "height": height,
        "width": width,
        "dtype": chunk.dtype,
        "crops": [0, 0, 8, 8],
        "source_frames": [],
        "chunk_fingerprint": "00",
    }
