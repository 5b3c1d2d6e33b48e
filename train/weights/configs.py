"""What the configuration files beside weights say of them: pure functions of parsed JSON."""

from collections.abc import Mapping
from typing import Any

from manifests.errors import UserError
from train.weights.converted import Facts

# Settings of open_clip's towers that show in shapes and names, or change nothing that is learned.
_OPEN_CLIP_FREE = {
    "vision_cfg": {
        "act_kwargs",
        "head_width",
        "image_size",
        "layers",
        "mlp_ratio",
        "norm_kwargs",
        "output_tokens",
        "patch_dropout",
        "patch_size",
        "width",
        "pool_type",
    },
    "text_cfg": {
        "act_kwargs",
        "context_length",
        "heads",
        "hf_tokenizer_name",
        "layers",
        "mlp_ratio",
        "norm_kwargs",
        "output_tokens",
        "pad_id",
        "pool_type",
        "proj_type",
        "tokenizer_kwargs",
        "vocab_size",
        "eos_id",
        "width",
    },
}
# Of the settings above, those that must have one of these values.
_OPEN_CLIP_NEEDED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("vision_cfg", "pool_type"): ("tok",),
    ("text_cfg", "pool_type"): ("argmax",),
    ("text_cfg", "proj_type"): ("linear",),
    ("vision_cfg", "act_kwargs"): (None, {}),
    ("text_cfg", "act_kwargs"): (None, {}),
}
_CLIP_NORM_EPS = 1e-5
_OPEN_CLIP_HEAD_WIDTH, _OPEN_CLIP_TEXT_HEADS = 64, 8


def facts_of_open_clip(model: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> Facts:
    """Facts from open_clip's `model_cfg` and `preprocess_cfg` (or the entry of a tag).

    Raises:
        UserError: the model computes something that the towers here do not.
    """
    for part, free in _OPEN_CLIP_FREE.items():
        for name, value in model.get(part, {}).items():
            needed = _OPEN_CLIP_NEEDED.get((part, name))
            # 0, False and None leave open_clip's extras out.
            if (needed is not None and value not in needed) or (name not in free and value):
                raise UserError(
                    f"{source}: {part}.{name} is {value!r}, which the towers here do not have",
                    hint="use the weights of a plain CLIP with a vision Transformer (ViT)",
                )
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    is_quick = bool(preprocess.get("quick_gelu", model.get("quick_gelu", False)))
    width = vision.get("width", 768)
    return Facts(
        activation="quick_gelu" if is_quick else "gelu",
        video_eps=_eps(vision),
        text_eps=_eps(text),
        mean=colours(preprocess.get("mean")),
        std=colours(preprocess.get("std")),
        video_heads=width // vision.get("head_width", _OPEN_CLIP_HEAD_WIDTH),
        text_heads=text.get("heads", _OPEN_CLIP_TEXT_HEADS),
    )


def facts_of_hf(config: Mapping[str, Any], preprocess: Mapping[str, Any], *, source: str) -> Facts:
    """Facts from the config.json and preprocessor_config.json of a CLIPModel.

    Raises:
        UserError: it is another kind of model, or one that computes something that the towers here do not.
    """
    if config.get("model_type") != "clip":
        raise UserError(
            f"{source}: the model is a {config.get('model_type')!r}, not a 'clip' or a 'videomae'",
            hint="name the folder of a CLIPModel or a VideoMAE",
        )
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    activations = {part.get("hidden_act", "quick_gelu") for part in (vision, text)}
    if activations not in ({"gelu"}, {"quick_gelu"}):
        raise UserError(
            f"{source}: the activations are {', '.join(sorted(activations))}; here both towers have gelu or quick_gelu",
            hint="use the weights of a plain CLIP",
        )
    # 2 is what old files say, and transformers then looks for the largest id, as CLIP does.
    end = text.get("eos_token_id", 49407)
    if end not in (2, text.get("vocab_size", 49408) - 1) and "vocab_size" in text:
        raise UserError(
            f"{source}: captions end with token {end}; here they end with the largest one", hint="use a plain CLIP"
        )
    return Facts(
        activation="gelu" if activations == {"gelu"} else "quick_gelu",
        video_eps=vision.get("layer_norm_eps", _CLIP_NORM_EPS),
        text_eps=text.get("layer_norm_eps", _CLIP_NORM_EPS),
        mean=colours(preprocess.get("image_mean")),
        std=colours(preprocess.get("image_std")),
        video_heads=vision.get("num_attention_heads", 12),
        text_heads=text.get("num_attention_heads", 8),
    )


def _eps(tower: Mapping[str, Any]) -> float:
    return float((tower.get("norm_kwargs") or {}).get("eps", _CLIP_NORM_EPS))


def colours(values: Any) -> tuple[float, float, float] | None:
    """Three numbers, for R, G and B, as a configuration has them; None where it has none."""
    if values is None:
        return None
    red, green, blue = (float(value) for value in values)
    return red, green, blue
