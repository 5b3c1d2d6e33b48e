"""Small VideoMAE models, from clipmill and from transformers, with random weights that differ in every element."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import VideoMAEConfig, VideoMAEForPreTraining, VideoMAEForVideoClassification

from clipmill.train.config.model import Init, Towers
from clipmill.train.models.attention import attend_with_sdpa
from clipmill.train.models.dual_encoder import size_of
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.models.video_vit import VideoViTSize
from clipmill.train.models.videomae import MaskedAutoencoder, predicted_cubes
from clipmill.train.tasks.classify.task import VideoClassifier
from clipmill.train.tasks.mae.task import normalised_cubes, reconstruction_loss
from clipmill.train.weights.conversion import IMAGENET_STD
from clipmill.train.weights.source import Source
from clipmill.train.weights.sources import open_weights
from tests.train.weights.small import shuffle

SIDE, PATCH, FRAMES, CLASSES, DECODER_DEPTH = 16, 8, 4, 5, 2
TRUNK = TransformerSize(width=32, depth=3, num_heads=4, norm_eps=1e-12, has_key_bias=False)
SIZE = VideoViTSize(trunk=TRUNK, patch_px=PATCH, cube_frames=2)
VIDEOMAE = Towers(kind="videomae")
State = dict[str, torch.Tensor]

# Parameter names of transformers, and the names in the authors' checkpoints, from which the documentation of
# transformers converts. The table repeats the product's mapping independently, from one format to the other.
PUBLIC = (
    (r"\.attention\.attention\.query\.weight$", ".attn.qkv.weight"),
    (r"\.attention\.attention\.([qv]_bias)$", r".attn.\1"),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^videomae\.embeddings\.patch_embeddings\.projection\.", "encoder.patch_embed.proj."),
    (r"^videomae\.encoder\.layer\.", "encoder.blocks."),
    (r"^videomae\.layernorm\.", "encoder.norm."),
    (r"^decoder\.decoder_layers\.", "decoder.blocks."),
    (r"^classifier\.", "head."),
)


def hf_config(**changes: Any) -> VideoMAEConfig:
    """Return transformers' configuration for the same sizes; the encoder has a final norm."""
    values: dict[str, Any] = {
        **{"image_size": SIDE, "patch_size": PATCH, "num_frames": FRAMES, "tubelet_size": 2},
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128},
        **{"decoder_hidden_size": 16, "decoder_num_hidden_layers": DECODER_DEPTH, "decoder_num_attention_heads": 2},
        **{"decoder_intermediate_size": 64, "use_mean_pooling": False},
    }
    return VideoMAEConfig(**values | changes)


def hf_autoencoder(**changes: Any) -> Any:
    """Make a VideoMAEForPreTraining with random weights."""
    model = VideoMAEForPreTraining(hf_config(**changes))
    shuffle(model, seed=3)
    return model.eval()


def hf_classifier() -> Any:
    """Make a VideoMAEForVideoClassification with random weights."""
    names = {number: f"class {number}" for number in range(CLASSES)}
    model = VideoMAEForVideoClassification(hf_config(use_mean_pooling=True, id2label=names))
    shuffle(model, seed=4)
    return model.eval()


def our_autoencoder(
    *, size: VideoViTSize = SIZE, decoder_depth: int = DECODER_DEPTH, image_px: int = SIDE, num_frames: int = FRAMES
) -> MaskedAutoencoder:
    """Make a small MaskedAutoencoder with random weights."""
    model = MaskedAutoencoder(
        size,
        decoder_depth=decoder_depth,
        image_px=image_px,
        num_frames=num_frames,
        attend=attend_with_sdpa,
        towers=VIDEOMAE,
    )
    shuffle(model, seed=7)
    return model.eval()


def our_classifier(*, size: VideoViTSize = SIZE, num_classes: int = CLASSES, image_px: int = SIDE) -> Any:
    """Make a small VideoClassifier with a videomae tower and random weights."""
    model = VideoClassifier(
        size,
        towers=VIDEOMAE,
        image_px=image_px,
        num_frames=FRAMES,
        num_classes=num_classes,
        dropout=0.0,
        attend=attend_with_sdpa,
    )
    shuffle(model, seed=8)
    return model.eval()


def tiny_size(norm_eps: float) -> VideoViTSize:
    """Return the size of the tower of `--model tiny`."""
    return size_of("tiny", replace(VIDEOMAE, video_norm_eps=norm_eps)).video


def clips(*, side: int = SIDE, num_frames: int = FRAMES, channels: int = 3) -> torch.Tensor:
    """Return two random clips [2, C, T, H, W] in float64."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, channels, num_frames, side, side, generator=generator, dtype=torch.float64)


def mask(num_cubes: int) -> torch.Tensor:
    """Return the mask of hidden cubes for two clips, [2, N].

    Half of the cubes are hidden, different ones in each clip.
    """
    hidden = torch.zeros(2, num_cubes, dtype=torch.bool)
    hidden[0, ::2] = hidden[1, num_cubes // 2 :] = True
    return hidden


def open_source(path: Path, **init: Any) -> Source:
    """Open the weights in a file or folder."""
    source = open_weights(Init(weights=str(path), **init))
    assert source is not None
    return source


@torch.no_grad()
def assert_same_reconstruction(ours: MaskedAutoencoder, theirs: Any, video_BCTHW: torch.Tensor) -> None:
    """Assert that both models make the same prediction in float64 and compute the same loss."""
    ours, theirs = ours.double(), theirs.eval().double()
    cube_frames, patch_px = ours.video.size.cube_frames, ours.video.size.patch_px
    masked_BN = mask(ours.video.grid.cubes)
    seen = theirs(video_BCTHW.transpose(1, 2), bool_masked_pos=masked_BN)
    predicted = ours(video_BCTHW, masked_BN)
    torch.testing.assert_close(predicted, seen.logits, rtol=1e-10, atol=1e-10)
    targets = normalised_cubes(
        video_BCTHW,
        predicted_cubes(masked_BN),
        cube_frames=cube_frames,
        patch_px=patch_px,
        std=IMAGENET_STD if video_BCTHW.shape[1] == 3 else None,
    )
    loss = reconstruction_loss(predicted, targets)
    torch.testing.assert_close(loss, seen.loss, rtol=1e-10, atol=1e-10)


def public(state: State) -> State:
    """Rename the tensors of a file to the authors' names."""
    renamed = {}
    for name, tensor in state.items():
        if name.endswith((".key.weight", ".value.weight")):
            continue
        if name.endswith(".query.weight"):
            begin = name.removesuffix("query.weight")
            tensor = torch.cat([state[f"{begin}{part}.weight"] for part in ("query", "key", "value")])
        for pattern, theirs in PUBLIC:
            name = re.sub(pattern, theirs, name)
        renamed[name] = tensor
    if "head.weight" in renamed:
        renamed = {name.removeprefix("encoder."): tensor for name, tensor in renamed.items()}
    return renamed
