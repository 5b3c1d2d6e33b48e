"""The recipe of the `text` column: the model that encodes the captions.

A CLIP text tower makes one embedding of a text, of unit length. The encoder of a T5 makes a sequence: one vector for
each token, stored without padding.

`TextRecipe` holds what the user gave; `ResolvedTextRecipe` adds the hash of the weights and the embedding width. The
resolved recipe is fingerprinted and stored beside the shards. It does not include the folder of a weights file: moving
the file does not change the embeddings.
"""

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from clipmill.manifests.checked_json import parse_json
from clipmill.manifests.errors import UserError
from clipmill.manifests.help_text import FIRST_RUN
from clipmill.manifests.settings import Checked, Range, errors_of
from clipmill.prep.core.column import WEIGHTS
from clipmill.prep.core.recipe import recipe_fingerprint
from clipmill.prep.core.selection import WHERE
from clipmill.shards.where_flag import check_where

SAFETENSORS = ".safetensors"
_PIECE_BYTES = 1 << 24
_MAX_HEADER_BYTES = 100 << 20
TEXT = "text"
MEMBER = "text.npy"
BANK_FOLDER = "bank"  # folder in a variant for embeddings that are not in their shard yet
BLOCK_FILE = re.compile(r"[0-9a-f]{32}\.arrow")
TEXT_RECIPE_SCHEMA = 2  # incremented when the same settings begin to produce different bytes
TINY, T5 = "tiny", "t5:"
MODEL = Parameter(group=Group("Model", sort_key=1))
DTYPE = "float16"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_SLUG_CHARS = 80
_ONE_OF_BOTH = "give --clip MODEL:TAG for embeddings, or --encoder t5:NAME for sequences"


@dataclass(frozen=True, kw_only=True)
class TextRecipe(Checked):
    """Settings of `prep text` that affect the embeddings."""

    clip: Annotated[str | None, MODEL, FIRST_RUN] = None
    """CLIP text tower: an open_clip model and the tag or file of its weights, as MODEL:TAG or MODEL:FILE; or tiny
    (small, random weights, for trials)."""

    encoder: Annotated[str | None, MODEL, FIRST_RUN] = None
    """Encoder of sequences in place of --clip: t5: and the folder or Hugging Face name of a T5 or umT5, such as
    t5:google/umt5-xxl."""

    max_tokens: Annotated[int, MODEL, Range(2, 4096)] = 512
    """Length of a sequence of --encoder, 2 to 4096; longer texts are truncated."""

    precision: Annotated[Literal["float32", "bfloat16"], MODEL] = "float32"
    """Precision of the computation of --encoder."""

    where: Annotated[str | None, MODEL] = None
    """Condition that selects the captions to encode, such as 'words > 3 and source == "human"'. It is not part of the
    variant: another condition encodes what is missing, and drops what it does not select. Default: all captions."""

    def rules(self) -> Iterator[UserError]:
        """Yield an error for two encoders, for a name that is not an encoder's, and for an invalid condition."""
        if self.clip is not None and self.encoder is not None:
            yield UserError("--clip and --encoder are both given", hint=_ONE_OF_BOTH, flags=("--clip", "--encoder"))
        if self.encoder is not None and not self.encoder.removeprefix(T5):
            yield UserError(
                f'--encoder "{self.encoder}" does not name a model',
                hint="give t5:NAME or t5:FOLDER",
                flags=("--encoder",),
            )
        elif self.encoder is not None and not self.encoder.startswith(T5):
            yield UserError(
                f'--encoder "{self.encoder}" is not the encoder of a T5',
                hint="give t5:NAME, or a CLIP with --clip",
                flags=("--encoder",),
            )
        if self.clip is not None and self.clip != TINY and not all(self.clip.partition(":")[::2]):
            yield UserError(
                f'--clip "{self.clip}" does not name a text encoder',
                hint="give MODEL:TAG or MODEL:FILE, for example ViT-B-32:laion2b_s34b_b79k, or tiny",
                flags=("--clip",),
            )
        yield from errors_of(check_where, self.where)

    def require_encoder(self) -> None:
        """Raise UserError if no encoder is given."""
        if self.clip is None and self.encoder is None:
            raise UserError("no text encoder is given", hint=_ONE_OF_BOTH)

    @property
    def flags(self) -> list[str]:
        """The flags that name the encoder."""
        return ["--clip", self.clip] if self.clip is not None else ["--encoder", str(self.encoder)]

    @property
    def model(self) -> str:
        """Name of the model in open_clip's list of configurations."""
        return str(self.clip).partition(":")[0].replace("/", "-")

    @property
    def weights(self) -> str:
        """Tag or file of the weights; empty for tiny."""
        return str(self.clip).partition(":")[2]

    @property
    def t5(self) -> str:
        """Folder or name of a T5."""
        return str(self.encoder).removeprefix(T5)


@dataclass(frozen=True, kw_only=True)
class ResolvedTextRecipe:
    """A recipe whose weights have been found.

    Attributes:
        encoder: tiny, MODEL:TAG, or MODEL: followed by the file name; or t5: followed by the name.
        encoder_sha256: hash of the weights file; for tiny, of the version of the code that makes it; of a T5 also of
            its configuration and tokenizer.
        width: embedding dimension.
        where: condition that selects captions; not part of the recipe, as embeddings do not depend on it.
        weights: Absolute path of weights on this machine, not part of the recipe either; None if they have a name.
        max_tokens, precision: of sequences; None for embeddings.
    """

    encoder: str
    encoder_sha256: str
    width: int
    dtype: str = DTYPE
    where: str | None = None
    weights: str | None = None
    max_tokens: int | None = None
    precision: str | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of `as_dict` as canonical JSON."""
        return recipe_fingerprint(self.as_dict())

    @property
    def variant(self) -> str:
        """Folder name of the recipe's variant: a readable part and the first 8 digits of the fingerprint."""
        readable = _UNSAFE.sub("-", self.encoder).strip("-")[:_MAX_SLUG_CHARS]
        return f"{readable}-{self.fingerprint[:8]}"

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        values = {"schema": TEXT_RECIPE_SCHEMA, "column": TEXT, **asdict(self)}
        return {name: value for name, value in values.items() if name not in (WHERE, WEIGHTS) and value is not None}


def text_recipe_from_dict(stored: Mapping[str, Any]) -> ResolvedTextRecipe:
    """Return the recipe of a variant (`clipmill.prep.core.selection.stored_request`).

    Raises:
        UserError: the recipe was written with another version of the recipe schema.
    """
    if stored.get("schema") != TEXT_RECIPE_SCHEMA or stored.get("column") != TEXT:
        raise UserError(
            f"the recipe has schema {stored.get('schema')!r} of column {stored.get('column')!r}, "
            f"but this version supports schema {TEXT_RECIPE_SCHEMA} of 'text'",
            hint="run `prep text` with the desired text encoder to create a new variant",
        )
    values: dict[str, Any] = {field.name: stored.get(field.name) for field in fields(ResolvedTextRecipe)}
    return ResolvedTextRecipe(**values)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor name -> shape for a safetensors file, from its header.

    Raises:
        UserError: the file is not a safetensors file, or is truncated.
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
            f"{path} is not a valid safetensors file: {error}", hint="download it again, or give another file"
        ) from None
