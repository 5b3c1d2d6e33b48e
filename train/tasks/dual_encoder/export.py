"""A dual encoder as a folder that open_clip or transformers opens.

A video tower is written as the image tower that it is for one frame. What an image tower has no place for stays beside
it, in video_extras.safetensors: `--init.weights FOLDER` reads both and gets the run's weights bit by bit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from manifests.errors import UserError
from train.config.files import load_settings
from train.config.training import DualEncoderSettings
from train.models.dual_encoder import DualEncoderSize, size_of
from train.run.folder import RunFolder
from train.tasks.dual_encoder.tokenizer_files import write_tokenizer
from train.tasks.dual_encoder.written_configs import hf_config, hf_preprocessor_config, open_clip_config
from train.weights.converted import LOGIT_SCALE, TEMPORAL_EMBEDDING, Tensors
from train.weights.exported import Exported, require_format, save_json
from train.weights.extras import EXTRAS_FILE, save_extras, save_tensors
from train.weights.hf_format import to_hf
from train.weights.open_clip_format import to_open_clip
from train.weights.run_weights import read_log_scale

FrameEmbedding = Literal["mean", "zero"]

_POSITIONS, _CONV = "video.positional_embedding", "video.conv1.weight"
_CLIPS_START = 2.6592  # log(1 / 0.07), what an untrained CLIP has
_RGB = 3


@dataclass(frozen=True, kw_only=True)
class ImageTowers:
    """Towers of which the video tower takes pictures.

    Attributes:
        tensors: by our name, without a temporal embedding.
        extras: the tensors that were changed or have no place, as they were.
        lost: what the image tower cannot do, for the user.
    """

    tensors: dict[str, torch.Tensor]
    extras: dict[str, torch.Tensor]
    lost: tuple[str, ...]


def image_towers(weights: Tensors, *, rule: FrameEmbedding) -> ImageTowers:
    """The towers for single pictures.

    Args:
        weights: a DualEncoder's.
        rule: mean: the mean temporal embedding is added to the positions of the patches (a picture is a frame from
            anywhere in a clip); zero: it is left out (what the tower computed before it learned one).
    """
    tensors, extras, lost = dict(weights), {}, []
    temporal_TD = tensors.pop(TEMPORAL_EMBEDDING)
    extras[TEMPORAL_EMBEDDING] = temporal_TD
    if temporal_TD.count_nonzero():
        how = {"mean": "its mean is added to the positions of patches", "zero": "it is left out"}[rule]
        lost.append(f"the temporal embedding of {len(temporal_TD)} steps has no place in an image tower: {how}")
    if rule == "mean" and temporal_TD.count_nonzero():
        extras[_POSITIONS] = tensors[_POSITIONS]
        tensors[_POSITIONS] = tensors[_POSITIONS].clone()
        tensors[_POSITIONS][1:] += temporal_TD.mean(0)
    if tensors[_CONV].ndim == 5:
        extras[_CONV] = tensors[_CONV]
        lost.append(
            f"cubes of {tensors[_CONV].shape[2]} frames become patches, which see a picture as so many equal frames"
        )
        tensors[_CONV] = tensors[_CONV].sum(2)
    return ImageTowers(tensors=tensors, extras=extras, lost=tuple(lost))


def exported_clip(
    run: RunFolder, weights: Tensors, *, checkpoint: Path, form: str, frame_embedding: FrameEmbedding
) -> Exported:
    """A dual encoder for open_clip or transformers.

    Raises:
        UserError: the format cannot hold such towers.
    """
    require_format(form, ("open_clip", "hf"), what="a dual encoder")
    settings = load_settings(run.settings, DualEncoderSettings)
    size = _checked_size(settings, weights)
    towers = image_towers(weights, rule=frame_embedding)
    log_scale = read_log_scale(checkpoint)
    remarks = [f"{one}; kept in {EXTRAS_FILE}" for one in towers.lost]
    if log_scale is None:
        remarks.append("the loss had no single temperature: the format wants one, and is given 0.07, CLIP's start")
    tensors = {**towers.tensors, LOGIT_SCALE: torch.tensor(_CLIPS_START if log_scale is None else log_scale)}
    return Exported(
        write=lambda folder: _write(folder, tensors, towers.extras, size, settings, form=form), remarks=tuple(remarks)
    )


def _checked_size(settings: DualEncoderSettings, weights: Tensors) -> DualEncoderSize:
    """The size of the towers.

    Raises:
        UserError: they are none of CLIP's.
    """
    if not any(name.startswith("text.") for name in weights):
        raise UserError(
            "the run has no text tower (--text-tower frozen): open_clip and transformers know no model without one",
            hint="export a run that trained one",
        )
    if weights[_CONV].shape[1] != _RGB:
        raise UserError(
            f"the run was trained on latents of {weights[_CONV].shape[1]} channels, and both formats take pictures",
            hint="export a run of --input pixels",
        )
    return size_of(settings.model, settings.towers)


def _write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    extras: dict[str, torch.Tensor],
    size: DualEncoderSize,
    settings: DualEncoderSettings,
    *,
    form: str,
) -> None:
    if form == "open_clip":
        file = folder / "open_clip_model.safetensors"
        save_tensors(to_open_clip(tensors), file)
        save_json(folder / "open_clip_config.json", open_clip_config(size, settings))
    else:
        file = folder / "model.safetensors"
        save_tensors(to_hf(tensors), file)
        log_scale = float(tensors[LOGIT_SCALE])
        save_json(folder / "config.json", hf_config(size, settings, log_scale=log_scale))
        save_json(folder / "preprocessor_config.json", hf_preprocessor_config(settings))
        write_tokenizer(folder, context_length=size.text.context_length)
    save_extras(extras, folder, beside=file)
