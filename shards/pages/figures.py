"""Figures for HTML pages: images and small clips (JPEG, PNG, H.264 in mp4) as data URIs, and histograms for SVG.

Pages show evenly spaced samples of a larger set, and evenly spaced frames of a clip.
"""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from clipmill.manifests.formatting import count_noun, short_number

if TYPE_CHECKING:
    import av

Item = TypeVar("Item")
CLIP_FPS = 12  # approximate frame rate of small clips
SHORT_SIDE_PX = 240  # maximum short side of small clips, in pixels
_ENCODER = {"crf": "29", "preset": "veryfast", "threads": "1"}


def evenly_spaced_items(items: Sequence[Item], *, at_most: int) -> list[Item]:
    """Return up to `at_most` evenly spaced items of a sequence, including the first and the last item."""
    last, count = len(items) - 1, min(len(items), at_most)
    return [items[round(index * last / max(1, count - 1))] for index in range(count)]


def middle_items(items: Sequence[Item], *, at_most: int) -> list[Item]:
    """Divide a sequence into up to `at_most` equal parts, and return the middle item of each part."""
    count = min(len(items), at_most)
    return [items[(2 * part + 1) * len(items) // (2 * count)] for part in range(count)]


def data_uri(content: bytes, kind: str) -> str:
    """Encode content as a data URI.

    Args:
        kind: Media type, such as image/jpeg.
    """
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def jpeg_uri(frame: "NDArray[np.uint8]") -> str:
    """Encode an image (uint8 RGB [H, W, 3]) as a JPEG data URI."""
    return data_uri(_encode_image(frame, codec="mjpeg", pix_fmt="yuvj420p", options={"qscale": "3"}), "image/jpeg")


def png_uri(frame: "NDArray[np.uint8]") -> str:
    """Encode an image (uint8 RGB [H, W, 3]) losslessly as a PNG data URI."""
    return data_uri(_encode_image(frame, codec="png", pix_fmt="rgb24", options={}), "image/png")


def small_clip(frames: "Iterable[av.VideoFrame]", *, fps: Fraction) -> bytes:
    """Encode frames as H.264 in mp4, scaled down to a short side of at most SHORT_SIDE_PX pixels.

    Args:
        frames: One or more frames with the same resolution.
        fps: Frame rate of the clip.
    """
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
            scaled_frame = frame.reformat(width=stream.width, height=stream.height, format="yuv420p")
            scaled_frame.pts, scaled_frame.time_base = number, 1 / fps
            container.mux(stream.encode(scaled_frame))
        container.mux(stream.encode(None))
    return content.getvalue()


def small_frame(frame: "av.VideoFrame") -> "av.VideoFrame":
    """Scale a frame down to the resolution that `small_clip` uses."""
    width, height = _small_size(frame)
    return frame.reformat(width=width, height=height, format="yuv420p")


def _small_size(frame: "av.VideoFrame") -> tuple[int, int]:
    scale = min(1.0, SHORT_SIDE_PX / min(frame.width, frame.height))
    width, height = (max(2, 2 * round(scale * side / 2)) for side in (frame.width, frame.height))
    return width, height


def _encode_image(
    frame: "NDArray[np.uint8]", *, codec: Literal["mjpeg", "png"], pix_fmt: str, options: Mapping[str, str]
) -> bytes:
    import av

    image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(format=pix_fmt)
    encoder = av.CodecContext.create(codec, "w")
    encoder.height, encoder.width = image.height, image.width
    encoder.pix_fmt = pix_fmt
    encoder.time_base = 1  # type: ignore[assignment]
    encoder.options = dict(options)
    return b"".join(bytes(packet) for packet in [*encoder.encode(image), *encoder.encode(None)])


MAX_BINS = 32
# Maximum number of labels on the axis if each bar represents one integer, and if each bar represents several integers.
_MAX_LABELS, _MAX_RANGE_LABELS = 8, 4
# The tail of unbounded values is the highest 1% of the values, or the highest five values if that is more, but at most
# a tenth of the values. A histogram omits the tail if the highest value is more than 1.5 times the value before the
# tail.
_TAIL_FRACTION, _TAIL_VALUES, _TAIL_FACTOR = 0.01, 5, 1.5


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram.

    Attributes:
        left: Position of the left edge in units of the SVG.
        text: Range and number of the values in the bar, as text.
        heights: Height for all values (`all`) and for the values that a selection keeps (`kept`), as percentages of
            the largest bar (at least 1 if there are any values). Without a selection, there is only `kept`, which
            represents all values.
    """

    left: int
    text: str
    heights: dict[str, float]


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of equal width.

    Attributes:
        begin, end: Lower edge of the first bin, and upper edge of the last bin.
        counts: Number of values in each bin, int64 [bins]. The last bin also counts values above `end`.
        kept_counts: Number of values in each bin that a selection keeps, int64 [bins]; None without a selection.
        omits_tail: True if some values are above `end`, so that the last bin counts them.
        is_count: True if the values are integers.
    """

    begin: float
    end: float
    counts: NDArray[np.int64]
    kept_counts: NDArray[np.int64] | None
    omits_tail: bool
    is_count: bool

    def bin_text(self, index: int) -> str:
        """Return the range of a bin as text: `3`, `4 to 7`, `1.5 to 2`, `90 and more`."""
        width = (self.end - self.begin) / len(self.counts)
        low = self.begin + index * width
        if self.omits_tail and index == len(self.counts) - 1:
            return f"{short_number(low)} and more"
        high = low + width - self.is_count
        return short_number(low) if self.is_count and width == 1 else f"{short_number(low)} to {short_number(high)}"

    @property
    def max_count(self) -> int:
        """Number of values in the bin with the most values, at least 1."""
        return max(int(self.counts.max()), 1)

    def span_text(self, unit: str) -> str:
        """Return the number of values and their range as text."""
        span = f"from {short_number(self.begin)} to {short_number(self.end)} {unit}".rstrip()
        return f"{count_noun(int(self.counts.sum()), 'value')} {span}"

    def bars(self, unit: str) -> list[Bar]:
        """Return a bar for each bin that is not empty."""
        bars = []
        for index, count in enumerate(self.counts.tolist()):
            if not count:
                continue
            text = f"{self.bin_text(index)} {unit}".rstrip() + f": {count_noun(count, 'chunk')}"
            counts = {"kept": count}
            if self.kept_counts is not None:
                counts = {"all": count, "kept": int(self.kept_counts[index])}
                text += f", {counts['kept']:,} kept"
            heights = {
                name: max(1.0, 100 * num_values / self.max_count) if num_values else 0.0
                for name, num_values in counts.items()
            }
            bars.append(Bar(10 * index, text, heights))
        return bars

    def ticks(self, unit: str) -> list[str]:
        """Return the labels of the axis.

        Integers have one label per bin. If there are many bins, most labels are empty. For other values, the axis has
        three labels, at its start, middle and end.
        """
        unit = f" {unit}" if unit else ""
        if not self.is_count:
            ticks = [short_number(value) for value in (self.begin, (self.begin + self.end) / 2, self.end)]
            ticks[-1] += f"{unit} and more" if self.omits_tail else unit
            return ticks
        num_bins = len(self.counts)
        is_single = self.end - self.begin == num_bins
        step = -(-num_bins // (_MAX_LABELS if is_single else _MAX_RANGE_LABELS))
        first_bin = 0 if is_single else step // 2
        ticks = [self.bin_text(index) if index % step == first_bin else "" for index in range(num_bins)]
        ticks[num_bins - 1 - (num_bins - 1 - first_bin) % step] += unit
        return ticks


def histogram(
    values: NDArray[np.float64],
    *,
    bounds: tuple[float, float] | None = None,
    is_count: bool = False,
    is_kept: NDArray[np.bool_] | None = None,
) -> Histogram:
    """Compute the histogram of values.

    Args:
        values: One or more values, float64 [values]. Unknown values must be removed first.
        bounds: Range of the values; None if there is no upper bound. Without bounds, the histogram begins at 0 and
            omits a long tail, so that a few large values do not squeeze all other values into one bin.
        is_count: True if the values are integers. Each bin then contains the same number of integers, and `bounds`
            is ignored.
        is_kept: True for each value whose sample a selection keeps, bool [values]; None without a selection.
    """
    highest, num_bins = float(values.max()), MAX_BINS
    if is_count:
        num_bins = min(MAX_BINS, int(highest) + 1)
        begin, end = 0.0, float(-(-(int(highest) + 1) // num_bins) * num_bins)
    else:
        num_above = max(int(_TAIL_FRACTION * len(values)), min(_TAIL_VALUES, len(values) // 10))
        tail = float(np.sort(values)[-1 - num_above])  # the value at which a long tail begins
        begin, end = bounds or (0.0, tail if highest > _TAIL_FACTOR * tail else highest)
    end = end if end > begin else begin + 1.0
    clipped_values = np.clip(values, begin, end)

    def count(part: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.histogram(part, bins=num_bins, range=(begin, end))[0].astype(np.int64)

    kept_counts = None if is_kept is None else count(clipped_values[is_kept])
    return Histogram(begin, end, count(clipped_values), kept_counts, highest > end, is_count)
