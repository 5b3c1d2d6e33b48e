"""Examples of retrieval for the results page: texts, and the clips that score best for each.

Half of the texts have a correct clip first and half have not, as far as there are some, so that a page shows failures
as well as successes; both are spread evenly over the split.

Shape suffixes: N clips, M texts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipmill.shards.pages.figures import evenly_spaced_items
from clipmill.train.evaluation.player import PicturedSamples, Player, clip_figure
from clipmill.train.tasks.dual_encoder.metrics import ranks

_NUM_QUERIES = 6
_NUM_FOUND = 4


@dataclass(frozen=True)
class Ranking:
    """Texts, clips, and how well they fit.

    Attributes:
        similarity_NM: of clips and texts.
        relevancy_NM: in [0, 1]; clips of relevancy 1 are correct.
        sample_N: int64, of each clip.
        text: of a text's index.
    """

    similarity_NM: NDArray[np.floating]
    relevancy_NM: NDArray[np.floating] | NDArray[np.bool_]
    sample_N: NDArray[np.int64]
    text: Callable[[int], str]


def retrieval_examples(
    ranking: Ranking, samples: PicturedSamples, *, num_frames: int, player: Player | None
) -> list[dict[str, Any]]:
    """Texts with the clips that score best and the best correct one, as plain values.

    Args:
        num_frames: of a clip.
    """
    similarity_NM, sample_N = ranking.similarity_NM, ranking.sample_N
    rank_M = ranks(similarity_NM.T, ranking.relevancy_NM.T == 1)
    figures: dict[int, dict[str, Any]] = {}

    def make_example(clip: int, text: int, *, place: int) -> dict[str, Any]:
        sample, relevancy = int(sample_N[clip]), float(ranking.relevancy_NM[clip, text])
        if clip not in figures:
            figures[clip] = clip_figure(samples, sample, num_frames=num_frames, player=player)
        return {
            **figures[clip],
            "place": place,
            "text": samples.text(sample),
            "score": float(similarity_NM[clip, text]),
            "is_right": relevancy == 1,
            "relevancy": relevancy,
        }

    examples = []
    for text in chosen_texts(rank_M):
        order = np.argsort(-similarity_NM[:, text], kind="stable")
        # If no correct clip is among the first, the best one takes the last of their places.
        best_right = int(np.flatnonzero(ranking.relevancy_NM[order, text] == 1)[0])
        places = [*range(min(_NUM_FOUND, len(order)))]
        places[-1] = max(places[-1], best_right)
        shown = [make_example(int(order[place]), text, place=place + 1) for place in places]
        examples.append({"text": ranking.text(text), "rank": int(rank_M[text]), "found": shown})
    return examples


def chosen_texts(rank_M: NDArray[np.int64], *, at_most: int = _NUM_QUERIES) -> list[int]:
    """Indices of texts, those with a correct clip first (rank 1) and others by turns."""
    right, wrong = np.flatnonzero(rank_M == 1).tolist(), np.flatnonzero(rank_M > 1).tolist()
    num_wrong = min(len(wrong), max(at_most // 2, at_most - len(right)))
    spread = (
        evenly_spaced_items(which, at_most=count) if which and count else []
        for which, count in ((right, min(len(right), at_most - num_wrong)), (wrong, num_wrong))
    )
    return [text for text in chain.from_iterable(zip_longest(*spread)) if text is not None]
