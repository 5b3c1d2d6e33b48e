"""Export latents and texts as a cache for diffusion-pipe (tdrussell/diffusion-pipe), which reads it with --trust_cache.

    dataset.toml                                                     the dataset configuration for the trainer
    segments/cache/MODEL/metadata/grouping_keys.json                 [[1.0, F]]
    segments/cache/MODEL/metadata/grouped_metadata_1.000_F/          segments and captions, in the format that
                                                                     save_to_disk of Hugging Face datasets writes
    segments/cache/MODEL/cache_1.000xSxSxF/latents/                  items with latents
    segments/cache/MODEL/ar_frames_1.000_F/text_embeddings_1/        items with texts, for models with a T5 encoder

S is the side length of the frames in pixels, and F is the number of frames in a segment. An item is the dict of tensors
for the latents or the text of a segment. The files shard_N.bin contain the items one after another, in the format of
torch.save. The SQLite file metadata.db contains their locations: the table `items` contains the shard of each item and
its index in the shard, and the tables `shard_N` contain offsets and sizes. Texts are in the order of the list of
segments. Latents are in the order in which the trainer shuffles this list, with a hash of S and F as the seed.

The table `fingerprint` in metadata.db is empty. When the trainer starts for the first time, it inserts the fingerprint
that it computes from the list of segments. Later, it deletes a cache with a different fingerprint. Because the trainer
writes to metadata.db, this file is never linked from an older cache.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clipmill.manifests.errors import UserError
from clipmill.prep.exports.kinds import DiffusionPipeFlags, ExportResult, Progress
from clipmill.prep.exports.trainers import CacheFile, Segment, Segments, torch_bytes, write_cache


@dataclass(frozen=True)
class _Model:
    """A model that the trainer supports.

    Attributes:
        name: Name in the trainer, which is also the name of a folder in the cache; None if the user must pass it.
        side_step: Step of the side lengths in pixels. The trainer rounds side lengths to multiples of this step.
        entries: Names of the two entries of a text item: the vectors, and their number or mask; None if the model does
            not use T5.
        num_tokens: Number of vectors in a text item, including padding.
    """

    name: str | None
    side_step: int
    entries: tuple[str, str] | None = None
    num_tokens: int = 0


_WAN = ("text_embeddings", "seq_lens")
_MODELS = {  # (VAE class, spatial downsampling factor) -> model
    ("AutoencoderKLWan", 8): _Model("wan", 16, _WAN, 512),
    ("AutoencoderKLWan", 16): _Model("wan2.2_5b", 32, _WAN, 512),
    ("AutoencoderKLLTXVideo", 32): _Model(None, 32, ("prompt_embeds", "prompt_attention_mask"), 256),
    ("AutoencoderKLHunyuanVideo", 8): _Model("hunyuan-video", 16),
    ("AutoencoderKLHunyuanVideo15", 16): _Model("hunyuan_video_1.5", 16),
}


@dataclass(frozen=True)
class _Item:
    """An item of a cache: the latents or the text of a segment.

    Attributes:
        mark: String that changes with the content of the item.
        shard: ID of the column's shard from which the item is made.
        make_values: Function that returns the content of the item.
    """

    mark: str
    shard: int
    make_values: Callable[[], dict[str, Any]]


def write_diffusion_pipe_cache(
    data_dir: Path, destination: Path, flags: DiffusionPipeFlags, show: Progress
) -> ExportResult:
    """Write a cache for diffusion-pipe.

    Raises:
        UserError: See `Segments` and `write_cache`; or the trainer has no model for the VAE, the size or the length of
            the texts; or the name of the model is unknown.
    """
    t5_classes = [vae_class for (vae_class, _), model in _MODELS.items() if model.entries]
    segments = Segments(data_dir, split=flags.split, t5_classes=t5_classes)
    model, size, num_frames = _model(segments), int(segments.recipe["size"]), segments.num_frames
    name = flags.model or model.name
    if name is None:
        raise UserError(
            "the name of the model is unknown, because diffusion-pipe names LTX-Video after its weights file",
            hint="pass --model with the name of the file in single_file_path, without .safetensors",
        )
    cache, bucket = f"segments/cache/{name}", (1.0, size, size, num_frames)
    latents_shard = segments.latents.field_values("shard")

    def make_files(selected_segments: list[Segment]) -> Iterator[CacheFile]:
        latents = [
            _Item(
                segments.latents_mark(segment),
                int(latents_shard[segment.sample]),
                partial(lambda segment: {"latents": segments.stored_latents(segment), "mask": None}, segment),
            )
            for segment in selected_segments
        ]
        # The trainer uses this seed to shuffle the segments of each size bucket.
        seed = int(hashlib.md5(str(bucket).encode(), usedforsecurity=False).hexdigest(), 16) % 10**9
        order: list[int] = np.random.default_rng(seed).permutation(len(selected_segments)).tolist()
        yield from _items(f"{cache}/cache_1.000x{size}x{size}x{num_frames}/latents", latents, order)
        texts = []
        if segments.has_texts:
            text_shard = segments.text.field_values("shard")
            texts = [
                _Item(
                    segments.text_mark(segment),
                    int(text_shard[segment.text_sample]),
                    partial(_text, segments, model, segment),
                )
                for segment in selected_segments
            ]
            folder = f"{cache}/ar_frames_1.000_{num_frames}/text_embeddings_1"
            yield from _items(folder, texts, range(len(selected_segments)))
        names = [f"{segment.name} {segment.caption}" for segment in selected_segments]
        mark = _digest([*(item.mark for item in latents + texts), *names])
        yield from _metadata(f"{cache}/metadata", selected_segments, num_frames=num_frames, mark=mark)
        folder = json.dumps(str(destination.resolve() / "segments"), ensure_ascii=False)
        yield _text_file(
            "dataset.toml",
            f"resolutions = [{size}]\nframe_buckets = [{num_frames}]\nenable_ar_bucket = false\n\n"
            f"[[directory]]\npath = {folder}\n",
        )

    form = f"diffusion-pipe {name}"
    return write_cache(destination, segments, make_files, form=form, show=show, derived_folder="segments")


def _model(segments: Segments) -> _Model:
    recipe, vae_class = segments.recipe, segments.vae_class
    model = _MODELS.get((vae_class, int(recipe["factor"])))
    if model is None:
        classes = " or ".join(dict.fromkeys(name for name, _ in _MODELS))
        raise UserError(
            f"diffusion-pipe has no model for the VAE {vae_class} with factor {recipe['factor']}",
            hint=f"use latents from {classes}",
        )
    if int(recipe["size"]) % model.side_step:
        raise UserError(
            f"the side length of the frames, {recipe['size']} pixels, is not a multiple of {model.side_step}, as"
            " diffusion-pipe requires for this model",
            hint="make latents with a different --size",
        )
    max_tokens = int(segments.text_recipe["max_tokens"]) if segments.has_texts else 0
    if max_tokens > model.num_tokens:
        raise UserError(
            f"the texts have up to {max_tokens} tokens, but diffusion-pipe accepts up to {model.num_tokens} for this"
            " model",
            hint=f"make texts with --max-tokens {model.num_tokens}",
        )
    return model


def _text(segments: Segments, model: _Model, segment: Segment) -> dict[str, Any]:
    import torch

    sequence = segments.sequence(segment)
    padded_sequence = torch.zeros(model.num_tokens, sequence.shape[1], dtype=torch.bfloat16)
    padded_sequence[: len(sequence)] = sequence
    vectors, length = model.entries or ("", "")
    num_tokens = torch.tensor(len(sequence))
    is_mask = length.endswith("mask")
    return {
        vectors: padded_sequence,
        length: (torch.arange(len(padded_sequence)) < num_tokens).long() if is_mask else num_tokens,
    }


def _items(folder: str, items: Sequence[_Item], order: Sequence[int]) -> Iterator[CacheFile]:
    """Yield the files with `items`. Identical items are stored only once.

    Args:
        folder: Folder of the files in the cache.
        order: Indices in `items`, in the order of the cache.
    """
    locations: dict[str, tuple[int, int]] = {}  # mark of an item -> (shard, index in the shard)
    shards: dict[int, list[_Item]] = {}
    segments: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        shard_items = shards.setdefault(item.shard, [])
        segments.setdefault(item.shard, []).append(index)
        # Segments of a video with the same caption share a text item.
        if item.mark not in locations:
            locations[item.mark] = item.shard, len(shard_items)
            shard_items.append(item)
    # All items have the same size, so the locations are known before the items are made.
    size = len(torch_bytes(items[0].make_values()))

    def contents(shard_items: list[_Item]) -> Iterator[bytes]:
        for item in shard_items:
            content = torch_bytes(item.make_values())
            if len(content) != size:
                raise RuntimeError(f"an item has {len(content)} bytes, but the first item has {size}")
            yield content

    def database() -> bytes:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("CREATE TABLE fingerprint(value)")
            connection.execute("CREATE TABLE items(shard, shard_index)")
            rows = [locations[items[index].mark] for index in order]
            connection.executemany("INSERT INTO items VALUES(?, ?)", rows)
            for shard, shard_items in shards.items():
                connection.execute(f"CREATE TABLE shard_{shard}(offset, size)")
                rows = [(index * size, size) for index in range(len(shard_items))]
                connection.executemany(f"INSERT INTO shard_{shard} VALUES(?, ?)", rows)
            connection.commit()
            return connection.serialize()

    for shard, shard_items in shards.items():
        mark = _digest(item.mark for item in shard_items)
        yield CacheFile(f"{folder}/shard_{shard}.bin", mark, partial(contents, shard_items), segments[shard])
    mark = f"places {_digest(items[index].mark for index in order)}"
    yield CacheFile(f"{folder}/metadata.db", mark, lambda: [database()], is_kept=False)


def _metadata(folder: str, selected_segments: list[Segment], *, num_frames: int, mark: str) -> Iterator[CacheFile]:
    """Yield the files with the list of segments. The listed video files do not exist; the trainer never opens them."""
    columns = {
        "image_spec": pa.array([[None, f"{segment.name}.mp4"] for segment in selected_segments], pa.list_(pa.string())),
        "mask_file": pa.nulls(len(selected_segments)),
        "caption": pa.array([[segment.caption] for segment in selected_segments], pa.list_(pa.string())),
        "ar_bucket": pa.array([[1.0, num_frames]] * len(selected_segments), pa.list_(pa.float64())),
        "size_bucket": pa.nulls(len(selected_segments)),
        "is_video": pa.array([True] * len(selected_segments)),
    }
    state: dict[str, Any] = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_fingerprint": mark,
        **dict.fromkeys(("_format_columns", "_format_type", "_split")),
        "_format_kwargs": {},
        "_output_all_columns": False,
    }

    def stream() -> list[bytes]:
        table, sink = pa.table(columns), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return [sink.getvalue().to_pybytes()]

    group_folder = f"{folder}/grouped_metadata_1.000_{num_frames}"
    yield _text_file(f"{folder}/grouping_keys.json", json.dumps([[1.0, num_frames]]))
    yield _text_file(f"{group_folder}/dataset_info.json", "{}")
    yield _text_file(f"{group_folder}/state.json", json.dumps(state))
    yield CacheFile(f"{group_folder}/data-00000-of-00001.arrow", mark, stream)


def _text_file(path: str, content: str) -> CacheFile:
    return CacheFile(path, content, lambda: [content.encode()])


def _digest(marks: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()
