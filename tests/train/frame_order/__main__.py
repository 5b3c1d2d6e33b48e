"""`train` with a fifth task; with `--commands`, a command line for each JSON list that comes on standard input."""

import contextlib
import io
import json
import sys

from tests.train.frame_order.spec import TASK
from train.registry import register


def serve() -> None:
    """Answers each command line with its exit status, and what it printed: the imports are paid for once."""
    answers = sys.stdout
    for line in sys.stdin:
        sys.argv = ["train", *json.loads(line)]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                main()
                status = 0
            except SystemExit as left:
                status = int(left.code or 0)
        print(json.dumps([status, out.getvalue(), err.getvalue()]), file=answers, flush=True)


if __name__ == "__main__":
    register(TASK)

    from train.cli import main

    if sys.argv[1:] == ["--commands"]:
        serve()
    else:
        main()
