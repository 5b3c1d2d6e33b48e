"""A video tower followed by one linear layer, and the weights that it is initialised from.

Shape suffixes: B batch, C channels, T frames, H and W pixels, D width, K classes.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from clipmill.train.config.model import LIBRARY, Towers, kind_of
from clipmill.train.engine.task import UNUSED_PARTS, without_parts
from clipmill.train.models.attention import Attend
from clipmill.train.models.library_towers import LibraryImage, image_tower
from clipmill.train.models.transformer import LayerNorm, checkpoint_blocks, drop_path_of
from clipmill.train.models.video_vit import VideoViT, VideoViTSize, clip_tower
from clipmill.train.models.videomae import VideoMAEEncoder
from clipmill.train.weights.loading import Loaded, fit_to
from clipmill.train.weights.source import Say, Source

_FEATURE_NORM = "fc_norm."
# Of the last layer's initial weights: AVION's; VideoMAE's 0.02 times its init_scale of 0.001.
_HEAD_STD = {"clip": 0.01, "videomae": 2e-5, LIBRARY: 0.01}


class VideoClassifier(nn.Module):
    """Logits of clips: one feature vector per clip, dropout and a linear layer with small initial weights.

    The feature vector is the class token of a CLIP tower, without CLIP's projection, a library's embedding, or the mean
    of all tokens of a videomae tower, through a layer norm that replaces the tower's last one (as in VideoMAE's
    fine-tuning).

    Parameters keep the names `video.*` of other tasks' towers; `fc_norm.*` and `head.*` are the classifier's.

    Args:
        size: of the tower, whose kind `towers` has.
    """

    video: VideoViT | VideoMAEEncoder | LibraryImage

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
        self.fc_norm, width = None, trunk.width
        if kind == "videomae":
            drop_path = drop_path_of(towers.drop_path, depth=trunk.depth, is_rising=towers.drop_path_rule == "rising")
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
            build = clip_tower if kind == "clip" else image_tower
            self.video = build(
                size, image_px=image_px, num_frames=num_frames, embedding_width=None, attend=attend, towers=towers
            )
            width = getattr(self.video, "feature_width", width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.head.weight, std=_HEAD_STD[kind])
        nn.init.zeros_(self.head.bias)
        if towers.activation_checkpointing:
            checkpoint_blocks(self)

    def forward(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of normalised clips [B, C, T, H, W]."""
        logits_BK: torch.Tensor = self.head(self.dropout(self.features(video_BCTHW)))
        return logits_BK

    def features(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        """Input of the last layer, [B, D]."""
        if isinstance(self.video, VideoMAEEncoder):
            assert self.fc_norm is not None
            features_BD: torch.Tensor = self.fc_norm(self.video.features(video_BCTHW))
            return features_BD
        class_BD: torch.Tensor = self.video(video_BCTHW)
        return class_BD


def start_of_classifier(model: VideoClassifier, source: Source, *, allow: Sequence[str], say: Say) -> Loaded:
    """Fit the video tower of `source` to a classifier, which may be on the meta device.

    Not used are the text tower, CLIP's projection, a decoder, another classifier's last layer, and the last norm of a
    masked autoencoder's encoder. The norm of another classifier's features is used.

    Raises:
        UserError: the tower does not fit.
    """
    wanted = _tower_of(model, source.converted.tensors)
    parts = dict(UNUSED_PARTS)
    if not any(name.startswith("video.ln_post.") for name in wanted.state_dict()):
        parts["video.ln_post."] = "the encoder's last norm (video.ln_post), which a new norm of their mean replaces"
    return fit_to(wanted, without_parts(source, parts, model="a classifier", say=say), allow=allow, say=say)


def _tower_of(model: VideoClassifier, names: Iterable[str]) -> nn.Module:
    """The parts of a classifier that are initialised from weights with these names."""
    wanted = nn.Module()
    wanted.video = model.video
    norm = getattr(model, "fc_norm", None)
    if norm is not None and any(name.startswith(_FEATURE_NORM) for name in names):
        wanted.fc_norm = norm
    return wanted
