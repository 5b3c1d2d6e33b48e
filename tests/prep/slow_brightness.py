"""`prep` whose workers wait before each chunk of `brightness`, so that a test finds the time to kill them."""

import time
from typing import Any

from clipmill_example.brightness import work

PAUSE_S = 5
_measure = work.measure


def _slowly(content: bytes, **settings: Any) -> Any:
    time.sleep(PAUSE_S)
    return _measure(content, **settings)


work.measure = _slowly  # in workers too, which load the main module of the command

if __name__ == "__main__":
    from clipmill.prep.cli import main

    main()
