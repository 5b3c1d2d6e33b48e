"""What a probe looks at: the labelled clips of a split, of pixels or of latents, each once, as a run's clips look."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from manifests.errors import UserError
from manifests.store import read_captions
from train.classify.classes import ClassList, label_names, read_classes
from train.data.decoding.clip import Views
from train.data.labelled_clips import LabelledClips
from train.data.latents.labelled import LabelledLatents
from train.data.remote.address import is_remote
from train.data.remote.folder import open_data_folder
from train.data.streams.tars import names_tars
from train.distributed.world import World
from train.settings import ClipSettings
from train.tasks.clips import clip_shape, loader_settings

Labelled = LabelledClips | LabelledLatents


def read_probe_classes(
    settings: ClipSettings, labels: Sequence[str], *, splits: Sequence[str]
) -> tuple[ClassList, ...]:
    """The classes of each label in some splits together.

    Raises:
        UserError: the data is no folder with a manifest, the captions have no such label, or fewer than two classes.
    """
    folder = _labelled_folder(settings)
    return tuple(read_classes(folder, label=label, splits=splits) for label in labels)


def labels_there(settings: ClipSettings) -> list[str]:
    """The labels that captions of the data have.

    Raises:
        UserError: the data is no folder with a manifest.
    """
    return label_names(read_captions(_labelled_folder(settings)))


def _labelled_folder(settings: ClipSettings) -> Path:
    if names_tars(settings.shards):
        raise UserError(
            f"{settings.shards} is a stream of tars, and labels are in the manifest of a data folder",
            hint="name the data folder that prep made",
        )
    return open_data_folder(settings.shards, cache=settings.cache).path


def open_labelled(
    settings: ClipSettings, *, split: str, classes: Sequence[ClassList], world: World, device: torch.device
) -> Labelled:
    """This rank's part of the clips of a split that have any of the labels.

    Raises:
        UserError: there are none.
    """
    own, *also = classes
    if getattr(settings, "input", "pixels") == "latents":
        if is_remote(settings.shards):
            raise UserError(
                f"--input latents cannot be read from {settings.shards}: latents are mapped into memory",
                hint="copy the data folder to this machine",
            )
        return LabelledLatents(
            Path(settings.shards),
            split=split,
            classes=own,
            also=also,
            segment=cast(str, settings.segment),  # type: ignore[attr-defined]
            batch=_batch(settings, world),
            seed=settings.seed,
            rank=world.rank,
            num_ranks=world.size,
        )
    folder = open_data_folder(settings.shards, cache=settings.cache)
    loading = loader_settings(settings, world, device=device)
    return LabelledClips(
        folder.path,
        split=split,
        classes=own,
        also=also,
        shape=clip_shape(settings, views=Views()),
        loading=replace(loading, batch=_batch(settings, world), group=1),
        decode=settings.decode,
        tars=folder.tars,
    )


def _batch(settings: ClipSettings, world: World) -> int:
    # What one process can train on at once, it can look at: an autoencoder then sees all cubes, but keeps nothing.
    return settings.microbatch or world.share(settings.batch)
