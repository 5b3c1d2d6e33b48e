"""The flags of `train caption-chunks`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from clipmill.manifests.settings import Checked, Needs, Range
from clipmill.train.config.clips import AS_TRAINED, Overrides
from clipmill.train.config.training import Device
from clipmill.train.tasks.caption.settings import DECODING, DecodingSettings, Method

_NUM_SAMPLES, _TOP_P = 5, 0.9


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChunkDecoding(DecodingSettings):
    """How the captions of chunks are generated: several per clip, by nucleus sampling."""

    prefix = ""

    method: Method = "sample"
    """Decoding method. sample: random sampling; greedy: the most likely token at each step; beam: beam search."""
    num_samples: Annotated[int | None, Range(1, 1000), Needs("method", ("sample",))] = None
    """sample: number of captions per clip. Default: 5."""
    top_p: Annotated[float | None, Range(above=0, most=1), Needs("method", ("sample",))] = None
    """sample: nucleus sampling, from the most likely tokens whose probabilities add up to this. Default: 0.9."""
    seed: int = 0
    """sample: random seed, combined with the key and start of the clip and the number of the caption."""

    def effective(self) -> "ChunkDecoding":
        """The settings with the defaults of sampling."""
        if self.method != "sample":
            return self
        num_samples = _NUM_SAMPLES if self.num_samples is None else self.num_samples
        return replace(self, num_samples=num_samples, top_p=_TOP_P if self.top_p is None else self.top_p)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ChunkCaptionsRequest(Checked):
    """Flags of `train caption-chunks`."""

    shards: str
    """Data folder."""
    out: Path
    """Parquet file to write."""
    split: str = "train"
    """Split of the data."""
    where: str | None = None
    """Condition that selects the chunks, such as 'num_captions == 0' for the videos without captions (docs/data.md).
    Default: all."""
    segment: str | None = None
    """Length of the segments to caption, such as 5s. A remainder shorter than a quarter of it is merged into the last
    segment of a chunk. Default: whole chunks."""
    batch: Annotated[int, Range(least=1)] = 16
    """Number of clips per batch and process."""
    workers: Annotated[int, Range(least=1)] = 4
    """Number of threads that read and decode, per process."""
    device: Device = "auto"
    """Device of the model."""
    shown: Overrides = AS_TRAINED
    decoding: Annotated[ChunkDecoding, DECODING] = ChunkDecoding()
    json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print one JSON object."""
