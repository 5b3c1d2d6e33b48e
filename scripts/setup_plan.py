"""Print the download, disk space and time that `make setup` needs, and check that the disk has room.

    python3 scripts/setup_plan.py .venv [PART]

The program runs before anything is installed, so it needs only the standard library. The sizes were measured on Linux,
x86-64, with Python 3.11: `du -s .venv`, and the download that uv reports with an empty cache. The values for `columns`
and `train` are sums over their packages.
"""

import os
import shutil
import sys
from pathlib import Path

# Download and disk space by part; "" stands for all parts.
_SIZES_GB = {"": (3.7, 7.9), "prep": (0.4, 1.3), "columns": (3.3, 7.1), "train": (3.2, 6.6)}
_SLACK_GB = 0.5  # the build of clipmill, and bytecode
_SMALLER = "make setup PART=prep VENV=.venv-prep"


def main() -> int:
    """Print the plan, and return the exit status."""
    environment, part = Path(sys.argv[1]).absolute(), "".join(sys.argv[2:])
    download_gb, disk_gb = _SIZES_GB[part]
    present_gb = folder_gb(environment)
    needed_gb = max(0.0, disk_gb - present_gb) + _SLACK_GB
    free_gb = shutil.disk_usage(existing(environment)).free / 1e9
    if present_gb > disk_gb / 2:
        print(f"setup: {environment.name} exists ({present_gb:.1f} GB); only packages that changed are replaced")
    else:
        cuda = "" if part == "prep" else " (more than half of it is CUDA)"
        print(f"setup: about {download_gb} GB to download and {disk_gb} GB on disk in {environment.name}{cuda}")
        print(
            f"       about {1 + 2 * download_gb:.0f} minutes at 10 MB/s; a minute or two if uv has the packages in its"
            f" cache; {free_gb:.0f} GB free"
        )
        if part != "prep":
            print(f"       to make shards only, without torch ({_SIZES_GB['prep'][1]} GB): {_SMALLER}")
    sys.stdout.flush()
    if free_gb < needed_gb:
        print(f"error: {environment} needs {needed_gb:.1f} GB, but its disk has {free_gb:.1f} GB free", file=sys.stderr)
        print("hint: free some space, or use a folder on another disk: make setup VENV=DIR", file=sys.stderr)
        return 2
    return 0


def existing(path: Path) -> Path:
    """Return the path if it is a folder, else the nearest existing folder above it."""
    return path if path.is_dir() else existing(path.parent)


def folder_gb(folder: Path) -> float:
    """Return the size of a folder in GB; 0 if it does not exist."""
    files = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in files) / 1e9


if __name__ == "__main__":
    sys.exit(main())
