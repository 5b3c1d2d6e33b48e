"""A video tower with one linear layer behind it.

Shape suffixes: B batch, C channels, T frames, H and W pixels, D width, K classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from train.config.model import Towers, kind_of
from train.models.attention import Attend
from train.models.transformer import LayerNorm, checkpoint_blocks, drop_path_of
from train.models.video_vit import VideoViT, VideoViTSize
from train.models.videomae import VideoMAEEncoder
from train.weights.conversion import LOGIT_SCALE
from train.weights.loading import Loaded, fit_to
from train.weights.sources import Say, Source

# Of the last layer at the start: AVION's; VideoMAE's 0.02 times its init_scale of 0.001.
_HEAD_STD = {"clip": 0.01, "videomae": 2e-5}


class VideoClassifier(nn.Module):
    """Logits of clips: a vector a clip through dropout and a linear layer, which starts small and without bias.

    The vector is a CLIP tower's class token, without CLIP's projection, or the mean of all tokens of a videomae tower
    through a layer norm of its own (in place of the tower's last one, as VideoMAE fine-tunes).

    Parameters are named as where the towers were trained, `video.*`, and `fc_norm.*`, `head.*`.

    Args:
        size: of the tower, of the kind that `towers` says.
    """

    video: VideoViT | VideoMAEEncoder

    def __init__(
        self,
        size: VideoViTSize,
        *,
        towers: Towers,
        image_px: int,
        num_frames: int,
        num_classes: int,
        dropout: float,
        attend: Attend,
    ) -> None:
        super().__init__()
        trunk, kind = size.trunk, kind_of(towers)
        drop_path = drop_path_of(towers.drop_path, depth=trunk.depth, is_rising=towers.drop_path_rule == "rising")
        self.fc_norm = None
        if kind == "videomae":
            self.video = VideoMAEEncoder(
                size,
                image_px=image_px,
                num_frames=num_frames,
                attend=attend,
                has_last_norm=False,
                drop_path=drop_path,
            )
            self.fc_norm = LayerNorm(trunk.width)
        else:
            self.video = VideoViT(
                size,
                image_px=image_px,
                num_frames=num_frames,
                embedding_width=None,
                attend=attend,
                temporal_std=trunk.width**-0.5 if towers.temporal == "random" else 0.0,
                patch_dropout=towers.patch_dropout,
                drop_path=drop_path,
            )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(trunk.width, num_classes)
        nn.init.normal_(self.head.weight, std=_HEAD_STD[kind])
        nn.init.zeros_(self.head.bias)
        if towers.activation_checkpointing:
            checkpoint_blocks(self)

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of normalised clips [B, C, T, H, W]."""
        logits_BK: torch.Tensor = self.head(self.dropout(self.features(video_BCTHW)))
        return logits_BK

    def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """What the last layer sees of clips, [B, D]."""
        if isinstance(self.video, VideoMAEEncoder):
            assert self.fc_norm is not None
            features_BD: torch.Tensor = self.fc_norm(self.video.features(video_BCTHW))
            return features_BD
        class_BD: torch.Tensor = self.video(video_BCTHW)
        return class_BD


# The weights that a classifier starts from: those of a video tower, whoever trained it and for what.


_HEAD = "head."
_FEATURE_NORM = "fc_norm."
# What a classifier has no use for, by how the names begin, and in which words that is said.
_OTHER_PARTS = {
    "text.": "the text tower",
    _HEAD: "another classifier's last layer (head)",
    "video.proj": "the projection (video.proj)",
    LOGIT_SCALE: "the temperature (logit_scale)",
    "decoder.": "the decoder and its mask token (decoder)",
}
_LAST_NORM = {"video.ln_post.": "the encoder's last norm (video.ln_post), in whose place is a new one of their mean"}


def start_of_classifier(model: VideoClassifier, source: Source, *, allow: Sequence[str], say: Say) -> Loaded:
    """Fits the video tower of `source` to a classifier, which may be on the meta device.

    Left aside are the text tower, the projection into the space of both, a decoder, another classifier's last layer,
    and the last norm of a masked autoencoder's encoder. The norm of another classifier's features is taken.

    Raises:
        UserError: the tower does not fit.
    """
    tensors = source.converted.tensors
    wanted = _tower_of(model, tensors)
    parts = dict(_OTHER_PARTS)
    if not any(name.startswith("video.ln_post.") for name in wanted.state_dict()):
        parts |= _LAST_NORM
    aside = {name: begin for name in tensors for begin in parts if name.startswith(begin)}
    if aside:
        said = ", ".join(words for begin, words in parts.items() if begin in aside.values())
        say(f"weights: left aside, as a classifier has no use for them: {said}")
    kept = {name: tensor for name, tensor in tensors.items() if name not in aside}
    return fit_to(wanted, replace(source, converted=replace(source.converted, tensors=kept)), allow=allow, say=say)


def _tower_of(model: VideoClassifier, names: Iterable[str]) -> nn.Module:
    """The parts of a classifier that are asked of weights with these names."""
    wanted = nn.Module()
    wanted.video = model.video
    norm = getattr(model, "fc_norm", None)
    if norm is not None and any(name.startswith(_FEATURE_NORM) for name in names):
        wanted.fc_norm = norm
    return wanted
