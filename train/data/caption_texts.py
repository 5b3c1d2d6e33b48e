"""The words of captions, by id."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manifests.errors import UserError
from manifests.store import read_captions


class CaptionTexts:
    """All captions of a manifest, as Arrow has them: no Python object a caption. Safe to use from many threads."""

    def __init__(self, data_dir: Path) -> None:
        table = read_captions(data_dir)
        self._caption_id: NDArray[np.int64] = table["caption_id"].to_numpy()
        self._texts: pa.ChunkedArray = table["text"]

    def text(self, caption_id: int) -> str:
        """The words of a caption that there is."""
        return str(self._texts[int(np.searchsorted(self._caption_id, caption_id))].as_py())

    def require_different(self, caption_id: NDArray[np.integer], *, split: str) -> None:
        """Raises a UserError where all of some captions are the same text: there is nothing to tell apart."""
        require_different(self._texts, np.searchsorted(self._caption_id, caption_id), split=split)


def require_different(texts: pa.ChunkedArray, rows: NDArray[np.integer], *, split: str) -> None:
    """Raises a UserError where the texts at `rows` are all the same: there is nothing to tell apart."""
    first = texts[int(rows[0])]
    if pc.equal(texts, first).to_numpy()[rows].all():
        raise UserError(
            f"all {len(rows):,} captions of split {split!r} are {first.as_py()!r:.60}: there is nothing to tell apart",
            hint="give prep manifest annotations with different captions",
        )
