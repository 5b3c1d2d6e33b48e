"""Entry point of run.sh: makes the kit's `packaging` importable if this Python has none, then starts `run`.

Until then, only the standard library is imported.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from manifests.errors import run_command
from scripts.gpu_kit.archives import opened

KIT = Path(__file__).resolve().parents[3]


def main() -> None:
    """Run the kit with the arguments of the command line."""
    run_command(_run)


def _run() -> None:
    if find_spec("packaging") is None:
        # The wheel, a zip of pure Python, is importable as it is. Version ranges are needed before anything is
        # unpacked.
        for wheel in KIT.glob("wheels/packaging-*.whl"):
            with opened(wheel) as archive:
                for name in archive.namelist():
                    archive.read(name)  # verifies checksums
            sys.path.append(str(wheel))
    from scripts.gpu_kit.run import main as run

    run()


if __name__ == "__main__":
    main()
