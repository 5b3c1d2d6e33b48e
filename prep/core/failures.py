"""Failure codes with their meaning and advice, and the groups of codes that runs treat alike."""

from enum import StrEnum

from clipmill.manifests.errors import StorageRefused


class FailureCode(StrEnum):
    """Failure code, as stored in commits and lists, shown on the console and accepted by `prep retry --only CODE`."""

    SOURCE_MISSING = "source_missing"
    SOURCE_UNREADABLE = "source_unreadable"  # not a supported container: text, a playlist, an empty file, no permission
    SOURCE_TRUNCATED = "source_truncated"  # the header announces more data than the file holds
    SOURCE_CHANGED = "source_changed"  # the file changed between planning and processing
    ACCESS_REFUSED = "access_refused"  # a bucket or a web server refuses access to a single object
    STORAGE_REFUSED = "storage_refused"  # a bucket refuses the credentials, or does not exist: all of its objects fail
    SOURCE_TOO_LARGE = "source_too_large"  # a remote source exceeds the scratch space for copies
    NO_VIDEO = "no_video"
    ZERO_DURATION = "zero_duration"
    BAD_TIMESTAMPS = "bad_timestamps"  # a raw stream without timestamps, or impossible timestamps
    NOT_INDEXABLE = "not_indexable"  # the packets of the source cannot be read in place
    PROBE_FAILED = "probe_failed"  # reading the source crashed the process, even when no other process was running
    DECODE_ERRORS = "decode_errors"  # the source contains damaged frames
    FRAMES_DIFFER = "frames_differ"  # the chunk does not contain the planned frames
    ENCODE_FAILED = "encode_failed"
    FFMPEG_DIFFERS = "ffmpeg_differs"  # the ffmpeg version of a node differs from the version of the plan
    CHUNK_DAMAGED = "chunk_damaged"  # an input from another column differs from its commit
    MODEL_UNAVAILABLE = "model_unavailable"  # a node lacks the model weights of the plan
    NOT_FINITE = "not_finite"  # a value that would be stored is NaN or infinite
    ANSWER_EMPTY = "answer_empty"  # a language model wrote nothing
    ANSWER_REFUSED = "answer_refused"  # the model declined to answer, or a filter removed the answer
    ANSWER_TRUNCATED = "answer_truncated"  # the answer reached the limit of tokens
    ANSWER_INCOMPLETE = "answer_incomplete"  # a server broke off the response because of an error or an abort
    PROMPT_TOO_LONG = "prompt_too_long"  # images, text and answer exceed the context length of the model
    OTHER_MODEL = "other_model"  # a server responded with a different model than the requested one
    REQUEST_INVALID = "request_invalid"  # a server rejected a single request
    ENDPOINT_REFUSED = "endpoint_refused"  # a server rejects all requests: key, credit, URL or name of the model
    ENDPOINT_FAILED = "endpoint_failed"  # no usable response from a server, after all retries
    BUDGET_SPENT = "budget_spent"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    IO_ERROR = "io_error"
    WORKER_LOST = "worker_lost"  # a process was killed from outside in every attempt
    WORKER_CRASHED = "worker_crashed"  # a process crashed in every attempt
    COLUMN_ERROR = "column_error"  # the code of a column raised an exception, or returned no valid sample for the chunk
    SHARD_MISSING = "shard_missing"  # the run ended without the planned commit


# Meaning of each failure code, and advice; {retry} stands for the command that retries the failures of the column.
EXPLANATIONS: dict[str, tuple[str, str]] = {
    FailureCode.SOURCE_MISSING: ("the file does not exist", "put it back, or run prep manifest again without it"),
    FailureCode.SOURCE_UNREADABLE: (
        "the file is not a readable video",
        "check its permissions and its content; replace or remove it, then run prep manifest and this command again",
    ),
    FailureCode.SOURCE_TRUNCATED: ("the file is incomplete", "download or copy it again"),
    FailureCode.SOURCE_CHANGED: ("the file changed during the run", "run the same command again"),
    FailureCode.ACCESS_REFUSED: (
        "the server refuses access to the file",
        "check the credentials and what they permit, then run the same command again",
    ),
    FailureCode.STORAGE_REFUSED: (
        "the bucket refuses the credentials, or does not exist",
        "renew the credentials or correct the address, then run the same command again",
    ),
    FailureCode.SOURCE_TOO_LARGE: ("the file exceeds the scratch space", "give a larger --scratch-size or $TMPDIR"),
    FailureCode.NO_VIDEO: ("the file has no video stream", "remove it, and run prep manifest again"),
    FailureCode.ZERO_DURATION: ("the video has no frames", "remove it, and run prep manifest again"),
    FailureCode.BAD_TIMESTAMPS: ("the timestamps are unusable", "remux it: ffmpeg -i IN -c copy OUT.mp4"),
    FailureCode.NOT_INDEXABLE: (
        "the file cannot be read in place",
        "remux it (ffmpeg -i IN -c copy OUT.mp4) or re-encode it, or encode all videos as chunks instead",
    ),
    FailureCode.PROBE_FAILED: ("reading the file crashed", "re-encode it with ffmpeg, or remove it"),
    FailureCode.DECODE_ERRORS: (
        "frames of the source are damaged",
        "get an intact copy, or re-encode it with ffmpeg, then run {retry}",
    ),
    FailureCode.FRAMES_DIFFER: (
        "the encoded frames differ from the plan",
        "re-encode the source, then run {retry}",
    ),
    FailureCode.ENCODE_FAILED: ("ffmpeg failed", "see its message, then run {retry}"),
    FailureCode.FFMPEG_DIFFERS: ("a node has another ffmpeg", "install the same ffmpeg on all nodes"),
    FailureCode.CHUNK_DAMAGED: ("the chunk is damaged", "run prep verify, then the commands that it names"),
    FailureCode.MODEL_UNAVAILABLE: ("a node cannot load the model", "make the weights available on all nodes"),
    FailureCode.NOT_FINITE: (
        "a value is NaN or infinite",
        "see its message; if a model made the value, check its weights, or try another precision; then run {retry}",
    ),
    FailureCode.ANSWER_EMPTY: ("the model wrote nothing", "change --prompt, or run {retry}"),
    FailureCode.ANSWER_REFUSED: (
        "the model declined to answer",
        "change --prompt, or exclude the chunk with --where",
    ),
    FailureCode.ANSWER_TRUNCATED: (
        "the answer was cut off",
        "give a larger --max-tokens, or ask for a shorter caption",
    ),
    FailureCode.ANSWER_INCOMPLETE: ("the server broke off the answer", "see its message; then run {retry}"),
    FailureCode.PROMPT_TOO_LONG: ("the context of the model is too short", "give fewer --frames, or a smaller --size"),
    FailureCode.OTHER_MODEL: ("the server has another model", "give the name of the model that it serves as --model"),
    FailureCode.REQUEST_INVALID: ("the server rejected the request", "see its message; then run {retry}"),
    FailureCode.ENDPOINT_REFUSED: (
        "the server rejects all requests",
        "check OPENAI_API_KEY and its credit, --endpoint and --model",
    ),
    FailureCode.ENDPOINT_FAILED: ("the server gave no answer", "check the server, then run the same command again"),
    FailureCode.BUDGET_SPENT: ("the tokens are spent", "run the same command with a larger --max-tokens-total"),
    FailureCode.TIMEOUT: ("no answer in time", "check the disk or mount, then run the same command again"),
    FailureCode.OUT_OF_MEMORY: ("out of memory", "give fewer --workers, then run the same command again"),
    FailureCode.DISK_FULL: ("the disk is full", "free some space, then run the same command again"),
    FailureCode.IO_ERROR: ("reading or writing failed", "check the disk or mount, then run the same command again"),
    FailureCode.WORKER_LOST: (
        "a process of the run was killed",
        "run the same command again, with fewer --workers if memory is short",
    ),
    FailureCode.WORKER_CRASHED: (
        "a program crashed",
        "run the same command again; if it crashes again, install another build of it "
        "($CLIPMILL_FFMPEG names an ffmpeg), or omit the source",
    ),
    FailureCode.COLUMN_ERROR: (
        "the code of the column gave no sample",
        "see the message: if it names a line of code, correct that; then run {retry}",
    ),
    FailureCode.SHARD_MISSING: ("the shard was not made", "run the same command again"),
}

# Failures that may disappear in another attempt, without any change by the user. All others wait for `prep retry` or
# for a repaired source.
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

# Failures that may disappear as soon as the source is readable again, such as a missing file or an unmounted disk.
SOURCE_AWAY = frozenset({FailureCode.SOURCE_MISSING, FailureCode.SOURCE_UNREADABLE})

# Failures caused by the machine of a worker: other machines may have disk space, memory, the weights, or valid keys.
MACHINE_FAULTS = frozenset(
    {
        FailureCode.DISK_FULL,
        FailureCode.OUT_OF_MEMORY,
        FailureCode.FFMPEG_DIFFERS,
        FailureCode.MODEL_UNAVAILABLE,
        FailureCode.STORAGE_REFUSED,
    }
)

# Requests that object storage or a web server refused.
REFUSALS = frozenset({FailureCode.ACCESS_REFUSED, FailureCode.STORAGE_REFUSED})

# Failures caused by a machine that lacks a mount, or by a few samples.
MOUNT_FAULTS = SOURCE_AWAY | {FailureCode.ACCESS_REFUSED, FailureCode.IO_ERROR}

# Failures caused by a machine whose programs do not run, or by a few samples that no machine can make.
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
    """Return the failure code for a task whose worker ended without a result."""
    return FailureCode.WORKER_CRASHED if crashed else FailureCode.WORKER_LOST


def refusal_code(refused: StorageRefused) -> FailureCode:
    """Return the failure code for a request that object storage refused."""
    return FailureCode.STORAGE_REFUSED if refused.concerns_all else FailureCode.ACCESS_REFUSED


class SourceFailure(Exception):
    """A failure of one sample or source, with its failure code; the rest of the run continues.

    Args:
        is_lasting: True if the cause lies in the file itself, so that the same bytes will fail again. False for
            permissions, mounts, disks and timeouts, which can recover while the file stays the same.
    """

    def __init__(self, code: FailureCode, message: str, *, is_lasting: bool = True) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.is_lasting = is_lasting
