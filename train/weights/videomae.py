"""Names and configuration of VideoMAE's own checkpoints (pre-trained and fine-tuned) and of Hugging Face's models.

VideoMAE V2 uses the same names as VideoMAE. In fine-tuned checkpoints, encoder names lack the prefix `encoder.`.
Queries, keys and values share a matrix without bias; the biases of queries and values are `attn.q_bias` and
`attn.v_bias`, as in our tower. Positional embeddings are fixed, so checkpoints do not contain them. The values
of a predicted cube are in the same order as in our decoder (t p p c).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.config.model import Init
from clipmill.train.models.dual_encoder import ModelShape
from clipmill.train.models.transformer import TransformerSize
from clipmill.train.weights.conversion import (
    CONV,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Format,
    NameTable,
    SourceFacts,
    Tensors,
    any_starts_with,
)
from clipmill.train.weights.exported import Export, preprocessor_config, save_json, save_tensors
from clipmill.train.weights.files import as_config, rgb_values

CHECKPOINT_FILE = "checkpoint.pth"
# Tensors that VideoMAE lacks. They identify other vision transformers whose remaining names are the same.
CLASS_TOKENS = ("cls_token", "embeddings.cls_token")
_MASK_TOKEN = "decoder.mask_token"
_EPS, _RGB, _IMAGE_DIMS, _CUBE_DIMS = 1e-6, 3, 4, 5
_BLOCK = {
    "ln_1.*": "norm1.*",
    "attn.in_proj_weight": "attn.qkv.weight",
    "attn.q_bias": "attn.q_bias",
    "attn.v_bias": "attn.v_bias",
    "attn.out_proj.*": "attn.proj.*",
    "ln_2.*": "norm2.*",
    "mlp.c_fc.*": "mlp.fc1.*",
    "mlp.c_proj.*": "mlp.fc2.*",
}
# Names that VideoMAE and transformers share.
SHARED_NAMES = {
    "decoder.embed.weight": "encoder_to_decoder.weight",
    _MASK_TOKEN: "mask_token",
    "decoder.ln_post.*": "decoder.norm.*",
    "decoder.head.*": "decoder.head.*",
    "fc_norm.*": "fc_norm.*",
}


def to_our_layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Flatten the mask token [1, 1, D] to [D], and drop the time dimension of cubes of a single frame."""
    if name == _MASK_TOKEN:
        return tensor.flatten()
    return tensor[:, :, 0] if name == CONV and tensor.ndim == _CUBE_DIMS and tensor.shape[2] == 1 else tensor


def to_their_layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Reshape the mask token [D] to [1, 1, D], and add a time dimension to patches."""
    if name == _MASK_TOKEN:
        return tensor[None, None]
    return tensor[:, :, None] if name == CONV and tensor.ndim == _IMAGE_DIMS else tensor


NAMES = NameTable(
    owner="VideoMAE",
    names={
        "video.conv1.*": "encoder.patch_embed.proj.*",
        **{f"video.transformer.resblocks.N.{ours}": f"encoder.blocks.N.{theirs}" for ours, theirs in _BLOCK.items()},
        "video.ln_post.*": "encoder.norm.*",
        **{f"decoder.transformer.resblocks.N.{ours}": f"decoder.blocks.N.{theirs}" for ours, theirs in _BLOCK.items()},
        **SHARED_NAMES,
        "head.*": "head.*",
    },
    canonical=lambda name: f"encoder.{name}" if name.startswith(("patch_embed.", "blocks.", "norm.")) else name,
    to_ours=to_our_layout,
    to_theirs=to_their_layout,
)
from_videomae = NAMES.read


def to_videomae(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return our tensors as a state dict for VideoMAE. A classifier gets the names of a fine-tuned model.

    Raises:
        ValueError: VideoMAE has no parameter for one of our tensors.
    """
    state = NAMES.write(tensors)
    return (
        {name.removeprefix("encoder."): tensor for name, tensor in state.items()} if "head.weight" in tensors else state
    )


def exported_checkpoint(trunk: TransformerSize, init: Init, weights: Tensors) -> Export:
    """Prepare the export of checkpoint.pth in VideoMAE's layout, `{"model": state dict}`, with tensors only.

    Raises:
        UserError: VideoMAE's code does not support the activation.
    """
    if trunk.activation != VIDEOMAE.facts.activation:
        raise UserError(
            f"VideoMAE's code does not support {trunk.activation} (--towers.activation)",
            hint="use --format hf, which supports this activation",
            flags=("--towers.activation",),
        )
    remarks = []
    if not math.isclose(trunk.norm_eps, _EPS):
        remarks.append(
            f"VideoMAE's code uses layer norms with eps {_EPS:g}, but this run uses {trunk.norm_eps:g}; a checkpoint "
            "does not record this value"
        )
    if weights[CONV].shape[1] == _RGB and (init.pixel_mean, init.pixel_std) != (IMAGENET_MEAN, IMAGENET_STD):
        remarks.append(
            "this run normalises pixels differently from VideoMAE (--init.pixel-mean, --init.pixel-std), but a "
            "checkpoint does not record the values"
        )

    def write(folder: Path) -> None:
        state = {name: tensor.detach().clone() for name, tensor in to_videomae(weights).items()}
        torch.save({"model": state}, folder / CHECKPOINT_FILE)

    return Export(write=write, remarks=tuple(remarks))


# Features that a VideoMAE V2 configuration may enable, but that our towers do not support.
_V2_OPTIONS = ("init_values", "use_learnable_pos_emb", "cos_attn", "qk_scale")


def facts_of_videomae_v2(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Return facts from the config.json of a model that the authors of VideoMAE V2 published with their code.

    Raises:
        UserError: The model uses a feature that our towers lack.
    """
    model = config.get("model_config")
    if not isinstance(model, dict):
        raise UserError(f"{source}: config.json lacks model_config", hint="download the folder again")
    for name in _V2_OPTIONS:
        if model.get(name):
            raise UserError(
                f"{source}: {name} is {model[name]!r}, which clipmill's towers do not support",
                hint="use the weights of a plain VideoMAE",
            )
    return SourceFacts(
        activation="gelu",
        video_eps=float(model.get("layer_norm_eps", _EPS)),
        mean=rgb_values(preprocess.get("image_mean")),
        std=rgb_values(preprocess.get("image_std")),
        video_heads=model.get("num_heads"),
    )


VIDEOMAE = Format(
    name="videomae",
    title="VideoMAE",
    convert=from_videomae,
    matches=lambda names: (
        any_starts_with(names, "encoder.patch_embed.", "encoder.blocks.")
        or (any_starts_with(names, "patch_embed.", "blocks.") and not any_starts_with(names, *CLASS_TOKENS))
    ),
    facts=SourceFacts(activation="gelu", video_eps=_EPS, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    model_types=("VideoMAEv2*",),
    read_config=facts_of_videomae_v2,
)


# Names, configuration and exported folders of Hugging Face's VideoMAEForPreTraining and VideoMAEForVideoClassification.
#
# A bare VideoMAEModel has the same names without `videomae.`. Files contain `q_bias` and `v_bias`, even if the version
# of transformers that wrote them uses different names for the parameters. Some releases of version 5 are exceptions.
# The values of a predicted cube are in the same order as in our decoder (t p p c).

_OUR_BLOCK, _ATTENTION = "transformer.resblocks.N", "attention.attention"
_HF_BLOCK = {
    "ln_1.*": "layernorm_before.*",
    "attn.in_proj_weight": f"{_ATTENTION}.{{query,key,value}}.weight",
    "attn.q_bias": f"{_ATTENTION}.q_bias",
    "attn.v_bias": f"{_ATTENTION}.v_bias",
    "attn.out_proj.*": "attention.output.dense.*",
    "ln_2.*": "layernorm_after.*",
    "mlp.c_fc.*": "intermediate.dense.*",
    "mlp.c_proj.*": "output.dense.*",
}
_LAYERS = {"video": "videomae.encoder.layer.N", "decoder": "decoder.decoder_layers.N"}


HF_NAMES = NameTable(
    owner="VideoMAE",
    names={
        "video.conv1.*": "videomae.embeddings.patch_embeddings.projection.*",
        **{
            f"{tower}.{_OUR_BLOCK}.{ours}": f"{layer}.{theirs}"
            for tower, layer in _LAYERS.items()
            for ours, theirs in _HF_BLOCK.items()
        },
        "video.ln_post.*": "videomae.layernorm.*",  # only if use_mean_pooling is false
        **SHARED_NAMES,
        "head.*": "classifier.*",
    },
    aliases={
        f"{layer}.{_ATTENTION}.{theirs}.bias": f"{tower}.{_OUR_BLOCK}.attn.{ours}_bias"
        for tower, layer in _LAYERS.items()
        for theirs, ours in (("query", "q"), ("value", "v"))
    },
    # Some versions of transformers give keys a bias. This bias adds the same value to all scores of a query,
    # and softmax cancels it.
    ignored=(f"{_ATTENTION}.key.bias",),
    canonical=lambda name: (
        f"videomae.{name}" if name.startswith(("embeddings.", "encoder.layer.", "layernorm.")) else name
    ),
    to_ours=to_our_layout,
    to_theirs=to_their_layout,
)
from_hf_videomae, to_hf_videomae = HF_NAMES.read, HF_NAMES.write

_KEYS = (
    "image_size num_channels hidden_size num_attention_heads num_hidden_layers decoder_num_attention_heads hidden_act "
    "layer_norm_eps qv_bias use_mean_pooling norm_pix_loss architectures"
)


def facts_of_hf_videomae(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Return facts from config.json and the processor (`read_processor`) of a VideoMAE.

    Raises:
        UserError: The model uses a feature that our towers lack.
    """
    from transformers import VideoMAEConfig

    # `qkv_bias` is the old name of `qv_bias`.
    entries = {"qv_bias": config.get("qkv_bias", True), **config}
    values = as_config(VideoMAEConfig, entries, keys=_KEYS, source=source)
    if values.hidden_act not in ("gelu", "quick_gelu"):
        raise UserError(
            f"{source}: the activation is {values.hidden_act!r}, but clipmill's towers have gelu or quick_gelu",
            hint="use the weights of a plain VideoMAE",
        )
    if not values.qv_bias:
        raise UserError(
            f"{source}: queries and values have no bias (qv_bias), but clipmill's towers have one",
            hint="use the weights of a plain VideoMAE",
        )
    remarks = []
    if any("PreTraining" in name for name in values.architectures or ()):
        if values.use_mean_pooling:
            remarks.append(
                "they were pre-trained without a layer norm after the encoder (use_mean_pooling), but masked "
                "autoencoders and captioners have one; use --init.allow 'video.ln_post.*' to initialise it"
            )
        if not values.norm_pix_loss:
            remarks.append(
                "they were pre-trained to predict unnormalised pixels (norm_pix_loss is false); the decoder of a "
                "masked autoencoder has to learn to predict normalised cubes"
            )
    is_rgb = values.num_channels == _RGB
    return SourceFacts(
        activation=values.hidden_act,
        video_eps=values.layer_norm_eps,
        mean=rgb_values(preprocess.get("image_mean")) if is_rgb else None,
        std=rgb_values(preprocess.get("image_std")) if is_rgb else None,
        video_heads=values.num_attention_heads,
        video_depth=values.num_hidden_layers,
        decoder_heads=values.decoder_num_attention_heads,
        frame_px=values.image_size if is_rgb and isinstance(values.image_size, int) else None,
        remarks=tuple(remarks),
    )


def exported_videomae(
    settings: ClipSettings, weights: Tensors, *, shape: ModelShape, format_name: str, model: Mapping[str, Any]
) -> Export:
    """Prepare the export of a model with a videomae tower as VideoMAE's own checkpoint or as a transformers folder.

    Args:
        settings: Settings of the run.
        weights: Tensors, keyed by our names.
        shape: Dimensions of the model.
        format_name: Name of the format, videomae or hf.
        model: Entries of the VideoMAEConfig that do not concern the encoder.

    Raises:
        UserError: The format cannot represent the model.
    """
    trunk = shape.size.video.trunk
    if format_name == "videomae":
        return exported_checkpoint(trunk, settings.init, weights)
    _, num_channels, tubelet, patch_px, _ = to_their_layout(CONV, weights[CONV]).shape
    if not shape.image_px:
        raise UserError(
            "config.json requires the size of the latents, but run.json does not record the size",
            hint="use --format videomae, which does not need the size",
        )
    is_rgb = num_channels == _RGB
    encoder: dict[str, Any] = {
        "image_size": shape.image_px,
        "patch_size": patch_px,
        "num_channels": num_channels,
        "num_frames": settings.num_frames,
        "tubelet_size": tubelet,
        "hidden_size": trunk.width,
        "num_hidden_layers": trunk.depth,
        "num_attention_heads": trunk.num_heads,
        "intermediate_size": trunk.mlp_width,
        "hidden_act": trunk.activation,
        "layer_norm_eps": trunk.norm_eps,
    }

    def write(folder: Path) -> None:
        from transformers import VideoMAEConfig

        save_tensors(to_hf_videomae(weights), folder / "model.safetensors", metadata={"format": "pt"})
        # Old versions of transformers read `qkv_bias`; new versions interpret it as `qv_bias`.
        save_json(folder / "config.json", {**VideoMAEConfig(**encoder, **model).to_dict(), "qkv_bias": True})
        if is_rgb:
            preprocessor = preprocessor_config("VideoMAEImageProcessor", settings, kind="videomae")
            save_json(folder / "preprocessor_config.json", preprocessor)

    remarks = () if is_rgb else ("the model takes latents, so there is no preprocessor_config.json",)
    return Export(write=write, remarks=remarks)


HF_VIDEOMAE = Format(
    name="hf_videomae",
    title="Hugging Face's VideoMAE",
    convert=from_hf_videomae,
    matches=lambda names: (
        any_starts_with(names, "videomae.", "decoder.decoder_layers.")
        or (any_starts_with(names, "embeddings.patch_embeddings.") and not any_starts_with(names, *CLASS_TOKENS))
    ),
    facts=replace(VIDEOMAE.facts, video_eps=1e-12),
    model_types=("videomae",),
    read_config=facts_of_hf_videomae,
)
