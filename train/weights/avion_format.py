"""Names of AVION's and LaViLa's dual encoders, and what else their weights were trained with.

    ours                  AVION                                          LaViLa (TimeSformer)
    video.*               visual.*                                       visual.*, with timm's names
    video.proj            visual.image_projection, image_projection      image_projection
    text.*                textual.*                                      *
    ...attn.in_proj_*     ...attn.in_proj_*, or attn.Wqkv.*              ...attn.qkv.*
    ...mlp.c_fc, c_proj   ...mlp.c_fc, c_proj, or fc1, fc2               ...mlp.fc1, fc2

AVION has the second names of a block where it was trained with FlashAttention, and a matrix for conv1 where it was
trained with --use-fast-conv1. LaViLa's video tower attends to time and to space in turn; a joint tower has no place for
its `timeattn` and `norm3`, which stay unknown.
"""

import re

import torch

from train.weights.converted import CLIP_STD, LOGIT_SCALE, Converted, Facts, Tensors, convert_names
from train.weights.open_clip_format import NO_WEIGHTS, TEXT_PARTS

# Both projects normalise by (108.3272985, 116.7460125, 104.0937) of 255. The red mean is a slip for CLIP's 122.77, but
# what was trained with it needs it.
MISTYPED_MEAN = (108.3272985 / 255, 116.7460125 / 255, 104.0937 / 255)

AVION_FACTS = Facts(
    activation="gelu",
    video_eps=1e-6,
    text_eps=1e-5,
    mean=MISTYPED_MEAN,
    std=CLIP_STD,
    remarks=(
        "AVION's weights were trained with GELU (CLIP: QuickGELU), layer norms of eps 1e-6 in vision (CLIP: 1e-5), and "
        "a red mean of 108.33 / 255 (CLIP: 122.77 / 255): so are they used here",
    ),
)
LAVILA_FACTS = Facts(
    activation="quick_gelu",
    video_eps=1e-6,
    text_eps=1e-5,
    mean=MISTYPED_MEAN,
    std=CLIP_STD,
    remarks=(
        "LaViLa's weights were trained with QuickGELU, layer norms of eps 1e-6 in vision (CLIP: 1e-5), and a red mean "
        "of 108.33 / 255 (CLIP: 122.77 / 255): so are they used here",
        "LaViLa's video tower attends to time and space in turn (TimeSformer); a joint tower is not the same function",
    ),
)

_FLASH = {
    "attn.Wqkv.weight": "attn.in_proj_weight",
    "attn.Wqkv.bias": "attn.in_proj_bias",
    "mlp.fc1.weight": "mlp.c_fc.weight",
    "mlp.fc1.bias": "mlp.c_fc.bias",
    "mlp.fc2.weight": "mlp.c_proj.weight",
    "mlp.fc2.bias": "mlp.c_proj.bias",
}
_TIMM = {
    "attn.qkv.weight": "attn.in_proj_weight",
    "attn.qkv.bias": "attn.in_proj_bias",
    "attn.proj.weight": "attn.out_proj.weight",
    "attn.proj.bias": "attn.out_proj.bias",
    "mlp.fc1.weight": "mlp.c_fc.weight",
    "mlp.fc1.bias": "mlp.c_fc.bias",
    "mlp.fc2.weight": "mlp.c_proj.weight",
    "mlp.fc2.bias": "mlp.c_proj.bias",
    "norm1.weight": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "norm2.weight": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
}
_LAVILA_VIDEO = {
    "visual.cls_token": "video.class_embedding",
    "visual.pos_embed": "video.positional_embedding",
    "visual.temporal_embed": "video.temporal_embedding",
    "visual.patch_embed.proj.weight": "video.conv1.weight",
    "visual.ln_pre.weight": "video.ln_pre.weight",
    "visual.ln_pre.bias": "video.ln_pre.bias",
    "visual.norm.weight": "video.ln_post.weight",
    "visual.norm.bias": "video.ln_post.bias",
}
_PROJECTIONS = {"image_projection": "video.proj", "visual.image_projection": "video.proj"}
_RESBLOCK = re.compile(r"(visual\.transformer\.resblocks\.\d+)\.(.+)")
_LAVILA_BLOCK = re.compile(r"visual\.blocks\.(\d+)\.(.+)")


def our_name_of_avion(name: str) -> str | None:
    """Our name of a tensor of AVION's CLIP, or None."""
    if name in _PROJECTIONS:
        return _PROJECTIONS[name]
    if name in (LOGIT_SCALE, "text_projection"):
        return {"text_projection": "text.text_projection"}.get(name, name)
    if match := _RESBLOCK.fullmatch(name):
        name = f"{match[1]}.{_FLASH.get(match[2], match[2])}"
    first, _, rest = name.partition(".")
    tower = {"visual": "video", "textual": "text"}.get(first)
    return f"{tower}.{rest}" if tower and rest else None


def our_name_of_lavila(name: str) -> str | None:
    """Our name of a tensor of LaViLa's CLIP, or None."""
    if name == LOGIT_SCALE:
        return name
    if name in _PROJECTIONS or name in _LAVILA_VIDEO:
        return {**_PROJECTIONS, **_LAVILA_VIDEO}[name]
    if match := _LAVILA_BLOCK.fullmatch(name):
        part = _TIMM.get(match[2])
        return f"video.transformer.resblocks.{match[1]}.{part}" if part else None
    return f"text.{name}" if name.partition(".")[0] in TEXT_PARTS else None


def from_avion(state: Tensors) -> Converted:
    """A state dict of AVION's CLIP under our names."""
    return convert_names(
        state, our_name_of_avion, no_weights=NO_WEIGHTS, transforms={"video.conv1.weight": _conv_of_matrix}
    )


def from_lavila(state: Tensors) -> Converted:
    """A state dict of LaViLa's CLIP under our names; what attends to time stays unknown."""
    without_ones = dict.fromkeys(("video.positional_embedding", "video.temporal_embedding"), lambda tensor: tensor[0])
    return convert_names(
        state,
        our_name_of_lavila,
        no_weights=NO_WEIGHTS,
        transforms={"video.class_embedding": torch.flatten, **without_ones},
    )


def _conv_of_matrix(weight: torch.Tensor) -> torch.Tensor:
    """[D, 3 p p], as --use-fast-conv1 has it, to [D, 3, p, p]."""
    if weight.ndim != 2 or weight.shape[1] % 3:
        return weight
    patch_px = round((weight.shape[1] // 3) ** 0.5)
    return weight.unflatten(1, (3, patch_px, patch_px)) if 3 * patch_px**2 == weight.shape[1] else weight
