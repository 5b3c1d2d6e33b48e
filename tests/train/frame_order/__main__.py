"""`train` with a fifth task; with `--commands`, one command line after another (`tests.served`)."""

import sys

from clipmill.train.registry import register
from tests.served import serve
from tests.train.frame_order.spec import TASK

if __name__ == "__main__":
    register(TASK)

    from clipmill.train.cli import main

    if sys.argv[1:] == ["--commands"]:
        serve("train", main)
    else:
        main()
