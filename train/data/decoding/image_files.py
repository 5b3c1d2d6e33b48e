"""Image files, decoded to frames by libav, as the packets of a video are.

A JPEG or lossy WebP file holds planes of YUV, mostly 4:2:0, which become those of the clip as they are: no conversion
to RGB and back. The format is that of the content, whatever the name of the file says.

CMYK, grey, palettes and 16 bits per channel are converted; transparency is dropped, as Pillow's `convert("RGB")` does.
A file that is cut, animated, or larger than `MAX_PIXELS` is an error.
"""

from fractions import Fraction
from typing import TYPE_CHECKING

from clipmill.train.data.decoding.decoders import MAX_PIXELS
from clipmill.train.data.decoding.pictures import as_yuv420

if TYPE_CHECKING:
    import av

_ORIENTATION_TAG = 0x0112
# Filters of libav for the orientations of EXIF; 1 is upright.
_UPRIGHT: dict[int, tuple[tuple[str, str], ...]] = {
    2: (("hflip", ""),),
    3: (("hflip", ""), ("vflip", "")),
    4: (("vflip", ""),),
    5: (("transpose", "cclock_flip"),),
    6: (("transpose", "clock"),),
    7: (("transpose", "clock_flip"),),
    8: (("transpose", "cclock"),),
}
_EXIF_MARKS = {"mjpeg": b"Exif\0\0", "png": b"eXIf", "webp": b"EXIF"}
_EXIF_SIZE_BYTES = 4  # of a WebP chunk, between its name and its content
_JPEG_FRAMES = (b"\xc0", b"\xc1", b"\xc2")  # markers of frame headers: baseline, extended, progressive


def decode_image(content: bytes) -> "av.VideoFrame":
    """The upright image in a JPEG, PNG or WebP file, as 8-bit YUV 4:2:0.

    Raises:
        ValueError: it is another kind of file, animated, too large, cut or damaged.
    """
    import av

    codec = _codec_of(content)
    # A new one for each image: libav's PNG decoder outputs noise for a second file. It costs a tenth of a small JPEG.
    context = av.CodecContext.create(codec, "r")
    assert isinstance(context, av.VideoCodecContext)
    context.thread_count = 1  # the loader's threads are the parallel part
    # An error, not a concealed one; and a file of a few bytes can claim an image of any size.
    context.options = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
    try:
        frames = context.decode(av.Packet(content))
    except av.FFmpegError as error:
        width, height = _claimed_size(content, codec)
        if width * height > MAX_PIXELS:
            raise ValueError(f"an image of {width} x {height} is larger than {MAX_PIXELS:,} pixels") from error
        raise ValueError(f"the file is damaged or was cut short ({codec}: {error.strerror})") from error
    if len(frames) != 1 or frames[0].is_corrupt:
        raise ValueError(f"the file is damaged or was cut short ({codec}: no intact image)")
    return as_yuv420(_turn_upright(frames[0], _orientation_of(content, codec)))


def _codec_of(content: bytes) -> str:
    """libav's name of the codec; raises ValueError for other files, and for animations."""
    if content.startswith(b"\xff\xd8\xff"):
        return "mjpeg"
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        # libav shows the first picture of an animation.
        if b"acTL" in content[: max(content.find(b"IDAT"), 0)]:
            raise ValueError("an animated PNG, not an image")
        return "png"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        if content[12:16] == b"VP8X" and content[20] & 2:
            raise ValueError("an animated WebP, not an image")
        return "webp"
    raise ValueError(f"neither JPEG, PNG nor WebP: it begins with {content[:12]!r}")


def _claimed_size(content: bytes, codec: str) -> tuple[int, int]:
    """Width and height as the header says, for the message of a rejected file; (0, 0) if they are not found."""
    if codec == "png":
        return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    if codec == "webp":
        if content[12:16] == b"VP8X":
            return int.from_bytes(content[24:27], "little") + 1, int.from_bytes(content[27:30], "little") + 1
        if content[12:16] == b"VP8L":
            packed = int.from_bytes(content[21:25], "little")
            return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        return int.from_bytes(content[26:28], "little") & 0x3FFF, int.from_bytes(content[28:30], "little") & 0x3FFF
    at = 2
    while content[at : at + 1] == b"\xff":  # segments: a marker, and the number of bytes that follow it
        if content[at + 1 : at + 2] in _JPEG_FRAMES:
            return int.from_bytes(content[at + 7 : at + 9]), int.from_bytes(content[at + 5 : at + 7])
        at += 2 + int.from_bytes(content[at + 2 : at + 4])
    return 0, 0


def _orientation_of(content: bytes, codec: str) -> int:
    """The orientation in the EXIF data of a file, 1 to 8; 1 without any."""
    mark = _EXIF_MARKS[codec]
    at = content.find(mark)
    if at < 0:
        return 1
    at += len(mark) + (_EXIF_SIZE_BYTES if codec == "webp" else 0)
    at += len(_EXIF_MARKS["mjpeg"]) if content.startswith(_EXIF_MARKS["mjpeg"], at) else 0
    tiff = memoryview(content)[at:]
    order = {b"II*\0": "little", b"MM\0*": "big"}.get(bytes(tiff[:4]))
    if order is None:
        return 1

    def number(begin: int, size: int) -> int:
        return int.from_bytes(tiff[begin : begin + size], "little" if order == "little" else "big")

    first = number(4, 4)
    for entry in range(first + 2, first + 2 + 12 * number(first, 2), 12):
        if number(entry, 2) == _ORIENTATION_TAG:
            return number(entry + 8, 2)
    return 1


def _turn_upright(frame: "av.VideoFrame", orientation: int) -> "av.VideoFrame":
    if orientation not in _UPRIGHT:
        return frame
    from av.filter import Graph

    graph = Graph()
    links = [graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=Fraction(1))]
    links += [graph.add(name, arguments or None) for name, arguments in _UPRIGHT[orientation]]
    # Copied, because vflip only lets the lines of a frame run backwards in memory.
    graph.link_nodes(*links, graph.add("copy"), graph.add("buffersink")).configure()
    graph.push(frame)
    turned = graph.pull()
    assert isinstance(turned, type(frame))
    return turned
