"""`open_clips` and `open_latents`: the loaders of the training commands as a Python interface (docs/python.md).

Samples, order, random draws, checks and failures are those of the commands.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from manifests.errors import UserError
from manifests.store import read_videos
from train.config.training import ClipSettings, is_remote
from train.data.arguments import require_device, require_whole_numbers
from train.data.batches import Batches, LateBatch
from train.data.classes import ClassList, read_classes
from train.data.clip_samples import ClipSamples
from train.data.decoding.clip import Views
from train.data.decoding.pictures import CropRule
from train.data.frame_sampling import US_PER_S, SamplingRule
from train.data.inputs import clip_shape, loader_settings
from train.data.labelled_clips import LabelledClips
from train.data.latents.loader import LatentLoader
from train.data.latents.segments import Tails
from train.data.remote import open_data_folder
from train.data.streams.stream import VideoStream
from train.data.streams.tars import names_tars
from train.data.video_captions import VideoCaptions
from train.distributed.world import World, joined_world


def open_clips(
    data: str | Path,
    *,
    split: str = "train",
    batch: int = 32,
    num_frames: int = 4,
    size_px: int = 224,
    sampling: SamplingRule = "uniform",
    stride: int = 4,
    crop: CropRule = "random",
    min_crop_area: float = 0.5,
    rgb: bool = True,
    label: str | None = None,
    shuffle: bool = True,
    workers: int = 4,
    seed: int = 0,
    rank: int | None = None,
    world: int | None = None,
    device: str | torch.device | None = "cpu",
    max_failures: int = 100,
    cache: Path | None = None,
) -> Batches:
    """Open the clips of a split: spans of videos, each with a caption or, with `label`, a class.

    Args:
        data: data folder that prep made, as a path or an address (s3://bucket/data); or tars: DIR/{000..999}.tar.
        split: of the manifest. Tars have no splits: all of their clips are used.
        batch: batch size of this process.
        num_frames, size_px, sampling, stride, crop, min_crop_area: see the flags of `train dual-encoder`.
        rgb: RGB frames; False for YUV 4:2:0, half as many bytes, which `train.augment.pictures.to_model_input` converts
            on the device.
        label: name of a label column of the captions, without `label_`. A batch then has `label` in place of
            `caption`.
        shuffle: random order, moments, crops and captions, as in training; False: every clip once, in order, with
            centred moments and crops, as in evaluation.
        workers: number of decoding threads.
        seed: random seed for order, moments, crops and captions.
        rank, world: index of this process and number of processes, each of which gets its own share. Default: those of
            torch.distributed, else of torchrun's environment, else one process.
        device: where frames, labels and embeddings go; None for NumPy arrays.
        max_failures: number of clips that may fail to load before iterating raises FailedWork.
        cache: folder for copies of remote data. Default: the user's cache folder.

    Raises:
        UserError: there is no such data, split, label or device, no clip that can be shown, or an argument is of
            another type or out of range.
    """
    numbers = {"batch": batch, "num_frames": num_frames, "size_px": size_px, "stride": stride}
    require_whole_numbers(**numbers, workers=workers, seed=seed, max_failures=max_failures)
    require_device(device)
    _require_choice("sampling", sampling, SamplingRule)
    _require_choice("crop", crop, CropRule)
    if rgb and size_px % 2:
        raise UserError(f"size_px is {size_px}", hint="use an even number: chroma has half the size of luma")
    ranks = _ranks(rank, world)
    own = ranks or joined_world()
    settings = ClipSettings(
        shards=str(data),
        split=split,
        batch=batch * own.size,
        num_frames=num_frames,
        size_px=size_px,
        sampling=sampling,
        stride=stride,
        crop=crop,
        min_crop_area=min_crop_area,
        workers=workers,
        seed=seed,
        max_failures=max_failures,
        cache=cache,
    )
    is_pinned = device is not None and torch.device(device).type == "cuda"
    shape = replace(clip_shape(settings, views=Views()), rgb=rgb)
    loading = loader_settings(settings, own, device=torch.device(device or "cpu"))
    loading = replace(loading, can_keep=not is_pinned)
    classes: ClassList | None = None
    samples: ClipSamples | VideoStream
    if names_tars(settings.shards):
        if label is not None:
            raise UserError(f"{data} is a stream of tars, without labels", hint="name the data folder that prep made")
        samples = VideoStream(settings.shards, shape=shape, tokenize=None, loading=loading, cache=cache)
    else:
        folder = open_data_folder(settings.shards, cache=cache)
        common: dict[str, Any] = {"split": split, "shape": shape, "loading": loading, "tars": folder.tars}
        if label is None:
            samples = VideoCaptions(folder.path, tokenize=None, **common)
        else:
            classes = _classes(folder.path, label)
            samples = LabelledClips(folder.path, classes=classes, **common)

    seconds = _as_seconds(device)

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        if rgb:
            found.pop("colour")
        if isinstance(samples, ClipSamples):
            clip = np.asarray(found["clip_id"])
            spans = samples.spans
            found["begin_s"], found["end_s"] = seconds(spans.begin_us[clip]), seconds(spans.end_us[clip])
        return found

    return Batches(
        samples, finish, classes, shuffle=shuffle, batch=batch, world=ranks, device=device, max_failures=max_failures
    )


def open_latents(
    data: str | Path,
    *,
    split: str = "train",
    segment: str = "5s",
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
) -> Batches:
    """Open the segments of the VAE latents of a split (`prep latents`), each with a caption or a class.

    Args:
        data: data folder that prep made, on this machine.
        segment: length of a segment, such as 5s: a whole number of frames.
        tails: what to do with a shorter rest of a chunk: "drop" it, or "pad" it with zeros.
        captions: "text", "embedding" (of `prep text`: `text` in place of `caption`), or None for segments alone.
        split, batch, label, shuffle, seed, rank, world, device, max_failures: see `open_clips`.

    Raises:
        UserError: there are no latents, embeddings, captions or labels of that split, there is no such device, or an
            argument is of another type or out of range.
    """
    require_whole_numbers(batch=batch, seed=seed, max_failures=max_failures)
    require_device(device)
    if is_remote(str(data)) or names_tars(str(data)):
        raise UserError(f"latents cannot be read from {data}: they are mapped", hint="copy the data folder here")
    _require_choice("tails", tails, Tails)
    ranks = _ranks(rank, world)
    own = ranks or joined_world()
    if batch < 1:
        raise UserError(f"batch is {batch}", hint="use 1 or more")
    if captions not in ("text", "embedding", None):
        raise UserError(f"captions is {captions!r}", hint="use 'text', 'embedding' or None")
    classes = None if label is None else _classes(Path(data), label)
    samples = LatentLoader(
        Path(data),
        split=split,
        segment=segment,
        batch=batch,
        seed=seed,
        rank=own.rank,
        num_ranks=own.size,
        text=captions is not None,
        words=captions == "text",
        classes=() if classes is None else (classes,),
        tails=tails,
        copy=device is None or torch.device(device).type != "cuda",
    )
    has_texts = captions == "text" and classes is None
    names = ("key", "begin_s", "end_s", *(["caption"] if has_texts else []))
    seconds = _as_seconds(device)

    def finish(found: dict[str, Any]) -> dict[str, Any]:
        key, clip_id, caption_id = found["key"], found["clip_id"], found.get("caption_id")

        def make() -> dict[str, Any]:
            begin_us, end_us = samples.span_us(np.asarray(clip_id))
            made = {"key": key[:], "begin_s": seconds(begin_us), "end_s": seconds(end_us)}
            return made | ({"caption": samples.texts_of(np.asarray(caption_id))} if has_texts else {})

        return LateBatch(found, names, make)

    return Batches(
        samples, finish, classes, shuffle=shuffle, batch=batch, world=ranks, device=device, max_failures=max_failures
    )


def _ranks(rank: int | None, world: int | None) -> World | None:
    """The ranks that the caller gives."""
    if (rank is None) != (world is None):
        raise UserError(f"rank is {rank} and world is {world}", hint="give both, or none of them")
    if rank is None or world is None:
        if get_worker_info() is not None:
            raise UserError(
                "opened in a worker of a DataLoader, each of which would load the same samples",
                hint="iterate without a DataLoader: clips are decoded by threads; or give rank= and world=",
            )
        return None
    require_whole_numbers(rank=rank, world=world)
    if not 0 <= rank < world:
        raise UserError(f"rank is {rank} of {world}", hint="ranks count from 0")
    return World(rank=rank, size=world)


def _classes(data_dir: Path, label: str) -> ClassList:
    """The classes of all captions, so that every split numbers them alike."""
    return read_classes(data_dir, label=label, splits=set(read_videos(data_dir)["split"].to_pylist()))


def _require_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise UserError(f"{name} is {value!r}", hint=f"use one of {', '.join(get_args(choices))}")


def _as_seconds(device: str | torch.device | None) -> Callable[[NDArray[np.int64]], Any]:
    made = np.asarray if device is None else torch.from_numpy
    return lambda times_us: made(times_us / US_PER_S)
