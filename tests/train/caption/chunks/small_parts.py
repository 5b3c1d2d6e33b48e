"""`train caption-chunks` with parts of one batch, for processes that are killed or share the work."""

import sys

from clipmill.train.cli import main
from clipmill.train.tasks.caption import chunk_captions


def caption_small_parts(*words: str) -> None:
    """Run `train caption-chunks` with parts of one batch of clips."""
    chunk_captions._BATCHES_PER_PART = 1
    sys.argv = ["train", "caption-chunks", *words]
    main()
