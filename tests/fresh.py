"""A program as in an interpreter of its own, but for what takes seconds to import: `-m tests.fresh PROGRAM WORDS...`.

It is for `tests.forks.Forks.python`: the process has imported torch, and imports clipmill again.
"""

import os
import sys

from tests.forked import forget

if __name__ == "__main__":
    _, program, *words = sys.argv
    forget("clipmill")
    sys.argv = ["-c", *words]
    # What an interpreter does as it starts.
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - the program of a test
