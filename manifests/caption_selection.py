"""Dropping captions of a table: those that are unlikely, and duplicates within a clip."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clipmill.manifests.caption_identity import caption_hashes

_SPACE = r"[\s\p{Z}]+"


def is_unlikely(captions: pa.Table, *, min_likelihood: float) -> np.ndarray:
    """Return True for captions with a likelihood below `min_likelihood`, bool[N]; those without one are not."""
    # As float32, like the column: otherwise a caption with exactly this likelihood could be below it.
    unlikely = pc.less(captions["likelihood"], pa.scalar(min_likelihood, pa.float32()))
    return np.asarray(unlikely.fill_null(False).to_numpy())


def is_duplicate(captions: pa.Table) -> np.ndarray:
    """Return True for captions that repeat another one of the same clip and source, bool[N].

    Texts are compared without regard to case and white space. The most likely of equal captions is not a duplicate;
    among equally likely ones the first.
    """
    if not captions.num_rows:
        return np.zeros(0, bool)
    folded = pc.replace_substring_regex(captions["text"], _SPACE, " ")
    folded = pc.utf8_lower(pc.utf8_trim_whitespace(folded))
    hashes = caption_hashes(captions.set_column(captions.column_names.index("text"), "text", folded))
    likelihood = captions["likelihood"].fill_null(-np.inf).to_numpy()
    order = np.lexsort((-likelihood, hashes[:, 1], hashes[:, 0]))
    repeats = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    duplicates = np.zeros(captions.num_rows, bool)
    duplicates[order[1:][repeats]] = True
    return duplicates
