"""`prep` with a fourth column; with `--commands`, one command line after another (`tests.served`)."""

import multiprocessing
import sys
from typing import Any

from clipmill.prep.registry import register
from tests.prep.brightness.column import COLUMN

if __name__ == "__main__":
    register(COLUMN)

    from clipmill.prep.cli import main

    if sys.argv[1:] == ["--commands"]:
        from clipmill.prep.engines import processes
        from tests.served import serve

        engine: Any = processes
        engine._CONTEXT = multiprocessing.get_context("fork")  # workers without imports of their own
        serve("prep", main)
    else:
        main()
