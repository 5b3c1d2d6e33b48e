"""Encoder for the frames of a source, with the times of a plan in place of the encoder's own times."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import numpy as np

TimedPacket = tuple[Fraction, Any]  # decoding time in seconds, and the packet


def add_video(
    file: Any,
    codec: str,
    fps: Fraction,
    picture: np.ndarray,
    form: tuple[Fraction, str | None],
    choices: dict[str, str],
) -> Any:
    stream = file.add_stream(codec, rate=fps, options=choices)
    _set_form(stream.codec_context, codec, fps, picture, form)
    # An AVI has a packet for each tick; an empty packet is a dropped frame.
    stream.time_base = 1 / fps if file.format.name == "avi" else Fraction(1, 90000)
    return stream


def open_encoder(
    codec: str, fps: Fraction, picture: np.ndarray, form: tuple[Fraction, str | None], choices: dict[str, str]
) -> Any:
    context: Any = av.CodecContext.create(codec, "w")
    context.options = choices
    context.framerate = fps
    _set_form(context, codec, fps, picture, form)
    return context


def _set_form(context: Any, codec: str, fps: Fraction, picture: np.ndarray, form: tuple[Fraction, str | None]) -> None:
    context.height, context.width = picture.shape[:2]
    context.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    context.time_base = 1 / fps
    aspect, matrix = form
    context.sample_aspect_ratio = aspect
    if matrix is not None:
        number = {"smpte170m": 6, "bt709": 1}[matrix]
        context.colorspace = context.color_trc = context.color_primaries = number


def encode_frames(
    context: Any, pictures: Iterator[np.ndarray], begins_s: list[Fraction], *, frame_s: Fraction, matrix: str | None
) -> list[TimedPacket]:
    """Return the packets of frames with decoding times that do not depend on the encoder's frame distances."""
    packets: list[Any] = []
    space = 1 if matrix == "bt709" else 5  # ITU-R BT.709 or BT.601
    for number, picture in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame = frame.reformat(format=context.pix_fmt, dst_colorspace=space)
        frame.pts, frame.time_base = number, context.time_base
        packets += context.encode(frame)
    packets += context.encode(None)
    order = [round(packet.pts * packet.time_base / context.time_base) for packet in packets]
    num_late = max(0, *(place - number for place, number in enumerate(order))) if order else 0
    extended_s = [begins_s[0] - (num_late - number) * frame_s for number in range(num_late)] + begins_s
    ends_s = [*begins_s[1:], begins_s[-1] + frame_s]
    made = []
    base = Fraction(1, 90000)
    for place, (packet, number) in enumerate(zip(packets, order, strict=True)):
        decoded_s = min(extended_s[place], begins_s[number])
        packet.time_base = base
        packet.pts, packet.dts = round(begins_s[number] / base), round(decoded_s / base)
        packet.duration = round((ends_s[number] - begins_s[number]) / base)
        made.append((decoded_s, packet))
    return made
