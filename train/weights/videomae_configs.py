"""What the configuration files beside VideoMAE's weights say of them: pure functions of parsed JSON."""

from collections.abc import Mapping
from typing import Any

from manifests.errors import UserError
from train.weights.configs import colours
from train.weights.converted import IMAGENET_MEAN, IMAGENET_STD, Facts

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
