"""What the configuration files beside weights say of them: pure functions of parsed JSON."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.json_text import parse_json
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


# Reads the configuration files beside weights, and checks the kind of every value that is used.


_MEND = "mend it, or get the folder again"
_COLOURS = 3


def read_config(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file.

    Raises:
        UserError: it cannot be read, or a value in it is of a kind that its key does not have.
    """
    if not path.is_file():
        return None
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", hint=_MEND) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object", hint=_MEND)
    _check(value, path=path, begin="")
    return value


def _check(config: Mapping[str, Any], *, path: Path, begin: str) -> None:
    for name, value in config.items():
        for names, is_so, kind in _KINDS:
            if name in names and not is_so(value):
                raise UserError(f"{path}: {begin}{name} is {value!r}, which is not {kind}", hint=_MEND)
        if name in _PARTS and value is not None:
            _check(value, path=path, begin=f"{begin}{name}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_side(value: Any) -> bool:
    return all(map(_is_size, value)) if isinstance(value, list) else _is_size(value)


def _is_triple(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == _COLOURS and all(map(_is_number, value)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_text, value)))


# Objects within a configuration, which have the same keys.
_PARTS = frozenset(
    {
        *("vision_config", "text_config", "encoder", "decoder", "model_config"),
        *("model_cfg", "preprocess_cfg", "vision_cfg", "text_cfg", "norm_kwargs"),
    }
)
_SIZES = frozenset(
    {
        *(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "decoder_num_attention_heads",
        ),
        *("num_channels", "num_frames", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
        *("num_heads", "width", "head_width", "heads"),
    }
)
_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"})
_SWITCHES = frozenset({"qkv_bias", "qv_bias", "use_mean_pooling", "norm_pix_loss", "quick_gelu"})
_KINDS: tuple[tuple[frozenset[str], Callable[[Any], bool], str], ...] = (
    (_PARTS, lambda value: value is None or isinstance(value, dict), "an object"),
    (_SIZES, _is_size, "a whole number of at least 1"),
    (frozenset({"image_size", "patch_size"}), _is_side, "a whole number of at least 1"),
    (frozenset({"layer_norm_eps", "layer_norm_epsilon", "eps"}), _is_number, "a finite number"),
    (_TOKENS, lambda value: value is None or _is_whole(value), "a whole number"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (frozenset({"hidden_act", "activation_function", "model_type"}), _is_text, "a text"),
    (frozenset({"architectures"}), _are_texts, "a list of texts"),
    (frozenset({"image_mean", "image_std", "mean", "std"}), _is_triple, "three finite numbers"),
)
