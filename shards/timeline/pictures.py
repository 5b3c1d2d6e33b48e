"""Decode the frames of a source as players display them: cropped and upright."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from clipmill.shards.timeline.model import ONE, Shape, Timeline, TimelineError, TrackPackets, find_track, video_tracks
from clipmill.shards.timeline.truncation import ebml_header

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

_MAX_ASPECT = 64  # limit for pixel aspect ratios; a damaged header could otherwise require gigabytes for a frame
_TRANSFERS = {16: "PQ", 18: "HLG"}


@dataclass(frozen=True)
class Picture:
    """Properties of the first frame of a source as it is displayed: upright, cropped, with square pixels.

    Attributes:
        transfer, primaries: See `clipmill.shards.timeline.model.Timeline`.
        notes: Unusual properties of the video, one text for each.
    """

    width: int
    height: int
    shape: Shape
    transfer: int
    primaries: int
    notes: tuple[str, ...]


def first_picture(container: "InputContainer", stream: "VideoStream") -> Picture:
    """Decode the first frame of a newly opened container.

    Raises:
        TimelineError: There is no decoder or no frame, or the shape of the frame is implausible.
        av.FFmpegError: The frame cannot be decoded.
    """
    if stream.codec_context is None:
        raise TimelineError("decode_errors", "no decoder for the video stream")
    stream.codec_context.thread_count = 1  # for a single frame, more threads would only use more memory
    frame = next(container.decode(stream), None)
    if frame is None:
        raise TimelineError("zero_duration", "the video stream has no frames")
    aspect = stream.sample_aspect_ratio or ONE
    if aspect > _MAX_ASPECT or 0 < aspect * _MAX_ASPECT < 1:
        raise TimelineError("decode_errors", f"implausible pixel aspect ratio in the header: {aspect}")
    shape = Shape(_container_crop(container, stream), _display_matrix(frame))
    if sum(shape.crop[::2]) >= frame.width or sum(shape.crop[1::2]) >= frame.height:
        raise TimelineError("decode_errors", f"the crop in the header leaves nothing of {frame.width}x{frame.height}")
    width, height = shape.crop_size(frame.width, frame.height)
    notes = []
    if (num_tracks := len(video_tracks(container))) > 1:
        notes.append(f"{num_tracks} video tracks: only stream {stream.index} is used")
    if frame.color_trc in _TRANSFERS:
        notes.append(f"HDR ({_TRANSFERS[frame.color_trc]}): colours are unchanged, without tone mapping")
    if any(shape.crop):
        notes.append(f"the container crops {frame.width}x{frame.height} to {width}x{height}")
    if shape.is_tilted:
        notes.append(f"rotated by {shape.degrees:.0f} degrees inside its frame, with black corners")
    if frame.interlaced_frame:
        notes.append("interlaced, and not deinterlaced")
    if aspect > 0:
        width = max(1, round(width * aspect))
    if shape.is_transposed:
        width, height = height, width
    return Picture(width, height, shape, frame.color_trc, frame.color_primaries, tuple(notes))


def _display_matrix(frame: "av.VideoFrame") -> tuple[float, float, float, float]:
    from av.sidedata.sidedata import Type

    data: Any = frame.side_data.get(Type.DISPLAYMATRIX)  # type: ignore[call-overload] # keys are types, not strings
    if data is None:
        return Shape().matrix
    a, b, _, c, d, *_ = (value / 65536 for value in np.frombuffer(bytes(data), "<i4").tolist())
    return (a, b, c, d) if a * d - b * c else Shape().matrix


def _container_crop(container: "InputContainer", stream: "VideoStream") -> tuple[int, int, int, int]:
    """Return the crop, in pixels, in the header of a container: left, top, right, bottom.

    PyAV does not expose the crop. However, libav writes it to the header of a Matroska file, as four EBML elements.
    """
    import av

    if not any(name in container.format.name for name in ("matroska", "mp4")):
        return (0, 0, 0, 0)
    target_file = io.BytesIO()
    try:
        with av.open(target_file, "w", format="matroska") as target:
            target.add_stream_from_template(stream)
            target.start_encoding()
    except (av.FFmpegError, ValueError):
        return (0, 0, 0, 0)  # Matroska does not support the codec
    crop = dict.fromkeys(_CROP_ELEMENTS, 0)
    path, content, position = list(_PATH_TO_CROP), target_file.getvalue(), 0
    while (header := ebml_header(content[position : position + 12])) is not None:
        element, header_bytes, length = header
        if path and element == path[0]:
            path.pop(0)
            position += header_bytes  # enter the element
            continue
        if not path and element in crop:
            start = position + header_bytes
            crop[element] = int.from_bytes(content[start : start + (length or 0)], "big")
        position += header_bytes + (length or 0)
    left, top, right, bottom = crop.values()
    return left, top, right, bottom


_PATH_TO_CROP = (0x18538067, 0x1654AE6B, 0xAE, 0xE0)  # Segment, Tracks, TrackEntry, Video
_CROP_ELEMENTS = (0x54CC, 0x54BB, 0x54DD, 0x54AA)  # PixelCropLeft, Top, Right, Bottom


def displayed_frames(
    container: "InputContainer", timeline: Timeline, packets: TrackPackets | None, *, skips_damage: bool = False
) -> "Iterator[tuple[Fraction, av.VideoFrame]]":
    """Decode a source, and yield (time in seconds, frame) for each frame, upright and cropped.

    Args:
        container: Newly opened container.
        packets: Packets of the track, from `read_timeline`; required if the timeline is not continuous.
        skips_damage: True to omit packets that cannot be decoded; False to raise an error.

    Raises:
        av.FFmpegError: A packet cannot be read or decoded.
    """
    import av

    stream = find_track(container, timeline.track)
    unit, upright_filter = stream.time_base or ONE, UprightFilter(timeline.shape)
    packet_index = 0
    for packet in container.demux(stream):
        if packet.size and not timeline.is_continuous:
            assert packets is not None, "the packets are required"
            packet.pts = packet.dts = int(packets.times[packet_index])
            packet_index += 1
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            if not skips_damage:
                raise
            continue
        for frame in frames:
            time = frame.dts if frame.pts is None else frame.pts
            if time is not None:
                yield time * unit - timeline.start, upright_filter.apply(frame)


class UprightFilter:
    """Filter that crops frames and turns them upright. If the resolution or format changes, the graph is rebuilt.

    Args:
        aspect: Pixel aspect ratio (width / height) of the input. The output has square pixels.
    """

    def __init__(self, shape: Shape, *, aspect: Fraction = ONE) -> None:
        square_filters = [("scale", {"w": f"2*round(iw*{aspect}/2)", "h": "ih"})] if aspect != ONE else []
        filters = [*shape.crop_filters(), *square_filters, *shape.orientation_filters()]
        self._filters = [*filters, ("copy", {})] if filters else []  # copy, because a flip only reverses the line order
        self._graph: Any = None
        self._graph_key: tuple[int, int, str] | None = None

    def apply(self, frame: "av.VideoFrame") -> "av.VideoFrame":
        """Return a frame as it is displayed. The time of the frame does not change."""
        if not self._filters:
            return frame
        from av.filter import Graph

        key = (frame.width, frame.height, frame.format.name)
        if self._graph_key != key:
            self._graph, self._graph_key = Graph(), key
            buffer = self._graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base or ONE
            )
            steps = [buffer, *(self._graph.add(name, None, **options) for name, options in self._filters)]
            self._graph.link_nodes(*steps, self._graph.add("buffersink")).configure()
        self._graph.vpush(frame)
        upright_frame: av.VideoFrame = self._graph.vpull()
        return upright_frame
