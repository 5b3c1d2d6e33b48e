"""A few queries of a retrieval with the clips that were found, as pictures for the results page."""

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from train.config.training import ClipSettings
from train.data.decoding.clip import Views
from train.evaluation.retrieval import ranks

if TYPE_CHECKING:
    import av


# What an evaluation looks at of a clip, in words that stand beside its numbers.


_ONE_LOOK = Views()


def clip_in_words(
    settings: ClipSettings, *, views: Views = _ONE_LOOK, mean_of: str = "", is_in_row: bool = False
) -> str:
    """Frames, their moments, looks, crop and size; of latents frames and moments.

    Args:
        views: looks at a clip of pixels.
        mean_of: what is averaged where there are several.
        is_in_row: the frames of latents are neighbours.
    """
    frames = f"T = {settings.num_frames} frames"
    if getattr(settings, "input", "pixels") == "latents":
        which = "in a row, in the middle" if is_in_row else "one in the middle of each of equal parts"
        segment: str = settings.segment  # type: ignore[attr-defined]
        return f"{frames} of latents of a segment of {segment}, {which}"
    crops = "1 crop (centre square)" if views.num_crops == 1 else f"{views.num_crops} crops along the longer side"
    moments = _moments(settings, is_in_middle=views.num_clips == 1)
    if len(views) == 1:
        return f"{frames}, {moments}, {crops}, {settings.size_px} px"
    clips = "1 clip" if views.num_clips == 1 else f"{views.num_clips} clips"
    return f"{frames}, {moments}, {clips} x {crops}, {settings.size_px} px, mean of their {mean_of}"


def _moments(settings: ClipSettings, *, is_in_middle: bool) -> str:
    """Several clips lie at places that are spread over the span, one in its middle."""
    middle = "the middle of " if is_in_middle else ""
    return {
        "uniform": f"one in {middle}each of equal parts",
        "stride": f"every {settings.stride} frames{', in the middle' if is_in_middle else ''}",
        "lavila": f"one in {middle}each of LaViLa's parts",
    }[settings.sampling]


# What results pages show: samples and frames spread evenly, and pictures as data URIs.


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


_NUM_QUERIES = 6
_NUM_FOUND = 4
_MAX_PICTURES = 4


def retrieval_examples(
    samples: ShownSet,
    sample_of_clip: NDArray[np.int64],
    *,
    num_frames: int,
    similarity_NM: NDArray[np.float32],
    first_rows: NDArray[np.int64],
    text_of_clip: NDArray[np.int64],
) -> list[dict[str, Any]]:
    """Queries spread evenly over the texts, whatever their rank, each with the clips that score best.

    Args:
        sample_of_clip: number of each of the N clips in `samples`.
        num_frames: pictures of a clip.
        similarity_NM: of N clips with M texts.
        first_rows: for each text a clip that has it.
        text_of_clip: for each clip its text.
    """
    num_texts = similarity_NM.shape[1]
    rank_M = ranks(similarity_NM.T, (text_of_clip[:, None] == np.arange(num_texts)).T)
    examples = []
    for text in from_end_to_end(range(num_texts), at_most=_NUM_QUERIES):
        best = np.argsort(-similarity_NM[:, text], kind="stable")[:_NUM_FOUND]
        examples.append(
            {
                "text": samples.text(int(sample_of_clip[first_rows[text]])),
                "rank": int(rank_M[text]),
                "found": [
                    _found(
                        samples,
                        int(sample_of_clip[clip]),
                        num_frames=num_frames,
                        score=float(similarity_NM[clip, text]),
                        is_right=bool(text_of_clip[clip] == text),
                    )
                    for clip in best
                ],
            }
        )
    return examples


def _found(samples: ShownSet, sample: int, *, num_frames: int, score: float, is_right: bool) -> dict[str, Any]:
    begin_s, end_s = samples.span_s(sample)
    pictures = samples.pictures(sample, num_frames=num_frames)
    return {
        "key": samples.key(sample),
        "begin_s": begin_s,
        "end_s": end_s,
        "text": samples.text(sample),
        "score": score,
        "is_right": is_right,
        "frames": [jpeg_uri(frame) for frame in from_middles(pictures, at_most=_MAX_PICTURES)],
    }
