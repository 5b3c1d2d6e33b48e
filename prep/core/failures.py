"""Failure codes with their meanings and advice, and groups of codes that a run handles in the same way."""

from enum import StrEnum

from clipmill.manifests.errors import StorageRefused


class FailureCode(StrEnum):
    """Failure code. It is stored in commits and lists, shown to the user, and accepted by `prep retry --only CODE`."""

    SOURCE_MISSING = "source_missing"
    SOURCE_UNREADABLE = "source_unreadable"  # no permission, or not a supported container, such as an empty file
    SOURCE_TRUNCATED = "source_truncated"  # the file has less data than its header states
    SOURCE_CHANGED = "source_changed"  # the file changed between planning and processing
    ACCESS_REFUSED = "access_refused"  # a bucket or a web server refuses access to a single object
    STORAGE_REFUSED = "storage_refused"  # a bucket rejects the credentials or does not exist; all its objects fail
    SOURCE_TOO_LARGE = "source_too_large"  # a remote source does not fit in the scratch space for copies
    NO_VIDEO = "no_video"
    ZERO_DURATION = "zero_duration"
    BAD_TIMESTAMPS = "bad_timestamps"  # a raw stream without timestamps, or impossible timestamps
    NOT_INDEXABLE = "not_indexable"  # packets cannot be read from the source in place
    PROBE_FAILED = "probe_failed"  # the process that read the source crashed, even when no other process was running
    DECODE_ERRORS = "decode_errors"  # the source contains damaged frames
    FRAMES_DIFFER = "frames_differ"  # the chunk does not contain the planned frames
    ENCODE_FAILED = "encode_failed"
    FFMPEG_DIFFERS = "ffmpeg_differs"  # the ffmpeg version on a node differs from the planned version
    CHUNK_DAMAGED = "chunk_damaged"  # a chunk, the input of other columns, differs from its commit
    MODEL_UNAVAILABLE = "model_unavailable"  # the planned model weights cannot be loaded on a node
    NOT_FINITE = "not_finite"  # a value that would be stored is NaN or infinite
    ANSWER_EMPTY = "answer_empty"  # the answer of a language model has no text
    ANSWER_REFUSED = "answer_refused"  # the model declined to answer, or a filter removed the answer
    ANSWER_TRUNCATED = "answer_truncated"  # the answer was cut off at the token limit
    ANSWER_INCOMPLETE = "answer_incomplete"  # the server ended the answer because of an error or an abort
    PROMPT_TOO_LONG = "prompt_too_long"  # images, prompt and answer exceed the context length of the model
    OTHER_MODEL = "other_model"  # the server used a different model than the requested one
    REQUEST_INVALID = "request_invalid"  # the server rejected a single request
    ENDPOINT_REFUSED = "endpoint_refused"  # the server rejects all requests: wrong key, URL or model name, or no credit
    ENDPOINT_FAILED = "endpoint_failed"  # no usable response from the server, after all retries
    BUDGET_SPENT = "budget_spent"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    IO_ERROR = "io_error"
    WORKER_LOST = "worker_lost"  # the worker process was killed from outside in every attempt
    WORKER_CRASHED = "worker_crashed"  # the worker process crashed in every attempt
    COLUMN_ERROR = "column_error"  # the code of a column raised an exception, or returned no valid sample for the chunk
    SHARD_MISSING = "shard_missing"  # the planned shard was not committed when the run ended


# Meaning of each failure code, and advice. {retry} is the command that retries the failures of the column.
EXPLANATIONS: dict[str, tuple[str, str]] = {
    FailureCode.SOURCE_MISSING: ("the file does not exist", "restore it, or run prep manifest again without it"),
    FailureCode.SOURCE_UNREADABLE: (
        "the file is not a readable video",
        "check its permissions and its content; replace or remove it, then run prep manifest and this command again",
    ),
    FailureCode.SOURCE_TRUNCATED: ("the file is incomplete", "download or copy it again"),
    FailureCode.SOURCE_CHANGED: ("the file changed during the run", "run the same command again"),
    FailureCode.ACCESS_REFUSED: (
        "the server denies access to the file",
        "check the credentials and their permissions, then run the same command again",
    ),
    FailureCode.STORAGE_REFUSED: (
        "the bucket rejects the credentials, or does not exist",
        "renew the credentials or correct the URL, then run the same command again",
    ),
    FailureCode.SOURCE_TOO_LARGE: (
        "the file does not fit in the scratch space",
        "use a larger --scratch-size, or set TMPDIR to a larger disk",
    ),
    FailureCode.NO_VIDEO: ("the file has no video stream", "remove it, and run prep manifest again"),
    FailureCode.ZERO_DURATION: ("the video has no frames", "remove it, and run prep manifest again"),
    FailureCode.BAD_TIMESTAMPS: ("the timestamps are unusable", "remux it: ffmpeg -i IN -c copy OUT.mp4"),
    FailureCode.NOT_INDEXABLE: (
        "packets cannot be read from the file in place",
        "remux it (ffmpeg -i IN -c copy OUT.mp4) or re-encode it, or encode all videos as chunks instead",
    ),
    FailureCode.PROBE_FAILED: ("reading the file crashed the process", "re-encode it with ffmpeg, or remove it"),
    FailureCode.DECODE_ERRORS: (
        "frames of the source are damaged",
        "replace the source with an intact copy, or re-encode it with ffmpeg, then run {retry}",
    ),
    FailureCode.FRAMES_DIFFER: (
        "the encoded frames differ from the planned frames",
        "re-encode the source, then run {retry}",
    ),
    FailureCode.ENCODE_FAILED: ("ffmpeg failed", "see the message of ffmpeg, then run {retry}"),
    FailureCode.FFMPEG_DIFFERS: ("a node has a different ffmpeg version", "install the same ffmpeg on all nodes"),
    FailureCode.CHUNK_DAMAGED: ("the chunk is damaged", "run prep verify, then the commands that it prints"),
    FailureCode.MODEL_UNAVAILABLE: ("a node cannot load the model", "make the weights available on all nodes"),
    FailureCode.NOT_FINITE: (
        "a value is NaN or infinite",
        "see the message; if the value comes from a model, check its weights or use a different precision, then run "
        "{retry}",
    ),
    FailureCode.ANSWER_EMPTY: ("the answer has no text", "change --prompt, or run {retry}"),
    FailureCode.ANSWER_REFUSED: (
        "the model declined to answer",
        "change --prompt, or exclude the chunk with --where",
    ),
    FailureCode.ANSWER_TRUNCATED: (
        "the answer was cut off",
        "use a larger --max-tokens, or prompt for a shorter caption",
    ),
    FailureCode.ANSWER_INCOMPLETE: ("the server did not complete the answer", "see the message, then run {retry}"),
    FailureCode.PROMPT_TOO_LONG: (
        "the prompt does not fit in the context of the model",
        "use fewer --frames or a smaller --size",
    ),
    FailureCode.OTHER_MODEL: ("the server uses a different model", "use --model with the model that the server runs"),
    FailureCode.REQUEST_INVALID: ("the server rejected the request", "see the message, then run {retry}"),
    FailureCode.ENDPOINT_REFUSED: (
        "the server rejects all requests",
        "check OPENAI_API_KEY and its credit, --endpoint and --model",
    ),
    FailureCode.ENDPOINT_FAILED: (
        "the server sent no usable response",
        "check the server, then run the same command again",
    ),
    FailureCode.BUDGET_SPENT: (
        "the token budget is spent",
        "run the same command with a larger --max-tokens-total",
    ),
    FailureCode.TIMEOUT: ("the operation timed out", "check the disk or mount, then run the same command again"),
    FailureCode.OUT_OF_MEMORY: ("out of memory", "run the same command again with fewer --workers"),
    FailureCode.DISK_FULL: ("the disk is full", "free some space, then run the same command again"),
    FailureCode.IO_ERROR: ("reading or writing failed", "check the disk or mount, then run the same command again"),
    FailureCode.WORKER_LOST: (
        "a worker process was killed",
        "run the same command again; after signal 9 (SIGKILL), with fewer --workers if memory is short",
    ),
    FailureCode.WORKER_CRASHED: (
        "a worker process crashed",
        "run the same command again; if it crashes again, use a different build of ffmpeg (set CLIPMILL_FFMPEG to "
        "its path), or omit the source",
    ),
    FailureCode.COLUMN_ERROR: (
        "the code of the column made no valid sample",
        "see the message, and correct the code if the message contains a line number; then run {retry}",
    ),
    FailureCode.SHARD_MISSING: ("the shard was not made", "run the same command again"),
}

# Failures that may not occur again in a new attempt, even if the user changes nothing. Other failures are retried only
# by `prep retry`, or after the source has changed.
TRANSIENT = frozenset(
    {
        FailureCode.SOURCE_CHANGED,
        FailureCode.ACCESS_REFUSED,
        FailureCode.STORAGE_REFUSED,
        FailureCode.SOURCE_TOO_LARGE,
        FailureCode.TIMEOUT,
        FailureCode.OUT_OF_MEMORY,
        FailureCode.DISK_FULL,
        FailureCode.IO_ERROR,
        FailureCode.WORKER_LOST,
        FailureCode.WORKER_CRASHED,
        FailureCode.SHARD_MISSING,
        FailureCode.FFMPEG_DIFFERS,
        FailureCode.CHUNK_DAMAGED,
        FailureCode.MODEL_UNAVAILABLE,
        FailureCode.OTHER_MODEL,
        FailureCode.ENDPOINT_REFUSED,
        FailureCode.ENDPOINT_FAILED,
        FailureCode.BUDGET_SPENT,
    }
)

# Failures of sources that were missing, or whose disk was not mounted. They are retried once the source is readable.
SOURCE_AWAY = frozenset({FailureCode.SOURCE_MISSING, FailureCode.SOURCE_UNREADABLE})

# Failures caused by a worker's machine. Other machines may have disk space, memory, the weights, or valid credentials.
MACHINE_FAULTS = frozenset(
    {
        FailureCode.DISK_FULL,
        FailureCode.OUT_OF_MEMORY,
        FailureCode.FFMPEG_DIFFERS,
        FailureCode.MODEL_UNAVAILABLE,
        FailureCode.STORAGE_REFUSED,
    }
)

# Failures caused by a request that object storage or a web server refused.
REFUSALS = frozenset({FailureCode.ACCESS_REFUSED, FailureCode.STORAGE_REFUSED})

# Failures with two possible causes: a machine that lacks a mount, or a few bad samples.
MOUNT_FAULTS = SOURCE_AWAY | {FailureCode.ACCESS_REFUSED, FailureCode.IO_ERROR}

# Failures with two possible causes: a machine whose programs do not run, or a few samples that no machine can make.
PROGRAM_FAULTS = frozenset(
    {
        FailureCode.WORKER_LOST,
        FailureCode.WORKER_CRASHED,
        FailureCode.ENCODE_FAILED,
        FailureCode.TIMEOUT,
        FailureCode.SOURCE_CHANGED,
        FailureCode.SOURCE_TOO_LARGE,
    }
)


def loss_code(*, crashed: bool) -> FailureCode:
    """Return the failure code of a task whose worker ended without a result."""
    return FailureCode.WORKER_CRASHED if crashed else FailureCode.WORKER_LOST


def refusal_code(refused: StorageRefused) -> FailureCode:
    """Return the failure code for a request that object storage refused."""
    return FailureCode.STORAGE_REFUSED if refused.denies_bucket else FailureCode.ACCESS_REFUSED


class SourceFailure(Exception):
    """Failure of one sample or source. The run continues with the other samples.

    Args:
        code: Failure code.
        message: Message for the user.
        is_lasting: True if the content of the file causes the failure, so the same bytes will fail again. False for
            permissions, mounts, disks and timeouts, which may recover although the file does not change.
    """

    def __init__(self, code: FailureCode, message: str, *, is_lasting: bool = True) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.is_lasting = is_lasting
