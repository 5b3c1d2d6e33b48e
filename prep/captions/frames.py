"""Frames of a chunk for a model: evenly spaced, in RGB, and as JPEG files for a server."""

import base64

import cv2
import numpy as np
from numpy.typing import NDArray

from clipmill.prep.core.chunk_input import decode_frames, frame_rate, read_chunk
from clipmill.shards.reader import CommittedShard

JPEG_QUALITY = 90
Picture = NDArray[np.uint8]  # [H, W, 3], RGB


def frames_to_show(num_frames: int, *, count: int) -> list[int]:
    """Return the frames in the middle of `count` parts of equal length, ascending; all of them if there are fewer."""
    if num_frames <= count:
        return list(range(num_frames))
    return [(2 * number + 1) * num_frames // (2 * count) for number in range(count)]


def read_pictures(video: CommittedShard, row: int, *, count: int, size: int) -> list[Picture]:
    """Read and decode frames of a chunk of a `video` shard.

    Raises:
        SourceFailure: the chunk is damaged or cannot be decoded.
    """
    return decode_pictures(read_chunk(video, row), video, row, count=count, size=size)


def decode_pictures(content: bytes, video: CommittedShard, row: int, *, count: int, size: int) -> list[Picture]:
    """Decode frames of a chunk from its MP4 file, their longer side at most `size` pixels.

    Raises:
        SourceFailure: the chunk cannot be decoded.
    """
    index = video.index
    frames = decode_frames(
        content,
        frames_to_show(index["num_frames"][row].as_py(), count=count),
        fps=frame_rate(index, row),
        packet_frame=index["packet_frame"][row].as_py(),
        packet_flags=index["packet_flags"][row].as_py(),
    )
    return [_resized(np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8), size) for frame in frames]


def _resized(picture: Picture, size: int) -> Picture:
    height, width = picture.shape[:2]
    scale = size / max(height, width)
    if scale >= 1:
        return picture
    shape = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(picture, shape, interpolation=cv2.INTER_AREA), np.uint8)


def jpeg_address(picture: Picture) -> str:
    """Return a picture as a JPEG file in a data URL."""
    is_encoded, content = cv2.imencode(
        ".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    )
    assert is_encoded, "OpenCV cannot encode JPEG"
    return f"data:image/jpeg;base64,{base64.b64encode(content.tobytes()).decode()}"
