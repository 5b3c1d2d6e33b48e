"""Where a figure comes from: machine, Python, ffmpeg, commit and date. Every table and every JSON file carries it."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def machine() -> str:
    """Processor and cores that may be used."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The commit that is measured; `-dirty` when files differ from it."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def surroundings() -> dict[str, str]:
    """Machine, Python, ffmpeg, commit and date."""
    from prep.ffmpeg import find_ffmpeg

    return {
        "machine": machine(),
        "python": platform.python_version(),
        "ffmpeg": find_ffmpeg().version,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
