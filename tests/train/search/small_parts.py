"""`train embed` with parts of a few clips, for processes that are killed or share the work."""

import sys

from clipmill.train.cli import main
from clipmill.train.search import embedding


def embed_small_parts(*words: str) -> None:
    """Run `train embed` with parts of one batch of clips and of four texts."""
    embedding._BATCHES_PER_PART, embedding._TEXTS_PER_PART = 1, 4
    sys.argv = ["train", "embed", *words]
    main()
