"""What decoding asks of a model: the same of one process and of the stages of a pipeline.

`train.models.captioner.Captioner` has it. Where several processes have a part of the model each, all of them decode in
step: each has the logits of the last stage from `step`, and so chooses the same tokens.

Shape suffixes: V videos, R rows of text (V * n, those of a video one behind the other), L tokens, W words of the
vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch


class Cache(Protocol):
    """What a model keeps of texts that are being written."""

    def keep(self, rows_r: torch.Tensor, videos_v: torch.Tensor | None = None) -> None:
        """Puts other rows in the places of the rows.

        Args:
            rows_r: int64, which row each of the new ones goes on from.
            videos_v: int64, the videos that are left, whose rows these are; all of them when left out.
        """


C = TypeVar("C", bound=Cache)


class Writer(Protocol[C]):
    """A model that writes about videos."""

    def start(self, video: torch.Tensor, /, *, num_tokens: int, rows_per_video: int = 1) -> C:
        """A cache with room for texts of so many tokens."""

    def step(self, tokens_RL: torch.Tensor, cache: C, /) -> torch.Tensor:
        """Logits [R, W] of what follows these tokens: all that is given in the first step, one a row later."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Captions.

    Attributes:
        tokens_VL: int64, what was written, with the end where there is one, and ends behind it.
        scores_V: of a beam search: sums of log probabilities, over the length to the power of the penalty.
    """

    tokens_VL: torch.Tensor
    scores_V: torch.Tensor | None = None
