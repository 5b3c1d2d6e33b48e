"""Text towers from open_clip: functions that find the weights, load a tower and encode texts.

In this package, only this module imports open_clip.

Every batch has the same size, and every text is padded to a length that depends only on the text. Embeddings are
therefore bit-identical regardless of the other texts in the batch, so a run may be interrupted and continued.

Shape suffixes: B texts in a batch, T tokens, D width.
"""

import hashlib
import heapq
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clipmill.manifests.errors import UserError, first_line
from clipmill.manifests.hub import hub_if_reachable
from clipmill.prep.core.recipe import Recipe
from clipmill.prep.text.recipe import SAFETENSORS, TINY, TextSettings, file_sha256, safetensors_shapes, text_recipe

TINY_WIDTH = 256  # embedding dimension of the tiny model
_TINY_VERSION = "seeded text tower: width 64, 2 heads, 2 layers, embedding 256, RandomState(0), version 1"
TINY_SHA256 = hashlib.sha256(_TINY_VERSION.encode()).hexdigest()
_LENGTH_STEP = 8  # texts are padded to a multiple of this number of tokens
_LONG_WORD_BYTES = 64  # words of at most 64 UTF-8 bytes are passed to the tokenizer, which is fast and has a cache
_INSTALL_HINT = "install clipmill[columns]"


@dataclass(frozen=True)
class Encoded:
    """Embeddings or sequences for some texts.

    Attributes:
        rows: Vectors of all texts, concatenated, float16 [sum of lengths, width]. Values may be non-finite. Embeddings
            have unit length.
        lengths: Number of rows of each text, int64 [texts]: 1 for an embedding, the number of tokens for a sequence.
        num_cut: Number of texts that were truncated to the maximum length of the encoder.
    """

    rows: np.ndarray
    lengths: np.ndarray
    num_cut: int

    @property
    def is_finite(self) -> np.ndarray:
        """True for each text whose values are all finite, bool [texts]."""
        return texts_with_all(np.isfinite(self.rows).all(axis=1), self.lengths)


def texts_with_all(is_good: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return True for each text whose rows are all good, bool [texts].

    Args:
        is_good: True for each good row, bool [sum of lengths].
        lengths: Number of rows of each text, int64 [texts].
    """
    num_bad = np.concatenate([[0], np.cumsum(~is_good)])
    ends = np.cumsum(lengths)
    return num_bad[ends] == num_bad[ends - lengths]


class Tower:
    """Text tower with its tokenizer.

    Args:
        model: Model from open_clip. Its image tower is removed.
        tokenizer: Tokenizer of the model.
        device: cuda or cpu.
    """

    def __init__(self, model: Any, tokenizer: Any, *, device: str) -> None:
        import open_clip

        if hasattr(model, "visual"):
            del model.visual
        self._model = model.to(device).eval()
        self._tokenizer, self._device = tokenizer, device
        self._context_length = int(tokenizer.context_length)
        # With causal attention, the embedding at the end token does not depend on the padding after it.
        self._can_shorten = (
            type(model) is open_clip.CLIP
            and isinstance(tokenizer, open_clip.SimpleTokenizer)
            and model.text_pool_type == "argmax"
            and model.attn_mask is not None
        )

    def encode(self, texts: Sequence[str], *, batch: int) -> Encoded:
        """Encode texts as embeddings, in batches of `batch` texts."""
        import torch

        ids, num_cut = self._token_ids(texts)
        lengths = np.full(len(texts), self._context_length)
        if self._can_shorten:
            ends = ids.argmax(dim=1).numpy() + 1
            lengths = np.minimum(-(-ends // _LENGTH_STEP) * _LENGTH_STEP, self._context_length)
        parts, positions = [], []
        with torch.inference_mode():
            for length in np.unique(lengths).tolist():
                rows = np.flatnonzero(lengths == length)
                for start in range(0, len(rows), batch):
                    batch_rows = rows[start : start + batch]
                    parts.append(self._embed(ids[batch_rows, :length], batch=batch))
                    positions.append(batch_rows)
        order = np.argsort(np.concatenate(positions), kind="stable")
        vectors = np.concatenate(parts)[order]
        return Encoded(vectors, np.ones(len(texts), np.int64), num_cut)

    def _embed(self, ids: Any, *, batch: int) -> np.ndarray:
        import torch

        num_texts = len(ids)
        # Pad the batch: a smaller batch would use different kernels, with different rounding.
        ids_BT = torch.cat([ids, ids[-1:].expand(batch - num_texts, -1)]).to(self._device)
        features_BD = (self._encode_short(ids_BT) if self._can_shorten else self._model.encode_text(ids_BT)).float()
        unit_BD = torch.nn.functional.normalize(features_BD, dim=-1)
        return np.asarray(unit_BD[:num_texts].half().cpu().numpy())

    def _encode_short(self, ids_BT: Any) -> Any:
        """Compute `open_clip.CLIP.encode_text` for texts of at most T tokens, where T is the width of `ids_BT`."""
        import torch

        model, length = self._model, ids_BT.shape[1]
        x_BTD = model.token_embedding(ids_BT) + model.positional_embedding[:length]
        x_BTD = model.ln_final(model.transformer(x_BTD, attn_mask=model.attn_mask[:length, :length]))
        x_BD = x_BTD[torch.arange(len(ids_BT), device=ids_BT.device), ids_BT.argmax(dim=-1)]
        projection = model.text_projection
        if projection is None:
            return x_BD
        return projection(x_BD) if isinstance(projection, torch.nn.Linear) else x_BD @ projection

    def _token_ids(self, texts: Sequence[str]) -> tuple[Any, int]:
        """Tokenize texts; return the token IDs, int64 [texts, context length], and the number of truncated texts."""
        import open_clip
        import torch

        length = self._context_length
        if not isinstance(self._tokenizer, open_clip.SimpleTokenizer) or self._tokenizer.reduction_fn is not None:
            ids = self._tokenizer(list(texts), context_length=length)
            # Tokenize again with a context that is one token longer: a text that fits the original context now ends
            # with padding, like the empty text.
            last_tokens = self._tokenizer([*texts, ""], context_length=length + 1)[:, -1]
            return ids, int((last_tokens[:-1] != last_tokens[-1]).sum())
        tokens_of_texts = [tokens_of(self._tokenizer, text, context_length=length) for text in texts]
        ids = torch.zeros(len(texts), length, dtype=torch.long)
        for row, tokens in enumerate(tokens_of_texts):
            ids[row, : len(tokens.ids)] = torch.tensor(tokens.ids)
        return ids, sum(tokens.is_cut for tokens in tokens_of_texts)


@lru_cache(maxsize=1)
def load_tower(clip: str, *, sha256: str, device: str) -> Tower:
    """Load the text tower that `clip` selects (see `TextSettings`). The result is cached.

    Args:
        sha256: Hash in the recipe of the plan.

    Raises:
        UserError: open_clip is not installed, or the weights do not exist on this machine, have a different hash, or
            cannot be loaded.
    """
    settings = TextSettings(clip=clip)
    open_clip = _import_open_clip()
    if clip == TINY:
        return Tower(_tiny_model(), open_clip.SimpleTokenizer(), device=device)
    path = weights_file(settings)
    if (file_hash := file_sha256(path)) != sha256:
        raise UserError(
            f"{path} on this machine has SHA-256 {file_hash[:12]}, but the plan requires {sha256[:12]}",
            hint="use the same weights on every machine",
        )
    try:
        model = open_clip.create_model(settings.model, pretrained=str(path), weights_only=True)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} cannot be loaded as {settings.model}: {first_line(error)}",
            hint="use --clip with weights of this model",
        ) from None
    return Tower(model, open_clip.get_tokenizer(settings.model), device=device)


def use_threads(num_threads: int) -> None:
    """Set the number of CPU threads that torch uses in this process."""
    import torch

    torch.set_num_threads(num_threads)


def is_tag(settings: TextSettings) -> bool:
    """Return True if the settings select the weights by a tag of open_clip."""
    return bool(_import_open_clip().pretrained.is_pretrained_cfg(settings.model, settings.weights))


def resolve(settings: TextSettings) -> Recipe[TextSettings]:
    """Find the weights that the settings select, downloading them if necessary, and return the recipe.

    Raises:
        UserError: The weights cannot be found (see `weights_file`), or do not belong to the model.
    """
    if settings.clip == TINY:
        return text_recipe(settings, encoder=TINY, sha256=TINY_SHA256, width=TINY_WIDTH)
    path = weights_file(settings)
    width, has_tag = check_weights(settings, path), is_tag(settings)
    clip = f"{settings.model}:{settings.weights if has_tag else path.resolve()}"
    name = settings.weights if has_tag else Path(settings.weights).name
    return text_recipe(
        replace(settings, clip=clip), encoder=f"{settings.model}:{name}", sha256=file_sha256(path), width=width
    )


def weights_file(settings: TextSettings) -> Path:
    """Return the path of the weights that the settings select; download weights with a tag if they are not cached.

    Raises:
        UserError: The model, tag or file does not exist, the model and the tag use different activation functions, or
            the download failed.
    """
    open_clip = _import_open_clip()
    models = open_clip.list_models()
    if settings.model not in models:
        similar_models = [name for name in models if name.lower()[:5] == settings.model.lower()[:5]] or models
        raise UserError(
            f'--clip {settings.clip}: open_clip has no model "{settings.model}"',
            hint=f"use one of open_clip's {len(models)} models, for example {', '.join(similar_models[:6])}; or tiny",
        )
    config = open_clip.pretrained.get_pretrained_cfg(settings.model, settings.weights)
    if not config:
        path = Path(settings.weights).expanduser()
        if path.is_file():
            return path.absolute()
        tags = open_clip.list_pretrained_tags_by_model(settings.model)
        raise UserError(
            f'"{settings.weights}" is neither a file nor a tag of {settings.model}',
            hint=f"use a weights file, or a tag such as {', '.join(tags[:6])}" if tags else "use a weights file",
        )
    if config.get("quick_gelu", False) != open_clip.get_model_config(settings.model).get("quick_gelu", False):
        is_quick = settings.model.endswith("-quickgelu")
        other_model = settings.model.removesuffix("-quickgelu") if is_quick else f"{settings.model}-quickgelu"
        raise UserError(
            f"the weights {settings.weights} require a different activation function than {settings.model} uses",
            hint=f"use {other_model}:{settings.weights}",
        )
    try:
        with hub_if_reachable():
            return Path(open_clip.pretrained.download_pretrained(config))
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"the weights of --clip {settings.clip} cannot be downloaded: {first_line(error)}",
            hint=f"copy the file to this machine, and use --clip {settings.model}:FILE",
        ) from None


def check_weights(settings: TextSettings, path: Path) -> int:
    """Check that a local file contains the tensors of the model; return the embedding dimension of the model.

    Raises:
        UserError: The file is not a checkpoint, or belongs to a different model.
    """
    import torch

    open_clip = _import_open_clip()
    width = int(open_clip.get_model_config(settings.model)["embed_dim"])
    if is_tag(settings):
        return width  # open_clip converts these weights itself, so their tensors may have other names
    shapes = _read_shapes(path)
    logging.disable(logging.WARNING)  # hide the warning that the model has no weights; only its shapes are needed
    try:
        with torch.device("meta"):
            model = open_clip.create_model(settings.model, load_weights=False, pretrained_text=False, device="meta")
    finally:
        logging.disable(logging.NOTSET)
    for name, tensor in model.state_dict().items():
        # Older checkpoints name the tensors of the text tower without the prefix `text.`.
        shape = shapes.get(name, shapes.get(name.removeprefix("text.")))
        if name.startswith(("visual.", "logit_")) or shape == tuple(tensor.shape):
            continue
        difference = "is missing" if shape is None else f"has shape {list(shape)}"
        raise UserError(
            f"{path} is not a checkpoint of {settings.model}: {name} {difference}, expected {list(tensor.shape)}",
            hint="use the model that the weights belong to; the weights must be in open_clip's format",
        )
    return width


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    import torch

    if path.suffix == SAFETENSORS:
        return safetensors_shapes(path)
    try:
        checkpoint = torch.load(path, map_location="meta", weights_only=True)
        tensors = checkpoint.get("state_dict", checkpoint)
        return {name.removeprefix("module."): tuple(tensor.shape) for name, tensor in tensors.items()}
    except Exception as error:  # noqa: BLE001 - unpickling a file that is not a checkpoint may raise anything
        raise UserError(
            f"{path} is not a PyTorch checkpoint that can be loaded safely ({type(error).__name__})",
            hint="use a .safetensors file, or a checkpoint that torch.load(weights_only=True) accepts",
        ) from None


def _tiny_model() -> Any:
    import open_clip
    import torch

    vision = {"layers": 1, "width": 64, "head_width": 64, "patch_size": 32, "image_size": 32}
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
    model = open_clip.CLIP(embed_dim=TINY_WIDTH, vision_cfg=vision, text_cfg=text)
    # NumPy guarantees that RandomState always produces the same numbers; torch gives no such guarantee.
    random = np.random.RandomState(0)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if name.endswith("bias") or name.startswith(("visual.", "logit_")):
                tensor.zero_()
            elif ".ln_" in name or name.startswith("ln_"):
                tensor.fill_(1.0)
            else:
                values = random.standard_normal(tuple(tensor.shape)) / np.sqrt(tensor.shape[-1])
                tensor.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def _import_open_clip() -> Any:
    """Import open_clip, but prevent timm, which open_clip imports, from importing wandb.

    wandb creates folders in $TMPDIR, which would remain after a worker is killed.
    """
    modules: dict[str, Any] = sys.modules
    is_imported = "wandb" in modules
    modules.setdefault("wandb", None)  # makes `import wandb` raise ImportError, which timm handles
    try:
        import open_clip
        import open_clip.pretrained
    except ImportError as error:
        raise UserError(f"text encoders require open_clip: {error}", hint=_INSTALL_HINT) from None
    finally:
        if not is_imported:
            del modules["wandb"]
    return open_clip


class Tokens(NamedTuple):
    """Token IDs of one text, including the start and end tokens, and whether the text was truncated."""

    ids: list[int]
    is_cut: bool


def tokens_of(tokenizer: Any, text: str, *, context_length: int) -> Tokens:
    """Return the tokens of a text, truncated to `context_length` tokens, as open_clip's `SimpleTokenizer` does.

    `SimpleTokenizer` encodes the complete text, although a tower reads only 77 tokens, and its time is quadratic in the
    length of a word: minutes for a word of 100,000 letters. This function stops at the first token that the tower does
    not read, and uses a heap to merge the pairs of a long word.
    """
    start, end = tokenizer.sot_token_id, tokenizer.eot_token_id
    ids = [start]
    for word in tokenizer.pat.finditer(tokenizer.clean_fn(text)):
        letters = "".join(tokenizer.byte_encoder[byte] for byte in word.group().encode("utf-8"))
        if len(letters) > _LONG_WORD_BYTES:
            symbols = merge_pairs([*letters[:-1], f"{letters[-1]}</w>"], ranks=tokenizer.bpe_ranks)
        else:
            symbols = tokenizer.bpe(letters).split(" ")
        ids.extend(tokenizer.encoder[symbol] for symbol in symbols)
        if len(ids) >= context_length:
            return Tokens([*ids[: context_length - 1], end], is_cut=True)
    return Tokens([*ids, end], is_cut=False)


def merge_pairs(symbols: list[str], *, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Apply byte-pair encoding (Sennrich et al. 2016) to the n symbols of a word in O(n log n) time.

    All occurrences of the pair with the lowest rank are merged from left to right; this step is repeated until no pair
    has a rank.
    """
    successor = [*range(1, len(symbols)), -1]
    predecessor = list(range(-1, len(symbols) - 1))
    symbols = list(symbols)
    heap = [(ranks[pair], position) for position, pair in enumerate(pairwise(symbols)) if pair in ranks]
    heapq.heapify(heap)
    pair_of_rank: dict[int, tuple[str, str]] = {ranks[pair]: pair for pair in set(pairwise(symbols)) if pair in ranks}
    while heap:
        # As in the original algorithm, merge all occurrences of a pair before the pairs that these merges create.
        rank, positions = heap[0][0], []
        while heap and heap[0][0] == rank:
            positions.append(heapq.heappop(heap)[1])
        first, second = pair_of_rank[rank]
        changed_positions = []
        for position in positions:
            follower = successor[position]
            if symbols[position] != first or follower < 0 or symbols[follower] != second:
                continue
            symbols[position], symbols[follower] = first + second, ""
            successor[position] = successor[follower]
            if successor[position] >= 0:
                predecessor[successor[position]] = position
            changed_positions.append(position)
        for position in changed_positions:
            for left in (predecessor[position], position):
                if left >= 0 and successor[left] >= 0:
                    pair = symbols[left], symbols[successor[left]]
                    if pair in ranks:
                        pair_of_rank[ranks[pair]] = pair
                        heapq.heappush(heap, (ranks[pair], left))
    return [symbol for symbol in symbols if symbol]
