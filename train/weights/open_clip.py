"""Names, configuration and pretrained tags of CLIP weights from open_clip, OpenAI, AVION and LaViLa.

ours                 open_clip, OpenAI       open_clip's CustomTextCLIP
video.*              visual.*                visual.*
text.*               *                       text.*
logit_scale          logit_scale             logit_scale
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.model import DualEncoderTowers, Init
from clipmill.train.models.dual_encoder import DualEncoderSize
from clipmill.train.models.transformer import NORM_EPS
from clipmill.train.weights.conversion import (
    CLIP_MEAN,
    CLIP_STD,
    CONV,
    LOGIT_SCALE,
    TEMPORAL_EMBEDDING,
    Format,
    NameTable,
    SourceFacts,
    Tensors,
    any_starts_with,
)
from clipmill.train.weights.files import rgb_values

_TEXT_PARTS = ("positional_embedding", "token_embedding", "transformer", "ln_final", "text_projection")
# In open_clip's CLIP, the text tower's parts have no prefix.
TEXT_ROOTS = {part: f"text.{part}" for part in _TEXT_PARTS} | {LOGIT_SCALE: LOGIT_SCALE}
# Names of sizes that OpenAI's archives store as tensors.
_OPENAI_SIZES = frozenset({"input_resolution", "context_length", "vocab_size"})
# Names of these sizes, and of masks that old versions of open_clip stored.
BUFFERS = (*_OPENAI_SIZES, "attn_mask")

NAMES = NameTable(owner="CLIP", roots={"visual": "video", "text": "text", **TEXT_ROOTS}, ignored=BUFFERS)
from_open_clip = NAMES.read


def to_open_clip(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return our tensors as a state dict for open_clip's CLIP, without the temporal embedding."""
    roots = {"video.": "visual.", "text.": ""}
    state = {}
    for name, tensor in tensors.items():
        root = next((root for root in roots if name.startswith(root)), "")
        if name != TEMPORAL_EMBEDDING:
            state[f"{roots.get(root, '')}{name.removeprefix(root)}"] = tensor
    return state


# Fields of CLIPVisionCfg and CLIPTextCfg that follow from tensor shapes, or that do not change what a tower computes.
_UNCHECKED_FIELDS = frozenset(
    {
        *("image_size", "layers", "width", "head_width", "heads", "mlp_ratio", "patch_size", "patch_dropout"),
        *("norm_kwargs", "output_tokens", "context_length", "vocab_size", "hf_tokenizer_name"),
        *("tokenizer_kwargs", "pad_id", "eos_id"),
    }
)
_POOLING = frozenset({"pool_type", "proj_type"})


def facts_of_open_clip(model: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Return facts from `model_cfg` and `preprocess_cfg` in open_clip_config.json, or from the entry for a tag.

    Raises:
        UserError: The model uses a feature that our towers lack.
    """
    from open_clip import CLIPTextCfg, CLIPVisionCfg

    towers = {}
    for part, config_class in (("vision_cfg", CLIPVisionCfg), ("text_cfg", CLIPTextCfg)):
        defaults, values = {field.name: field.default for field in fields(config_class)}, model.get(part) or {}
        for name, value in values.items():
            is_plain = value == defaults.get(name) or (not value and name not in _POOLING)
            # In a ResNet, `layers` is a list.
            if not is_plain and (name not in _UNCHECKED_FIELDS or isinstance(value, list)):
                raise UserError(
                    f"{source}: {part}.{name} is {value!r}, which clipmill's towers do not support",
                    hint="use open_clip's own towers (--towers.image open_clip:NAME and --towers.text), or the weights "
                    "of a plain CLIP with a vision Transformer (ViT)",
                )
        towers[part] = {**defaults, **values}
    vision, text = towers["vision_cfg"], towers["text_cfg"]
    is_quick = bool(preprocess.get("quick_gelu", model.get("quick_gelu", False)))
    return SourceFacts(
        activation="quick_gelu" if is_quick else "gelu",
        video_eps=_eps(vision),
        text_eps=_eps(text),
        mean=rgb_values(preprocess.get("mean")),
        std=rgb_values(preprocess.get("std")),
        video_heads=vision["width"] // vision["head_width"],
        text_heads=text["heads"],
        video_depth=vision["layers"] if isinstance(vision["layers"], int) else None,
        text_depth=text["layers"],
    )


def _eps(tower: Mapping[str, Any]) -> float:
    return float((tower["norm_kwargs"] or {}).get("eps", NORM_EPS))


def open_clip_config(size: DualEncoderSize, init: Init, *, image_px: int) -> dict[str, Any]:
    """Return the content of open_clip_config.json for a CLIP that takes single frames.

    `mlp_ratio` and `norm_kwargs` are omitted if they have the default value, because some versions of open_clip do not
    know them.
    """
    video, text = size.video.trunk, size.text.trunk
    norm = {} if video.norm_eps == NORM_EPS else {"norm_kwargs": {"eps": video.norm_eps}}
    return {
        "model_cfg": {
            "embed_dim": size.embedding_width,
            "quick_gelu": video.activation == "quick_gelu",
            "vision_cfg": {
                "image_size": image_px,
                "layers": video.depth,
                "width": video.width,
                "head_width": video.width // video.num_heads,
                **({} if video.mlp_ratio == 4 else {"mlp_ratio": video.mlp_ratio}),
                "patch_size": size.video.patch_px,
                **norm,
            },
            "text_cfg": {
                "context_length": size.text.context_length,
                "vocab_size": size.text.vocabulary_size,
                "width": text.width,
                "heads": text.num_heads,
                "layers": text.depth,
            },
        },
        "preprocess_cfg": {"mean": list(init.pixel_mean or CLIP_MEAN), "std": list(init.pixel_std or CLIP_STD)},
    }


def file_of_tag(
    name: str, tag: str, *, read_facts: Callable[[Mapping[str, Any]], SourceFacts] | None = None
) -> tuple[Path, SourceFacts]:
    """Return the file with open_clip's pretrained weights, and facts about them. Download the file unless it is cached.

    Args:
        name: Name of the model in open_clip.
        tag: Tag of the weights in open_clip.
        read_facts: Function that takes open_clip's entry for the tag and returns facts. It is required for a model that
            open_clip itself builds, because our towers may not support its configuration.

    Raises:
        UserError: open_clip does not know the weights, or cannot download them.
    """
    import open_clip
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg, list_pretrained_tags_by_model

    from clipmill.manifests.hub import hub_if_reachable

    entry, model = get_pretrained_cfg(name, tag), open_clip.get_model_config(name)
    if not entry or model is None:
        tags = list_pretrained_tags_by_model(name)
        raise UserError(
            f"there is no file {name}:{tag}, and open_clip has no weights with this name and tag",
            hint=f"use one of the tags of {name}: {', '.join(tags)}"
            if tags
            else "use a name and tag that open_clip.list_pretrained() returns",
        )
    facts = facts_of_open_clip(model, entry, source=f"{name}:{tag}") if read_facts is None else read_facts(entry)
    try:
        with hub_if_reachable():
            return Path(download_pretrained(entry)), facts
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{name}:{tag} is not in the cache and cannot be downloaded: {str(error).splitlines()[0]}",
            hint="check the network, fill the cache with open_clip.create_model on a machine with network access, or "
            "use a file",
        ) from error


def named_towers(name: str, tag: str) -> DualEncoderTowers | None:
    """Return the towers that open_clip must build for pretrained weights.

    Return None if our towers fit the weights, or if open_clip does not know the name and tag.
    """
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    entry, model = get_pretrained_cfg(name, tag), open_clip.get_model_config(name)
    if not entry or model is None:
        return None
    try:
        facts_of_open_clip(model, entry, source=f"{name}:{tag}")
    except UserError:
        # The model's default configuration specifies GELU, even if the weights were trained with QuickGELU.
        quick_name = f"{name}-quickgelu"
        model_name = quick_name if entry.get("quick_gelu") and open_clip.get_model_config(quick_name) else name
        return DualEncoderTowers(image=f"open_clip:{model_name}", text=f"open_clip:{model_name}")
    return None


_OTHER_TOWERS = {
    "visual.layer1.": "a ResNet",
    "visual.trunk.": "a timm tower",
    "text.transformer.encoder.": "a BERT",
}


def _is_open_clip(names: frozenset[str]) -> bool:
    for prefix, kind in _OTHER_TOWERS.items():
        if any_starts_with(names, prefix):
            raise UserError(
                f"the weights contain {kind} (tensors {prefix}*), but clipmill's towers are CLIP's Transformers",
                hint="use the weights of a CLIP with a vision Transformer (ViT)",
            )
    return any_starts_with(names, "visual.conv1.", "transformer.resblocks.", "text.transformer.resblocks.")


OPEN_CLIP = Format(name="open_clip", title="open_clip", convert=from_open_clip, matches=_is_open_clip)
OPENAI = Format(
    name="openai",
    title="OpenAI's CLIP",
    convert=from_open_clip,
    matches=lambda names: _is_open_clip(names) and names >= _OPENAI_SIZES,
    facts=SourceFacts(activation="quick_gelu", video_eps=NORM_EPS, text_eps=NORM_EPS, mean=CLIP_MEAN, std=CLIP_STD),
)


# Names in AVION's and LaViLa's dual encoders, and facts about their training. Both projects normalise with a mean of
# (108.3272985, 116.7460125, 104.0937) / 255. The value for red is a mistake (CLIP: 122.77), but weights that were
# trained with this value need it.
#
#     ours                  AVION                                          LaViLa (TimeSformer)
#     video.*               visual.*                                       visual.*, with timm's names
#     video.proj            visual.image_projection, image_projection      image_projection
#     text.*                textual.*                                      *
#
# AVION's blocks have different names after training with FlashAttention (`attn.Wqkv`, `mlp.fc1`), and `conv1` is a
# matrix after training with --use-fast-conv1. LaViLa's video tower attends to time and space in turn
# (`clipmill.train.models.space_time`, --towers.attention divided). A tower with joint attention has no parameters
# for LaViLa's `timeattn` and `norm3`.

MISTYPED_MEAN = (108.3272985 / 255, 116.7460125 / 255, 104.0937 / 255)

_PROJECTIONS = {"image_projection": "video.proj", "visual.image_projection": "video.proj"}
_OUR_BLOCK, _AVION_BLOCK = "video.transformer.resblocks.N", "visual.transformer.resblocks.N"


def _reshape_conv(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Reshape the convolution that AVION trains with --use-fast-conv1 from a matrix [D, 3 p p] to [D, 3, p, p]."""
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
    to_ours=_reshape_conv,
)


def _drop_leading_dimensions(name: str, tensor: torch.Tensor) -> torch.Tensor:
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
    to_ours=_drop_leading_dimensions,
)

AVION = Format(
    name="avion",
    title="AVION",
    convert=_AVION_NAMES.read,
    matches=lambda names: any_starts_with(names, "textual.") and any_starts_with(names, "visual."),
    facts=SourceFacts(
        activation="gelu",
        video_eps=1e-6,
        text_eps=1e-5,
        mean=MISTYPED_MEAN,
        std=CLIP_STD,
        remarks=(
            "AVION's weights were trained with GELU (CLIP: QuickGELU), a layer norm eps of 1e-6 in the video tower "
            "(CLIP: 1e-5), and a mean of 108.33 / 255 for red (CLIP: 122.77 / 255); clipmill uses AVION's values",
        ),
    ),
)
LAVILA = Format(
    name="lavila",
    title="LaViLa",
    convert=_LAVILA_NAMES.read,
    matches=lambda names: any_starts_with(names, "visual.blocks.", "visual.patch_embed."),
    facts=SourceFacts(
        activation="quick_gelu",
        video_eps=1e-6,
        text_eps=1e-5,
        mean=MISTYPED_MEAN,
        std=CLIP_STD,
        remarks=(
            "LaViLa's weights were trained with QuickGELU, a layer norm eps of 1e-6 in the video tower (CLIP: 1e-5), "
            "and a mean of 108.33 / 255 for red (CLIP: 122.77 / 255); clipmill uses LaViLa's values",
            "LaViLa's video tower has divided attention over time and space (--towers.attention divided)",
        ),
    ),
)
