"""Towers of transformers: models of its own, or one half of a CLIP or SigLIP. What all libraries share is here too.

Shape suffixes: B pictures or texts, C channels, H and W pixels, L tokens of a text, N tokens of a picture, W width of
the embedding, D width of tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.hub import hub_if_reachable

Mean = tuple[float, float, float]
Pooling = str  # of --towers.text-pooling

_LONGEST = 512  # of the default context of text encoders without a limit of their own


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How a library prepares pictures for a tower; None where it does not say.

    Attributes:
        size_px: side of the square pictures.
        mean, std: of R, G and B, from 0 to 1.
        interpolation: name of the filter of its resize.
    """

    size_px: int | None
    mean: Mean | None
    std: Mean | None
    interpolation: str | None


@contextmanager
def hub_files(reference: str, what: str) -> Iterator[None]:
    """Files that the Hub may have; a UserError that says what to download where they are not at hand."""
    name = reference.removeprefix("hf:")
    is_folder = Path(name).is_absolute() or Path(name).is_dir()
    try:
        with nullcontext() if is_folder else hub_if_reachable():
            yield
    except (OSError, ValueError, ImportError) as error:
        if is_folder:
            raise UserError(
                f"the {what} of {reference} cannot be read: {first_line(error)}",
                hint="name a folder that save_pretrained of transformers wrote, with its tokenizer for texts",
            ) from error
        raise UserError(
            f"the {what} of {reference} is not here: {first_line(error)}",
            hint=f"on a machine with a network: hf download {name}; then name that folder, or copy the cache",
        ) from error


def flat(tokens: Tensor, *, channels_last: bool = False) -> Tensor:
    """Tokens [B, N, D] of tokens, or of a feature map [B, D, H, W] or [B, H, W, D]."""
    if tokens.ndim == 4:
        return tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
    return tokens


class HuggingFace:
    """transformers: a model of its own, or one half of a CLIP or SigLIP."""

    def image(self, name: str) -> nn.Module:
        return _half(self.config(name), "vision_config")

    def embed(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        found = model(**_pictures(model, pictures_BCHW))
        if (embeds := getattr(found, "image_embeds", None)) is not None:
            return embeds
        pooled = getattr(found, "pooler_output", None)
        return flat(found.last_hidden_state).mean(1) if pooled is None else pooled.flatten(1)

    def tokens(self, model: nn.Module, pictures_BCHW: Tensor) -> Tensor:
        return flat(model(**_pictures(model, pictures_BCHW)).last_hidden_state)

    def preprocessing(self, name: str) -> Preprocessing:
        from transformers import ImageProcessingMixin

        config = self.config(name)
        size = getattr(getattr(config, "vision_config", config), "image_size", None)
        try:
            with hub_if_reachable():
                found, _ = ImageProcessingMixin.get_image_processor_dict(name)
        except OSError:
            found = {}
        mean, std = found.get("image_mean"), found.get("image_std")
        return Preprocessing(
            size_px=size,
            mean=None if mean is None else tuple(mean),
            std=None if std is None else tuple(std),
            interpolation=None if found.get("resample") is None else _FILTERS.get(found["resample"]),
        )

    def text(self, name: str, context_length: int | None) -> nn.Module:
        config = self.config(name)
        own = getattr(config, "text_config", config)
        if context_length is not None and own.model_type == "clip_text_model":
            own.max_position_embeddings = context_length
        return _half(config, "text_config")

    def embed_text(self, model: nn.Module, tokens_BL: Tensor, pooling: Pooling) -> Tensor:
        config: Any = model.config
        mask = None if tokens_BL.is_meta else _not_padding(tokens_BL, config)  # its values are read
        found = model(input_ids=tokens_BL, **({} if mask is None else {"attention_mask": mask}))
        pooled = getattr(found, "text_embeds", None)
        pooled = getattr(found, "pooler_output", None) if pooled is None else pooled
        if pooling == "own" and pooled is not None:
            return pooled
        x_BLD = found.last_hidden_state
        mask = torch.ones_like(tokens_BL) if mask is None else mask
        if pooling == "first":
            return x_BLD[:, 0]
        if pooling == "last":
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), mask.sum(1) - 1]
        weights_BL1 = mask[..., None].to(x_BLD.dtype)
        return (x_BLD * weights_BL1).sum(1) / weights_BL1.sum(1)

    def context_length(self, name: str) -> int:
        config = self.config(name)
        limits = [getattr(getattr(config, "text_config", config), "max_position_embeddings", None) or _LONGEST]
        limits.append(self.hub_tokenizer(name).model_max_length)
        return int(min(limits))

    def tokenizer(self, name: str, context_length: int) -> Callable[[list[str]], Tensor]:
        found = self.hub_tokenizer(name)
        options = {"padding": "max_length", "truncation": True, "max_length": context_length, "return_tensors": "pt"}
        return lambda texts: found(texts, **options)["input_ids"]

    def hub_tokenizer(self, name: str) -> Any:
        """transformers' tokenizer of a model."""
        from transformers import AutoTokenizer

        with hub_files(f"hf:{name}", "tokenizer"):
            if (folder := Path(name)).is_dir() and not any(folder.glob("tokenizer*")):
                # transformers would make one up, without a vocabulary.
                raise FileNotFoundError(f"{name} has no tokenizer.json")
            return AutoTokenizer.from_pretrained(name)

    def config(self, name: str) -> Any:
        """The configuration of a model."""
        from transformers import AutoConfig

        with hub_files(f"hf:{name}", "configuration"):
            return AutoConfig.from_pretrained(name)


_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def _half(config: Any, part: str) -> nn.Module:
    """A new model: of the configuration itself, or of its vision_config or text_config."""
    import transformers

    own = getattr(config, part, config)
    name = type(own).__name__.removesuffix("Config")
    if name.endswith(("Vision", "Text")):  # half of a CLIP or SigLIP
        kinds = (getattr(transformers, f"{name}{end}", None) for end in ("ModelWithProjection", "Model"))
        if (kind := next(filter(None, kinds), None)) is not None:
            return kind(own)
    auto = transformers.AutoModelForTextEncoding if part == "text_config" else transformers.AutoModel
    return (auto if type(own) in auto._model_mapping else transformers.AutoModel).from_config(own)


def read_hf(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder of transformers by the names of its modules, as its own loader converts them.

    Tensors that its model has no place for are there too, empty.

    Raises:
        UserError: transformers cannot load them.
    """
    import transformers

    config, kind = HuggingFace().config(str(folder)), transformers.AutoModel
    if not hasattr(config, "vision_config"):
        with torch.device("meta"):
            kind = type(_half(config, "text_config"))
    with hub_files(f"hf:{folder}", "model"):
        model, info = kind.from_pretrained(folder, output_loading_info=True, use_safetensors=True)
    found = {name: one for name, one in model.state_dict().items() if name not in info["missing_keys"]}
    return found | {name: torch.empty(0) for name in info["unexpected_keys"]}


def _pictures(model: nn.Module, pictures_BCHW: Tensor) -> dict[str, Tensor]:
    """The arguments of a model for pictures; the NaFlex towers of SigLIP 2 take patches, row by row."""
    config: Any = model.config
    if config.model_type != "siglip2_vision_model":
        return {"pixel_values": pictures_BCHW}
    side = config.patch_size
    cells = pictures_BCHW.unflatten(3, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 3, 5, 1)
    rows, columns = cells.shape[1:3]
    shapes_B2 = torch.tensor([[rows, columns]], device="cpu").expand(len(cells), 2)  # it is read there
    return {
        "pixel_values": cells.flatten(3).flatten(1, 2),
        "pixel_attention_mask": None,  # all of them
        "spatial_shapes": shapes_B2,
    }


def _not_padding(tokens_BL: Tensor, config: Any) -> Tensor | None:
    """1 for tokens and 0 for padding, int64 [B, L]; None for a SigLIP, which attends to it, and a CLIP, which is causal
    and pads with the token that ends a text."""
    if config.model_type.startswith(("siglip", "clip")) or config.pad_token_id is None:
        return None
    return (tokens_BL != config.pad_token_id).to(torch.int64)
