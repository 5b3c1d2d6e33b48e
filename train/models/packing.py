"""Packed sequences: sequences of different lengths concatenated into one row of tokens, without padding.

Shape suffixes: N sequences, M tokens of all of them, n sequences of the same length L.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from train.device.transfer import sent


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The layout of a row of packed sequences, as made by `pack`. Index tensors are int64.

    Attributes:
        lengths: number of tokens of each sequence, at least 1.
        longest: the largest length.
        sequence_M: the sequence of each token.
        position_M: the position of each token in its sequence, from 0.
        place_M: the index of each token in the flattened padded batch, [N * longest].
        end_N: the last token of each sequence.
    """

    lengths: tuple[int, ...]
    longest: int
    sequence_M: torch.Tensor
    position_M: torch.Tensor
    place_M: torch.Tensor
    end_N: torch.Tensor

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @cached_property
    def rows_by_length(self) -> tuple[tuple[int, torch.Tensor], ...]:
        """Each length L that occurs, with the tokens of the sequences of that length: int64 [n * L]."""
        lengths_N = torch.tensor(self.lengths)
        begins_N = lengths_N.cumsum(0) - lengths_N
        tokens = {
            length: (begins_N[lengths_N == length][:, None] + torch.arange(length)).flatten()
            for length in sorted(set(self.lengths))
        }
        return tuple((length, sent(tokens_nL, self.place_M.device)) for length, tokens_nL in tokens.items())

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What an attention implementation derives from the lengths once for all blocks, by its name."""
        return {}


def pack(lengths: Sequence[int], *, device: torch.device) -> Packing:
    """Pack sequences of these lengths, with tensors on `device`; ValueError if there are none or one is empty."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"cannot pack sequences of lengths {list(lengths)}: each needs a token")
    longest = max(lengths)
    # Computed on the host and copied in one transfer.
    lengths_N = torch.tensor(lengths)
    begins_N = lengths_N.cumsum(0) - lengths_N
    sequence_M = torch.repeat_interleave(torch.arange(len(lengths)), lengths_N)
    position_M = torch.arange(len(sequence_M)) - begins_N[sequence_M]
    end_N = lengths_N.cumsum(0) - 1
    places = torch.cat([sequence_M, position_M, sequence_M * longest + position_M, end_N])
    num_tokens = len(sequence_M)
    sequence_M, position_M, place_M, end_N = sent(places, device).split([num_tokens] * 3 + [len(lengths)])
    indices = {"sequence_M": sequence_M, "position_M": position_M, "place_M": place_M, "end_N": end_N}
    return Packing(lengths=tuple(lengths), longest=longest, **indices)
