"""The flags of `train embed` and `train search`."""

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
    """Names of variants to read, as prep status shows them. Default: the variants of the training, and of other data
    the current ones."""
    out: Path
    """Folder to write."""
    split: str = "val"
    """Split of the data."""
    where: str | None = None
    """Condition that selects the clips, such as "motion > 0.2 and not duplicate" (docs/data.md). Default: all."""
    features: FeatureKind | None = None
    """Features to store for each clip: embedding (unit length, with captions), pooled (one vector of the video
    tower before any projection) or tokens (all tokens of the tower). Default: embedding for dual encoders, otherwise
    pooled."""
    clips: Literal["captions", "chunks"] = "captions"
    """Rows: each time span that has captions, or each complete chunk, for videos without captions."""
    shown: Overrides = AS_TRAINED
    batch: Annotated[int, Range(least=1)] = 64
    """Number of clips per forward pass and process."""
    workers: Annotated[int, Range(least=1)] = 4
    """Number of threads that read and decode, per process."""
    device: Device = "auto"
    """Device of the model."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchRequest(Checked):
    """Flags of `train search`."""

    like: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Clip to find similar clips to: the key of its chunk, or its row in clips.parquet."""
    top: int = 10
    """Number of clips to find for each query."""
    page: Path | None = None
    """HTML file to write, which plays the clips."""
    weights: str | None = None
    """Weights that the clips were embedded with. Default: where they were at that time."""
    shards: str | None = None
    """Data folder of the page's clips. Default: where it was when the clips were embedded."""
    device: Device = "auto"
    """Device of the text tower."""
    json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print one JSON object."""
