"""AVION's and LaViLa's dual encoders: names, and what else their weights were trained with.

    ours                  AVION                                          LaViLa (TimeSformer)
    video.*               visual.*                                       visual.*, with timm's names
    video.proj            visual.image_projection, image_projection      image_projection
    text.*                textual.*                                      *

AVION has other names in a block after training with FlashAttention (`attn.Wqkv`, `mlp.fc1`), and a matrix for conv1
after training with --use-fast-conv1. LaViLa's video tower attends to time and to space in turn
(`clipmill.train.models.space_time`, --towers.attention divided); a tower with joint attention has no parameter for its
`timeattn` and `norm3`.
"""

import torch

from clipmill.train.weights.conversion import CLIP_STD, CONV, LOGIT_SCALE, Format, NameTable, SourceFacts, any_begins
from clipmill.train.weights.open_clip import BUFFERS, TEXT_ROOTS

# Both projects normalise by (108.3272985, 116.7460125, 104.0937) of 255. The red mean is a slip for CLIP's 122.77, but
# what was trained with it needs it.
MISTYPED_MEAN = (108.3272985 / 255, 116.7460125 / 255, 104.0937 / 255)

_PROJECTIONS = {"image_projection": "video.proj", "visual.image_projection": "video.proj"}
_OUR_BLOCK, _AVION_BLOCK = "video.transformer.resblocks.N", "visual.transformer.resblocks.N"


def _conv_of_matrix(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[D, 3 p p], as --use-fast-conv1 has it, to [D, 3, p, p]."""
    if name != CONV or tensor.ndim != 2 or tensor.shape[1] % 3:
        return tensor
    patch_px = round((tensor.shape[1] // 3) ** 0.5)
    return tensor.unflatten(1, (3, patch_px, patch_px)) if 3 * patch_px**2 == tensor.shape[1] else tensor


_AVION_NAMES = NameTable(
    owner="AVION's CLIP",
    aliases={
        **_PROJECTIONS,
        "text_projection": "text.text_projection",
        f"{_AVION_BLOCK}.attn.Wqkv.*": f"{_OUR_BLOCK}.attn.in_proj_*",
        f"{_AVION_BLOCK}.mlp.fc1.*": f"{_OUR_BLOCK}.mlp.c_fc.*",
        f"{_AVION_BLOCK}.mlp.fc2.*": f"{_OUR_BLOCK}.mlp.c_proj.*",
    },
    roots={"visual": "video", "textual": "text", LOGIT_SCALE: LOGIT_SCALE},
    ignored=BUFFERS,
    to_ours=_conv_of_matrix,
)


def _without_leading_ones(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name == "video.class_embedding":
        return tensor.flatten()
    return tensor[0] if name in ("video.positional_embedding", "video.temporal_embedding") else tensor


_LAVILA_NAMES = NameTable(
    owner="LaViLa's CLIP",
    aliases={
        **_PROJECTIONS,
        "visual.cls_token": "video.class_embedding",
        "visual.pos_embed": "video.positional_embedding",
        "visual.temporal_embed": "video.temporal_embedding",
        "visual.patch_embed.proj.weight": CONV,
        "visual.ln_pre.*": "video.ln_pre.*",
        "visual.norm.*": "video.ln_post.*",
        "visual.blocks.N.attn.qkv.*": f"{_OUR_BLOCK}.attn.in_proj_*",
        "visual.blocks.N.attn.proj.*": f"{_OUR_BLOCK}.attn.out_proj.*",
        "visual.blocks.N.mlp.fc1.*": f"{_OUR_BLOCK}.mlp.c_fc.*",
        "visual.blocks.N.mlp.fc2.*": f"{_OUR_BLOCK}.mlp.c_proj.*",
        "visual.blocks.N.timeattn.qkv.*": f"{_OUR_BLOCK}.temporal_attn.in_proj_*",
        "visual.blocks.N.timeattn.proj.*": f"{_OUR_BLOCK}.temporal_attn.out_proj.*",
        "visual.blocks.N.norm3.*": f"{_OUR_BLOCK}.ln_temporal.*",
        "visual.blocks.N.norm1.*": f"{_OUR_BLOCK}.ln_1.*",
        "visual.blocks.N.norm2.*": f"{_OUR_BLOCK}.ln_2.*",
    },
    roots=TEXT_ROOTS,
    ignored=BUFFERS,
    to_ours=_without_leading_ones,
)

AVION = Format(
    name="avion",
    title="AVION",
    convert=_AVION_NAMES.read,
    matches=lambda names: any_begins(names, "textual.") and any_begins(names, "visual."),
    facts=SourceFacts(
        activation="gelu",
        video_eps=1e-6,
        text_eps=1e-5,
        mean=MISTYPED_MEAN,
        std=CLIP_STD,
        remarks=(
            "AVION's weights were trained with GELU (CLIP: QuickGELU), a layer norm eps of 1e-6 in vision (CLIP: "
            "1e-5), and a red mean of 108.33 / 255 (CLIP: 122.77 / 255); these values are used here too",
        ),
    ),
)
LAVILA = Format(
    name="lavila",
    title="LaViLa",
    convert=_LAVILA_NAMES.read,
    matches=lambda names: any_begins(names, "visual.blocks.", "visual.patch_embed."),
    facts=SourceFacts(
        activation="quick_gelu",
        video_eps=1e-6,
        text_eps=1e-5,
        mean=MISTYPED_MEAN,
        std=CLIP_STD,
        remarks=(
            "LaViLa's weights were trained with QuickGELU, a layer norm eps of 1e-6 in vision (CLIP: 1e-5), and a red "
            "mean of 108.33 / 255 (CLIP: 122.77 / 255); these values are used here too",
            "LaViLa's video tower has divided attention over time and space (--towers.attention divided)",
        ),
    ),
)
