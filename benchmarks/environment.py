"""Where a figure comes from: machine, Python, ffmpeg, commit and date. Every table and every JSON file carries it."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from manifests.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
# In a copy without a history, such as the GPU kit: the name that the commit had where the copy was made.
COMMIT_FILE = "COMMIT"


def machine() -> str:
    """Processor and cores that may be used."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The commit that is measured; `-dirty` when files differ from it, `unknown` in a copy that does not say."""
    # First, because git would find the history of a repository that the copy happens to lie in.
    written = REPOSITORY / COMMIT_FILE
    if written.is_file():
        return written.read_text().strip()
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    described = subprocess.run(command, capture_output=True, text=True)
    return described.stdout.strip() if described.returncode == 0 else "unknown"


def ffmpeg_version() -> str:
    """The version that `prep` would use; `none` on a machine that only trains."""
    from prep.video.ffmpeg import find_ffmpeg

    try:
        return find_ffmpeg().version
    except UserError:
        return "none"


def describe_environment() -> dict[str, str]:
    """Machine, Python, ffmpeg, commit and date."""
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "ffmpeg": ffmpeg_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
