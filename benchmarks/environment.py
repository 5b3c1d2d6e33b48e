"""Environment of the results, which every table and JSON file contains: machine, Python, ffmpeg, commit and date."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from clipmill.manifests.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent


def machine() -> str:
    """Return the name of the processor, and the number of cores available to this process."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Return the commit, with `-dirty` if files differ from it; `unknown` without a git history."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    described = subprocess.run(command, capture_output=True, text=True)
    return described.stdout.strip() if described.returncode == 0 else "unknown"


def ffmpeg_version() -> str:
    """Return the version of the ffmpeg that `prep` uses; `none` without ffmpeg."""
    from clipmill.prep.video.ffmpeg import find_ffmpeg

    try:
        return find_ffmpeg().version
    except UserError:
        return "none"


def describe_environment() -> dict[str, str]:
    """Return machine, Python, ffmpeg, commit and date."""
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "ffmpeg": ffmpeg_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
