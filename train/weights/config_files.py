"""Configuration files beside weights: reads JSON, checks the types of the values used, builds transformers' classes."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manifests.errors import UserError
from manifests.json_text import parse_json
from train.weights.conversion import Mean

_DAMAGED = "correct it, or get the folder again"
_COLOURS = 3


def read_config(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file.

    Raises:
        UserError: it cannot be read, or a value has a type that its key does not take.
    """
    if not path.is_file():
        return None
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", hint=_DAMAGED) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object", hint=_DAMAGED)
    _check(value, path=path, parent="")
    return value


def as_config(config_class: Callable[..., Any], given: Mapping[str, Any], *, keys: str, source: str) -> Any:
    """A configuration object of transformers, with its own defaults where `given` has no value.

    Args:
        config_class: such as VideoMAEConfig.
        given: an object of a checked config.json.
        keys: those that are used, separated by spaces. The others are left out: their values may be anything.
        source: for errors.

    Raises:
        UserError: the class refuses the values.
    """
    from huggingface_hub.errors import StrictDataclassError

    values = {key: given[key] for key in keys.split() if key in given}
    # The classes take no integer where they expect a float.
    values |= {key: float(value) for key, value in values.items() if key in _EPS}
    try:
        return config_class(**values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"{source}: {' '.join(str(error).split())}", hint=_DAMAGED) from error


def colours(values: Any) -> Mean | None:
    """The values of a configuration for R, G and B; None if it has none."""
    if values is None:
        return None
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def _check(config: Mapping[str, Any], *, path: Path, parent: str) -> None:
    for name, value in config.items():
        for names, is_valid, wanted in _TYPES:
            if name in names and not is_valid(value):
                raise UserError(f"{path}: {parent}{name} is {value!r}, which is not {wanted}", hint=_DAMAGED)
        if name in _OBJECTS and value is not None:
            _check(value, path=path, parent=f"{parent}{name}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return _is_integer(value) and value >= 1


def _is_side(value: Any) -> bool:
    return all(map(_is_size, value)) if isinstance(value, list) else _is_size(value)


def _is_triple(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == _COLOURS and all(map(_is_number, value)))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_text, value)))


# Nested objects, whose keys are checked too.
_OBJECTS = frozenset(
    {
        *("vision_config", "text_config", "encoder", "decoder", "model_config", "model_cfg", "preprocess_cfg"),
        *("vision_cfg", "text_cfg", "norm_kwargs"),
    }
)
_SIZES = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("decoder_num_attention_heads", "num_channels", "num_frames", "vocab_size", "n_positions", "n_embd"),
        *("n_layer", "n_head", "num_heads", "width", "head_width", "heads"),
    }
)
_EPS = frozenset({"layer_norm_eps", "layer_norm_epsilon", "eps"})
_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"})
_SWITCHES = frozenset({"qkv_bias", "qv_bias", "use_mean_pooling", "norm_pix_loss", "quick_gelu"})
_TYPES: tuple[tuple[frozenset[str], Callable[[Any], bool], str], ...] = (
    (_OBJECTS, lambda value: value is None or isinstance(value, dict), "an object"),
    (_SIZES, _is_size, "a whole number of at least 1"),
    (frozenset({"image_size", "patch_size"}), _is_side, "a whole number of at least 1"),
    (_EPS, _is_number, "a finite number"),
    (_TOKENS, lambda value: value is None or _is_integer(value), "a whole number"),
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (frozenset({"hidden_act", "activation_function", "model_type"}), _is_text, "a text"),
    (frozenset({"architectures"}), _are_texts, "a list of texts"),
    (frozenset({"image_mean", "image_std", "mean", "std"}), _is_triple, "three finite numbers"),
)
