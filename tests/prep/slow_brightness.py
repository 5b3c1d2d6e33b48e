"""`prep` whose workers wait before each chunk of `brightness`, so that a test has time to kill them."""

import time
from typing import Any

from clipmill_example import brightness

from clipmill.prep.core.chunk_input import Chunk

PAUSE_S = 5
_measure = brightness.measure


def _slowly(chunk: Chunk, **settings: Any) -> Any:
    time.sleep(PAUSE_S)
    return _measure(chunk, **settings)


brightness.measure = _slowly  # also in workers, which load the main module of the command

if __name__ == "__main__":
    from clipmill.prep.cli import main

    main()
