"""Reads the configuration files beside weights, and checks the kind of every value that is used."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.json_text import parse_json

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
