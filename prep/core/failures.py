"""Every way in which a chunk can fail, by name, and which of them may pass when tried again."""

from enum import StrEnum


class FailureCode(StrEnum):
    """Written into commits, lists and the console; `prep retry --only CODE` takes them."""

    SOURCE_MISSING = "source_missing"
    SOURCE_UNREADABLE = "source_unreadable"  # no container that we read: text, a playlist, zero bytes, no permission
    SOURCE_TRUNCATED = "source_truncated"  # the header promises more than the file holds
    SOURCE_CHANGED = "source_changed"  # between the plan and the work
    NO_VIDEO = "no_video"
    ZERO_DURATION = "zero_duration"
    BAD_TIMESTAMPS = "bad_timestamps"  # a raw stream, which has none; or times that no video has
    PROBE_FAILED = "probe_failed"  # reading the source ended the process that read it: a crash, or a bug
    DECODE_ERRORS = "decode_errors"  # the source's frames are damaged
    FRAMES_DIFFER = "frames_differ"  # the chunk is not the frames that were planned
    ENCODE_FAILED = "encode_failed"
    FFMPEG_DIFFERS = "ffmpeg_differs"  # a node has another ffmpeg than the one that was planned with
    CHUNK_DAMAGED = "chunk_damaged"  # what another column is made from is not what was committed
    MODEL_UNAVAILABLE = "model_unavailable"  # a node has not the weights that were planned with
    NOT_FINITE = "not_finite"  # a model gave NaN or infinity
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    IO_ERROR = "io_error"
    WORKER_LOST = "worker_lost"
    SHARD_MISSING = "shard_missing"  # the run ended without the commit that was planned


# What another try may cure without anybody mending anything. The others wait for `prep retry` or a mended source.
TRANSIENT = frozenset(
    {
        FailureCode.SOURCE_CHANGED,
        FailureCode.TIMEOUT,
        FailureCode.OUT_OF_MEMORY,
        FailureCode.DISK_FULL,
        FailureCode.IO_ERROR,
        FailureCode.WORKER_LOST,
        FailureCode.SHARD_MISSING,
        FailureCode.FFMPEG_DIFFERS,
        FailureCode.CHUNK_DAMAGED,
        FailureCode.MODEL_UNAVAILABLE,
    }
)

# What may pass as soon as the source can be read again: it had gone, or a disk was not mounted.
SOURCE_AWAY = frozenset({FailureCode.SOURCE_MISSING, FailureCode.SOURCE_UNREADABLE})


class SourceFailure(Exception):
    """A part of the work failed for a named reason; the rest goes on.

    Args:
        is_lasting: whether the cause lies in the file itself, so that the same bytes fail again. Permissions, mounts,
            disks and time limits are causes that pass without the file changing.
    """

    def __init__(self, code: FailureCode, message: str, *, is_lasting: bool = True) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.is_lasting = is_lasting
