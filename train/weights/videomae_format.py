"""Names of VideoMAE's own checkpoints, of pre-training and of fine-tuning; VideoMAE V2 has the same.

ours                                    pre-training                    fine-tuning
video.conv1.*                           encoder.patch_embed.proj.*      patch_embed.proj.*
video.transformer.resblocks.N.*         encoder.blocks.N.*              blocks.N.*
video.ln_post.*                         encoder.norm.*                  norm.*
fc_norm.*, head.*                                                       fc_norm.*, head.*
decoder.embed.weight                    encoder_to_decoder.weight
decoder.mask_token, [D]                 mask_token, [1, 1, D]
decoder.transformer.resblocks.N.*       decoder.blocks.N.*
decoder.ln_post.*, decoder.head.*       decoder.norm.*, decoder.head.*

Queries, keys and values share a matrix without bias; those of queries and values are `attn.q_bias` and `attn.v_bias`,
here and there. Positions are fixed, and in no checkpoint. The values of a cube are in the same order (t p p c).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from manifests.errors import UserError
from train.weights.configs import colours
from train.weights.converted import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Converted,
    Facts,
    Tensors,
    Transform,
    convert_names,
)

VIDEOMAE_FACTS = Facts(activation="gelu", video_eps=1e-6, mean=IMAGENET_MEAN, std=IMAGENET_STD)
MASK_TOKEN, CONV = "decoder.mask_token", "video.conv1.weight"

_SINGLE = {
    "video.conv1.weight": "encoder.patch_embed.proj.weight",
    "video.conv1.bias": "encoder.patch_embed.proj.bias",
    "video.ln_post.weight": "encoder.norm.weight",
    "video.ln_post.bias": "encoder.norm.bias",
    "decoder.embed.weight": "encoder_to_decoder.weight",
    MASK_TOKEN: "mask_token",
    "decoder.ln_post.weight": "decoder.norm.weight",
    "decoder.ln_post.bias": "decoder.norm.bias",
    "decoder.head.weight": "decoder.head.weight",
    "decoder.head.bias": "decoder.head.bias",
    "fc_norm.weight": "fc_norm.weight",
    "fc_norm.bias": "fc_norm.bias",
    "head.weight": "head.weight",
    "head.bias": "head.bias",
}
_BLOCK = {
    "ln_1.weight": "norm1.weight",
    "ln_1.bias": "norm1.bias",
    "attn.in_proj_weight": "attn.qkv.weight",
    "attn.q_bias": "attn.q_bias",
    "attn.v_bias": "attn.v_bias",
    "attn.out_proj.weight": "attn.proj.weight",
    "attn.out_proj.bias": "attn.proj.bias",
    "ln_2.weight": "norm2.weight",
    "ln_2.bias": "norm2.bias",
    "mlp.c_fc.weight": "mlp.fc1.weight",
    "mlp.c_fc.bias": "mlp.fc1.bias",
    "mlp.c_proj.weight": "mlp.fc2.weight",
    "mlp.c_proj.bias": "mlp.fc2.bias",
}
_SINGLE_BACK = {theirs: ours for ours, theirs in _SINGLE.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}
_OURS = re.compile(r"(video|decoder)\.transformer\.resblocks\.(\d+)\.(.+)")
_THEIRS = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)")
# What a checkpoint of fine-tuning has without the `encoder.` of pre-training.
_OF_ENCODER = ("patch_embed.", "blocks.", "norm.")


def our_name(name: str) -> str | None:
    """Our name of a tensor of VideoMAE, or None."""
    if name.startswith(_OF_ENCODER):
        name = f"encoder.{name}"
    if match := _THEIRS.fullmatch(name):
        part = _BLOCK_BACK.get(match[3])
        tower = "video" if match[1] == "encoder" else "decoder"
        return f"{tower}.transformer.resblocks.{match[2]}.{part}" if part else None
    return _SINGLE_BACK.get(name)


def from_videomae(state: Tensors) -> Converted:
    """A state dict of VideoMAE under our names."""
    return convert_names(state, our_name, transforms=FROM_VIDEOMAE)


def to_videomae(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Our tensors as a state dict of VideoMAE: of fine-tuning where a classifier's are among them.

    Raises:
        ValueError: a tensor has a name that VideoMAE knows nothing like.
    """
    begin = "" if "head.weight" in tensors else "encoder."
    state = {}
    for name, tensor in tensors.items():
        if match := _OURS.fullmatch(name):
            part = _BLOCK.get(match[3])
            tower = "encoder" if match[1] == "video" else "decoder"
            theirs = f"{tower}.blocks.{match[2]}.{part}" if part else None
        else:
            theirs = _SINGLE.get(name)
        if theirs is None:
            raise ValueError(f"VideoMAE has no place for {name}")
        if theirs.startswith("encoder."):
            theirs = begin + theirs.removeprefix("encoder.")
        state[theirs] = as_videomae(name, tensor)
    return state


def as_videomae(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of our name in the shape that VideoMAE and transformers give it."""
    if name == MASK_TOKEN:
        return tensor[None, None]
    return tensor[:, :, None] if name == CONV and tensor.ndim == 4 else tensor


def _cubes(weight: torch.Tensor) -> torch.Tensor:
    # Cubes of one frame are patches here.
    return weight[:, :, 0] if weight.ndim == 5 and weight.shape[2] == 1 else weight


FROM_VIDEOMAE: Mapping[str, Transform] = {MASK_TOKEN: torch.flatten, CONV: _cubes}


# What the configuration files beside VideoMAE's weights say of them: pure functions of parsed JSON.


HF_EPS = 1e-12  # of VideoMAEConfig
_PUBLIC_EPS = 1e-6
_RGB = 3
# What VideoMAE V2's configurations could turn on, and the towers here do not have.
_V2_EXTRAS = ("init_values", "use_learnable_pos_emb", "cos_attn", "qk_scale")


def facts_of_hf_videomae(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> Facts:
    """Facts from the config.json and preprocessor_config.json of one of transformers' models of VideoMAE.

    Raises:
        UserError: the model computes something that the towers here do not.
    """
    activation = config.get("hidden_act", "gelu")
    if activation not in ("gelu", "quick_gelu"):
        raise UserError(
            f"{source}: the activation is {activation!r}; the towers here have gelu or quick_gelu",
            hint="use the weights of a plain VideoMAE",
        )
    if not config.get("qv_bias", config.get("qkv_bias", True)):
        raise UserError(
            f"{source}: queries and values have no bias (qv_bias), and those of the towers here have one",
            hint="use the weights of a plain VideoMAE",
        )
    remarks = []
    if any("PreTraining" in name for name in config.get("architectures") or ()):
        if config.get("use_mean_pooling", True):
            remarks.append(
                "they were pre-trained without a layer norm behind the encoder (use_mean_pooling); masked autoencoders "
                "and captioners have one, which starts anew with --init.allow 'video.ln_post.*'"
            )
        if not config.get("norm_pix_loss", True):
            remarks.append(
                "they were pre-trained towards pixels as they are (norm_pix_loss is false); a masked autoencoder's "
                "decoder, which has normalised cubes to fill in, has to learn that"
            )
    side = config.get("image_size", 224)
    is_rgb = config.get("num_channels", _RGB) == _RGB
    return Facts(
        activation=activation,
        video_eps=float(config.get("layer_norm_eps", HF_EPS)),
        mean=colours(preprocess.get("image_mean", IMAGENET_MEAN)) if is_rgb else None,
        std=colours(preprocess.get("image_std", IMAGENET_STD)) if is_rgb else None,
        video_heads=config.get("num_attention_heads", 12),
        decoder_heads=config.get("decoder_num_attention_heads", 6),
        picture_px=side if is_rgb and isinstance(side, int) else None,
        remarks=tuple(remarks),
    )


def facts_of_videomae_v2(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> Facts:
    """Facts from the config.json of a model that VideoMAE V2's authors published with code of its own.

    Raises:
        UserError: the model computes something that the towers here do not.
    """
    model = config["model_config"]
    for name in _V2_EXTRAS:
        if model.get(name):
            raise UserError(
                f"{source}: {name} is {model[name]!r}, which the towers here do not have",
                hint="use the weights of a plain VideoMAE",
            )
    return Facts(
        activation="gelu",
        video_eps=float(model.get("layer_norm_eps", _PUBLIC_EPS)),
        mean=colours(preprocess.get("image_mean", IMAGENET_MEAN)),
        std=colours(preprocess.get("image_std", IMAGENET_STD)),
        video_heads=model.get("num_heads"),
    )
