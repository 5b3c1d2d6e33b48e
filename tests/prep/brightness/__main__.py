"""`prep` with a fourth column; with `--commands`, one command line after another (`tests.served`)."""

import sys

from clipmill.prep.registry import register
from tests.prep.brightness.column import COLUMN

if __name__ == "__main__":
    register(COLUMN)

    from clipmill.prep.cli import main

    if sys.argv[1:] == ["--commands"]:
        from tests.served import serve

        serve("prep", main)
    else:
        main()
