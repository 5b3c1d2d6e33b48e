"""`open_clips` and `open_latents`: the loaders of the training commands as a Python interface (docs/python.md).

Samples, order, random draws, checks and failures are the same as in the commands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.formatting import quote_value
from clipmill.shards.columns import LATENTS
from clipmill.train.augment.draws import draw
from clipmill.train.augment.pictures import to_model_input
from clipmill.train.config.clips import Augment, CaptionSettings, ClipSettings
from clipmill.train.config.model import Init
from clipmill.train.config.shards import DataSettings, kind_of
from clipmill.train.data.arguments import (
    Data,
    colours_of,
    names_arguments,
    ranks_of,
    require_choice,
    require_device,
    require_texts,
    require_whole_numbers,
    shards_of,
)
from clipmill.train.data.batches import Batches, LateBatch
from clipmill.train.data.clip_frames import CropRule, Views
from clipmill.train.data.data_folder import open_data_folder
from clipmill.train.data.frame_sampling import US_PER_S, SamplingRule
from clipmill.train.data.inputs import open_mixed, read_classes_of, require_no_streams
from clipmill.train.data.latents.reader import LatentReader
from clipmill.train.data.latents.segments import SegmentQuery, ShownCaptions, Tails
from clipmill.train.data.loader import LoaderSettings
from clipmill.train.data.producers.latent_segments import open_latent_segments
from clipmill.train.data.query import DataQuery, loader_settings, open_samples
from clipmill.train.data.samples import Samples
from clipmill.train.distributed.world import joined_world

ClipText = Literal["text", "embedding", "all"]


@dataclass(frozen=True, kw_only=True)
class FinishedClips:
    """Last steps of a batch of clips, in the caller's thread.

    Attributes:
        samples: Loader of clips, images or a stream, or of their mixture.
        settings: Settings with normalisation and augmentation of model input; without a mean, clips stay uint8.
        rgb: True if the loader makes RGB.
        views: Views of an evaluation.
        is_training: Augment clips.
        all_captions: Add `captions`.
        device: Device of tensors; None for NumPy arrays.
    """

    samples: Any
    settings: ClipSettings
    rgb: bool
    views: Views
    is_training: bool
    all_captions: bool
    device: str | torch.device | None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Finish the batch in place, and return it."""
        mean = self.settings.init.pixel_mean
        if mean is not None:
            clips = self._model_input(batch, mean=mean)
            batch["video"] = clips.numpy() if self.device is None else clips
        elif len(self.views) > 1:
            video = batch["video"]
            batch["video"] = video.reshape(len(video), len(self.views), -1, *video.shape[2:])
        if self.rgb or mean is not None:
            del batch["colour"]
        if self.samples.num_samples is not None:  # a stream does not know its clips
            batch |= of_clips(batch["clip_id"], self.samples, device=self.device)
            if self.all_captions:
                batch["captions"] = texts_of_clips(self.samples, np.asarray(batch["clip_id"]))
        return batch

    def _model_input(self, batch: dict[str, Any], *, mean: tuple[float, float, float]) -> torch.Tensor:
        """Return normalised clips [B, 3, T, S, S]; of several views [B, V, 3, T, S, S]."""
        settings = self.settings
        assert settings.init.pixel_std is not None
        positions = np.asarray(batch["position"])
        clips = to_model_input(
            torch.as_tensor(batch["video"]),
            torch.as_tensor(batch["colour"]),
            size_px=settings.size_px,
            mean=mean,
            std=settings.init.pixel_std,
            draw=draw(positions, settings.augment, seed=settings.seed) if self.is_training else None,
        )
        if len(self.views) == 1:
            return clips
        return clips.unflatten(2, (len(self.views), -1)).transpose(1, 2).contiguous()


def texts_of_clips(samples: Any, clips: NDArray[np.int64]) -> list[list[str]]:
    """Return all captions of each clip, of captioned clips or a mixture of them, in the order of their sources."""
    if samples.folders is None:
        return [samples.captions.texts_of(clip) for clip in clips.tolist()]
    texts: list[list[str]] = [[] for _ in clips]
    for folder, where, rows in samples.numbering.divide(clips):
        for index, of_clip in zip(where.tolist(), texts_of_clips(samples.parts[folder], rows), strict=True):
            texts[index] = of_clip
    return texts


def of_clips(clip_id: Any, samples: Any, *, device: Any) -> dict[str, Any]:
    """Return the span of each clip in seconds, and in a mixture the index of its folder."""
    convert = np.asarray if device is None else torch.from_numpy
    clips = np.asarray(clip_id)
    begin_us, end_us = samples.span_us(clips)
    entries = {"begin_s": convert(begin_us / US_PER_S), "end_s": convert(end_us / US_PER_S)}
    if samples.folders is not None:
        entries["folder"] = convert(samples.numbering.folder_of(clips))
    return entries


def caption_settings(sources: Mapping[str, float] | None, min_relevancy: float | None) -> CaptionSettings:
    """Return the settings of captions; raises UserError for invalid weights."""
    if sources is not None and not isinstance(sources, Mapping):
        raise UserError(
            f"sources is {quote_value(sources)}", hint='give weights by name: {"human": 1, "*rephraser*": 2}'
        )
    text = None if sources is None else ",".join(f"{name}={weight}" for name, weight in sources.items())
    return CaptionSettings(sources=text, min_relevancy=min_relevancy)


def augmentation(values: Mapping[str, float] | None) -> Augment:
    """Return the augmentation by the names of its settings; raises UserError for others."""
    known = vars(Augment())
    if values is not None and (not isinstance(values, Mapping) or values.keys() - known.keys()):
        raise UserError(f"augment is {quote_value(values)}", hint=f"give a dictionary with some of {', '.join(known)}")
    given: Mapping[str, Any] = values or {}
    numbers: dict[str, Any] = {}
    for name, value in given.items():
        is_integer = isinstance(known[name], int)
        if isinstance(value, bool) or not isinstance(value, Real) or (is_integer and not float(value).is_integer()):
            raise UserError(
                f"augment.{name} is {quote_value(value)}", hint="use a whole number" if is_integer else "use a number"
            )
        numbers[name] = type(known[name])(value)
    return Augment(**numbers)


@names_arguments
def open_clips(
    data: Data,
    *,
    mix: Sequence[float] | None = None,
    split: str = "train",
    where: str | None = None,
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
    """Open the clips of a split: spans of videos, each with a caption or, with `label`, a class.

    Args:
        data: Data folder of prep, a path or an address (s3://bucket/data); or tars of videos or of images:
            DIR/{000..999}.tar. A list of folders and tars of images is a mixture.
        mix: Weights of the folders of a mixture; by default in proportion to their sizes. A batch then has `folder`,
            the index in the list. Every folder has its own epochs; an epoch of `Batches` has as many samples as all.
        split: Split of the manifest. Tars have no splits: all of their clips are used.
        where: Condition that selects clips, such as "motion > 0.2 and words > 3" (docs/data.md).
        batch: Batch size of this process.
        num_frames, size_px, sampling, stride, crop, min_crop_area: See the flags of `train dual-encoder`.
        rgb: True for frames of RGB; False for YUV 4:2:0, half as many bytes.
        pixel_mean, pixel_std: Mean and standard deviation of R, G and B, for values from 0 to 1. `video` is then the
            input of a model of the commands, converted on the device: float32 [B, 3, T, S, S], normalised.
        augment: Augmentation of this input with `shuffle`, by the names of `--augment.*`, such as {"flip": 0.5}.
        captions: "text"; "embedding" (of `prep text`: `text` in place of `caption`); or "all": a batch also has
            `captions`, the list of all captions of each clip from the sources that `sources` names.
        sources: Sampling weights of caption sources, by name or pattern; others are omitted. See --captions.sources.
        min_relevancy: Also show captions of other clips that are more relevant than this. See --captions.min-relevancy.
        label: Name of a label column of the captions, without `label_`. A batch then has `label` in place of
            `caption`.
        shuffle: Random order, moments, crops and captions, as in training; False: every clip once, in order, with
            centred moments and crops, as in evaluation.
        clips, crops: Number of temporal and spatial views of each clip, without `shuffle`. With more than one view,
            `video` has a dimension of views after the batch dimension; all crops of the first moments come first.
        workers: Number of decoding threads.
        seed: Random seed for order, moments, crops and captions.
        rank, world: Index of this process and number of processes; each gets its share. Default: values
            of torch.distributed, else of torchrun's environment, else one process.
        device: Device of frames, labels and embeddings; None for NumPy arrays.
        max_failures: Number of clips that may fail to load before iterating raises FailedWork.
        cache: Folder for copies of remote data. Default: the user's cache folder.
        cache_size: Limit for complete tars in it, such as "100GB". Default: 80 % of the free disk.

    Raises:
        UserError: The data, split, label or device does not exist, no clip can be shown or is selected, or an argument
            is of another type or out of range.
    """
    numbers = {"batch": batch, "num_frames": num_frames, "size_px": size_px, "stride": stride}
    require_whole_numbers(**numbers, clips=clips, crops=crops, workers=workers, seed=seed, max_failures=max_failures)
    require_device(device)
    require_texts(split=split, label=label, cache_size=cache_size)
    require_choice("sampling", sampling, SamplingRule)
    require_choice("crop", crop, CropRule)
    require_choice("captions", captions, ClipText)
    mean, std = colours_of("pixel_mean", pixel_mean), colours_of("pixel_std", pixel_std)
    is_normalised = mean is not None and std is not None
    if (mean is None) != (std is None) or (augment is not None and not is_normalised):
        raise UserError(
            f"pixel_mean is {mean}, pixel_std is {std} and augment is {augment}",
            hint="give both mean and standard deviation, or neither; augmentation needs them",
        )
    views = Views(num_clips=clips, num_crops=crops)
    if min(clips, crops) < 1 or (shuffle and len(views) > 1):
        raise UserError(f"clips is {clips} and crops is {crops}", hint="use 1 or more; more with shuffle=False only")
    shown = caption_settings(sources, min_relevancy)
    if label is not None and (captions != "text" or shown != CaptionSettings()):
        raise UserError(
            f"label is {label!r}, in place of captions", hint="leave out captions=, sources= and min_relevancy="
        )
    if size_px < 1 or ((rgb or is_normalised) and size_px % 2):
        parity = "even number, as chroma has half the size of luma" if rgb or is_normalised else "number"
        raise UserError(f"size_px is {size_px}", hint=f"use a positive {parity}")
    ranks = ranks_of(rank, world)
    this_world = ranks or joined_world()
    settings = ClipSettings(
        shards=shards_of(data, mix),
        mix=None if mix is None else ",".join(map(str, mix)),
        split=split,
        where=where,
        batch=batch * this_world.size,
        num_frames=num_frames,
        size_px=size_px,
        sampling=sampling,
        stride=stride,
        crop=crop,
        min_crop_area=min_crop_area,
        augment=augmentation(augment),
        init=Init(pixel_mean=mean, pixel_std=std),
        workers=workers,
        seed=seed,
        max_failures=max_failures,
        cache=cache,
        cache_size=cache_size,
    )
    is_pinned = device is not None and torch.device(device).type == "cuda"
    loading = loader_settings(settings, this_world, device=torch.device(device or "cpu"))
    loading = replace(loading, can_keep=not is_pinned)
    for address in settings.folders:
        if kind_of(address).has_manifest:
            continue
        if where is not None:
            raise UserError(f"{address} names tars, without scores", hint="name the data folder that prep made")
        if captions != "text" or shown != CaptionSettings():
            raise UserError(
                f"{address} names tars: each clip has only the caption in its tar",
                hint="leave out captions=, sources= and min_relevancy=, or name a data folder that prep made",
            )
    require_no_streams(settings)
    classes = None if label is None else read_classes_of(settings, label=label)

    def open_one(address: str) -> Any:
        return open_samples(
            DataQuery(
                settings=replace(settings, shards=address, mix=None),
                content="captions" if classes is None else "labels",
                split=split,
                loading=loading,
                views=views,
                is_rgb=rgb and not is_normalised,
                has_stored_text=captions == "embedding",
                captions=shown,
                classes=() if classes is None else (classes,),
            )
        )

    samples = open_mixed(open_one, settings)
    finish = FinishedClips(
        samples=samples,
        settings=settings,
        rgb=rgb,
        views=views,
        is_training=shuffle,
        all_captions=captions == "all",
        device=device,
    )
    return Batches(
        samples, finish, classes, shuffle=shuffle, batch=batch, world=ranks, device=device, max_failures=max_failures
    )


@names_arguments
def open_latents(
    data: Data,
    *,
    mix: Sequence[float] | None = None,
    split: str = "train",
    where: str | None = None,
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
    """Open the segments of the VAE latents of a split (`prep latents`), each with a caption or a class.

    Args:
        data: Data folder that prep made, as a path or an address; or a list of folders, a mixture, with latents of the
            same VAE.
        segment: Length of a segment, such as 5s: a whole number of frames. None: the stored segments of a VAE of
            videos, and 5s of other latents.
        max_segments: Maximum number of segments of each video, spread evenly over it; None for all.
        tails: Treatment of a shorter rest of a chunk: "drop" it, or "pad" it with zeros.
        captions: "text", "embedding" (of `prep text`: `text` in place of `caption`), or None for only segments.
        mix, split, where, batch, label, shuffle, seed, rank, world, device, max_failures, cache, cache_size: See
            `open_clips`.

    Raises:
        UserError: There are no latents, embeddings, captions or labels of that split, the device does not exist, or an
            argument is of another type or out of range.
    """
    require_whole_numbers(batch=batch, seed=seed, max_failures=max_failures)
    require_texts(split=split, segment=segment, label=label, cache_size=cache_size)
    if max_segments is not None:
        require_whole_numbers(max_segments=max_segments)
        if max_segments < 1:
            raise UserError(f"max_segments is {max_segments}", hint="use 1 or more, or None for all")
    require_device(device)
    settings = DataSettings(shards=shards_of(data, mix), mix=None if mix is None else ",".join(map(str, mix)))
    for address in settings.folders:
        if not kind_of(address).has_manifest:
            raise UserError(
                f"latents cannot be read from {address}: a stream of tars has no index", hint="name a data folder"
            )
    require_choice("tails", tails, Tails)
    ranks = ranks_of(rank, world)
    this_world = ranks or joined_world()
    if batch < 1:
        raise UserError(f"batch is {batch}", hint="use 1 or more")
    if captions not in ("text", "embedding", None):
        raise UserError(f"captions is {captions!r}", hint="use 'text', 'embedding' or None")
    opened = {
        address: open_data_folder(address, cache=cache, cache_size=cache_size, column=LATENTS)
        for address in settings.folders
    }
    classes = None if label is None else read_classes_of(settings, label=label)
    can_keep = device is None or torch.device(device).type != "cuda"
    loading = LoaderSettings(batch=batch, seed=seed, rank=this_world.rank, num_ranks=this_world.size, can_keep=can_keep)
    shown: dict[str | None, ShownCaptions] = {None: "none", "text": "words", "embedding": "stored"}

    def open_one(address: str) -> Samples[LatentReader]:
        return open_latent_segments(
            SegmentQuery(
                opened[address].path,
                split=split,
                segment=segment,
                captions=shown[captions if classes is None else None],
                loading=loading,
                tails=tails,
                classes=() if classes is None else (classes,),
                max_segments=max_segments,
                where=where,
                tars=opened[address].tars,
            )
        )

    samples = open_mixed(open_one, settings)
    reader: Any = samples.loader.reader
    shown_captions = reader.captions if captions == "text" and classes is None else None
    late = () if samples.folders is None else ("folder",)
    names = ("key", "begin_s", "end_s", *late, *(["caption"] if shown_captions else []))

    def finish(entries: dict[str, Any]) -> dict[str, Any]:
        key, clip_id, text_row = entries["key"], entries["clip_id"], entries.pop("text_row", None)
        if samples.frame_shape.segment_frames:
            entries["latents"] = entries["latents"].swapaxes(1, 2)  # in the stored layout, without a copy

        def make() -> dict[str, Any]:
            late_entries = {"key": key[:], **of_clips(clip_id, samples, device=device)}
            return late_entries | ({"caption": shown_captions.texts_at(np.asarray(text_row))} if shown_captions else {})

        return LateBatch(entries, names, make)

    return Batches(
        samples, finish, classes, shuffle=shuffle, batch=batch, world=ranks, device=device, max_failures=max_failures
    )
