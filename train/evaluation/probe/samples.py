"""What a probe looks at: the labelled clips of a split, of pixels or of latents, each once, as a run's clips look."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from manifests.store import read_captions
from train.config.training import ClipSettings
from train.data.classes import ClassList, label_names, read_classes
from train.data.decoding.clip import Views
from train.data.inputs import clip_shape, loader_settings, open_labelled_folder, open_latents
from train.data.labelled_clips import LabelledClips
from train.data.latents.loader import LabelledLatents
from train.distributed.world import World

Labelled = LabelledClips | LabelledLatents


def read_probe_classes(
    settings: ClipSettings, labels: Sequence[str], *, splits: Sequence[str]
) -> tuple[ClassList, ...]:
    """The classes of each label in some splits together.

    Raises:
        UserError: the data is no folder with a manifest, the captions have no such label, or fewer than two classes.
    """
    folder = open_labelled_folder(settings).path
    return tuple(read_classes(folder, label=label, splits=splits) for label in labels)


def labels_there(settings: ClipSettings) -> list[str]:
    """The labels that captions of the data have.

    Raises:
        UserError: the data is no folder with a manifest.
    """
    return label_names(read_captions(open_labelled_folder(settings).path))


def open_labelled(
    settings: ClipSettings, *, split: str, classes: Sequence[ClassList], world: World, device: torch.device
) -> Labelled:
    """This rank's part of the clips of a split that have any of the labels.

    Raises:
        UserError: there are none.
    """
    own, *also = classes
    if getattr(settings, "input", "pixels") == "latents":
        return open_latents(
            partial(LabelledLatents, classes=classes),
            settings,
            segment=getattr(settings, "segment", ""),  # of the tasks that can read latents
            split=split,
            world=world,
            batch=_batch(settings, world),
        )
    folder = open_labelled_folder(settings)
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
