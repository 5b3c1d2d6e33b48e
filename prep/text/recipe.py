"""Settings of the column `text` and their recipe. The main setting is the text encoder.

A CLIP text tower makes one unit-length embedding per text. A T5 encoder makes a sequence per text: one vector for each
token, stored without padding.

In addition to the settings, the stored recipe contains the hash of the weights and the embedding width. It omits the
folder of a weights file, because moving the file does not change the embeddings.
"""

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.publish import parse_json
from clipmill.manifests.settings import Checked, Range, errors_of
from clipmill.prep.core.recipe import NOT_STORED, Recipe
from clipmill.prep.core.variants import WHERE
from clipmill.shards.where_flag import check_where

SAFETENSORS = ".safetensors"
_READ_BYTES = 1 << 24
_MAX_HEADER_BYTES = 100 << 20
TEXT = "text"
MEMBER = "text.npy"
BANK_FOLDER = "bank"  # folder in a variant for embeddings that are not in a shard yet
BLOCK_FILE = re.compile(r"[0-9a-f]{32}\.arrow")
TEXT_RECIPE_SCHEMA = 2  # increment it when the same settings start to produce different bytes
TINY, T5 = "tiny", "t5:"
MODEL = Parameter(group=Group("Model", sort_key=1))
DTYPE = "float16"
SEQUENCE_SETTINGS = ("max_tokens", "precision")  # names of settings that affect only sequences
_UNSAFE_CHARS = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_SLUG_CHARS = 80
_ENCODER_HINT = "use --clip MODEL:TAG for embeddings, or --encoder t5:NAME for sequences"


@dataclass(frozen=True, kw_only=True)
class TextSettings(Checked):
    """Settings of `prep text`: the text encoder, and a condition that selects captions."""

    clip: Annotated[str | None, MODEL, FIRST_RUN] = None
    """CLIP text tower: an open_clip model and the tag or file of its weights, as MODEL:TAG or MODEL:FILE; or tiny, a
    small model with random weights for trials."""

    encoder: Annotated[str | None, MODEL, FIRST_RUN] = None
    """Encoder for sequences, used instead of --clip: t5: followed by the folder or Hugging Face name of a T5 or umT5
    model, such as t5:google/umt5-xxl."""

    max_tokens: Annotated[int, MODEL, Range(2, 4096)] = 512
    """Maximum length of a sequence from --encoder in tokens, 2 to 4096. Longer texts are truncated."""

    precision: Annotated[Literal["float32", "bfloat16"], MODEL] = "float32"
    """Data type in which --encoder computes. Vectors are stored as float16."""

    where: Annotated[str | None, MODEL, NOT_STORED] = None
    """Condition that selects the captions to encode, such as 'words > 3 and source == "human"'. The condition is not
    part of the recipe: a run with a different condition adds the missing captions to the same variant, and removes
    captions that are no longer selected. Default: all captions."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error for two encoders, for a value that does not name an encoder, and for an invalid condition."""
        if self.clip is not None and self.encoder is not None:
            yield UserError(
                "--clip and --encoder cannot be used together", hint=_ENCODER_HINT, flags=("--clip", "--encoder")
            )
        if self.encoder is not None and not self.encoder.removeprefix(T5):
            yield UserError(
                f'--encoder "{self.encoder}" does not name a model',
                hint="use t5:NAME or t5:FOLDER",
                flags=("--encoder",),
            )
        elif self.encoder is not None and not self.encoder.startswith(T5):
            yield UserError(
                f'--encoder "{self.encoder}" is not a T5 encoder',
                hint="use --encoder t5:NAME, or --clip for a CLIP text tower",
                flags=("--encoder",),
            )
        if self.clip is not None and self.clip != TINY and not all(self.clip.partition(":")[::2]):
            yield UserError(
                f'--clip "{self.clip}" does not name a text encoder',
                hint="use MODEL:TAG or MODEL:FILE, for example ViT-B-32:laion2b_s34b_b79k, or tiny",
                flags=("--clip",),
            )
        yield from errors_of(check_where, self.where)

    def require_encoder(self) -> None:
        """Raise UserError if no encoder is selected."""
        if self.clip is None and self.encoder is None:
            raise UserError("no text encoder is selected", hint=_ENCODER_HINT)

    @property
    def model(self) -> str:
        """Name of the model in open_clip."""
        return str(self.clip).partition(":")[0].replace("/", "-")

    @property
    def weights(self) -> str:
        """Tag or file of the weights; empty for tiny."""
        return str(self.clip).partition(":")[2]

    @property
    def t5(self) -> str:
        """Folder or Hugging Face name of the T5 model."""
        return str(self.encoder).removeprefix(T5)


def text_recipe(settings: TextSettings, *, encoder: str, sha256: str, width: int) -> Recipe[TextSettings]:
    """Return the recipe of the settings.

    Args:
        settings: Settings with the absolute path of any local weights.
        encoder: Name of the encoder: tiny, MODEL:TAG, MODEL:FILENAME, or t5:NAME.
        sha256: SHA-256 (hex) of the weights file; for tiny, of a description of the model; for a T5 model, of the
            weights, the configuration and the tokenizer.
        width: Embedding dimension.
    """
    sequence_settings = (
        {} if settings.encoder is None else {name: getattr(settings, name) for name in SEQUENCE_SETTINGS}
    )
    stored = {"encoder": encoder, "encoder_sha256": sha256, "width": width, "dtype": DTYPE, **sequence_settings}
    name = _UNSAFE_CHARS.sub("-", encoder).strip("-")[:_MAX_SLUG_CHARS]
    return Recipe(settings, {"schema": TEXT_RECIPE_SCHEMA, "column": TEXT, **stored}, name)


def settings_of(stored: Mapping[str, Any], weights: str | None) -> TextSettings:
    """Return the settings that reproduce a stored recipe.

    Args:
        stored: Recipe, merged with the request of the last run (`variants.stored_request`).
        weights: Path of local weights; None for weights that are selected by a tag or a Hub name, and for tiny.
    """
    encoder = stored["encoder"] if weights is None else f"{stored['encoder'].partition(':')[0]}:{weights}"
    sequence_settings = {name: stored[name] for name in SEQUENCE_SETTINGS if name in stored}
    settings: dict[str, Any] = {"encoder" if sequence_settings else "clip": encoder, **sequence_settings}
    return TextSettings(**settings, where=stored.get(WHERE))


def local_weights(recipe: Recipe[TextSettings]) -> str | None:
    """Return the absolute path of local weights; None for weights that are selected by a tag or a Hub name."""
    encoder = str(recipe.settings.clip or recipe.settings.encoder)
    return None if encoder == recipe.values["encoder"] else encoder.partition(":")[2]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the header of a safetensors file and return the shape of each tensor, keyed by name.

    Raises:
        UserError: The file is not a safetensors file, or is truncated.
    """
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError("no valid header")
            header = parse_json(file.read(header_bytes))
        header.pop("__metadata__", None)
        end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size < end:
            raise ValueError(f"truncated at {path.stat().st_size} of {end} bytes")
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(
            f"{path} is not a valid safetensors file: {error}", hint="download it again, or use a different file"
        ) from None
