"""What results pages show: samples and frames spread evenly, and pictures as data URIs."""

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import av

One = TypeVar("One")


class ShownSet(Protocol):
    """A set whose samples can be shown."""

    def text(self, sample: int) -> str:
        """The words of the caption."""
        ...

    def key(self, sample: int) -> str:
        """The chunk in which the clip begins."""
        ...

    def span_s(self, sample: int) -> tuple[float, float]:
        """Begin and end of the clip in its video, seconds."""
        ...

    def pictures(self, sample: int, *, num_frames: int) -> list[NDArray[np.uint8]]:
        """Frames of the clip, RGB [H, W, 3]; none where they cannot be had."""
        ...


def from_end_to_end(some: Sequence[One], *, at_most: int) -> list[One]:
    """Some of the things, spread evenly over their row: the first and the last among them."""
    return [some[place] for place in np.unique(np.linspace(0, len(some) - 1, at_most).round().astype(int))]


def from_middles(some: Sequence[One], *, at_most: int) -> list[One]:
    """Some of the things, from the middles of equal parts of their row."""
    count = min(len(some), at_most)
    return [some[(2 * number + 1) * len(some) // (2 * count)] for number in range(count)]


def jpeg_uri(frame: NDArray[np.uint8]) -> str:
    """A picture (uint8 RGB [H, W, 3]) as a data URI."""
    import av

    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(format="yuvj420p")
    return _uri(picture, codec="mjpeg", kind="jpeg", options={"qscale": "3"})


def png_uri(frame: NDArray[np.uint8]) -> str:
    """A picture (uint8 RGB [H, W, 3]) as a data URI without loss."""
    import av

    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
    return _uri(picture, codec="png", kind="png", options={})


def _uri(picture: "av.VideoFrame", *, codec: Literal["mjpeg", "png"], kind: str, options: Mapping[str, str]) -> str:
    import av

    encoder = av.CodecContext.create(codec, "w")
    encoder.height, encoder.width = picture.height, picture.width
    encoder.pix_fmt = picture.format.name
    encoder.time_base = 1  # type: ignore[assignment]
    encoder.options = dict(options)
    packets = [*encoder.encode(picture), *encoder.encode(None)]
    return f"data:image/{kind};base64," + base64.b64encode(b"".join(bytes(packet) for packet in packets)).decode()
