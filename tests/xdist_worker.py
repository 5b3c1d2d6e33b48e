"""A worker of pytest-xdist that is forked (`tests.forks`): it gets its program as execnet sends it to `python -c`."""

import sys

if __name__ == "__main__":
    exec(eval(sys.stdin.readline()))  # noqa: S102, S307 - execnet's own line
