"""Hugging Face's VideoMAEForPreTraining and VideoMAEForVideoClassification: names, configuration, and exported folders.

A bare VideoMAEModel has the same names without `videomae.`. Files have `q_bias` and `v_bias`, whatever the version of
transformers that wrote them calls these parameters itself, except for some versions 5. The values of a cube are in the
same order (t p p c).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipmill.manifests.errors import UserError
from clipmill.train.config.clips import ClipSettings
from clipmill.train.models.dual_encoder import ModelShape
from clipmill.train.weights.conversion import (
    CONV,
    Format,
    NameTable,
    SourceFacts,
    Tensors,
    any_begins,
)
from clipmill.train.weights.exported import Exported, preprocessor_config, save_json, save_tensors
from clipmill.train.weights.files import as_config, colours
from clipmill.train.weights.videomae import (
    CLASS_TOKENS,
    SHARED_NAMES,
    VIDEOMAE,
    exported_checkpoint,
    to_our_layout,
    to_their_layout,
)

_RGB = 3
_OUR_BLOCK, _ATTENTION = "transformer.resblocks.N", "attention.attention"
_BLOCK = {
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


def _with_videomae(name: str) -> str:
    return f"videomae.{name}" if name.startswith(("embeddings.", "encoder.layer.", "layernorm.")) else name


NAMES = NameTable(
    owner="VideoMAE",
    names={
        "video.conv1.*": "videomae.embeddings.patch_embeddings.projection.*",
        **{
            f"{tower}.{_OUR_BLOCK}.{ours}": f"{layer}.{theirs}"
            for tower, layer in _LAYERS.items()
            for ours, theirs in _BLOCK.items()
        },
        "video.ln_post.*": "videomae.layernorm.*",  # only where use_mean_pooling is false
        **SHARED_NAMES,
        "head.*": "classifier.*",
    },
    aliases={
        f"{layer}.{_ATTENTION}.{theirs}.bias": f"{tower}.{_OUR_BLOCK}.attn.{ours}_bias"
        for tower, layer in _LAYERS.items()
        for theirs, ours in (("query", "q"), ("value", "v"))
    },
    # Some versions of transformers give keys a bias. It adds the same to all scores of a query: softmax cancels it.
    ignored=(f"{_ATTENTION}.key.bias",),
    canonical=_with_videomae,
    to_ours=to_our_layout,
    to_theirs=to_their_layout,
)
from_hf_videomae, to_hf_videomae = NAMES.read, NAMES.write

_KEYS = (
    "image_size num_channels hidden_size num_attention_heads num_hidden_layers decoder_num_attention_heads hidden_act "
    "layer_norm_eps qv_bias use_mean_pooling norm_pix_loss architectures"
)


def facts_of_hf_videomae(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> SourceFacts:
    """Facts from the config.json and the processor (`read_processor`) of a VideoMAE.

    Raises:
        UserError: the model computes something that the towers here do not.
    """
    from transformers import VideoMAEConfig

    # `qkv_bias` is the old name of `qv_bias`.
    given = {"qv_bias": config.get("qkv_bias", True), **config}
    found = as_config(VideoMAEConfig, given, keys=_KEYS, source=source)
    if found.hidden_act not in ("gelu", "quick_gelu"):
        raise UserError(
            f"{source}: the activation is {found.hidden_act!r}; the towers here have gelu or quick_gelu",
            hint="use the weights of a plain VideoMAE",
        )
    if not found.qv_bias:
        raise UserError(
            f"{source}: queries and values have no bias (qv_bias), and those of the towers here have one",
            hint="use the weights of a plain VideoMAE",
        )
    remarks = []
    if any("PreTraining" in name for name in found.architectures or ()):
        if found.use_mean_pooling:
            remarks.append(
                "they were pre-trained without a layer norm after the encoder (use_mean_pooling); masked autoencoders "
                "and captioners have one, which --init.allow 'video.ln_post.*' initialises anew"
            )
        if not found.norm_pix_loss:
            remarks.append(
                "they were pre-trained to predict unnormalised pixels (norm_pix_loss is false); a masked autoencoder "
                "here predicts normalised cubes, which its decoder has to learn"
            )
    is_rgb = found.num_channels == _RGB
    return SourceFacts(
        activation=found.hidden_act,
        video_eps=found.layer_norm_eps,
        mean=colours(preprocess.get("image_mean")) if is_rgb else None,
        std=colours(preprocess.get("image_std")) if is_rgb else None,
        video_heads=found.num_attention_heads,
        video_depth=found.num_hidden_layers,
        decoder_heads=found.decoder_num_attention_heads,
        picture_px=found.image_size if is_rgb and isinstance(found.image_size, int) else None,
        remarks=tuple(remarks),
    )


def exported_videomae(
    settings: ClipSettings, weights: Tensors, *, shape: ModelShape, form: str, model: Mapping[str, Any]
) -> Exported:
    """A model with a videomae tower, as VideoMAE's own checkpoint or as a folder of transformers.

    Args:
        form: videomae or hf.
        model: values of the VideoMAEConfig besides those of the encoder.

    Raises:
        UserError: the format cannot hold it.
    """
    trunk = shape.size.video.trunk
    if form == "videomae":
        return exported_checkpoint(trunk, settings.init, weights)
    _, num_channels, tubelet, patch_px, _ = to_their_layout(CONV, weights[CONV]).shape
    if not shape.image_px:
        raise UserError(
            "run.json does not say how large the latents were, and config.json has to",
            hint="use --format videomae, which does not need it",
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
        # Old versions of transformers read `qkv_bias`, and new ones take it for `qv_bias`.
        save_json(folder / "config.json", {**VideoMAEConfig(**encoder, **model).to_dict(), "qkv_bias": True})
        if is_rgb:
            preprocessor = preprocessor_config("VideoMAEImageProcessor", settings, kind="videomae")
            save_json(folder / "preprocessor_config.json", preprocessor)

    remarks = () if is_rgb else ("the model takes latents: there is no preprocessor_config.json",)
    return Exported(write=write, remarks=remarks)


HF_VIDEOMAE = Format(
    name="hf_videomae",
    title="Hugging Face's VideoMAE",
    convert=from_hf_videomae,
    matches=lambda names: (
        any_begins(names, "videomae.", "decoder.decoder_layers.")
        or (any_begins(names, "embeddings.patch_embeddings.") and not any_begins(names, *CLASS_TOKENS))
    ),
    facts=replace(VIDEOMAE.facts, video_eps=1e-12),
    model_types=("videomae",),
    read_config=facts_of_hf_videomae,
)
