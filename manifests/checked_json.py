"""JSON from untrusted sources, and JSON records with a checksum.

The key `sha256` of such a record holds the SHA-256 of the other content.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from clipmill.manifests.publish import publish_json, read_record

CHECKSUM_KEY = "sha256"


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: it is not JSON, not valid UTF-8, or nested too deeply for the parser.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def record_sha256(record: dict[str, Any]) -> str:
    """Compute the SHA-256 (hex) of the canonical JSON of `record`, independent of white space and key order."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def publish_checked_json(path: Path, record: dict[str, Any]) -> None:
    """Publish `record` with its checksum."""
    publish_json(path, {**record, CHECKSUM_KEY: record_sha256(record)})


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read the record at `path` and remove its checksum.

    Raises:
        OSError: the file cannot be read; the exception has the file name.
        ValueError: it is a folder, the content is not a JSON object, or its checksum is missing or does not match.
    """
    try:
        record = parse_json(read_record(path))
    except IsADirectoryError as error:
        raise ValueError(error.strerror) from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    checksum = record.pop(CHECKSUM_KEY, None)
    if checksum is None:
        raise ValueError("it has no checksum")
    if checksum != record_sha256(record):
        raise ValueError("its checksum does not match its content")
    return record
