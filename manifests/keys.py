"""Video IDs and chunk keys that are safe as names of tar members.

The key of a chunk, a part of a video, has the form `<video_id>_<start_ms:09d>`. WebDataset splits a member's name at
its first dot, and USTAR limits the name to 100 bytes. Therefore, a safe ID consists of at most 64 characters from
`[A-Za-z0-9_-]`: with the underscore, nine digits and the longest extension (`.latents.npy.zst`), a member name has at
most 90 bytes.
"""

import hashlib
import re

MAX_VIDEO_ID_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY = re.compile(r"(?P<video_id>[A-Za-z0-9_-]{1,64})_(?P<start_ms>\d{9,})")


def safe_video_id(source_id: str) -> str:
    """Convert a video's ID in its dataset to an ID that is safe in a key.

    A safe ID is returned unchanged. In any other ID, underscores replace the unsafe characters, and the first ten hex
    digits of the ID's SHA-256 are appended, so that different IDs such as `a.b` and `a/b` stay distinct.
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
    """Split a chunk key into the video ID and the start in milliseconds. This is the inverse of `chunk_key`.

    Raises:
        ValueError: `key` is not a chunk key.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is not a chunk key: expected <video_id>_<start_ms with nine digits>")
    return match["video_id"], int(match["start_ms"])
