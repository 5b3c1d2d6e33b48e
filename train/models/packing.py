"""Sequences of different lengths, one behind the other in one row of tokens, so that nothing is computed for padding.

Shape suffixes: N sequences, M tokens of all of them together, P places of the same sequences padded to the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from train.device.transfer import sent


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Where the sequences of a row of tokens begin and end. Made by `pack`.

    Attributes:
        lengths: tokens of each sequence; each has one at least.
        longest: the largest of them.
        sequence_M: int64, the sequence that a token belongs to.
        position_M: int64, a token's place in its sequence, from 0.
        place_M: int64, a token's place in the rows of sequences padded to the longest, [N * longest].
        end_N: int64, the last token of each sequence.
    """

    lengths: tuple[int, ...]
    longest: int
    sequence_M: torch.Tensor
    position_M: torch.Tensor
    place_M: torch.Tensor
    end_N: torch.Tensor

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    @cached_property
    def rows_by_length(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """For each length that occurs, that length L and the tokens of the sequences that have it: int64 [n * L]."""
        lengths_N = torch.tensor(self.lengths)
        begins_N = lengths_N.cumsum(0) - lengths_N
        found = []
        for length in sorted(set(self.lengths)):
            begins_n = begins_N[lengths_N == length]
            tokens = (begins_n[:, None] + torch.arange(length)).flatten()
            found.append((length, sent(tokens, self.place_M.device)))
        return tuple(found)

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What an implementation of attention makes of these lengths once and keeps for the next block, by its name."""
        return {}


def pack(lengths: Sequence[int], *, device: torch.device) -> Packing:
    """The packing of sequences of these lengths, its tensors on `device`.

    Raises:
        ValueError: there are no sequences, or an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"cannot pack sequences of the lengths {list(lengths)}: each needs a token")
    longest = max(lengths)
    # Computed on the host, where the lengths are, and sent in one piece.
    lengths_N = torch.tensor(lengths)
    begins_N = lengths_N.cumsum(0) - lengths_N
    sequence_M = torch.repeat_interleave(torch.arange(len(lengths)), lengths_N)
    position_M = torch.arange(len(sequence_M)) - begins_N[sequence_M]
    end_N = lengths_N.cumsum(0) - 1
    places = torch.cat([sequence_M, position_M, sequence_M * longest + position_M, end_N])
    num_tokens = len(sequence_M)
    sequence_M, position_M, place_M, end_N = sent(places, device).split([num_tokens] * 3 + [len(lengths)])
    return Packing(
        lengths=tuple(lengths),
        longest=longest,
        sequence_M=sequence_M,
        position_M=position_M,
        place_M=place_M,
        end_N=end_N,
    )
