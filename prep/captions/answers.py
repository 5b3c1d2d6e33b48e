"""Answers of a model, the journal that stores each answer as soon as it arrives, and the samples made from them.

    <variant>/answers/000003.jsonl   the answers about chunks of shard 3, one per line: `<CRC-32, 8 digits> <JSON>`
    <variant>/answers/spent          the tokens of the current run, 8 bytes per answer (`Budget`)

A line is on disk before the next request is sent in its place. A killed run therefore loses only requests in flight,
but no answer that was paid for. A truncated or damaged line is ignored. If a chunk has several lines, the last one
counts. The journal is kept, because it has values that the shard lacks, such as the seconds of each answer. A line
identifies its chunk by the fingerprint of the content, so that an answer is found even if the chunk has moved to
another shard.
"""

import json
import os
import re
import threading
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clipmill.manifests.formatting import on_one_line, quote_value
from clipmill.manifests.publish import make_folder, parse_json
from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.shards.format import CAPTIONS_FIELDS
from clipmill.shards.writer import Sample

ANSWERS_FOLDER = "answers"
ANSWER_FILE = re.compile(r"\d{6,}\.jsonl|spent")
KEY_VARIABLE = "OPENAI_API_KEY"
_SPENT_FILE = "spent"
_LENGTH, _FILTERED = "length", "content_filter"
# Finish reasons of complete answers: the words of OpenAI, Together, TGI and Anthropic. Any other word, even an unknown
# one, means that the text may be cut off.
_COMPLETE = ("stop", "eos", "eos_token", "stop_sequence", "end_turn")
_RECORD_BYTES = 8
_FINGERPRINT = re.compile(rb'"chunk_fingerprint": "([0-9a-f]{32})"')
_MAX_TOKENS = (1 << 31) - 1  # maximum for one answer, since the index uses 32-bit integers
_MIN_SECRET_CHARS = 8  # minimum length of keys that are also hidden within words
# Invisible characters that Unicode does not classify as format characters: joiners, fillers, selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
EXTENSION = "caption.json"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a model about a chunk. Lone surrogates are removed from its strings, because files cannot store them.

    Attributes:
        text: Text as received.
        finish_reason: Reason why the model ended: stop, length, content_filter; None if the server gave none.
        refusal: Reason why the model declines to answer, as a separate field.
        tokens_in, tokens_out: Number of tokens of pictures and prompt, and of the answer; None if the server gave none.
        seconds: Time in seconds from the request to the answer, including retries; in a batch, an equal share.
        model: Name that the model gave in the answer.
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
            given = getattr(self, name)
            values[name] = None if given is None else _storable(given) or None
        values |= {name: _token_count(getattr(self, name)) for name in ("tokens_in", "tokens_out")}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def tokens(self) -> int:
        """Number of tokens in and out, as far as they are known."""
        return (self.tokens_in or 0) + (self.tokens_out or 0)

    @property
    def is_counted(self) -> bool:
        """True if the server reported both numbers of tokens."""
        return None not in (self.tokens_in, self.tokens_out)

    @property
    def caption(self) -> str:
        """Text on one line, without control characters and invisible words."""
        text = "".join(" " if unicodedata.category(char) == "Cc" else char for char in self.text)
        return " ".join(
            word
            for word in text.split()
            if not all(unicodedata.category(char) == "Cf" or _INVISIBLE.fullmatch(char) for char in word)
        )

    def problem(self, model: str) -> SourceFailure | None:
        """Return the reason why the answer is not a caption by `model`; None if it is. The server's key is removed.

        A server may add the date of a snapshot to the name: gpt-4o-2024-08-06 for gpt-4o.
        """
        code = message = None
        if re.fullmatch(re.escape(model) + r"(-\d[\d-]*)?", self.model) is None:
            code = FailureCode.OTHER_MODEL
            message = f'the server answered with the model "{self.model}" in place of "{model}"'
        elif self.refusal or self.finish_reason == _FILTERED:
            code = FailureCode.ANSWER_REFUSED
            message = self.refusal or "a filter of the server removed the answer"
        elif self.finish_reason == _LENGTH:
            code = FailureCode.ANSWER_TRUNCATED
            message = f"the answer was cut off after {self.tokens_out} tokens"
        elif self.finish_reason is not None and self.finish_reason.lower() not in _COMPLETE:
            code = FailureCode.ANSWER_INCOMPLETE
            message = f'the server ended the answer with finish_reason "{on_one_line(self.finish_reason)}"'
        elif not self.caption:
            code, message = FailureCode.ANSWER_EMPTY, "the answer has no text"
        return None if code is None or message is None else SourceFailure(code, without_key(message))


def without_key(message: str) -> str:
    """Replace the key of the server in a message by `***`, because some servers repeat the key in their errors.

    Only messages are changed, never answers. A short key, such as EMPTY for a server that needs none, is replaced only
    if it is a separate word.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return message
    pattern = re.escape(key) if len(key) >= _MIN_SECRET_CHARS else rf"(?<![\w-]){re.escape(key)}(?![\w-])"
    return re.sub(pattern, "***", message)


def _storable(text: object) -> str:
    """Return the text without lone surrogates.

    Raises:
        ValueError: It is not a text.
    """
    if not isinstance(text, str):
        raise ValueError(f"{quote_value(text)} is not a text")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")


def _token_count(given: object) -> int | None:
    """Return the number of tokens that a server reports; None for an impossible value."""
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    is_count = isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= _MAX_TOKENS
    return given if is_count else None  # type: ignore[return-value]


def journal_path(variant_dir: Path, shard_id: int) -> Path:
    """Return the journal of a shard."""
    return variant_dir / ANSWERS_FOLDER / f"{shard_id:06d}.jsonl"


def read_answers(path: Path) -> dict[str, Answer]:
    """Return the answers in a journal by the fingerprint of their chunk; none if there is no journal."""
    return dict(_lines(path))


def answered_chunks(folder: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the ID of each shard that has a journal, and the chunk fingerprints in its lines, even in damaged lines."""
    for path in sorted(folder.glob("*.jsonl")):
        yield int(path.stem), _FINGERPRINT.findall(path.read_bytes())


def answers_in(folder: Path) -> Iterator[Answer]:
    """Yield all answers in the journals of a variant, including several answers about one chunk."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from (answer for _, answer in _lines(path))


def _lines(path: Path) -> Iterator[tuple[str, Answer]]:
    """Yield the fingerprint of the chunk and the answer in each intact line of a journal."""
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
            except (ValueError, LookupError, TypeError, AttributeError):  # written by another version
                continue
            yield entry


class Journal:
    """Context manager for the journal of a shard while a worker adds to it; threads may share it.

    Args:
        others: Journals of shards that contained chunks of this shard before. Answers in this journal take precedence.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._path, self._lock = path, threading.Lock()
        self.answers = {name: answer for journal in (*others, path) for name, answer in read_answers(journal).items()}

    def __enter__(self) -> Self:
        make_folder(self._path.parent)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def add(self, fingerprint: str, answer: Answer) -> None:
        """Store an answer about the chunk with this fingerprint. It is on disk when the method returns."""
        text = json.dumps({"chunk_fingerprint": fingerprint, **asdict(answer)}, sort_keys=True).encode()
        # The line feed at the beginning ends a line that a kill has cut off.
        line = b"\n%08x %s\n" % (zlib.crc32(text), text)
        with self._lock:
            self.answers[fingerprint] = answer
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.write(self._descriptor, line[written:])  # raises the error that cut the first write short
        os.fsync(self._descriptor)


class Budget:
    """`--max-tokens-total`: the tokens of a variant's answers. All workers of a run share the count through a file.

    Args:
        limit: Number of tokens; None for no limit.
        spent: Tokens of the answers of earlier runs.
    """

    def __init__(self, variant_dir: Path, *, limit: int | None, spent: int) -> None:
        self._path, self._limit, self._spent = variant_dir / ANSWERS_FOLDER / _SPENT_FILE, limit, spent
        self._num_read = 0

    def begin(self) -> None:
        """Forget the tokens of an earlier run, because its answers are in the journals. Only the driver calls this."""
        self._path.unlink(missing_ok=True)

    def add(self, tokens: int) -> None:
        """Add the tokens of an answer."""
        if self._limit is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write(tokens.to_bytes(_RECORD_BYTES, "little"))

    def is_spent(self) -> bool:
        """Return True once the answers have used all tokens of the limit."""
        if self._limit is None:
            return False
        try:
            with self._path.open("rb") as file:
                file.seek(self._num_read)
                new = file.read()
        except FileNotFoundError:
            new = b""
        # Another worker may be writing the last record.
        size_bytes = len(new) // _RECORD_BYTES * _RECORD_BYTES
        self._num_read += size_bytes
        self._spent += sum(
            int.from_bytes(new[at : at + _RECORD_BYTES], "little") for at in range(0, size_bytes, _RECORD_BYTES)
        )
        return self._spent >= self._limit


def caption_sample(chunk: Chunk, answer: Answer) -> Sample:
    """Return the sample of a chunk."""
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
    """Compare the member of a sample with its index row, and the caption with its rules."""
    try:
        stated = parse_json(members[EXTENSION])
        in_member = {name: stated[name] for name in ("key", *(field.name for field in CAPTIONS_FIELDS))}
    except (ValueError, KeyError, TypeError) as error:
        return CheckedSample([(DeepCode.JSON_DIFFERS, f"the member cannot be read: {error!r}")], 0)
    differences = [
        (DeepCode.JSON_DIFFERS, f"{name}: {value!r} in the member, {row[name]!r} in the index")
        for name, value in in_member.items()
        if value != row[name]
    ]
    text = row["caption_text"]
    if not text or text != " ".join(text.split()) or len(text.split()) != row["caption_words"]:
        differences.append((DeepCode.JSON_DIFFERS, "caption_text is not one line of caption_words words"))
    return CheckedSample(differences, 1)
