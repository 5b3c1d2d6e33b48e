"""Pictures and small clips that a page holds, as data URIs or as files beside it: JPEG, PNG, H.264 in mp4.

Pages show some of many samples, and some frames of a clip: those that are evenly spread.
"""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import av
    import numpy as np
    from numpy.typing import NDArray

Item = TypeVar("Item")
CLIP_FPS = 12  # of small clips, about
SHORT_SIDE_PX = 240  # of small clips, at most
_ENCODER = {"crf": "29", "preset": "veryfast", "threads": "1"}


def evenly_spaced_items(items: Sequence[Item], *, at_most: int) -> list[Item]:
    """Return evenly spaced items, the first and the last included."""
    last, count = len(items) - 1, min(len(items), at_most)
    return [items[round(number * last / max(1, count - 1))] for number in range(count)]


def evenly_within(items: Sequence[Item], *, at_most: int) -> list[Item]:
    """Return the items in the middles of equal parts of the sequence."""
    count = min(len(items), at_most)
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]


def data_uri(content: bytes, kind: str) -> str:
    """Return a data URI of a media type such as image/jpeg."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def jpeg_uri(frame: "NDArray[np.uint8]") -> str:
    """Return a picture (uint8 RGB [H, W, 3]) as a data URI."""
    return data_uri(_encode_picture(frame, codec="mjpeg", pix_fmt="yuvj420p", options={"qscale": "3"}), "image/jpeg")


def png_uri(frame: "NDArray[np.uint8]") -> str:
    """Return a picture (uint8 RGB [H, W, 3]) as a lossless data URI."""
    return data_uri(_encode_picture(frame, codec="png", pix_fmt="rgb24", options={}), "image/png")


def small_clip(frames: "Iterable[av.VideoFrame]", *, fps: Fraction) -> bytes:
    """Return an mp4 of one or more frames in H.264, scaled down to a short side of 240 pixels."""
    import av
    from av.video.stream import VideoStream

    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options=_ENCODER)
        assert isinstance(stream, VideoStream)
        stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(frames):
            if number == 0:
                stream.width, stream.height = _small_size(frame)
            picture = frame.reformat(width=stream.width, height=stream.height, format="yuv420p")
            picture.pts, picture.time_base = number, 1 / fps
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return content.getvalue()


def small_frame(frame: "av.VideoFrame") -> "av.VideoFrame":
    """Return a frame as small as those of a small clip."""
    width, height = _small_size(frame)
    return frame.reformat(width=width, height=height, format="yuv420p")


def _small_size(frame: "av.VideoFrame") -> tuple[int, int]:
    scale = min(1.0, SHORT_SIDE_PX / min(frame.width, frame.height))
    width, height = (max(2, 2 * round(scale * side / 2)) for side in (frame.width, frame.height))
    return width, height


def _encode_picture(
    frame: "NDArray[np.uint8]", *, codec: Literal["mjpeg", "png"], pix_fmt: str, options: Mapping[str, str]
) -> bytes:
    import av
    import numpy as np

    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(format=pix_fmt)
    encoder = av.CodecContext.create(codec, "w")
    encoder.height, encoder.width = picture.height, picture.width
    encoder.pix_fmt = pix_fmt
    encoder.time_base = 1  # type: ignore[assignment]
    encoder.options = dict(options)
    return b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])
