"""A few queries of a retrieval with the clips that were found, as pictures for the results page."""

import base64
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from train.evaluation.retrieval import ranks

_NUM_QUERIES = 6
_NUM_FOUND = 4
_MAX_PICTURES = 4


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
    for text in np.unique(np.linspace(0, num_texts - 1, _NUM_QUERIES).round().astype(int)):
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
        "frames": [jpeg_uri(frame) for frame in spread_over(pictures, at_most=_MAX_PICTURES)],
    }


def spread_over(pictures: list[NDArray[np.uint8]], *, at_most: int) -> list[NDArray[np.uint8]]:
    """Some of the pictures, from the middles of equal parts of their row."""
    if len(pictures) <= at_most:
        return pictures
    return [pictures[(2 * number + 1) * len(pictures) // (2 * at_most)] for number in range(at_most)]


def jpeg_uri(frame: NDArray[np.uint8]) -> str:
    """A picture (uint8 RGB [H, W, 3]) as a data URI."""
    import av

    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.height, encoder.width = frame.shape[:2]
    encoder.pix_fmt = "yuvj420p"
    encoder.time_base = 1  # type: ignore[assignment]
    encoder.options = {"qscale": "3"}
    picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(format="yuvj420p")
    packets = [*encoder.encode(picture), *encoder.encode(None)]
    return "data:image/jpeg;base64," + base64.b64encode(b"".join(bytes(packet) for packet in packets)).decode()
