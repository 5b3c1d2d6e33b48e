"""Names that are safe in tar archives: video IDs and chunk keys.

A key is `<video_id>_<start_ms:09d>`. WebDataset splits a member's name at its first dot, and USTAR limits the name to
100 bytes. Therefore a safe ID has at most 64 characters of `[A-Za-z0-9_-]`: with the underscore, the nine digits and
the longest extension (`.latents.npy`), a member name stays under 90 bytes.
"""

import hashlib
import re

MAX_VIDEO_ID_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY = re.compile(r"(?P<video_id>[A-Za-z0-9_-]{1,64})_(?P<start_ms>\d{9,})")


def safe_video_id(source_id: str) -> str:
    """Map the ID of a video in a dataset to an ID that is valid in a key.

    A safe ID is returned unchanged. Any other ID keeps its readable characters, followed by the first ten hex digits of
    its SHA-256, so that different IDs never collide (`a.b` and `a/b` stay distinct).
    """
    if _SAFE_ID.fullmatch(source_id):
        return source_id
    digest = hashlib.sha256(source_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    readable = _UNSAFE.sub("_", source_id)[: MAX_VIDEO_ID_CHARS - len(digest) - 1].strip("_")
    return f"{readable}-{digest}" if readable else digest


def chunk_key(video_id: str, start_ms: int) -> str:
    """Return the key of the chunk of `video_id` that begins at `start_ms`."""
    return f"{video_id}_{start_ms:09d}"


def split_key(key: str) -> tuple[str, int]:
    """Split a chunk key into video_id and start_ms, the inverse of `chunk_key`.

    Raises:
        ValueError: `key` is not a chunk key.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is not a chunk key: expected <video_id>_<start_ms with nine digits>")
    return match["video_id"], int(match["start_ms"])
