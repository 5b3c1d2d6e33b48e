"""Names that survive tar archives: safe video ids, and the keys of chunks.

A key is `<video_id>_<start_ms:09d>`. WebDataset cuts a member's name at its first dot and USTAR holds 100
bytes of it, so a safe id uses `[A-Za-z0-9_-]` only and is at most 64 characters long: with the nine digits,
the underscore and the longest ending (`.latents.npy`) a member name stays under 90 bytes.
"""

import hashlib
import re

MAX_VIDEO_ID_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY = re.compile(r"(?P<video_id>[A-Za-z0-9_-]{1,64})_(?P<start_ms>\d{9,})")


def safe_video_id(source_id: str) -> str:
    """Maps a data set's own id to one that may stand in a key.

    An id that is safe already stays as it is. Any other keeps its readable characters and gains the first ten
    hex digits of its SHA-256, so that different ids never meet (`a.b` and `a/b` stay apart).
    """
    if _SAFE_ID.fullmatch(source_id):
        return source_id
    digest = hashlib.sha256(source_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    readable = _UNSAFE.sub("_", source_id)[: MAX_VIDEO_ID_CHARS - len(digest) - 1].strip("_")
    return f"{readable}-{digest}" if readable else digest


def chunk_key(video_id: str, start_ms: int) -> str:
    """Key of the chunk of `video_id` that begins at `start_ms`."""
    return f"{video_id}_{start_ms:09d}"


def split_key(key: str) -> tuple[str, int]:
    """Inverse of `chunk_key`: (video_id, start_ms).

    Raises:
        ValueError: `key` is not a chunk's key.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is not a chunk key: expected <video_id>_<start_ms with nine digits>")
    return match["video_id"], int(match["start_ms"])
