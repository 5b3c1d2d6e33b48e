"""Sentences that are relevant for a clip, whoever said them of which clip: the positives of EK-100's retrieval.

Training for EPIC-KITCHENS-100's multi-instance retrieval shows a clip with any sentence of the split whose relevancy
for it (train.data.relevancy) is more than 0.1, all alike. A sentence is a distinct text; its classes are those of
the caption with the lowest id that has it. A clip's own sentence always counts, with relevancy 1.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from train.data.relevancy import Actions, Relevancy, relevancy_of_classes
from train.device.random import below

LABELS = ("label_verb", "label_nouns")


class RelevantCaptions:
    """Which captions N clips can be shown with.

    Args:
        captions: text and labels of all captions that are used, ordered by id.
        own: int64 [N], for each clip the place of its own caption in `captions`.
        min_relevancy: sentences count that are more relevant.

    Raises:
        UserError: captions have no classes.
    """

    def __init__(self, captions: pa.Table, own: NDArray[np.int64], *, min_relevancy: float) -> None:
        actions = _actions(captions)
        coded = captions["text"].combine_chunks().dictionary_encode()
        sentence = coded.indices.to_numpy().astype(np.int64)
        _, self._caption_of_sentence = np.unique(sentence, return_index=True)
        self._own = sentence[own]
        self._min = min_relevancy
        self._relevancy: Relevancy = relevancy_of_classes(
            _take(actions, own), _take(actions, self._caption_of_sentence)
        )

    @property
    def num_sentences(self) -> int:
        """Distinct texts."""
        return len(self._caption_of_sentence)

    def relevant(self, clip: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The sentences that a clip can be shown with, as places of captions, and their relevancy."""
        values_M = self._relevancy.rows(np.array([clip]))[0]
        values_M[self._own[clip]] = 1.0
        chosen = np.flatnonzero(values_M > self._min)
        return self._caption_of_sentence[chosen], values_M[chosen]

    def draw(self, clip: int, *, position: int, seed: int) -> tuple[int, float]:
        """One of them for a visit, and its relevancy: a pure function of (clip, position, seed)."""
        places, values = self.relevant(clip)
        number = int(below(np.array([len(places)]), np.array([position]), seed=seed, purpose="relevant caption")[0])
        return int(places[number]), float(values[number])


def _actions(captions: pa.Table) -> Actions:
    for name in LABELS:
        num_missing = captions[name].null_count if name in captions.column_names else captions.num_rows
        if num_missing:
            raise UserError(
                f"{num_missing:,} of {captions.num_rows:,} captions have no {name}, and --captions.min-relevancy "
                "needs their classes",
                hint="leave it out, or use a data set with verb and noun classes: prep manifest epic-kitchens",
            )
    verb = captions["label_verb"].to_numpy().astype(np.int64)
    nouns = captions["label_nouns"].combine_chunks()
    flat = pc.list_flatten(nouns).to_numpy().astype(np.int64)
    nouns_NK = np.zeros((len(verb), int(flat.max(initial=-1)) + 1), bool)
    nouns_NK[pc.list_parent_indices(nouns).to_numpy(), flat] = True
    return Actions(verb, nouns_NK)


def _take(actions: Actions, rows: NDArray[np.int64]) -> Actions:
    return Actions(actions.verb_N[rows], actions.nouns_NK[rows])
