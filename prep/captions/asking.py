"""Interface between a caption worker and a model or server, and the frames of a chunk that the model receives."""

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from clipmill.prep.captions.answers import Answer
from clipmill.prep.core.chunk_content import ChunkContent
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.core.shard_result import Stop
from clipmill.shards.pages.figures import evenly_within

JPEG_QUALITY = 90
Picture = NDArray[np.uint8]  # [H, W, 3], RGB


def decode_pictures(content: ChunkContent, *, count: int, size: int) -> list[Picture]:
    """Decode frames of a chunk, and limit their longer side to `size` pixels.

    Raises:
        SourceFailure: The chunk cannot be decoded.
    """
    pictures = []
    for frame in content.frames(evenly_within(range(content.num_frames), at_most=count)):
        picture = np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8)
        height, width = picture.shape[:2]
        scale = size / max(height, width)
        if scale < 1:
            shape = (max(1, round(width * scale)), max(1, round(height * scale)))
            picture = np.asarray(cv2.resize(picture, shape, interpolation=cv2.INTER_AREA), np.uint8)
        pictures.append(picture)
    return pictures


def jpeg_address(picture: Picture) -> str:
    """Return a picture as a JPEG file in a data URL."""
    is_encoded, content = cv2.imencode(
        ".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    )
    assert is_encoded, "OpenCV cannot encode JPEG"
    return f"data:image/jpeg;base64,{base64.b64encode(content.tobytes()).decode()}"


@dataclass(frozen=True)
class Questions:
    """Chunks to caption, and the functions that a captioner calls for them.

    Attributes:
        rows: Rows of the shard to caption.
        stop: Function that returns a reason to send no further requests, or None. It is called before each request.
        read: Function that returns the content of a chunk. It may raise SourceFailure, and must be thread-safe.
        pictures: Function that decodes frames of a chunk. It may raise SourceFailure, and must be thread-safe.
        keep: Function that stores the answer for a row, or the reason why there is no answer. The answer is on disk
            when the function returns. It must be thread-safe.
        seed: Function that returns the random seed for a row.
    """

    rows: Iterator[int]
    stop: Callable[[], Stop | None]
    read: Callable[[int], ChunkContent]
    pictures: Callable[[ChunkContent], Sequence[Picture]]
    keep: Callable[[int, Answer | SourceFailure], None]
    seed: Callable[[int], int]


class Captioner(Protocol):
    """Model or server that writes captions."""

    def answer(self, questions: Questions) -> Stop | None:
        """Caption all rows. Return the reason if requests for some rows were not sent; otherwise None."""
        ...
