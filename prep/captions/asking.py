"""The interface between a worker and what answers it: a model in its process, or a server."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from clipmill.prep.captions.answers import Answer
from clipmill.prep.captions.frames import Picture
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.shard_result import Stop


@dataclass(frozen=True)
class Questions:
    """Chunks to be captioned.

    Attributes:
        rows: the rows of the shard to ask about.
        stop: return why nothing more may be asked, or None; called before each request.
        read: return the file of a row; may raise SourceFailure. Threads may call it.
        pictures: decode the pictures of a row from its file; likewise.
        keep: keep the answer about a row, or why there is none; on return, an answer is on disk. Threads may call it.
        seed: return the random seed of a row.
    """

    rows: Iterator[int]
    stop: Callable[[], Stop | None]
    read: Callable[[int], bytes]
    pictures: Callable[[bytes, int], Sequence[Picture]]
    keep: Callable[[int, Answer | SourceFailure], None]
    seed: Callable[[int], int]


class Captioner(Protocol):
    """Answers questions."""

    def answer(self, questions: Questions) -> Stop | None:
        """Answer all questions; return why the rest could not be asked, or None."""
        ...
