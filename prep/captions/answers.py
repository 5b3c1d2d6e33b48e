"""Answers from vision-language models: the interface to models and servers, the journal of answers, and the samples.

    <variant>/answers/000003.jsonl   the answers for chunks of shard 3, one per line: `<CRC-32, 8 hex digits> <JSON>`
    <variant>/answers/spent          the tokens used by the current run, 8 bytes per answer (`Budget`)

Each answer is on disk before the next request takes its slot. A killed run therefore loses the requests in flight,
but no response that was received and paid for. Truncated or damaged lines are ignored. If a chunk has several lines,
the last line counts. The journal is kept because it contains values that the shard lacks, such as the duration of
each request. A line identifies its chunk by the fingerprint of the chunk's content, so an answer is found even if the
chunk has moved to a different shard.
"""

import base64
import json
import os
import re
import threading
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.formatting import on_one_line, quote_value
from clipmill.manifests.publish import make_folder, parse_json
from clipmill.prep.core.chunk_content import ChunkContent
from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.core.shard_result import Stop
from clipmill.shards.format import CAPTIONS_FIELDS
from clipmill.shards.writer import Sample

ANSWERS_FOLDER = "answers"
ANSWER_FILE = re.compile(r"\d{6,}\.jsonl|spent")
KEY_VARIABLE = "OPENAI_API_KEY"
_SPENT_FILE = "spent"
_LENGTH, _FILTERED = "length", "content_filter"
# Finish reasons of complete answers, as sent by OpenAI, Together, TGI and Anthropic. With any other value, the text may
# be cut off.
_COMPLETE_REASONS = ("stop", "eos", "eos_token", "stop_sequence", "end_turn")
_RECORD_BYTES = 8
_FINGERPRINT = re.compile(rb'"chunk_fingerprint": "([0-9a-f]{32})"')
_MAX_TOKENS = (1 << 31) - 1  # maximum for one answer: the index stores 32-bit integers
_MIN_SECRET_CHARS = 8  # minimum length of keys that are replaced even inside a word
# Invisible characters that are not in the Unicode category Cf (format): joiners, fillers and variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
EXTENSION = "caption.json"
JPEG_QUALITY = 90
Picture = NDArray[np.uint8]  # [H, W, 3], RGB


@dataclass(frozen=True)
class CaptionTask:
    """Rows of a shard to caption, and the functions that a captioner calls for them.

    `read`, `pictures` and `keep` must be thread-safe. `read` and `pictures` may raise SourceFailure.

    Attributes:
        rows: Rows of the shard to caption.
        stop: Function that returns a reason to send no further requests, or None. It is called before each request
            or batch.
        read: Function that returns the content of the chunk in a row.
        pictures: Function that decodes those frames of a chunk that are sent to the model.
        keep: Function that stores the answer for a row, or the reason why there is no answer. The answer is on disk
            when the function returns.
        seed: Function that returns the random seed for a row.
    """

    rows: Iterator[int]
    stop: Callable[[], Stop | None]
    read: Callable[[int], ChunkContent]
    pictures: Callable[[ChunkContent], Sequence[Picture]]
    keep: "Callable[[int, Answer | SourceFailure], None]"
    seed: Callable[[int], int]


class Captioner(Protocol):
    """Model or server that writes captions."""

    def caption(self, task: CaptionTask) -> Stop | None:
        """Caption all rows. Return the reason if some requests were not sent, otherwise None."""
        ...


def decode_pictures(content: ChunkContent, *, count: int, size: int) -> list[Picture]:
    """Decode up to `count` evenly spaced frames of a chunk, and scale down frames whose longer side exceeds `size` px.

    Raises:
        SourceFailure: The chunk cannot be decoded.
    """
    import cv2

    from clipmill.shards.pages.figures import middle_items

    pictures = []
    for frame in content.frames(middle_items(range(content.num_frames), at_most=count)):
        picture = np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8)
        height, width = picture.shape[:2]
        scale = size / max(height, width)
        if scale < 1:
            shape = (max(1, round(width * scale)), max(1, round(height * scale)))
            picture = np.asarray(cv2.resize(picture, shape, interpolation=cv2.INTER_AREA), np.uint8)
        pictures.append(picture)
    return pictures


def jpeg_data_url(picture: Picture) -> str:
    """Encode a picture as JPEG and return the data URL."""
    import cv2

    is_encoded, content = cv2.imencode(
        ".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    )
    assert is_encoded, "OpenCV cannot encode JPEG"
    return f"data:image/jpeg;base64,{base64.b64encode(content.tobytes()).decode()}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer from a model for one chunk. Lone surrogates are removed, because UTF-8 cannot encode them.

    Attributes:
        text: Text as received.
        finish_reason: Reason why generation ended, such as stop, length or content_filter; None if the server does not
            report it.
        refusal: Reason why the model declined to answer, if the server reports it in a separate field.
        tokens_in: Number of tokens of the images and the prompt; None if unknown.
        tokens_out: Number of tokens of the answer; None if unknown.
        seconds: Time from the request to the response in seconds, including retries. For a batch, this is the
            time of the batch divided by the batch size.
        model: Name of the model, as stated in the response or as recorded for a local model.
    """

    text: str
    finish_reason: str | None
    tokens_in: int | None
    tokens_out: int | None
    seconds: float
    model: str
    refusal: str | None = None

    def __post_init__(self) -> None:
        values: dict[str, Any] = {name: _storable(getattr(self, name)) for name in ("text", "model")}
        for name in ("finish_reason", "refusal"):
            value = getattr(self, name)
            values[name] = None if value is None else _storable(value) or None
        values |= {name: _token_count(getattr(self, name)) for name in ("tokens_in", "tokens_out")}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def tokens(self) -> int:
        """Number of input and output tokens; an unknown number counts as 0."""
        return (self.tokens_in or 0) + (self.tokens_out or 0)

    @property
    def is_counted(self) -> bool:
        """True if the server reported both token counts."""
        return None not in (self.tokens_in, self.tokens_out)

    @property
    def caption(self) -> str:
        """Text of the answer on one line, without control characters or words that consist of invisible characters."""
        text = "".join(" " if unicodedata.category(char) == "Cc" else char for char in self.text)
        return " ".join(
            word
            for word in text.split()
            if not all(unicodedata.category(char) == "Cf" or _INVISIBLE.fullmatch(char) for char in word)
        )

    def problem(self, model: str) -> SourceFailure | None:
        """Return the reason why the answer cannot be used as a caption from `model`, or None.

        The message does not contain the API key. A server may append a snapshot date to the name of the model: for
        example, gpt-4o-2024-08-06 is accepted for gpt-4o.
        """
        code = message = None
        if re.fullmatch(re.escape(model) + r"(-\d[\d-]*)?", self.model) is None:
            code = FailureCode.OTHER_MODEL
            message = f'the server answered with the model "{self.model}" instead of "{model}"'
        elif self.refusal or self.finish_reason == _FILTERED:
            code = FailureCode.ANSWER_REFUSED
            message = self.refusal or "a filter on the server removed the answer"
        elif self.finish_reason == _LENGTH:
            code = FailureCode.ANSWER_TRUNCATED
            num_tokens = "an unknown number of" if self.tokens_out is None else self.tokens_out
            message = f"the answer was cut off after {num_tokens} tokens"
        elif self.finish_reason is not None and self.finish_reason.lower() not in _COMPLETE_REASONS:
            code = FailureCode.ANSWER_INCOMPLETE
            message = f'the server ended the answer with finish_reason "{on_one_line(self.finish_reason)}"'
        elif not self.caption:
            code, message = FailureCode.ANSWER_EMPTY, "the answer has no text"
        return None if code is None or message is None else SourceFailure(code, without_key(message))


def without_key(message: str) -> str:
    """Replace the API key in a message with `***`, because some servers repeat the key in their errors.

    Only messages are changed, never answers. A short key, such as EMPTY for a server that needs no key, is replaced
    only where it is a separate word.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return message
    pattern = re.escape(key) if len(key) >= _MIN_SECRET_CHARS else rf"(?<![\w-]){re.escape(key)}(?![\w-])"
    return re.sub(pattern, "***", message)


def _storable(text: object) -> str:
    """Remove lone surrogates from a string.

    Raises:
        ValueError: `text` is not a string.
    """
    if not isinstance(text, str):
        raise ValueError(f"{quote_value(text)} is not a string")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")


def _token_count(value: object) -> int | None:
    """Return the token count that a server reports; None if the value is not a valid count."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS
    return value if is_count else None  # type: ignore[return-value]


def journal_path(variant_dir: Path, shard_id: int) -> Path:
    """Return the path of a shard's journal."""
    return variant_dir / ANSWERS_FOLDER / f"{shard_id:06d}.jsonl"


def read_answers(path: Path) -> dict[str, Answer]:
    """Return the answers in a journal, keyed by chunk fingerprint; empty if the journal does not exist."""
    return dict(_lines(path))


def answered_chunks(folder: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the ID of each shard with a journal, and the chunk fingerprints in all its lines, even damaged lines."""
    for path in sorted(folder.glob("*.jsonl")):
        yield int(path.stem), _FINGERPRINT.findall(path.read_bytes())


def answers_in(folder: Path) -> Iterator[Answer]:
    """Yield all answers in the journals of a variant, including several answers for the same chunk."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from (answer for _, answer in _lines(path))


def _lines(path: Path) -> Iterator[tuple[str, Answer]]:
    """Yield the chunk fingerprint and the answer in each intact line of a journal."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for line in content.split(b"\n"):
        digits, _, text = line.partition(b" ")
        if line and digits == b"%08x" % zlib.crc32(text):
            try:
                record: dict[str, Any] = parse_json(text)
                entry = record.pop("chunk_fingerprint"), Answer(**record)
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
            ):  # a different version of clipmill wrote the line
                continue
            yield entry


class Journal:
    """Journal of the answers for a shard: a thread-safe context manager.

    Args:
        path: Path of the journal.
        other_paths: Journals of other shards that used to contain chunks of this shard. If a chunk has several
            answers, the answer in this shard's journal is used.
    """

    def __init__(self, path: Path, other_paths: Sequence[Path] = ()) -> None:
        self._path, self._lock = path, threading.Lock()
        self.answers = {
            name: answer for journal in (*other_paths, path) for name, answer in read_answers(journal).items()
        }

    def __enter__(self) -> Self:
        make_folder(self._path.parent)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def add(self, fingerprint: str, answer: Answer) -> None:
        """Store the answer for the chunk with this fingerprint. The answer is on disk when the method returns."""
        text = json.dumps({"chunk_fingerprint": fingerprint, **asdict(answer)}, sort_keys=True).encode()
        # The leading line feed ends a line that was truncated when a writer was killed.
        line = b"\n%08x %s\n" % (zlib.crc32(text), text)
        with self._lock:
            self.answers[fingerprint] = answer
            num_bytes = os.write(self._descriptor, line)
            if num_bytes < len(line):
                os.write(self._descriptor, line[num_bytes:])  # raises the error that cut the first write short
        os.fsync(self._descriptor)


class Budget:
    """Token budget of a variant (`--max-tokens-total`). All workers of a run count tokens in the same file.

    Args:
        limit: Maximum number of tokens; None for no limit.
        num_spent: Number of tokens that earlier runs have used.
    """

    def __init__(self, variant_dir: Path, *, limit: int | None, num_spent: int) -> None:
        self._path, self._limit, self._num_spent = variant_dir / ANSWERS_FOLDER / _SPENT_FILE, limit, num_spent
        self._num_read = 0

    def begin(self) -> None:
        """Reset the shared count. The journals record the tokens of earlier runs. Only the driver calls this method."""
        self._path.unlink(missing_ok=True)

    def add(self, tokens: int) -> None:
        """Count the tokens of an answer."""
        if self._limit is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write(tokens.to_bytes(_RECORD_BYTES, "little"))

    def is_spent(self) -> bool:
        """Return True once the answers have used `limit` tokens."""
        if self._limit is None:
            return False
        try:
            with self._path.open("rb") as file:
                file.seek(self._num_read)
                new_bytes = file.read()
        except FileNotFoundError:
            new_bytes = b""
        # The last record may be incomplete, because another worker is writing it.
        size_bytes = len(new_bytes) // _RECORD_BYTES * _RECORD_BYTES
        self._num_read += size_bytes
        self._num_spent += sum(
            int.from_bytes(new_bytes[offset : offset + _RECORD_BYTES], "little")
            for offset in range(0, size_bytes, _RECORD_BYTES)
        )
        return self._num_spent >= self._limit


def caption_sample(chunk: Chunk, answer: Answer) -> Sample:
    """Return the sample of a chunk: its caption, and the finish reason and token counts of the answer."""
    text = answer.caption
    fields = chunk.fields(
        {
            "caption_text": text,
            "caption_words": len(text.split()),
            "finish_reason": answer.finish_reason,
            "tokens_in": answer.tokens_in,
            "tokens_out": answer.tokens_out,
        }
    )
    member = json.dumps({"key": chunk.key, **fields}, ensure_ascii=False, separators=(",", ":"))
    return chunk.sample({EXTENSION: member.encode()}, fields)


def check_caption(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Compare the member of a sample with its index row, and check that the caption is a single line of text."""
    try:
        description = parse_json(members[EXTENSION])
        member_values = {name: description[name] for name in ("key", *(field.name for field in CAPTIONS_FIELDS))}
    except (ValueError, KeyError, TypeError) as error:
        return CheckedSample([(DeepCode.JSON_DIFFERS, f"the member cannot be read: {error!r}")], 0)
    differences = [
        (DeepCode.JSON_DIFFERS, f"{name}: {value!r} in the member, {row[name]!r} in the index")
        for name, value in member_values.items()
        if value != row[name]
    ]
    text = row["caption_text"]
    if not text or text != " ".join(text.split()) or len(text.split()) != row["caption_words"]:
        message = "caption_text is empty, is not a single line, or does not have caption_words words"
        differences.append((DeepCode.JSON_DIFFERS, message))
    return CheckedSample(differences, 1)
