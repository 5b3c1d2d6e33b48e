"""Times that a container does not tell, or tells wrongly, and what key frames say of changes within a stream."""

import io
from fractions import Fraction
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clipmill.shards.timeline.model import ONE, TimelineError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream
    from av.video.stream import VideoStream

RESTART_S = Fraction(1, 5)  # decoding times that go back by less are the rounding of a muxer
_GAP_S, _GAP_FRAMES = 5.0, 50  # a longer pause between two frames is mentioned
MPEG_VIDEO = frozenset({"mpeg1video", "mpeg2video"})
_MAX_GUESS_FRAMES = 4  # by which libav's guess of a missing timestamp may be wrong, in whole frames or fields
_ROUNDING = 0.25  # of a frame

LONGEST_FRAME_S = 3600  # a later timestamp is damaged, or the beginning of another part


def is_b_picture(packet: "Packet[Stream]") -> bool:
    """Whether an MPEG-1 or MPEG-2 picture is a B picture (ISO/IEC 13818-2, 6.2.3)."""
    head = bytes(memoryview(packet)[:2048])
    begin = head.find(b"\0\0\1\0")
    return 0 <= begin < len(head) - 5 and head[begin + 5] >> 3 & 7 == 3


def times_in_display_order(
    times: NDArray[np.int64], durations: NDArray[np.int64], is_b: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the presentation times of MPEG-1 or MPEG-2 pictures in a program stream, and the same in display order.

    It has a timestamp for every few pictures only, and libav guesses the others, at times wrongly. A picture follows
    the one before it in display order, in which B pictures come before the reference that precedes them in the file.
    A timestamp counts if it is very near, because sums of durations are rounded; or if it is further away than a few
    pictures: there is a gap, or time starts again. As many pictures are displayed before it as there are in the file,
    so that times go back at the same picture in both orders.
    """
    display: list[int] = []
    held = None
    for row, is_bidirectional in enumerate(is_b.tolist()):
        if is_bidirectional:
            display.append(row)
        else:
            display += [] if held is None else [held]
            held = row
    display += [] if held is None else [held]
    found, due = times.copy(), int(times[display[0]])
    for row in display:
        length, error = int(durations[row]), abs(int(times[row]) - due)
        if error > _MAX_GUESS_FRAMES * length or error < length * _ROUNDING:
            due = int(times[row])
        found[row] = due
        due += length
    return found, found[display]


def key_steps(times: NDArray[np.int64], is_key: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return times that go back only where timestamps start again, for a container without decoding times.

    A key frame is shown after all frames before it.
    """
    latest = np.maximum.accumulate(times)
    restarts = np.flatnonzero(is_key[1:] & (times[1:] < latest[:-1])) + 1
    for first, behind in pairwise([0, *restarts.tolist(), len(times)]):
        latest[first:behind] = np.maximum.accumulate(times[first:behind])
    return latest


def find_restarts(
    steps_s: NDArray[np.float64],
    times: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    unit: Fraction,
    may_wrap: bool,
) -> tuple[tuple[int, int], ...]:
    """Return where timestamps start again: the first packet of each part, and what is added to its timestamps.

    Args:
        steps_s: Seconds from each packet to the next in decoding order.
        may_wrap: Whether a part that starts again may seem to begin hours later.

    Raises:
        TimelineError: A timestamp is damaged.
    """
    is_jump = steps_s > LONGEST_FRAME_S
    firsts = (np.flatnonzero((steps_s < -float(RESTART_S)) | is_jump) + 1).tolist()
    restarts, offset = [(0, 0)], 0
    for first, behind in pairwise([*firsts, len(times)]):
        if (is_jump[first - 1] and not may_wrap) or (behind - first < 2 and first > 1):
            jump = f"jump by {steps_s[first - 1] / 3600:,.1f} hours" if is_jump[first - 1] else "go back"
            where = f"at packet {first} ({float((int(times[first - 1]) - int(times[0])) * unit):.2f} s)"
            raise TimelineError("bad_timestamps", f"the timestamps {jump} {where}")
        begin = restarts[-1][0]
        last = begin + int(np.argmax(times[begin:first]))
        offset += int(times[last] + lengths[last]) - int(times[first:behind].min())
        restarts.append((first, offset))
    return tuple(restarts)


def gap_notes(times: NDArray[np.int64], *, unit: Fraction, start: Fraction) -> list[str]:
    """Return a note if there are pauses that are much longer than a frame."""
    shown = np.sort(times)
    steps = np.diff(shown)
    if not len(steps):
        return []
    gaps = np.flatnonzero(steps > max(_GAP_S / float(unit), _GAP_FRAMES * float(np.median(steps))))
    if not len(gaps):
        return []
    begin_s, length_s = float(int(shown[gaps[0]]) * unit - start), float(int(steps[gaps[0]]) * unit)
    more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
    return [f"no frames for {length_s:.1f} s from {begin_s:.2f} s{more}: the last one stays on show"]


def sequence_header(packet: "Packet[Stream]", *, codec: str) -> bytes:
    """Return the bytes at the beginning of a key packet that fix the size of its pictures; empty if unknown."""
    if codec not in ("h264", "hevc", "mpeg1video", "mpeg2video", "vp8"):
        return b""
    head = bytes(memoryview(packet)[:2048])
    if codec == "vp8":
        return head[6:10]
    units = head.split(b"\0\0\1")[1:]
    if codec == "h264":
        return next((unit for unit in units if unit and unit[0] & 31 == 7), b"")
    if codec == "hevc":
        return next((unit for unit in units if unit and unit[0] >> 1 & 63 == 33), b"")
    return next((unit[1:5] for unit in units if unit[:1] == b"\xb3"), b"")


def decoded_shape(stream: "VideoStream", content: bytes) -> tuple[int, int, Fraction] | None:
    """Return width, height and pixel aspect of a key packet; None if it cannot be decoded on its own."""
    import av

    decoder: Any = av.VideoCodecContext.create(stream.codec_context.codec.name, "r")
    decoder.thread_count = 1
    try:
        frames = [*decoder.decode(av.Packet(content)), *decoder.decode(None)]
    except av.FFmpegError:
        return None
    if not frames:
        return None
    aspect = decoder.sample_aspect_ratio or ONE
    return frames[0].width, frames[0].height, aspect if aspect > 0 else ONE


def decoded_order(container: "InputContainer", stream: "VideoStream", *, num_packets: int) -> NDArray[np.int64] | None:
    """Return the rank of each packet in presentation order, by decoding; None if packets are shown as they come.

    The container has decoding times only, and the decoder alone knows the order.
    """
    import av

    context = stream.codec_context
    if context is None or not context.has_b_frames:
        return None
    context.thread_count = 1
    container.seek(0, stream=stream)
    shown, number = [], 0
    for packet in container.demux(stream):
        if packet.size:
            packet.pts = packet.dts = number
            number += 1
        try:
            shown += [frame.pts for frame in packet.decode() if frame.pts is not None]
        except av.error.InvalidDataError:
            continue
    if sorted(shown) != list(range(num_packets)):
        return None  # a packet holds two frames or none: libav's times are as good
    order = np.empty(num_packets, np.int64)
    order[shown] = np.arange(num_packets)
    return order


def num_avi_frames(file: "IO[bytes]", track: int) -> int:
    """Return the number of frames that the index of an AVI lists, frames without bytes included; 0 if it has none."""
    position, size_bytes = 12, file.seek(0, io.SEEK_END)
    while position + 8 <= size_bytes:
        file.seek(position)
        head = file.read(8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] == b"idx1":
            entries = np.frombuffer(file.read(length // 16 * 16), "S4, V12")["f0"]
            return int(np.isin(entries, [f"{track:02d}{kind}".encode() for kind in ("dc", "db")]).sum())
        position += 8 + length + length % 2
    return 0


def is_cut_avi(file: "IO[bytes]") -> bool:
    """Whether the outermost lists of an AVI extend beyond its end; above 1 GB there are several, one after another."""
    position, size_bytes = 0, file.seek(0, io.SEEK_END)
    while position < size_bytes:
        file.seek(position)
        head = file.read(8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] != b"RIFF" or length in (0, 2**32 - 1):  # lists that were never finished
            return False
        position += 8 + length
    return position > size_bytes
