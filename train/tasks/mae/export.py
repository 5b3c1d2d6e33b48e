"""Masked autoencoders, and classifiers of videomae towers, as VideoMAE and transformers write them.

`hf` is a folder for VideoMAEForPreTraining or VideoMAEForVideoClassification; `videomae` is VideoMAE's own
`{"model": state dict}` of torch.save, of nothing but tensors, so that `weights_only` reads it.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manifests.errors import UserError
from train.config.files import load_settings
from train.config.training import ClipSettings
from train.data.classes import ClassList
from train.models.dual_encoder import size_of
from train.models.masked_autoencoder import decoder_size
from train.models.transformer import TransformerSize
from train.run.folder import RunFolder
from train.tasks.classify.evaluation import read_run_classes
from train.tasks.classify.settings import ClassifySettings
from train.tasks.mae.settings import MaeSettings
from train.weights.converted import IMAGENET_MEAN, IMAGENET_STD, Tensors, kind_of_tensors
from train.weights.exported import Exported, require_format, save_json
from train.weights.extras import save_tensors
from train.weights.hf_videomae_format import (
    classifier_config,
    encoder_config,
    pretraining_config,
    to_hf_videomae,
    videomae_preprocessor_config,
)
from train.weights.videomae_format import CONV, VIDEOMAE_FACTS, as_videomae, to_videomae

CHECKPOINT_FILE = "checkpoint.pth"
_RGB = 3


def exported_autoencoder(run: RunFolder, weights: Tensors, *, form: str) -> Exported:
    """A masked autoencoder.

    Raises:
        UserError: the format cannot hold it.
    """
    require_format(form, ("hf", "videomae"), what="a masked autoencoder")
    settings = load_settings(run.settings, MaeSettings)
    if form == "videomae":
        return _own_checkpoint(settings, weights)
    decoder = decoder_size(_trunk(settings), depth=settings.decoder_depth)
    config = pretraining_config(_encoder_config(run, settings, weights), decoder)
    return _hf_folder(settings, weights, config)


def exported_classifier(run: RunFolder, weights: Tensors, *, form: str) -> Exported:
    """A classifier of a videomae tower.

    Raises:
        UserError: the format cannot hold it, or its tower is another.
    """
    if kind_of_tensors(weights) != "videomae":
        raise UserError(
            f"{run.path} is a classifier with CLIP's tower, which no format has a place for",
            hint="export the run of train dual-encoder, or a classifier with --towers.kind videomae",
        )
    require_format(form, ("hf", "videomae"), what="a classifier of videos")
    settings = load_settings(run.settings, ClassifySettings)
    if form == "videomae":
        return _own_checkpoint(settings, weights)
    classes: ClassList = read_run_classes(run)
    return _hf_folder(settings, weights, classifier_config(_encoder_config(run, settings, weights), classes.names))


def _hf_folder(settings: ClipSettings, weights: Tensors, config: dict[str, Any]) -> Exported:
    has_pictures = config["num_channels"] == _RGB
    remarks = () if has_pictures else ("latents are no pictures: there is no preprocessor_config.json",)

    def write(folder: Path) -> None:
        save_tensors(to_hf_videomae(weights), folder / "model.safetensors", metadata={"format": "pt"})
        save_json(folder / "config.json", config)
        if has_pictures:
            save_json(folder / "preprocessor_config.json", videomae_preprocessor_config(settings))

    return Exported(write=write, remarks=remarks)


def _own_checkpoint(settings: ClipSettings, weights: Tensors) -> Exported:
    trunk, init = _trunk(settings), settings.init
    if trunk.activation != VIDEOMAE_FACTS.activation:
        raise UserError(
            f"VideoMAE's code has no {trunk.activation} (--towers.activation)", hint="use --format hf, which has"
        )
    remarks = []
    if not math.isclose(trunk.norm_eps, VIDEOMAE_FACTS.video_eps or 0):
        remarks.append(
            f"VideoMAE's code has layer norms of eps {VIDEOMAE_FACTS.video_eps:g}, and this run of {trunk.norm_eps:g}: "
            "no checkpoint says it"
        )
    if weights[CONV].shape[1] == _RGB and (init.pixel_mean, init.pixel_std) != (IMAGENET_MEAN, IMAGENET_STD):
        remarks.append(
            "this run normalised pictures otherwise than VideoMAE does (--init.pixel-mean): no checkpoint says it"
        )
    write: Callable[[Path], None] = lambda folder: _save_checkpoint(folder, weights)  # noqa: E731
    return Exported(write=write, remarks=tuple(remarks))


def _save_checkpoint(folder: Path, weights: Tensors) -> None:
    state = {name: tensor.detach().clone() for name, tensor in to_videomae(weights).items()}
    torch.save({"model": state}, folder / CHECKPOINT_FILE)


def _trunk(settings: ClipSettings) -> TransformerSize:
    return size_of(settings.model, settings.towers).video.trunk


def _encoder_config(run: RunFolder, settings: ClipSettings, weights: Tensors) -> dict[str, Any]:
    conv = as_videomae(CONV, weights[CONV])
    return encoder_config(
        _trunk(settings),
        cube=(conv.shape[1], conv.shape[2], conv.shape[3]),
        num_frames=settings.num_frames,
        side=settings.size_px if conv.shape[1] == _RGB else _side_of_latents(run),
    )


def _side_of_latents(run: RunFolder) -> int:
    """Raises a UserError where run.json does not say it."""
    try:
        return int(run.require_facts()["latents"]["side"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{run.facts} does not say how large the latents were, and config.json has to",
            hint="use --format videomae, which need not know it",
        ) from error
