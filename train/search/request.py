"""Flags of `train embed` and `train search`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.settings import Checked, Range
from clipmill.train.config.clips import AS_TRAINED, Overrides
from clipmill.train.config.fields import SEVERAL
from clipmill.train.config.training import Device

FeatureKind = Literal["embedding", "pooled", "tokens"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EmbedRequest(Checked):
    """Flags of `train embed`."""

    shards: str | None = None
    """Data folder. Default: the data of the training run."""
    variant: Annotated[tuple[str, ...], SEVERAL] = ()
    """Names of variants to read, as listed by prep status. Default: the variants of the training run; for other
    data, the current variants."""
    out: Path
    """Folder to write."""
    split: str = "val"
    """Split to embed."""
    where: str | None = None
    """Condition that selects the clips, such as "motion > 0.2 and not duplicate" (docs/data.md). Default: all."""
    features: FeatureKind | None = None
    """Features to store for each clip: embedding (unit length; captions are also embedded), pooled (one vector of the
    video tower, before any projection) or tokens (all tokens of the tower). Default: embedding for dual encoders,
    otherwise pooled."""
    clips: Literal["captions", "chunks"] = "captions"
    """Clips to embed: captions (each time span with captions) or chunks (each complete chunk, for videos without
    captions)."""
    shown: Overrides = AS_TRAINED
    batch: Annotated[int, Range(least=1)] = 64
    """Number of clips per forward pass of each process."""
    workers: Annotated[int, Range(least=1)] = 4
    """Number of reading and decoding threads per process."""
    device: Device = "auto"
    """Device to run the model on."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchRequest(Checked):
    """Flags of `train search`."""

    like: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Example clip whose nearest neighbours are listed: the key of its chunk, or its row in clips.parquet."""
    top: int = 10
    """Number of clips to list for each query."""
    page: Path | None = None
    """Path of an HTML page to write. The page plays the clips."""
    weights: str | None = None
    """Weights that embedded the clips. Default: the location that train embed recorded."""
    shards: str | None = None
    """Data folder with the clips for the page. Default: the location that train embed recorded."""
    device: Device = "auto"
    """Device to run the text tower on."""
    json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print the results as one JSON object."""
