"""Builds the GPU kit: `make gpu-kit`, or `make gpu-kit VIDEOS=DIR` with your own natural videos.

    build/gpu-kit/run.sh          the command to run on the GPU machine
    build/gpu-kit/checkout/       the files tracked by git, and COMMIT with the commit
    build/gpu-kit/wheels/         packages that a GPU machine usually lacks, pinned by requirements.lock
    build/gpu-kit/data/           chunks, latents and text embeddings
    build/gpu-kit/CONTENTS.txt    list of contents

docs/gpu_kit.md describes its use.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.environment import COMMIT_FILE, commit
from manifests.errors import UserError, run_command
from manifests.quoting import counted
from scripts.gpu_kit.data import CLIPS_PACKAGE, DataSize, fetch_clips, make_data, natural_videos
from scripts.gpu_kit.wheels import choose, fetch

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_BYTES = 60_000_000
CONTENTS = "CONTENTS.txt"
HOW_TO_RUN = """\
The GPU kit of clipmill: tests and benchmarks for a machine with an NVIDIA GPU. Requirements: Linux x86-64, Python 3.11
to 3.13 and torch; no network, compiler or root privileges. Copy this folder to that machine, then run:

    ./run.sh OUT                 parts A (correctness), B (speed) and C (data loading): 22 minutes
    ./run.sh OUT --part A        one part
    ./run.sh OUT --dry-run       the same programs at tiny sizes on a CPU
    PYTHON=/path/to/python3.12 ./run.sh OUT

OUT is the folder for the results. See checkout/docs/gpu_kit.md for details.
"""


@dataclass(frozen=True, kw_only=True)
class Content:
    """One line of the summary."""

    what: str
    size_bytes: int
    remark: str


def main() -> None:
    """Build the kit and print its contents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-kit"), help="folder of the kit; it is replaced")
    parser.add_argument("--videos", type=Path, metavar="DIR", help="folder of natural videos to cut pieces from")
    parser.add_argument(
        "--pieces",
        type=int,
        help=f"maximum number of pieces of natural videos (default: up to {DataSize().num_pieces}, as size permits)",
    )
    found = parser.parse_args()
    size = DataSize() if found.pieces is None else DataSize(num_pieces=found.pieces)
    run_command(lambda: build(found.out, videos=found.videos, size=size, may_take_fewer=found.pieces is None))


def build(kit: Path, *, videos: Path | None, size: DataSize, may_take_fewer: bool = False) -> None:
    """Build the kit in `kit`, replacing an older one, and print its contents.

    Args:
        may_take_fewer: include fewer pieces of natural videos than `size` says if they would exceed the size limit.

    Raises:
        UserError: `kit` is another folder, no videos are found, a download or a prep command fails, or the kit is too
            large.
    """
    if size.num_pieces < 1:
        raise UserError(f"{size.num_pieces} pieces of natural videos are too few", hint="give 1 or more (PIECES=1)")
    own = natural_videos(videos) if videos is not None else None
    if kit.exists() and not (kit / "run.sh").is_file():
        raise UserError(f"{kit} exists and is not a GPU kit", hint="give another folder with --out, or remove it")
    kit.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-", dir=kit.parent) as folder:
        scratch, new = Path(folder), Path(folder) / "kit"
        _step("checkout")
        contents = {"checkout": copy_checkout(new)}
        _step("wheels")
        pins = choose(REPOSITORY / "pyproject.toml", REPOSITORY / "requirements.lock")
        fetch(pins, new / "wheels")
        contents["wheels"] = ", ".join(f"{pin.name} {pin.version}" for pin in pins)
        _step("natural videos")
        natural = fetch_clips(scratch / "clips") if own is None else own
        origin = f"the clips of {CLIPS_PACKAGE}" if own is None else f"from {counted(len(own), 'given video')}"
        num_pieces = add_data(new, natural=natural, size=size, scratch=scratch, may_take_fewer=may_take_fewer)
        pieces = counted(num_pieces, "natural piece")
        contents["data"] = f"{counted(size.num_made, 'synthetic video')}; {pieces}: {origin}"
        finish(new, contents)
        # Remove an older kit, so that none of its files remain in the new one.
        if kit.exists():
            shutil.rmtree(kit)
        new.rename(kit)
    print(f"\n{(kit / CONTENTS).read_text()}\nCopy {kit} to the machine with the GPU and run `./run.sh OUT` in it.")


def add_data(
    kit: Path,
    *,
    natural: Sequence[Path],
    size: DataSize,
    scratch: Path,
    may_take_fewer: bool,
    max_bytes: int = MAX_BYTES,
) -> int:
    """Add data to an otherwise complete kit; return the number of pieces of natural videos.

    Args:
        may_take_fewer: include as many pieces as fit the size limit, and at least one.
    """
    while True:
        _step("data (some minutes)")
        work = scratch / f"data-{size.num_pieces}"
        num_pieces = make_data(kit / "data", natural=natural, size=size, scratch=work)
        total_bytes = _size_bytes(kit)
        if total_bytes <= max_bytes or not may_take_fewer or num_pieces <= 1:
            return num_pieces
        _step(
            f"the kit has {total_bytes / 1e6:.1f} MB with {num_pieces} natural pieces, but the limit is "
            f"{max_bytes / 1e6:.0f} MB: trying {num_pieces - 1}"
        )
        shutil.rmtree(kit / "data")
        size = replace(size, num_pieces=num_pieces - 1)


def copy_checkout(kit: Path) -> str:
    """Copy run.sh and the tracked files from the working tree; return the commit."""
    names = _git("ls-files", "-z").split("\0")
    for name in filter(None, names):
        source, target = REPOSITORY / name, kit / "checkout" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    shutil.copy(Path(__file__).with_name("run.sh"), kit / "run.sh")
    name = commit()
    (kit / "checkout" / COMMIT_FILE).write_text(f"{name}\n")
    remarks = [f"commit {name}"]
    if name.endswith("-dirty"):
        remarks.append("with uncommitted changes")
    untracked = list(filter(None, _git("ls-files", "-z", "--others", "--exclude-standard").split("\0")))
    if untracked:
        remarks.append(f"without {counted(len(untracked), 'untracked file')} such as {untracked[0]}")
    return ", ".join(remarks)


def finish(kit: Path, remarks: Mapping[str, str], *, max_bytes: int = MAX_BYTES) -> None:
    """Write the summary of the kit.

    Args:
        remarks: description of each folder of the kit.

    Raises:
        UserError: the kit is larger than `max_bytes`.
    """
    contents = [Content(what=name, size_bytes=_size_bytes(kit / name), remark=text) for name, text in remarks.items()]
    total_bytes = _size_bytes(kit)
    lines = [f"{'what':<10} {'MB':>6}"]
    lines += [f"{one.what:<10} {one.size_bytes / 1e6:6.1f}  {one.remark}" for one in contents]
    lines.append(f"{'total':<10} {total_bytes / 1e6:6.1f}  at most {max_bytes / 1e6:.0f}")
    text = "\n".join(lines) + "\n"
    if total_bytes > max_bytes:
        raise UserError(
            f"the kit has {total_bytes / 1e6:.1f} MB, but the limit is {max_bytes / 1e6:.0f} MB:\n{text}",
            hint="omit PIECES to include as many pieces as fit, or include fewer packages (scripts/gpu_kit/wheels.py)",
        )
    (kit / CONTENTS).write_text(f"{HOW_TO_RUN}\n{text}")


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"git failed: {done.stderr.strip()}", hint="build the kit in a clone of the repository")
    return done.stdout


def _step(name: str) -> None:
    print(f"gpu-kit: {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
