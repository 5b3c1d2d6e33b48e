"""Assembles the GPU kit: `make gpu-kit`, or `make gpu-kit VIDEOS=DIR` with natural videos of your own.

    build/gpu-kit/run.sh          what to run there
    build/gpu-kit/checkout/       the files that git tracks, and COMMIT, which names the commit
    build/gpu-kit/wheels/         packages that such a machine usually lacks, as requirements.lock pins them
    build/gpu-kit/data/           chunks, latents and text embeddings
    build/gpu-kit/CONTENTS.txt    what is in it

docs/gpu_kit.md says how to use it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import COMMIT_FILE, commit
from manifests.errors import UserError, run_command
from scripts.gpu_kit.data import CLIPS_PACKAGE, DataSize, fetch_clips, make_data, natural_videos
from scripts.gpu_kit.wheels import choose, fetch

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_BYTES = 60_000_000
CONTENTS = "CONTENTS.txt"


@dataclass(frozen=True, kw_only=True)
class Content:
    """One line of the summary."""

    what: str
    size_bytes: int
    remark: str


def main() -> None:
    """Builds the kit and prints what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-kit"), help="folder of the kit; it is replaced")
    parser.add_argument("--videos", type=Path, metavar="DIR", help="natural videos to take pieces of")
    parser.add_argument("--pieces", type=int, default=DataSize().num_pieces, help="pieces of natural videos at most")
    arguments = parser.parse_args()
    run_command(lambda: build(arguments.out, videos=arguments.videos, size=DataSize(num_pieces=arguments.pieces)))


def build(kit: Path, *, videos: Path | None, size: DataSize) -> None:
    """Writes the kit to `kit` in place of an older one, and prints its contents.

    Raises:
        UserError: `kit` is something else, a download or a command of prep fails, or the kit is too large.
    """
    if kit.exists() and not (kit / "run.sh").is_file():
        raise UserError(f"{kit} exists and is not a GPU kit", hint="name another folder with --out, or remove it")
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
        natural = natural_videos(videos) if videos else fetch_clips(scratch / "clips")
        origin = f"pieces of {len(natural)} videos of yours" if videos else f"the clips of {CLIPS_PACKAGE}"
        _step("data (some minutes)")
        make_data(new / "data", natural=natural, size=size, scratch=scratch)
        contents["data"] = f"{size.num_made} made videos; natural: {origin}"
        finish(new, contents)
        # Parts of an older kit must not remain in the new one.
        if kit.exists():
            shutil.rmtree(kit)
        new.rename(kit)
    print(f"\n{(kit / CONTENTS).read_text()}\nCarry {kit} to the machine with the GPU and run `./run.sh OUT` in it.")


def copy_checkout(kit: Path) -> str:
    """Copies run.sh and the tracked files, as they are in the working tree; says which commit that is."""
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
        remarks.append("with changes that are not committed")
    untracked = list(filter(None, _git("ls-files", "-z", "--others", "--exclude-standard").split("\0")))
    if untracked:
        remarks.append(f"without {len(untracked)} files that git does not track, such as {untracked[0]}")
    return ", ".join(remarks)


def finish(kit: Path, remarks: Mapping[str, str], *, max_bytes: int = MAX_BYTES) -> None:
    """Writes the summary of the kit.

    Args:
        remarks: what there is to say about each folder of the kit.

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
            f"the kit has {total_bytes / 1e6:.1f} MB, more than the {max_bytes / 1e6:.0f} that it may have:\n{text}",
            hint="take fewer pieces of natural videos (PIECES=3), or bring fewer packages (scripts/gpu_kit/wheels.py)",
        )
    (kit / CONTENTS).write_text(text)


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"git says: {done.stderr.strip()}", hint="build the kit in a clone of the repository")
    return done.stdout


def _step(name: str) -> None:
    print(f"gpu-kit: {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
