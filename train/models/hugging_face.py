"""Towers from transformers (complete models, or halves of a CLIP or SigLIP model), and code that all libraries share.

Shape suffixes: B images or texts, C channels, H and W pixels, L tokens of a text, N tokens of an image, W embedding
width, D token width.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.hub import hub_if_reachable
from clipmill.manifests.publish import parse_json
from clipmill.manifests.settings import Range
from clipmill.train.config.model import PIXEL_MEAN, PIXEL_STD

Mean = tuple[float, float, float]
Pooling = str  # value of --towers.text-pooling

# ID that fills the row of a text after its tokens. No token has this ID, so the attention mask can be computed from it.
# The models' own padding tokens are unsuitable: some models have none, and others also use theirs to end texts.
PADDING = -1
_MAX_LENGTH = 512  # default context length of text encoders that support longer texts
_NUM_COLORS = 3
# Text for messages about values that `is_triple` rejects. The placeholder takes a `Range`.
TRIPLE = "three numbers from {0.least:g} to {0.most:g}, for R, G and B"


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Preprocessing of images that a library specifies for a tower; None for values that it does not specify.

    Attributes:
        size_px: Side length of the square images, in pixels.
        mean: Mean of R, G and B, for pixel values from 0 to 1.
        std: Standard deviation of R, G and B, for pixel values from 0 to 1.
        interpolation: Name of the filter for resizing.
    """

    size_px: int | None
    mean: Mean | None
    std: Mean | None
    interpolation: str | None


@contextmanager
def hub_files(reference: str, what: str) -> Iterator[None]:
    """Context manager for reading files that may come from the Hub.

    Args:
        reference: Tower, such as hf:ORGANISATION/NAME.
        what: Kind of files, for the error.

    Raises:
        UserError: The files are missing or damaged. For a model on the Hub, the hint contains the download command.
    """
    name = reference.removeprefix("hf:")
    is_folder = Path(name).is_absolute() or Path(name).is_dir()
    try:
        with nullcontext() if is_folder else hub_if_reachable():
            yield
    except (OSError, ValueError, ImportError) as error:
        if is_folder:
            raise UserError(
                f"the {what} of {reference} cannot be read: {first_line(error)}",
                hint="use a folder that save_pretrained of transformers wrote; also save the tokenizer of a text tower",
            ) from error
        raise UserError(
            f"the {what} of {reference} is neither cached nor available for download: {first_line(error)}",
            hint=f"run `hf download {name}` on a machine with network access, and use that copy of the model",
        ) from error


def flatten_tokens(tokens: Tensor, *, channels_last: bool = False) -> Tensor:
    """Return tokens, or a feature map [B, D, H, W] or [B, H, W, D], as [B, N, D]."""
    if tokens.ndim == 4:
        return tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
    return tokens


class HuggingFace:
    """Towers from transformers, with the methods that clipmill.train.models.library_towers describes."""

    def image(self, name: str) -> nn.Module:
        return _build_half(self.config(name), "vision_config")

    def embed(self, model: nn.Module, images_BCHW: Tensor) -> Tensor:
        output = model(**_image_arguments(model, images_BCHW))
        if (embeds := getattr(output, "image_embeds", None)) is not None:
            return embeds
        pooled_output = getattr(output, "pooler_output", None)
        return flatten_tokens(output.last_hidden_state).mean(1) if pooled_output is None else pooled_output.flatten(1)

    def tokens(self, model: nn.Module, images_BCHW: Tensor) -> Tensor:
        return flatten_tokens(model(**_image_arguments(model, images_BCHW)).last_hidden_state)

    def preprocessing(self, name: str) -> Preprocessing:
        config = self.config(name)
        processor = read_processor(name)
        resample = processor.get("resample")
        return Preprocessing(
            size_px=getattr(getattr(config, "vision_config", config), "image_size", None),
            mean=None if (mean := processor.get("image_mean")) is None else tuple(mean),
            std=None if (std := processor.get("image_std")) is None else tuple(std),
            interpolation=None if resample is None else _FILTERS.get(resample),
        )

    def text(self, name: str, context_length: int | None) -> nn.Module:
        config = self.config(name)
        text_config = getattr(config, "text_config", config)
        if context_length is not None and text_config.model_type == "clip_text_model":
            text_config.max_position_embeddings = context_length
        model = _build_half(config, "text_config")
        if "attention_mask" not in inspect.signature(model.forward).parameters:
            raise UserError(
                f"hf:{name} is a {text_config.model_type} model, which takes no attention mask, so the embedding of a "
                "text would depend on the padding of the batch",
                hint="use a text encoder that takes a mask, such as a BERT or a CLIP",
            )
        return model

    def embed_text(self, model: nn.Module, tokens_BL: Tensor, pooling: Pooling) -> Tensor:
        config: Any = model.config
        mask_BL = tokens_BL != PADDING
        # RoBERTa counts positions only over tokens that are not its padding token.
        tokens_BL = tokens_BL.masked_fill(~mask_BL, getattr(config, "pad_token_id", None) or 0)
        if tokens_BL.is_meta:
            config.pad_token_id = None  # some models search for this ID, but meta tensors have no values
        # SigLIP attends to padding, and CLIP is causal: neither needs a mask. On the meta device, a mask has no values.
        has_mask = not tokens_BL.is_meta and not config.model_type.startswith((_SIGLIP, "clip"))
        output = model(input_ids=tokens_BL, **({"attention_mask": mask_BL.to(torch.int64)} if has_mask else {}))
        pooled_output = getattr(output, "text_embeds", None)
        pooled_output = getattr(output, "pooler_output", None) if pooled_output is None else pooled_output
        if pooling == "own" and pooled_output is not None:
            return pooled_output
        x_BLD = output.last_hidden_state
        if pooling == "first":
            return x_BLD[:, 0]
        if pooling == "last":
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), mask_BL.sum(1) - 1]
        weights_BL1 = mask_BL[..., None].to(x_BLD.dtype)
        return (x_BLD * weights_BL1).sum(1) / weights_BL1.sum(1)

    def context_length(self, name: str) -> int:
        return int(min(self._limit(name) or _MAX_LENGTH, self.hub_tokenizer(name).model_max_length, _MAX_LENGTH))

    def tokenizer(self, name: str, context_length: int) -> Callable[[list[str]], Tensor]:
        """Return a function that converts texts to IDs [B, L], with `PADDING` after the tokens of each text.

        Tokens have the same positions as without padding, even if the original tokenizer pads on the left. SigLIP
        attends to padding up to a fixed length, so this padding has the model's own padding ID.

        Raises:
            UserError: The context length is larger than the model's, or a SigLIP model has no padding token.
        """
        tokenizer, limit = self.hub_tokenizer(name), self._limit(name)
        text = getattr(config := self.config(name), "text_config", config)
        if limit is not None and context_length > limit and text.model_type != "clip_text_model":
            raise UserError(
                f"--towers.context-length {context_length} is larger than the {limit} tokens that hf:{name} takes",
                hint=f"use {limit} or less",
                flags=("--towers.context-length",),
            )
        ends = (tokenizer.eos_token_id, tokenizer.pad_token_id, pad := getattr(text, "pad_token_id", None), 0)
        end = next(token for token in ends if token is not None)
        if is_siglip := text.model_type.startswith(_SIGLIP):
            padding = pad if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            length = limit or context_length
            if padding is None:
                raise UserError(
                    f"hf:{name} has no padding token, although SigLIP models attend to padding",
                    hint="set pad_token in tokenizer_config.json",
                )

        def tokenize(texts: list[str]) -> Tensor:
            rows = tokenizer(texts, truncation=True, max_length=context_length)["input_ids"]
            # Some tokenizers return no token for an empty text.
            rows = [row or [end] for row in rows]
            if is_siglip:
                pads = [[padding] * (length - len(row)) for row in rows]
                is_left = tokenizer.padding_side == "left"
                rows = [pad + row if is_left else row + pad for pad, row in zip(pads, rows, strict=True)]
                return torch.tensor(rows)
            return torch.tensor([row + [PADDING] * (context_length - len(row)) for row in rows])

        return tokenize

    def _limit(self, name: str) -> int | None:
        """Return the maximum number of tokens per text; None if the model's configuration does not limit it."""
        config = self.config(name)
        limit = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
        with torch.device("meta"):
            embeddings = getattr(_build_half(config, "text_config"), "embeddings", None)
        first_position = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
        # RoBERTa's positions start after the padding position.
        return limit if limit is None or first_position is None else limit - first_position - 1

    def hub_tokenizer(self, name: str) -> Any:
        """Return the tokenizer of a model as an object of transformers."""
        from transformers import AutoTokenizer

        with hub_files(f"hf:{name}", "tokenizer"):
            if (folder := Path(name)).is_dir() and not any(folder.glob("tokenizer*")):
                # transformers would create a tokenizer without a vocabulary.
                raise FileNotFoundError(f"{name} has no tokenizer.json")
            return AutoTokenizer.from_pretrained(name)

    def config(self, name: str) -> Any:
        """Return the configuration of a model, changed to float32 regardless of the dtype of the stored weights."""
        from transformers import AutoConfig

        with hub_files(f"hf:{name}", "configuration"):
            config = AutoConfig.from_pretrained(name)
        for part_config in (config, *(getattr(config, part, None) for part in config.sub_configs)):
            if part_config is not None:
                part_config.dtype = torch.float32
        return config


_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_SIGLIP = "siglip"

# Files in which transformers stores the preprocessing of images. Version 5 writes several processors of a model as
# parts of the first file. Version 4, and version 5 for a single processor, write a file for each kind of processor.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_PROCESSORS = (
    *((PROCESSOR_FILES[0], part) for part in ("image_processor", "feature_extractor")),
    (PROCESSOR_FILES[1], None),
    (PROCESSOR_FILES[0], "video_processor"),
    (PROCESSOR_FILES[2], None),
)
_BYTE, _OFFSETS = 255, ("offset", "rescale_offset")
_REPAIR_HINT = "correct the file, or download the folder again"


def read_processor(name: str) -> dict[str, Any]:
    """Return a model's preprocessing of images, with the keys of preprocessor_config.json; {} if no file specifies it.

    `image_mean` and `image_std` are converted to pixel values from 0 to 1, regardless of the processor's own scaling.
    If several files specify a mean, image processors take precedence over video processors, and parts of
    processor_config.json over separate files, as in transformers.

    Args:
        name: Folder, or name on the Hub.

    Raises:
        UserError: A file is damaged, or a mean or standard deviation is not three numbers in the valid range.
    """
    files = {file: _read_object(path) for file in PROCESSOR_FILES if (path := _file_of(name, file)) is not None}
    for file, part in _PROCESSORS:
        value = files.get(file, {}) if part is None else files.get(file, {}).get(part)
        if isinstance(value, dict) and (
            value.get("do_normalize") is False or {"image_mean", "image_std"} & value.keys()
        ):
            return _convert_to_unit_values(value, source=f"{name}/{file}")
    return next((files[file] for file in PROCESSOR_FILES[1:] if file in files), {})


def _file_of(name: str, file: str) -> Path | None:
    """Return a file from a folder, or from a model on the Hub; None if it does not exist."""
    from transformers.utils.hub import cached_file

    if Path(name).is_dir():
        return path if (path := Path(name) / file).is_file() else None
    with hub_if_reachable():
        try:
            cached_path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        except OSError:
            return None
    return None if cached_path is None else Path(cached_path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}", hint=_REPAIR_HINT) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", hint=_REPAIR_HINT)
    return content


def _convert_to_unit_values(processor: dict[str, Any], *, source: str) -> dict[str, Any]:
    """Return an equivalent configuration that divides bytes by 255 and normalises the result."""
    if processor.get("do_normalize") is False:
        processor = {**processor, "image_mean": [0.0] * _NUM_COLORS, "image_std": [1.0] * _NUM_COLORS}
    factor, is_rescaled = processor.get("rescale_factor"), processor.get("do_rescale") is not False
    scale = _BYTE * factor if is_rescaled and isinstance(factor, int | float) and factor > 0 else 1.0
    # ViViT and EfficientNet subtract 1 from the rescaled values.
    offset = float(is_rescaled and any(processor.get(key) is True for key in _OFFSETS))
    is_plain = math.isclose(scale, 1, rel_tol=1e-6) and not offset
    values: dict[str, Any] = {}
    for key, limits, shift in (("image_mean", PIXEL_MEAN, offset), ("image_std", PIXEL_STD, 0.0)):
        value = processor.get(key)
        if not is_triple(value, limits):
            raise UserError(f"{source}: {key} is {value!r}, but must be {TRIPLE.format(limits)}", hint=_REPAIR_HINT)
        if value is not None:
            values[key] = [float(number) if is_plain else (number + shift) / scale for number in value]
    defaults = {"do_normalize": True, "do_rescale": True, "rescale_factor": 1 / _BYTE} | dict.fromkeys(_OFFSETS, False)
    return {**processor, **{key: value for key, value in defaults.items() if key in processor}, **values}


def is_triple(value: Any, limits: Range) -> bool:
    """Return True if a configuration value is None, or a list of three numbers (R, G, B) within the limits."""
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != _NUM_COLORS:
        return False
    return all(
        isinstance(number, int | float) and not isinstance(number, bool) and limits.holds(number) for number in value
    )


def _build_half(config: Any, part: str) -> nn.Module:
    """Build a model with random weights for `config.vision_config` or `config.text_config`, or else for `config`."""
    import transformers

    part_config = getattr(config, part, config)
    name = type(part_config).__name__.removesuffix("Config")
    if name.endswith(("Vision", "Text")):  # half of a CLIP or SigLIP model
        kinds = (getattr(transformers, f"{name}{end}", None) for end in ("ModelWithProjection", "Model"))
        if (kind := next(filter(None, kinds), None)) is not None:
            return kind(part_config)
    auto = transformers.AutoModelForTextEncoding if part == "text_config" else transformers.AutoModel
    return (auto if type(part_config) in auto._model_mapping else transformers.AutoModel).from_config(part_config)


def read_hf(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a transformers folder, by the parameter names of the module that transformers builds.

    Tensors that the model does not use are included as empty tensors.

    Raises:
        UserError: transformers cannot load the weights.
    """
    import transformers

    config, kind = HuggingFace().config(str(folder)), transformers.AutoModel
    if not hasattr(config, "vision_config"):
        with torch.device("meta"):
            kind = type(_build_half(config, "text_config"))
    with hub_files(f"hf:{folder}", "model"):
        model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, use_safetensors=True)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in info["missing_keys"]}
    return tensors | {name: torch.empty(0) for name in info["unexpected_keys"]}


def _image_arguments(model: nn.Module, images_BCHW: Tensor) -> dict[str, Tensor]:
    """Return the arguments that a model takes for images. The NaFlex towers of SigLIP 2 take patches, row by row."""
    config: Any = model.config
    if config.model_type != "siglip2_vision_model":
        return {"pixel_values": images_BCHW}
    patch_px = config.patch_size
    cells = images_BCHW.unflatten(3, (-1, patch_px)).unflatten(2, (-1, patch_px)).permute(0, 2, 4, 3, 5, 1)
    rows, columns = cells.shape[1:3]
    shapes_B2 = torch.tensor([[rows, columns]], device="cpu").expand(len(cells), 2)  # transformers reads it on the CPU
    return {
        "pixel_values": cells.flatten(3).flatten(1, 2),
        "pixel_attention_mask": None,  # no pixel is masked
        "spatial_shapes": shapes_B2,
    }
