"""`prep` with a fourth column."""

from prep.registry import register
from tests.prep.brightness.column import COLUMN

if __name__ == "__main__":
    register(COLUMN)

    from prep.cli import main

    main()
