"""Weights that were read, and the record of the weights that checkpoints omit (clipmill.train.weights.sources)."""

from collections.abc import Callable
from dataclasses import dataclass

from clipmill.train.config.model import FormatChoice, Kind
from clipmill.train.weights.conversion import CONV, ConvertedStateDict, SourceFacts, kind_of_tensors

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights that were read.

    Attributes:
        title: origin and format, for the user.
        converted: the tensors under our names.
        facts: what no tensor shows.
    """

    title: str
    converted: ConvertedStateDict
    facts: SourceFacts

    @property
    def kind(self) -> Kind | None:
        """The kind of the video tower; None without one."""
        return kind_of_tensors(self.converted.tensors)

    @property
    def tubelet(self) -> int | None:
        """Frames of a cube of the video tower; None if it has patches, or is not there."""
        conv = self.converted.tensors.get(CONV)
        return int(conv.shape[2]) if conv is not None and conv.ndim == 5 else None


@dataclass(frozen=True, kw_only=True)
class Base:
    """The frozen tensors that checkpoints leave out.

    Attributes:
        weights: where they are from: a path or a NAME:TAG; `format` as in --init.format.
        sha256: SHA-256 of their names, shapes and values.
        tensors: their names, and the shape of each.
        scale: of the adapters.
        text: origin of the weights of the text tower, if it is another one.
    """

    weights: str
    format: FormatChoice
    sha256: str
    tensors: dict[str, list[int]]
    scale: float
    text: str | None = None
