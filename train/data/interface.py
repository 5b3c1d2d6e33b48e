"""`open_clips`, `read_clips` and `open_latents`: Python interface to the training commands' loaders (docs/python.md).

Samples, order, random numbers, checks and error handling are the same as in the commands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.shards.columns import LATENTS
from clipmill.train.augment.model_input import draw_parameters, to_model_input
from clipmill.train.config.clips import CaptionSettings, ClipSettings
from clipmill.train.config.model import Init
from clipmill.train.config.shards import DataSettings, data_folder_error, kind_of
from clipmill.train.data import arguments
from clipmill.train.data.arguments import Data, name_arguments_in_errors
from clipmill.train.data.batches import Batches, LateBatch
from clipmill.train.data.chunks import ChunkSet
from clipmill.train.data.clip_frames import CropRule, Views
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.frame_sampling import US_PER_S, SamplingRule, to_us
from clipmill.train.data.latents.reader import LatentReader
from clipmill.train.data.latents.segments import SegmentQuery, ShownCaptions, Tails
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.query import (
    DataQuery,
    clip_shape,
    loader_settings,
    open_folder,
    open_mixed,
    open_samples,
    read_classes_of,
    require_no_streams,
)
from clipmill.train.data.samples import Samples
from clipmill.train.data.variants import VariantNames, use_variants
from clipmill.train.distributed.world import World, joined_world

ClipText = Literal["text", "embedding", "all"]
_MAX_OFFSET_US = 10**12  # maximum absolute offset of a frame, microseconds


@dataclass(frozen=True, kw_only=True)
class ClipFinisher:
    """Callable that turns a loaded batch of clips into the caller's batch. It runs in the caller's thread.

    Attributes:
        samples: Clips, images, a stream, or a mixture of data folders.
        settings: Settings of the clips, such as normalisation and augmentation. Without a pixel mean, clips stay uint8.
        rgb: True for RGB frames in the caller's batch; False for YUV frames.
        views: Temporal and spatial views of each clip in an evaluation.
        is_training: True to augment the clips.
        all_captions: True to add `captions`, the list of all captions of each clip.
        device: Device of the tensors; None for NumPy arrays.
    """

    samples: Any
    settings: ClipSettings
    rgb: bool
    views: Views
    is_training: bool
    all_captions: bool
    device: str | torch.device | None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Convert the batch in place and return it."""
        mean = self.settings.init.pixel_mean
        if mean is not None:
            clips = self._model_input(batch, mean=mean)
            batch["video"] = clips.numpy() if self.device is None else clips
        elif len(self.views) > 1:
            video = batch["video"]
            batch["video"] = video.reshape(len(video), len(self.views), -1, *video.shape[2:])
        if len(self.views) > 1:
            times_BNT = np.asarray(batch["time_s"]).reshape(len(batch["time_s"]), self.views.num_clips, -1)
            times_s = times_BNT.repeat(self.views.num_crops, axis=1)
            batch["time_s"] = times_s if self.device is None else torch.from_numpy(times_s)
        if self.rgb or mean is not None:
            del batch["colour"]
        if self.samples.num_samples is not None:  # a stream cannot look up its clips by ID
            batch |= span_entries(batch["clip_id"], self.samples, device=self.device)
            if self.all_captions:
                batch["captions"] = captions_of_clips(self.samples, np.asarray(batch["clip_id"]))
        return batch

    def _model_input(self, batch: dict[str, Any], *, mean: tuple[float, float, float]) -> torch.Tensor:
        """Return normalised clips: [B, 3, T, S, S], or [B, V, 3, T, S, S] with several views or cameras."""
        settings, cameras = self.settings, self.settings.num_views
        assert settings.init.pixel_std is not None
        positions, video, colour = (torch.as_tensor(batch[name]) for name in ("position", "video", "colour"))
        if cameras > 1:
            video, colour = video.flatten(0, 1), colour.flatten()
            positions = positions.repeat_interleave(cameras)
        clips = to_model_input(
            video,
            colour,
            size_px=settings.size_px,
            mean=mean,
            std=settings.init.pixel_std,
            draw=draw_parameters(positions.numpy(), settings.augment, seed=settings.seed) if self.is_training else None,
        )
        if cameras > 1:
            return clips.unflatten(0, (-1, cameras))
        if len(self.views) == 1:
            return clips
        return clips.unflatten(2, (len(self.views), -1)).transpose(1, 2).contiguous()


def captions_of_clips(samples: Any, clips: NDArray[np.int64]) -> list[list[str]]:
    """Return all captions of each clip, ordered by source. `samples` must be captioned clips or a mixture of them."""
    if samples.folders is None:
        return [samples.captions.texts_of(clip) for clip in clips.tolist()]
    texts: list[list[str]] = [[] for _ in clips]
    for folder, indices, rows in samples.numbering.divide(clips):
        for index, clip_texts in zip(indices.tolist(), captions_of_clips(samples.parts[folder], rows), strict=True):
            texts[index] = clip_texts
    return texts


def span_entries(clip_id: Any, samples: Any, *, device: Any) -> dict[str, Any]:
    """Return the entries `begin_s` and `end_s` of a batch and, for a mixture, the entry `folder`."""
    convert = np.asarray if device is None else torch.from_numpy
    clips = np.asarray(clip_id)
    begin_us, end_us = samples.span_us(clips)
    entries = {"begin_s": convert(begin_us / US_PER_S), "end_s": convert(end_us / US_PER_S)}
    if samples.folders is not None:
        entries["folder"] = convert(samples.numbering.folder_of(clips))
    return entries


def loading_settings(settings: ClipSettings, world: World, *, device: str | torch.device | None) -> LoaderSettings:
    """Return loader settings for batches that the caller may keep, because later batches do not overwrite them."""
    is_pinned = device is not None and torch.device(device).type == "cuda"
    return replace(
        loader_settings(settings, world, device=torch.device(device or "cpu")),
        can_keep=not is_pinned,
    )


@name_arguments_in_errors
def open_clips(
    data: Data,
    *,
    mix: Sequence[float] | None = None,
    split: str = "train",
    where: str | None = None,
    variant: VariantNames = None,
    views: Sequence[str] | None = None,
    batch: int = 32,
    num_frames: int = 4,
    size_px: int = 224,
    sampling: SamplingRule = "uniform",
    stride: int = 4,
    crop: CropRule = "random",
    min_crop_area: float = 0.5,
    rgb: bool = True,
    pixel_mean: Sequence[float] | None = None,
    pixel_std: Sequence[float] | None = None,
    augment: Mapping[str, float] | None = None,
    captions: ClipText = "text",
    sources: Mapping[str, float] | None = None,
    min_relevancy: float | None = None,
    label: str | None = None,
    shuffle: bool = True,
    clips: int = 1,
    crops: int = 1,
    workers: int = 4,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    device: str | torch.device | None = "cpu",
    max_failures: int = 100,
    cache: Path | None = None,
    cache_size: str | None = None,
) -> Batches:
    """Open the clips of a split: spans of videos, each with a caption or, if `label` is given, a class.

    Args:
        data: Path or URL (s3://bucket/data) of a data folder that prep made; or video tars or image tars, such as
            DIR/{000..999}.tar. A list of data folders and image tars is a mixture. Its batches contain `folder`,
            the position of each clip's data folder or image tars in the list.
        mix: Sampling weights of the folders of a mixture. Default: weights proportional to the folders' numbers of
            samples. Every folder has its own epochs; an epoch of `Batches` has as many samples as all folders combined.
        split: Split of the manifest. Tars have no splits, so all their clips are used.
        where: Condition that selects clips, such as "motion > 0.2 and words > 3" (docs/data.md).
        variant: Name of the column variant to read (see `prep status`), or a list of names for several columns.
            Default: the current variants. `prep gc` does not delete a variant while batches that read it exist.
        views: Names of cameras, such as ("top", "wrist"). A clip then shows one span from each camera: the spans of
            captions with the same `group` (docs/python.md). Frames of all cameras have the same offsets from the starts
            of their spans. `video` is [B, V, ...], and `time_s` is [B, V, T].
        batch: Batch size of this process.
        num_frames, size_px, sampling, stride, crop, min_crop_area: See the `train dual-encoder` flags of the same
            names.
        rgb: True for RGB frames; False for YUV 4:2:0 frames, which take half the memory.
        pixel_mean, pixel_std: Mean and standard deviation of R, G and B, on a scale from 0 to 1. If both are given,
            `video` is normalised on the device: float32 [B, 3, T, S, S], the input of the commands' models.
        augment: Augmentation settings by name, such as {"flip": 0.5}. See the flags --augment.*. Augmentation needs
            `pixel_mean` and `pixel_std`, and has no effect with shuffle=False.
        captions: "text" to get `caption`; "embedding" to get `text`, which is the embedding stored by `prep text`;
            "all" to get `caption` and also `captions`, the list of all captions of each clip.
        sources: Sampling weights of caption sources, by name or pattern; captions from other sources are omitted. See
            --captions.sources.
        min_relevancy: Relevancy above which captions of other clips are also shown. See --captions.min-relevancy.
        label: Name of a label column of the captions, without the prefix `label_`. Batches then contain `label` instead
            of `caption`.
        shuffle: True for random order, moments, crops and captions, as in training; False for every clip once, in
            order, with centred moments and crops, as in evaluation.
        clips, crops: Number of temporal views and number of spatial views of each clip. Several views need
            shuffle=False; `video` then has a view dimension after the batch dimension, ordered by temporal view and
            then by crop.
        workers: Number of decoding threads.
        seed: Random seed for order, moments, crops, captions and augmentation.
        rank, world: Index of this process and number of processes; each process gets its share of the samples. Default:
            the values from torch.distributed; without a process group, the values that torchrun has set in the
            environment; without torchrun, a single process.
        device: Device of frames, labels and embeddings; None for NumPy arrays.
        max_failures: Maximum number of clips that may fail to load; one more failure raises FailedWork.
        cache: Folder for copies of remote data. Default: the user's cache folder.
        cache_size: Maximum size of complete tars in the cache, such as "100GB". Default: 80 % of the free disk space.

    Raises:
        UserError: The data, split, label or device does not exist; no clip is selected or usable; or an argument has
            the wrong type or is out of range.
    """
    numbers = {"batch": batch, "num_frames": num_frames, "size_px": size_px, "stride": stride}
    arguments.require_whole_numbers(
        **numbers, clips=clips, crops=crops, workers=workers, seed=seed, max_failures=max_failures
    )
    arguments.require_device(device)
    arguments.require_strings(split=split, label=label, cache_size=cache_size)
    arguments.require_choice("sampling", sampling, SamplingRule)
    arguments.require_choice("crop", crop, CropRule)
    arguments.require_choice("captions", captions, ClipText)
    mean, std = arguments.mean_and_std(pixel_mean, pixel_std, augment=augment)
    is_normalised = mean is not None
    clip_views = Views(num_clips=clips, num_crops=crops)
    if min(clips, crops) < 1 or (shuffle and len(clip_views) > 1):
        raise UserError(
            f"clips is {clips} and crops is {crops}", hint="use 1 or more; pass shuffle=False for more than 1"
        )
    caption_options = arguments.caption_settings(sources, min_relevancy)
    if label is not None and (captions != "text" or caption_options != CaptionSettings()):
        raise UserError(
            f"label is {label!r}, which cannot be combined with captions=, sources= or min_relevancy=",
            hint="omit label=, or omit captions=, sources= and min_relevancy=",
        )
    if size_px < 1 or ((rgb or is_normalised) and size_px % 2):
        noun = "even number, because chroma has half the resolution of luma" if rgb or is_normalised else "number"
        raise UserError(f"size_px is {size_px}", hint=f"use a positive {noun}")
    ranks = arguments.explicit_world(rank, world)
    this_world = ranks or joined_world()
    settings = ClipSettings(
        shards=arguments.shards_value(data, mix),
        mix=None if mix is None else ",".join(map(str, mix)),
        split=split,
        where=where,
        views=arguments.views_setting(views),
        batch=batch * this_world.size,
        num_frames=num_frames,
        size_px=size_px,
        sampling=sampling,
        stride=stride,
        crop=crop,
        min_crop_area=min_crop_area,
        augment=arguments.augment_settings(augment),
        init=Init(pixel_mean=mean, pixel_std=std),
        workers=workers,
        seed=seed,
        max_failures=max_failures,
        cache=cache,
        cache_size=cache_size,
    )
    loading = loading_settings(settings, this_world, device=device)
    for address in settings.folders:
        if kind_of(address).has_manifest:
            continue
        if where is not None:
            raise data_folder_error(address, "which have no scores")
        if captions != "text" or caption_options != CaptionSettings():
            error = data_folder_error(address, "whose samples have only one caption each")
            error.add_hint("or omit captions=, sources= and min_relevancy=")
            raise error
    require_no_streams(settings)

    def open_source(address: str) -> Any:
        return open_samples(
            DataQuery(
                settings=replace(settings, shards=address, mix=None),
                content="captions" if classes is None else "labels",
                split=split,
                loading=loading,
                views=clip_views,
                is_rgb=rgb and not is_normalised,
                has_stored_text=captions == "embedding",
                captions=caption_options,
                classes=() if classes is None else (classes,),
            )
        )

    with use_variants(settings.folders, variant, cache=cache):
        classes = None if label is None else read_classes_of(settings, label=label)
        samples = open_mixed(open_source, settings)
    finish = ClipFinisher(
        samples=samples,
        settings=settings,
        rgb=rgb,
        views=clip_views,
        is_training=shuffle,
        all_captions=captions == "all",
        device=device,
    )
    return Batches(
        samples, finish, classes, shuffle=shuffle, batch=batch, world=ranks, device=device, max_failures=max_failures
    )


@name_arguments_in_errors
def read_clips(
    data: str | Path,
    table: pa.Table | Mapping[str, Any],
    *,
    offsets_s: Sequence[float] = (0.0,),
    variant: VariantNames = None,
    views: Sequence[str] | None = None,
    batch: int = 32,
    size_px: int | tuple[int, int] = 224,
    crop: CropRule = "centre",
    min_crop_area: float = 0.5,
    rgb: bool = True,
    pixel_mean: Sequence[float] | None = None,
    pixel_std: Sequence[float] | None = None,
    shuffle: bool = True,
    workers: int = 4,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    device: str | torch.device | None = "cpu",
    max_failures: int = 100,
    cache: Path | None = None,
    cache_size: str | None = None,
) -> Batches:
    """Open clips at given times. Each row of a table selects the frames on screen at offsets from the row's time.

    Batches contain `video`, `time_s` (float64 [B, T], time at which each frame appeared on screen, in seconds),
    `is_padded` (bool [B, T]), and `row` (int64 [B], index in the table). If an offset points outside the video or the
    row's span, the first or last frame is shown and marked in `is_padded`. A row fails if its own time lies outside, or
    if a chunk that contains one of its frames is missing.

    Args:
        data: Path or URL of a data folder that prep made.
        table: Arrow table or mapping of columns: `video_id`, or the `key` of any chunk of the video; `time_s`, in
            seconds from the start of the video; and optionally `begin_s` and `end_s`, which limit the frames to a span
            such as an episode. A frame that appears up to 0.1 ms after a time counts as on screen at that time.
        offsets_s: Offsets of the T frames in seconds, in the order of the frames in `video`.
        views: Names of cameras, such as ("top", "wrist"). The table then needs columns for each camera, such as
            `video_id.top` and `time_s.top`; a column without a camera's name applies to all cameras. `video` is
            [B, V, T, ...].
        size_px: Side length of a square crop; or (height, width), to which complete frames are resized.
        shuffle: True for random order and crops; False for the rows in order, with centred crops.
        variant, batch, crop, min_crop_area, rgb, pixel_mean, pixel_std, workers, seed: See `open_clips`.
        rank, world, device, max_failures, cache, cache_size: See `open_clips`.

    Raises:
        UserError: The data or the device does not exist; the table lacks a column or lists videos that are not in the
            data; or an argument has the wrong type or is out of range.
    """
    from clipmill.train.data.producers.given_moments import GivenRows, open_given_moments

    is_uncropped = not isinstance(size_px, Integral)
    height_px, width_px = _height_and_width(size_px)
    arguments.require_whole_numbers(batch=batch, workers=workers, seed=seed, max_failures=max_failures)
    arguments.require_device(device)
    arguments.require_strings(cache_size=cache_size)
    arguments.require_choice("crop", crop, CropRule)
    mean, std = arguments.mean_and_std(pixel_mean, pixel_std)
    if is_uncropped and mean is not None:
        raise UserError("pixel_mean needs square frames", hint="use one number for size_px, or omit pixel_mean")
    offsets_us = _offsets_us(offsets_s)
    ranks = arguments.explicit_world(rank, world)
    this_world = ranks or joined_world()
    settings = ClipSettings(
        shards=arguments.shards_value(data, None),
        views=arguments.views_setting(views),
        batch=batch * this_world.size,
        num_frames=len(offsets_us),
        size_px=height_px,
        crop=crop,
        min_crop_area=min_crop_area,
        init=Init(pixel_mean=mean, pixel_std=std),
        workers=workers,
        seed=seed,
        max_failures=max_failures,
        cache=cache,
        cache_size=cache_size,
    )
    shape = replace(
        clip_shape(settings, views=Views()), rgb=rgb and mean is None, width_px=width_px if is_uncropped else None
    )
    with use_variants(settings.folders, variant, cache=cache):
        folder = open_folder(settings, reason="times refer to videos of a data folder")
        chunks = ChunkSet(folder.path, split=None, rule=settings.decode, tars=folder.tars)
    loading = loading_settings(settings, this_world, device=device)
    rows = [GivenRows.from_table(table, view=view) for view in settings.view_names or ("",)]
    samples = open_given_moments(rows, chunks, shape, loading, offsets_us=offsets_us)
    finish_clips = ClipFinisher(
        samples=samples,
        settings=settings,
        rgb=rgb,
        views=Views(),
        is_training=False,
        all_captions=False,
        device=device,
    )

    def finish(entries: dict[str, Any]) -> dict[str, Any]:
        clips = finish_clips(entries)
        return {name: value for name, value in clips.items() if name != "clip_id"} | {"row": clips["clip_id"]}

    return Batches(
        samples, finish, None, shuffle=shuffle, batch=batch, world=ranks, device=device, max_failures=max_failures
    )


def _height_and_width(size_px: int | tuple[int, int]) -> tuple[int, int]:
    sides: list[Any] = list(size_px) if isinstance(size_px, Sequence) else [size_px, size_px]
    # The numbers must be even, because chroma has half the resolution of luma.
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 == int(side) % 2 for side in sides):
        raise UserError(
            f"size_px is {quote_value(size_px)}",
            hint="use a positive even number, or a pair of such numbers (height, width)",
        )
    return int(sides[0]), int(sides[1])


def _offsets_us(offsets_s: Sequence[float]) -> tuple[int, ...]:
    try:
        offsets_us = tuple(to_us(float(offset_s)) for offset_s in offsets_s)
    except (TypeError, ValueError):
        offsets_us = ()
    if not offsets_us or max(map(abs, offsets_us)) > _MAX_OFFSET_US:
        raise UserError(f"offsets_s is {quote_value(offsets_s)}", hint="pass seconds, such as (-0.2, -0.1, 0.0)")
    return offsets_us


@name_arguments_in_errors
def open_latents(
    data: Data,
    *,
    mix: Sequence[float] | None = None,
    split: str = "train",
    where: str | None = None,
    variant: VariantNames = None,
    segment: str | None = None,
    max_segments: int | None = None,
    batch: int = 32,
    tails: Tails = "drop",
    captions: Literal["text", "embedding"] | None = "text",
    label: str | None = None,
    shuffle: bool = True,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    device: str | torch.device | None = "cpu",
    max_failures: int = 100,
    cache: Path | None = None,
    cache_size: str | None = None,
) -> Batches:
    """Open segments of the VAE latents that `prep latents` made, each with a caption, a class, or neither.

    Args:
        data: Path or URL of a data folder that prep made; or a list of folders, for a mixture. All folders must contain
            latents from the same VAE.
        segment: Length of a segment, such as "5s"; it must be a whole number of frames. Default: the length of the
            segments that a video VAE encoded; 5 s for latents of single frames.
        max_segments: Maximum number of segments per video, evenly spaced; None for all.
        tails: Treatment of the frames after the last full segment of a chunk: "drop" them, or "pad" them with zeros to
            a full segment.
        captions: "text" to get `caption`; "embedding" to get `text`, which is the embedding stored by `prep text`;
            None for segments without captions.
        mix, split, where, variant, batch, label, shuffle, seed: See `open_clips`.
        rank, world, device, max_failures, cache, cache_size: See `open_clips`.

    Raises:
        UserError: The split has no latents, embeddings, captions or labels; the device does not exist; or an argument
            has the wrong type or is out of range.
    """
    arguments.require_whole_numbers(batch=batch, seed=seed, max_failures=max_failures)
    arguments.require_strings(split=split, segment=segment, label=label, cache_size=cache_size)
    if max_segments is not None:
        arguments.require_whole_numbers(max_segments=max_segments)
        if max_segments < 1:
            raise UserError(f"max_segments is {max_segments}", hint="use 1 or more, or None for all")
    arguments.require_device(device)
    settings = DataSettings(
        shards=arguments.shards_value(data, mix), mix=None if mix is None else ",".join(map(str, mix))
    )
    for address in settings.folders:
        if not kind_of(address).has_manifest:
            raise data_folder_error(address, "but only data folders contain latents")
    arguments.require_choice("tails", tails, Tails)
    ranks = arguments.explicit_world(rank, world)
    this_world = ranks or joined_world()
    if batch < 1:
        raise UserError(f"batch is {batch}", hint="use 1 or more")
    if captions not in ("text", "embedding", None):
        raise UserError(f"captions is {captions!r}, an unknown value", hint="use 'text', 'embedding' or None")
    can_keep = device is None or torch.device(device).type != "cuda"
    loading = LoaderSettings(batch=batch, seed=seed, rank=this_world.rank, num_ranks=this_world.size, can_keep=can_keep)
    caption_forms: dict[str | None, ShownCaptions] = {None: "none", "text": "words", "embedding": "stored"}

    def open_source(address: str) -> Samples[LatentReader]:
        return open_latent_segments(
            SegmentQuery(
                opened[address].path,
                split=split,
                segment=segment,
                captions=caption_forms[captions if classes is None else None],
                loading=loading,
                tails=tails,
                classes=() if classes is None else (classes,),
                max_segments=max_segments,
                where=where,
                tars=opened[address].tars,
            )
        )

    with use_variants(settings.folders, variant, cache=cache):
        opened = {
            address: open_data_folder(address, cache=cache, cache_size=cache_size, column=LATENTS)
            for address in settings.folders
        }
        classes = None if label is None else read_classes_of(settings, label=label)
        samples = open_mixed(open_source, settings)
    reader: Any = samples.loader.reader
    shown_captions = reader.captions if captions == "text" and classes is None else None
    mixture_names = () if samples.folders is None else ("folder",)
    names = ("key", "begin_s", "end_s", *mixture_names, *(["caption"] if shown_captions else []))

    def finish(entries: dict[str, Any]) -> dict[str, Any]:
        key, clip_id, text_row = entries["key"], entries["clip_id"], entries.pop("text_row", None)
        if samples.frame_shape.segment_frames:
            entries["latents"] = entries["latents"].swapaxes(1, 2)  # back to the stored layout, without a copy

        def make_late_entries() -> dict[str, Any]:
            late_entries = {"key": key[:], **span_entries(clip_id, samples, device=device)}
            return late_entries | ({"caption": shown_captions.texts_at(np.asarray(text_row))} if shown_captions else {})

        return LateBatch(entries, names, make_late_entries)

    return Batches(
        samples, finish, classes, shuffle=shuffle, batch=batch, world=ranks, device=device, max_failures=max_failures
    )
