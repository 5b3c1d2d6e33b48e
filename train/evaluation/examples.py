"""A few queries of a retrieval with the clips that were found, as pictures for the results page."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.evaluation.retrieval import ranks
from train.evaluation.shown import ShownSet, from_end_to_end, from_middles, jpeg_uri

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
