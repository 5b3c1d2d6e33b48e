"""The GPU kit: a folder for machines with a GPU and without a network.

`build` assembles it, `run` checks and measures there what only a GPU can show; docs/gpu_kit.md describes both.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("packaging") is None:
    # The wheel in the kit is importable as it is: a zip of pure Python. Ranges of versions are read before anything is
    # unpacked.
    sys.path += [str(wheel) for wheel in Path(__file__).resolve().parents[3].glob("wheels/packaging-*.whl")]
