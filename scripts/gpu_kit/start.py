"""What run.sh starts: puts `packaging` of the kit on the path where this Python has none, then runs `run`.

Only the standard library is imported before that.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from manifests.errors import run_command
from scripts.gpu_kit.archives import opened

KIT = Path(__file__).resolve().parents[3]


def main() -> None:
    """Runs the kit with the arguments of the command line."""
    run_command(_run)


def _run() -> None:
    if find_spec("packaging") is None:
        # Its wheel is importable as it is: a zip of pure Python. Ranges of versions are read before anything is
        # unpacked.
        for wheel in KIT.glob("wheels/packaging-*.whl"):
            with opened(wheel) as archive:
                for name in archive.namelist():
                    archive.read(name)  # compares checksums
            sys.path.append(str(wheel))
    from scripts.gpu_kit.run import main as run

    run()


if __name__ == "__main__":
    main()
