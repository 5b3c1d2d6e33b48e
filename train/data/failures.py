"""A sample that cannot be had: named, counted and never replaced by another one in its place."""

from dataclasses import dataclass
from typing import Any, Literal

from manifests.errors import ClipmillError

Reason = Literal["shard_unreadable", "checksum", "undecodable", "frame_missing", "chunks_differ", "empty_span", "stuck"]


class SampleFailed(ClipmillError):
    """One sample could not be read or decoded.

    Args:
        key: the chunk at fault.
        reason: a code.
        detail: what happened, in words.
    """

    def __init__(self, key: str, *, reason: Reason, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key = key
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class FailedSample:
    """A line of failures.jsonl."""

    position: int  # in the order of samples
    key: str
    reason: Reason
    detail: str

    def as_json(self) -> dict[str, Any]:
        """The line as a JSON object."""
        return {"position": self.position, "key": self.key, "reason": self.reason, "detail": self.detail}


class TooManyFailures(ClipmillError):
    """The failure budget is spent.

    Args:
        failed: the failures since the last batch, the one too many included.
    """

    def __init__(self, failed: tuple[FailedSample, ...]) -> None:
        super().__init__(f"{failed[-1].key}: {failed[-1].detail}")
        self.failed = failed
