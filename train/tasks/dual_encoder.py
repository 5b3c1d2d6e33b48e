"""Contrastive training of clips and captions (CLIP's recipe on video, as AVION's)."""

from typing import cast

import torch
from torch import nn

from train.data.batch import Batch
from train.data.video_captions import ClipShape, VideoCaptions
from train.losses.infonce import info_nce
from train.models.attention import AttentionDoor
from train.models.dual_encoder import SIZES, DualEncoder
from train.models.text import load_tokenizer
from train.settings import DualEncoderSettings

# Means and deviations of CLIP's training images, by colour.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


class DualEncoderTask:
    """The task of `train dual-encoder`."""

    name = "dual-encoder"
    columns: tuple[str, ...] = ("video",)

    def __init__(self, settings: DualEncoderSettings, *, door: AttentionDoor) -> None:
        self._settings = settings
        self._door = door

    def training_set(self) -> VideoCaptions:
        """Clips and captions of the split that the settings name."""
        return self.samples(self._settings.split)

    def samples(self, split: str) -> VideoCaptions:
        """Clips and captions of any split."""
        settings = self._settings
        shape = ClipShape(
            num_frames=settings.num_frames, size_px=settings.size_px, min_crop_area=settings.min_crop_area
        )
        return VideoCaptions(settings.shards, split=split, shape=shape, tokenize=load_tokenizer())

    def build_model(self) -> DualEncoder:
        """The two towers in the size that the settings name."""
        settings = self._settings
        return DualEncoder(
            SIZES[settings.model],
            image_px=settings.size_px,
            num_frames=settings.num_frames,
            attend=self._door.attend,
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """InfoNCE of the batch, with the temperature and the share of clips that find their own caption."""
        towers = cast(DualEncoder, model)
        video_BE, text_BE = towers(normalised(batch["video"]), batch["tokens"])
        loss = info_nce(video_BE, text_BE, log_scale=towers.logit_scale)
        with torch.no_grad():
            found_B = (video_BE @ text_BE.T).argmax(dim=1)
            # Equal captions have equal embeddings, and any of them is right.
            right = (batch["tokens"][found_B] == batch["tokens"]).all(dim=1).float().mean()
            temperature = (-towers.logit_scale).exp()
        return loss, {"batch_accuracy": right.item(), "temperature": temperature.item()}

    def after_step(self, model: nn.Module) -> None:
        """Keeps the temperature at or above 0.01."""
        cast(DualEncoder, model).clamp_scale()


def normalised(video_BTHWC: torch.Tensor) -> torch.Tensor:
    """uint8 clips [B, T, H, W, 3] as the towers want them: float32 [B, 3, T, H, W], CLIP's mean and deviation."""
    mean, std = (torch.tensor(values, device=video_BTHWC.device) for values in (_MEAN, _STD))
    return ((video_BTHWC.float() / 255 - mean) / std).permute(0, 4, 1, 2, 3)
