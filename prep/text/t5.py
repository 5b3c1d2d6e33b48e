"""T5 and umT5 encoders, which turn a text into a sequence of vectors. In this package, only this module imports
transformers.

Every batch has the same size, and every text is padded to a length that depends only on the text, as in `tower.py`. The
vectors are therefore bit-identical regardless of the other texts in the batch.

Shape suffixes: B texts in a batch, T tokens, D width.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.core.request import model_folder
from clipmill.prep.text.recipe import T5, TextSettings, file_sha256, safetensors_shapes, text_recipe
from clipmill.prep.text.tower import Encoded

_LENGTH_STEP = 8  # texts are padded to a multiple of this number of tokens
_CLASSES = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel"}
_TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_DOWNLOAD_PATTERNS = [
    f"{folder}{file}"
    for folder in ("", "text_encoder/", "tokenizer/")
    for file in ("config.json", "model*.safetensors", "model*.safetensors.index.json", *_TOKENIZER_FILES)
]
_SUGGESTION = (
    "use t5:NAME, such as t5:google/umt5-xxl, or t5:FOLDER with a folder that contains config.json, weights in "
    "safetensors and a tokenizer"
)


def resolve_t5(settings: TextSettings) -> Recipe[TextSettings]:
    """Find the T5 model that the settings select, downloading it if it is not cached, and return the recipe.

    Raises:
        UserError: The model does not exist, is not a T5 model, lacks files, or has damaged weights.
    """
    model, tokenizer = _folders(settings.t5)
    config = _config(model)
    weights = sorted(model.glob("*.safetensors"))
    tokenizer_files = [path for name in _TOKENIZER_FILES if (path := tokenizer / name).is_file()]
    if not weights:
        raise UserError(f"{model} lacks weights in safetensors", hint=_SUGGESTION)
    if not tokenizer_files:
        raise UserError(f"{tokenizer} lacks the files of a tokenizer", hint=_SUGGESTION)
    for path in weights:
        safetensors_shapes(path)  # raises UserError if the file is damaged
    # The hash covers all files that affect the vectors.
    digest = hashlib.sha256()
    for path in (model / "config.json", *weights, *tokenizer_files):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    folder, name = Path(settings.t5).expanduser(), settings.t5
    if folder.is_dir():
        name, settings = folder.resolve().name, replace(settings, encoder=f"{T5}{folder.resolve()}")
    return text_recipe(settings, encoder=f"{T5}{name}", sha256=digest.hexdigest(), width=int(config["d_model"]))


class T5Encoder:
    """T5 encoder with its tokenizer.

    Args:
        model: Encoder model of transformers.
        tokenizer: Tokenizer of the model.
        max_tokens: Maximum number of tokens per text, including the end token. Longer texts are truncated.
        device: cuda or cpu.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int, device: str) -> None:
        self._model, self._tokenizer = model.to(device).eval(), tokenizer
        self._max_tokens, self._device = max_tokens, device

    def encode(self, texts: Sequence[str], *, batch: int) -> Encoded:
        """Encode texts as sequences, in batches of `batch` texts."""
        import torch

        tokens = self._tokenizer(list(texts), add_special_tokens=True, truncation=False)["input_ids"]
        num_cut = sum(len(ids) > self._max_tokens for ids in tokens)
        tokens = [ids if len(ids) <= self._max_tokens else [*ids[: self._max_tokens - 1], ids[-1]] for ids in tokens]
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        padded_lengths = -(-lengths // _LENGTH_STEP) * _LENGTH_STEP
        vectors: dict[int, np.ndarray] = {}
        with torch.inference_mode():
            for length in np.unique(padded_lengths).tolist():
                rows = np.flatnonzero(padded_lengths == length).tolist()
                for start in range(0, len(rows), batch):
                    batch_rows = rows[start : start + batch]
                    sequences = self._vectors([tokens[row] for row in batch_rows], length, batch)
                    vectors.update(zip(batch_rows, sequences, strict=True))
        return Encoded(np.concatenate([vectors[row] for row in range(len(texts))]), lengths, num_cut)

    def _vectors(self, tokens: list[list[int]], length: int, batch: int) -> list[np.ndarray]:
        import torch

        # Pad the batch: a smaller batch would use different kernels, with different rounding.
        full_batch = tokens + [tokens[-1]] * (batch - len(tokens))
        ids_BT = torch.tensor([ids + [self._tokenizer.pad_token_id] * (length - len(ids)) for ids in full_batch])
        mask_BT = torch.arange(length) < torch.tensor([[len(ids)] for ids in full_batch])
        hidden_BTD = self._model(
            input_ids=ids_BT.to(self._device), attention_mask=mask_BT.long().to(self._device)
        ).last_hidden_state
        vectors_BTD = hidden_BTD.half().cpu().numpy()
        return [vectors_BTD[row, : len(ids)] for row, ids in enumerate(tokens)]


@lru_cache(maxsize=1)
def load_t5(settings: TextSettings, *, sha256: str, device: str) -> T5Encoder:
    """Load the T5 model that the settings select. The result is cached.

    Args:
        sha256: Hash in the recipe of the plan.

    Raises:
        UserError: transformers is not installed, or the model does not exist on this machine, has a different hash, or
            cannot be loaded.
    """
    import torch

    model_hash = resolve_t5(settings).values["encoder_sha256"]
    if model_hash != sha256:
        raise UserError(
            f"{settings.encoder} on this machine has SHA-256 {model_hash[:12]}, but the plan requires {sha256[:12]}",
            hint="use the same weights on every machine",
        )
    model_dir, tokenizer_dir = _folders(settings.t5)
    try:
        import transformers
    except ImportError:
        raise UserError("transformers is not installed", hint="install clipmill[columns]") from None
    transformers.utils.logging.disable_progress_bar()
    try:
        model = getattr(transformers, _CLASSES[_config(model_dir)["model_type"]]).from_pretrained(
            model_dir, dtype=getattr(torch, settings.precision), local_files_only=True, use_safetensors=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{settings.encoder} cannot be loaded: {reason}", hint=_SUGGESTION) from None
    return T5Encoder(model, tokenizer, max_tokens=settings.max_tokens, device=device)


def _folders(name: str) -> tuple[Path, Path]:
    """Return the folders of the model and the tokenizer, which are subfolders in a diffusers pipeline."""
    folder = model_folder(name, files=_DOWNLOAD_PATTERNS, what="", flag=f"--encoder {T5}{name}", hint=_SUGGESTION)
    model, tokenizer = folder / "text_encoder", folder / "tokenizer"
    return (model if model.is_dir() else folder), (tokenizer if tokenizer.is_dir() else folder)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = parse_json(path.read_bytes())
        kind = config["model_type"]
        int(config["d_model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the configuration of a T5 model: {error!r}", hint=_SUGGESTION) from None
    if kind not in _CLASSES:
        raise UserError(
            f"{path} configures a model of type {kind}, not of type {' or '.join(_CLASSES)}", hint=_SUGGESTION
        )
    return dict(config)
