"""Exports for trainers of video models, which read latents and text sequences from a cache.

Each segment of latents has one caption. The files of a cache are written into a new folder, which then replaces the old
folder; unchanged files are linked from the old folder. This module also contains the exports for two trainers with
simple file formats:

finetrainers (huggingface/finetrainers) reads precomputed data with --precomputation_reuse:

    finetrainers-precomputed-data/condition-N.pt   the padded sequence of a caption and, except for Wan, its mask
    finetrainers-precomputed-data/latent-N.pt      the parameters of the posterior

The trainer samples the posterior of each segment, and normalises the sample. The mean is exported as the stored latents
with scaling and normalisation undone. The exported variance is almost zero, because the column does not contain it.

musubi-tuner (kohya-ss/musubi-tuner, format_version 1.0.1) trains from its cache without the VAE and T5. Each segment
has a safetensors file with latents and, for Wan, a second file with the text. NAME is the name of the segment:

    NAME_00000-FFF_WWWWxHHHH_ARCH.safetensors   latents_T'xhxw_DTYPE [C, T', h, w]
    NAME_ARCH_te.safetensors                    varlen_t5_DTYPE [L, D]

FFF is the number of video frames; WWWW and HHHH are the width and height in pixels. Latents for Wan are normalised per
channel. Latents for HunyuanVideo are neither shifted nor scaled, because the trainer does this. HunyuanVideo does not
use T5, so its texts must be encoded by the trainer's own script.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.divided_videos import is_in_splits, read_divided_videos, split_mask, split_names
from clipmill.manifests.errors import UserError
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import parse_json
from clipmill.manifests.store import read_captions, read_videos
from clipmill.prep.core.column_arrays import ColumnArrays
from clipmill.prep.exports.kinds import ExportResult, Progress, TrainerFlags, replace_folder
from clipmill.shards.columns import LATENTS, TEXT, command_for, how_to_make

if TYPE_CHECKING:
    import torch

RECORD_FILE = "clipmill.json"
_SCHEMA = 1
_MAKE_TEXTS = f"run `prep {command_for(TEXT)} --encoder t5:NAME` to make sequences"


@dataclass(frozen=True)
class Segment:
    """A segment of latents, and the overlapping caption with the lowest ID.

    Attributes:
        name: Key of the chunk, and index of the segment in the chunk.
        sample, index: Row of the chunk in the table of latents, and index of the segment in the array of the chunk.
        text_sample, text_index: Row of the video in the table of texts, and index of the caption's text among the texts
            of the video; 0 if texts are not exported.
        caption: Text of the caption.
    """

    name: str
    sample: int
    index: int
    text_sample: int
    text_index: int
    caption: str


class Segments:
    """The segments of a split with their captions. If texts are exported, captions without a sequence are ignored.

    Args:
        t5_classes: VAE classes whose models use sequences from a T5 encoder. For these classes, texts are exported.

    Attributes:
        latents: Column of latents.
        recipe: Recipe of the latents.
        vae_class: Class of the VAE in diffusers.
        has_texts: True if texts are exported.
        num_uncaptioned: Number of segments without a caption, or without a caption that has a sequence; set by the
            iteration.
        num_other_split: Number of segments that contain video from other splits; set by the iteration.

    Raises:
        UserError: A column is missing, or does not contain segments or sequences.
    """

    def __init__(self, data_dir: Path, *, split: str, t5_classes: Collection[str]) -> None:
        self._data_dir, self._split = data_dir, split
        self.latents = ColumnArrays.open(data_dir, LATENTS)
        self.recipe = self.latents.variant.recipe
        if not self.recipe.get("latent_frames"):
            raise UserError(
                f"{self.latents.variant.directory} contains latents of individual frames, not of segments",
                hint=f"run {how_to_make(LATENTS, data_dir)} with the VAE of a video model",
            )
        self.vae_class, self.num_uncaptioned, self.num_other_split = str(self.recipe["kind"]), 0, 0
        self.has_texts = self.vae_class in t5_classes
        if self.has_texts and not self.text_recipe.get("max_tokens"):
            raise UserError(
                f"{self.text.variant.directory} contains CLIP embeddings, but trainers need sequences", hint=_MAKE_TEXTS
            )
        self._load_latents = lru_cache(maxsize=1)(self.latents.array)
        self._load_texts = lru_cache(maxsize=1)(lambda sample: self.text.array(sample))

    def __iter__(self) -> Iterator[Segment]:
        """Yield the segments, ordered by video and time."""
        videos, divided_videos = read_videos(self._data_dir), read_divided_videos(self._data_dir)
        video_ids, is_member = videos["video_id"].combine_chunks(), split_mask(self._split, videos, divided_videos)
        video_row, start_ms = self.latents.video_rows(video_ids), self.latents.field_values("start_ms")
        samples = np.flatnonzero((video_row >= 0) & is_member[video_row])
        if not len(samples):
            splits = ", ".join(sorted(split_names(videos, divided_videos)))
            raise UserError(f"no latents of split {self._split!r}", hint=f"use one of the splits {splits}")
        table, frames = self.latents.rows.table, int(self.recipe["latent_frames"])
        seconds = frames / (table["fps_num"][0].as_py() / table["fps_den"][0].as_py())
        self.num_uncaptioned = self.num_other_split = 0
        for sample in samples[np.lexsort((start_ms[samples], video_row[samples]))].tolist():
            video_id = video_ids[int(video_row[sample])].as_py()
            for index in range(int(self.latents.field_values("num_frames")[sample]) // frames):
                begin_s = int(start_ms[sample]) / 1000 + index * seconds
                name = f"{chunk_key(video_id, int(start_ms[sample]))}-{index:02d}"
                if divided_videos is not None:
                    begin_us, end_us = (np.array([round(at_s * 1e6)]) for at_s in (begin_s, begin_s + seconds))
                    times = {"begin_us": begin_us, "end_us": end_us}
                    if not divided_videos.is_entirely_in(self._split, video=video_row[[sample]], **times)[0]:
                        self.num_other_split += 1
                        continue
                # Captions are in the order of their IDs. Without exported texts, a caption needs no sequence.
                text_sample, text_rows = self._texts.get(video_id, (0, {})) if self.has_texts else (0, None)
                for caption_id, caption_begin_s, caption_end_s, caption in self._captions.get(video_id, ()):
                    overlaps = caption_begin_s < begin_s + seconds and caption_end_s > begin_s
                    if overlaps and (text_rows is None or caption_id in text_rows):
                        text_index = text_rows[caption_id] if text_rows else 0
                        yield Segment(name, sample, index, text_sample, text_index, caption)
                        break
                else:
                    self.num_uncaptioned += 1

    @cached_property
    def text(self) -> ColumnArrays:
        """Text column."""
        try:
            return ColumnArrays.open(self._data_dir, TEXT)
        except UserError as error:
            raise UserError(str(error), hint=_MAKE_TEXTS) from None

    @property
    def text_recipe(self) -> dict[str, Any]:
        """Recipe of the text column."""
        return self.text.variant.recipe

    @property
    def num_frames(self) -> int:
        """Number of video frames in a segment."""
        return int(str(self.recipe["segment"])[:-1])

    def stored_latents(self, segment: Segment) -> "torch.Tensor":
        """Return the stored latents of a segment, [C, T', h, w]."""
        import torch

        array = torch.from_numpy(self._load_latents(segment.sample)[segment.index])
        return array.view(torch.bfloat16) if self.recipe["dtype"] == "bfloat16" else array

    def raw_latents(self, segment: Segment) -> "torch.Tensor":
        """Return the output of the VAE for a segment, neither shifted nor scaled, float32 [C, T', h, w]."""
        import torch

        latents = self.stored_latents(segment).float() / float(self.recipe["scaling_factor"])
        if None in self.statistics:
            return latents + float(self.recipe["shift_factor"] or 0)
        shape = (len(latents), -1, 1, 1)
        mean, std = (torch.tensor(values).view(shape)[:, : latents.shape[1]] for values in self.statistics)
        return latents * std + mean

    @property
    def statistics(self) -> tuple[list[float] | None, list[float] | None]:
        """Mean and standard deviation of each channel for normalisation; (None, None) if latents are not normalised."""
        return self.recipe["latents_mean"], self.recipe["latents_std"]

    def sequence(self, segment: Segment) -> "torch.Tensor":
        """Return the vectors of the text encoder for the tokens of a segment's caption, float16 [L, D]."""
        import torch

        lengths = self.text.rows.table["row_tokens"][segment.text_sample].as_py()
        begin = sum(lengths[: segment.text_index])
        end = begin + lengths[segment.text_index]
        return torch.from_numpy(self._load_texts(segment.text_sample)[begin:end].copy())

    def latents_mark(self, segment: Segment) -> str:
        """Return a string that changes with the stored latents of a segment."""
        crc32 = self.latents.field_values("crc32")[segment.sample]
        return f"{self.latents.variant.directory.name} {crc32} {segment.index}"

    def text_mark(self, segment: Segment) -> str:
        """Return a string that changes with the caption of a segment and its stored sequence."""
        crc32 = self.text.field_values("crc32")[segment.text_sample]
        return f"{self.text.variant.directory.name} {crc32} {segment.text_index} {segment.caption}"

    @cached_property
    def _captions(self) -> dict[str, list[tuple[int, float, float, str]]]:
        table = read_captions(self._data_dir)
        table = table.filter(pa.array(is_in_splits(table, read_videos(self._data_dir), [self._split])))
        names = ("video_id", "caption_id", "begin_s", "end_s", "text")
        captions: dict[str, list[tuple[int, float, float, str]]] = {}
        for video_id, *caption in zip(*(table[name].to_pylist() for name in names), strict=True):
            captions.setdefault(video_id, []).append(tuple(caption))
        return {video_id: sorted(video_captions) for video_id, video_captions in captions.items()}

    @cached_property
    def _texts(self) -> dict[str, tuple[int, dict[int, int]]]:
        """Row in the table of texts, keyed by video ID, and the index of each text, keyed by caption ID."""
        entries, codes = self.text.rows.dictionary_codes("video_id")
        ids: pa.Array = pc.take(entries, pa.array(codes))
        table = self.text.rows.table
        rows = (table[name].to_pylist() for name in ("caption_id", "caption_row"))
        return {
            video_id: (sample, dict(zip(*lists, strict=True)))
            for sample, (video_id, *lists) in enumerate(zip(ids.to_pylist(), *rows, strict=True))
        }


@dataclass(frozen=True)
class CacheFile:
    """A file of a cache.

    Attributes:
        path: Path within the cache.
        mark: String that changes with the content of the file.
        content: Function that returns the bytes of the file in blocks.
        segments: Indices of the segments in the file.
        is_kept: True to link the file from the old folder if its mark is unchanged; False if the trainer may write to
            the file.
    """

    path: str
    mark: str
    content: Callable[[], Iterable[bytes]]
    segments: Sequence[int] = ()
    is_kept: bool = True


def write_cache(
    destination: Path,
    segments: Segments,
    make_files: Callable[[list[Segment]], Iterable[CacheFile]],
    *,
    form: str,
    show: Progress,
    derived_folder: str | None = None,
) -> ExportResult:
    """Write a cache with all captioned segments, unless `destination` is up to date. Unrelated files are kept.

    Args:
        make_files: Function that takes the segments, and returns the files of the cache.
        form: Name of the format, with its version or the name of the model, such as "musubi 1.0.1".
        show: Function that is called with (number of segments done, total number of segments).
        derived_folder: Subfolder with files that the trainer derives from the cache. These files are not kept.

    Raises:
        UserError: No segment has a caption, or `destination` exists and was not written by `prep export`.
    """
    old_digests: dict[str, str] = {}  # digests of the files at `destination`, by path
    if destination.exists():
        try:
            files = parse_json((destination / RECORD_FILE).read_bytes())["files"]
            old_digests = {path: bytes.fromhex(digest).hex() for path, digest in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{destination} exists, but was not written by `prep export`", hint="remove it, or use a different name"
            ) from None
    selected_segments = list(segments)
    requirement = "a caption that has a sequence" if segments.has_texts else "a caption"
    left_out = {
        f"segments without {requirement}": segments.num_uncaptioned,
        "segments with seconds of other splits": segments.num_other_split,
    }
    if not selected_segments:
        remedy = _MAKE_TEXTS if segments.has_texts else "add captions to the videos"
        raise UserError(f"no segment has {requirement}", hint=f"{remedy}, or use a different --split")
    files_to_write = list(make_files(selected_segments))
    record = {
        file.path: hashlib.sha256(f"{_SCHEMA} {form} {file.mark}".encode()).hexdigest() for file in files_to_write
    }
    if old_digests == record and all((destination / path).is_file() for path in record):
        return ExportResult("segment", len(selected_segments), 0, left_out)
    old_paths = {digest: path for path, digest in old_digests.items()}
    finished_segments: set[int] = set()
    written_segments: set[int] = set()
    with replace_folder(destination) as folder:
        for cache_file in files_to_write:
            path, source = (
                folder / cache_file.path,
                old_paths.get(record[cache_file.path]) if cache_file.is_kept else None,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            if source is None or not _link(destination / source, path):
                with path.open("wb") as file:
                    file.writelines(cache_file.content())
                written_segments.update(cache_file.segments)
            finished_segments.update(cache_file.segments)
            show(len(finished_segments), len(selected_segments))
        for path in destination.rglob("*"):
            name = path.relative_to(destination)
            is_unrelated = str(name) not in (*old_digests, *record, RECORD_FILE) and name.parts[0] != derived_folder
            if is_unrelated and (path.is_file() or path.is_symlink()):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _link(path, folder / name)
        (folder / RECORD_FILE).write_text(json.dumps({"format": form, "files": record}))
    return ExportResult("segment", len(selected_segments), len(written_segments), left_out)


def torch_bytes(values: dict[str, Any]) -> bytes:
    """Return the bytes that `torch.save` writes for `values`."""
    import torch

    content = BytesIO()
    torch.save(values, content)
    return content.getvalue()


def _link(source: Path, path: Path) -> bool:
    """Link or copy `source` to `path`; return False if `source` no longer exists."""
    with suppress(FileNotFoundError):
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)
        return True
    return False


_FOLDER = "finetrainers-precomputed-data"
_LOG_VARIANCE = -1e4  # the trainer clips the value to -30 (for Wan, after dividing it by latents_std)
# VAE class -> name of the entry with the mask of a caption; None for a model without a mask.
_MODELS = {
    "AutoencoderKLWan": None,
    "AutoencoderKLLTXVideo": "encoder_attention_mask",
    "AutoencoderKLCogVideoX": "prompt_attention_mask",
}


def write_finetrainers_data(data_dir: Path, destination: Path, flags: TrainerFlags, show: Progress) -> ExportResult:
    """Write precomputed data for finetrainers.

    Raises:
        UserError: See `Segments` and `write_cache`; or the trainer has no model with this VAE and a T5 encoder.
    """
    segments = Segments(data_dir, split=flags.split, t5_classes=_MODELS)
    if segments.vae_class not in _MODELS:
        raise UserError(
            f"finetrainers has no model with the VAE {segments.vae_class} and the text encoder T5",
            hint=f"use latents from {' or '.join(_MODELS)}",
        )

    def make_files(selected_segments: list[Segment]) -> Iterator[CacheFile]:
        for index, segment in enumerate(selected_segments):
            for name, mark, make in (
                ("condition", segments.text_mark(segment), _condition),
                ("latent", segments.latents_mark(segment), _latents),
            ):
                content = partial(lambda make, segment: [torch_bytes(make(segments, segment))], make, segment)
                yield CacheFile(f"{_FOLDER}/{name}-{index}.pt", mark, content, (index,))

    return write_cache(destination, segments, make_files, form="finetrainers", show=show)


def _latents(segments: Segments, segment: Segment) -> dict[str, Any]:
    import torch

    mean = segments.raw_latents(segment)
    moments = torch.cat([mean, torch.full_like(mean, _LOG_VARIANCE)])[None].to(torch.bfloat16)
    if segments.vae_class == "AutoencoderKLCogVideoX":
        return {"latents": moments.transpose(1, 2).contiguous()}
    statistics = [torch.tensor(values) for values in segments.statistics]
    if segments.vae_class == "AutoencoderKLWan":
        return {"latents": moments, "latents_mean": statistics[0], "latents_std": 1 / statistics[1]}
    frames, height, width = mean.shape[1:]
    shape = {"num_frames": frames, "height": height, "width": width}
    return {"latents": moments, **shape, "latents_mean": statistics[0], "latents_std": statistics[1]}


def _condition(segments: Segments, segment: Segment) -> dict[str, "torch.Tensor"]:
    import torch

    sequence = segments.sequence(segment)
    padded_sequence = torch.zeros(1, int(segments.text_recipe["max_tokens"]), sequence.shape[1], dtype=torch.bfloat16)
    padded_sequence[0, : len(sequence)] = sequence
    mask = _MODELS[segments.vae_class]
    condition = {"encoder_hidden_states": padded_sequence}
    return (
        condition
        if mask is None
        else {**condition, mask: (torch.arange(padded_sequence.shape[1]) < len(sequence))[None]}
    )


_FORMAT_VERSION = "1.0.1"
# VAE class -> (short name of the architecture, full name, True if latents are normalised).
_ARCHITECTURES = {
    "AutoencoderKLWan": ("wan", "wan", True),
    "AutoencoderKLHunyuanVideo": ("hv", "hunyuan_video", False),
    "AutoencoderKLHunyuanVideo15": ("hv15", "hunyuan_video_1_5", False),
}
_WAN_5B = {"channels": 48, "factor": 16}  # VAE of Wan 2.2 TI2V-5B, which the trainer does not support
_T5_CLASSES = ("AutoencoderKLWan",)


def write_musubi_cache(data_dir: Path, destination: Path, flags: TrainerFlags, show: Progress) -> ExportResult:
    """Write a cache for musubi-tuner.

    Raises:
        UserError: See `Segments` and `write_cache`; or the trainer has no architecture with this VAE.
    """
    segments = Segments(data_dir, split=flags.split, t5_classes=_T5_CLASSES)
    vae_class, recipe = segments.vae_class, segments.recipe
    if vae_class not in _ARCHITECTURES:
        raise UserError(
            f"musubi-tuner has no architecture with the VAE {vae_class}",
            hint=f"use latents from {' or '.join(_ARCHITECTURES)}",
        )
    if vae_class == "AutoencoderKLWan" and any(recipe.get(name) == value for name, value in _WAN_5B.items()):
        raise UserError(
            "the latents are from the VAE of Wan 2.2 TI2V-5B (48 channels, factor 16), which musubi-tuner does not"
            " support",
            hint="use `prep export diffusion-pipe`, or make latents with the VAE of Wan 2.1 (also used by Wan 2.2 14B)",
        )
    short_name, full_name, is_normalised = _ARCHITECTURES[vae_class]
    size, num_frames = int(segments.recipe["size"]), segments.num_frames

    def latents(segment: Segment) -> list[bytes]:
        values = segments.stored_latents(segment)
        values = values if is_normalised else segments.raw_latents(segment).to(values.dtype)
        _, frames, height, width = values.shape
        return _safetensors_file(
            {f"latents_{frames}x{height}x{width}_{str(values.dtype).removeprefix('torch.')}": values},
            architecture=full_name,
            width=str(size),
            height=str(size),
            frame_count=str(num_frames),
        )

    def text(segment: Segment) -> list[bytes]:
        return _safetensors_file(
            {"varlen_t5_float16": segments.sequence(segment)}, architecture=full_name, caption1=segment.caption
        )

    def make_files(selected_segments: list[Segment]) -> Iterator[CacheFile]:
        for index, segment in enumerate(selected_segments):
            name = f"{segment.name}_00000-{num_frames:03d}_{size:04d}x{size:04d}_{short_name}.safetensors"
            yield CacheFile(name, segments.latents_mark(segment), partial(latents, segment), (index,))
            if segments.has_texts:
                name = f"{segment.name}_{short_name}_te.safetensors"
                yield CacheFile(name, segments.text_mark(segment), partial(text, segment), (index,))

    return write_cache(destination, segments, make_files, form=f"musubi {_FORMAT_VERSION}", show=show)


def _safetensors_file(tensors: dict[str, object], **metadata: str) -> list[bytes]:
    from safetensors.torch import save

    contiguous_tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}  # type: ignore[attr-defined]
    return [save(contiguous_tensors, metadata={**metadata, "format_version": _FORMAT_VERSION})]
