"""Hostile sources for `prep`.

Each source must be processed exactly or reported by name, and the other sources must be processed. No other file is
read, no network connection is opened, and memory is limited. Sources are processed in batches, in one data folder; each
source is a separate case that checks its own outcome.
"""

import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from pathlib import Path

from clipmill.prep.core.failures import FailureCode
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.video.ffmpeg import find_ffmpeg
from clipmill.prep.video.span_task import read_chunk
from clipmill.shards.reader import Variant
from tests.prep.numbered import frame_numbers
from tests.torture import bases
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well, no_litter, nothing_in
from tests.torture.hostile_media import (
    FPS,
    NAMES,
    NUM_FRAMES,
    HostileSource,
    Outside,
    hostile_sources,
    write_containers,
)
from tests.torture.workspace import Workspace

PART = "hostile"
_BATCH = 12
_OUTPUT_FPS = 30
_CHUNK = ("chunk", "--len", "500ms", "--preset", "ultrafast", "--fps", _OUTPUT_FPS, "--keyint", 15)
_ADDRESS = re.compile("0x[0-9a-f]{9}")
_MOST_MEMORY_BYTES = 4 << 30
_HONEST = {"honest-first": 300, "honest-last": 400}  # the number of its first frame
_OUTSIDE_FRAME = 900  # first frame of a video that is not part of the input
# Program that prints once when another process opens the file in its argument.
_WATCH = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, lambda *_: (print("opened", flush=True), os._exit(0)))
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("watching", flush=True)
while True: signal.pause()
"""


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases of each kind of input, in an order determined by `seed`."""
    return {"source": partial(_sources, seed, workspace), "name": partial(_names, workspace)}


def _sources(seed: int, workspace: Workspace) -> Iterator[Case]:
    every = hostile_sources(seed, _containers(workspace))
    for begin in range(0, len(every), _BATCH):
        batch = every[begin : begin + _BATCH]
        made = partial(_try, workspace, f"hostile-{seed}-{begin}", batch)
        for number, source in enumerate(batch):
            name = f"{PART}/source/{source.name}"
            yield Case(name, source.kind, partial(_outcome_of, made, number, source))
        yield Case(f"{PART}/source/batch-{begin // _BATCH}", "beside", partial(_beside, made))


def _containers(workspace: Workspace) -> Path:
    def make(folder: Path) -> None:
        FrameNumberVideo(num_frames=NUM_FRAMES, fps=Fraction(FPS), width=160, height=120).write(folder / "video.mp4")
        write_containers(folder / "video.mp4", folder)

    return workspace.made("containers", make)


def _id(number: int) -> str:
    return f"s{number:02d}"


def _try(workspace: Workspace, name: str, batch: list[HostileSource]) -> Path:
    """Chunk a batch together with valid videos; report.json in the returned folder lists the observed accesses."""

    def make(folder: Path) -> None:
        videos, honest = folder / "videos", _containers(workspace) / "a.mp4"
        videos.mkdir()
        for video, first in _HONEST.items():
            _write_video(videos / f"{video}.mp4", first=first)
        for number, source in enumerate(batch):
            (videos / f"{_id(number)}.{source.suffix}").write_bytes(honest.read_bytes())
        where = ("--data", folder / "data")
        run = partial(workspace.commands.run, "prep", scratch=folder / "tmp")
        ended_well(run(["manifest", "folder", videos, *where]), status=0)
        _write_video(folder / "outside.mp4", first=_OUTSIDE_FRAME)
        with _listening() as listener, _watch(folder / "outside.mp4") as was_opened:
            outside = Outside(folder / "outside.mp4", listener.getsockname()[1])
            for number, source in enumerate(batch):
                path = videos / f"{_id(number)}.{source.suffix}"
                path.unlink()
                source.put(path, outside)
            limited = {"CLIPMILL_FFMPEG": str(_limited_ffmpeg(folder))}
            engine = ("--engine", "processes", "--workers", 2)
            ran = run([*_CHUNK, *engine, *where], environment=limited, is_fresh=True)
            report = {
                "status": ran.status,
                "output": ran.output,
                "was_opened": was_opened(),
                "num_connections": _num_connections(listener),
                "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            }
        report |= {"failures": _failures(folder / "data"), "shown": _frames_shown(folder / "data")}
        (folder / "report.json").write_text(json.dumps(report))

    return workspace.made(name, make)


def _write_video(path: Path, *, first: int) -> None:
    FrameNumberVideo(num_frames=NUM_FRAMES, fps=Fraction(FPS), width=160, height=120, first_number=first).write(path)


def _limited_ffmpeg(folder: Path) -> Path:
    """Write an ffmpeg wrapper that limits its address space, so that excessive use is a named failure."""
    path = folder / "ffmpeg"
    path.write_text(f'#!/bin/sh\nulimit -v {_MOST_MEMORY_BYTES >> 10}\nexec "{find_ffmpeg().path}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@contextmanager
def _listening() -> Iterator[socket.socket]:
    """Listen on a port that must not receive connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        yield listener


def _num_connections(listener: socket.socket) -> int:
    num = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return num
        num += 1


@contextmanager
def _watch(path: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True if the file has been opened; always False on file systems without leases."""
    watcher = subprocess.Popen([sys.executable, "-c", _WATCH, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert watcher.stdout is not None
    is_watching = watcher.stdout.readline() == b"watching\n"
    try:
        yield lambda: is_watching and watcher.poll() is not None
    finally:
        watcher.kill()
        watcher.communicate()


def _failures(data: Path) -> dict[str, dict[str, str]]:
    listed = [line for path in data.glob("video/*/failures.jsonl") for line in path.read_text().splitlines()]
    return {row["video_id"]: row for row in map(json.loads, listed)}


def _frames_shown(data: Path) -> dict[str, list[int]]:
    """Return the frame numbers shown by the chunks of each video, in order."""
    chunks: dict[str, list[tuple[str, bytes]]] = {}
    for sample in Variant.open(data).iterate():
        video, _, start = sample["__key__"].rpartition("_")
        chunks.setdefault(video, []).append((start, sample["mp4"]))
    return {
        video: [number for _, content in sorted(mine) for number in _frame_numbers(content)]
        for video, mine in chunks.items()
    }


def _frame_numbers(content: bytes) -> list[int]:
    """Decode the numbers in all frames of a chunk; -1 if one of them is unreadable."""
    try:
        return frame_numbers(content)
    except ValueError:  # possible for a source with corrupted pixels
        return [-1] * len(read_chunk(content, fps=Fraction(_OUTPUT_FPS)).packet_frame)


def _outcome_of(made: Callable[[], Path], number: int, source: HostileSource, folder: Path) -> None:
    """Check that the source has failed with an error that names it, or that its frames were encoded."""
    report = json.loads((made() / "report.json").read_text())
    failure, shown = report["failures"].get(_id(number)), report["shown"].get(_id(number), [])
    if failure is not None:
        if (
            failure["code"] not in set(FailureCode)
            or not failure["message"].strip()
            or _ADDRESS.search(failure["message"])
        ):
            raise Broken(f"badly named: {failure}")
        if failure["code"] == FailureCode.PROBE_FAILED:
            raise Broken(f"its reader crashed: {failure}")
        if shown:
            raise Broken(f"failed and made: {failure}, {len(shown)} frames")
        return
    if not shown:
        raise Broken("neither made nor named")
    if source.kind in ("script", "no-file"):
        raise Broken(f"made of {source.name}: frames {shown[:5]}...")
    if any(number >= min(_HONEST.values()) for number in shown):
        raise Broken(f"frames of another video: {sorted(set(shown))}")
    if source.is_whole:
        # Without an index, frames near the end that precede a truncated one in presentation order may be missing.
        unsure = _OUTPUT_FPS if source.suffix in ("ts", "mpg") and source.kind.startswith("cut") else 0
        _require_first_frames(shown[: len(shown) - unsure], first=0)
        if source.kind in ("mislabelled", "with-more") and len(shown) < (NUM_FRAMES - 1) * _OUTPUT_FPS // FPS:
            raise Broken(f"{len(shown)} of {NUM_FRAMES * _OUTPUT_FPS // FPS} frames were made of a whole file")


def _require_first_frames(shown: list[int], *, first: int) -> None:
    """Check the first frame numbers: three output frames per source frame.

    Rounding may assign one of the three to the neighbouring source frame.
    """
    for frame, number in enumerate(shown):
        if abs(number - first - frame * FPS / _OUTPUT_FPS) > 1:
            raise Broken(f"output frame {frame} shows frame {number - first}: {shown[: frame + 3]}")


def _beside(made: Callable[[], Path], folder: Path) -> None:
    """Check the outcome of everything except the hostile sources."""
    batch = made()
    report = json.loads((batch / "report.json").read_text())
    described = report["output"][-3000:]
    if "Traceback" in report["output"] or report["status"] != 1:
        raise Broken(f"ended with {report['status']}:\n{described}")
    if report["num_connections"] or report["was_opened"]:
        raise Broken(f"{report['num_connections']} connections; opened outside: {report['was_opened']}\n{described}")
    if report["peak_bytes"] > _MOST_MEMORY_BYTES:
        raise Broken(f"{report['peak_bytes'] / (1 << 30):.1f} GiB of memory were taken")
    if (batch / "outside.mp4.ran").exists():
        raise Broken("a source was run")
    shown = report["shown"]
    for video, first in _HONEST.items():
        _require_first_frames(shown.get(video, []), first=first)
        if len(shown.get(video, [])) != NUM_FRAMES * _OUTPUT_FPS // FPS:
            raise Broken(f"{len(shown.get(video, []))} frames were made of {video}")
    no_litter(batch / "data")
    nothing_in(batch / "tmp")


def _names(workspace: Workspace) -> Iterator[Case]:
    made = partial(_named_videos, workspace)
    for number, name in enumerate(NAMES):
        yield Case(f"{PART}/name/{number:02d}-{ascii(name)[1:-1][:40]}", "name", partial(_name_is_kept, made, number))


def _named_videos(workspace: Workspace) -> Path:
    """Chunk valid videos whose names are those in NAMES, and one whose name is not valid UTF-8."""

    def make(folder: Path) -> None:
        videos = folder / "videos"
        videos.mkdir()
        for number, name in enumerate([*map(os.fsencode, NAMES), b"\xff\xfe"]):
            FrameNumberVideo(num_frames=1, fps=Fraction(10), width=160, height=120, first_number=10 + number).write(
                folder / "video.mp4"
            )
            (folder / "video.mp4").rename(Path(os.fsdecode(os.fsencode(videos) + b"/" + name + b".mp4")))
        where = ("--data", folder / "data")
        run = partial(workspace.commands.run, "prep", scratch=folder / "tmp")
        ended_well(run(["manifest", "folder", videos, *where]), status=0)
        ended_well(run([*_CHUNK, *bases.ENGINE, *where]), status=0)

    return workspace.made("names", make)


def _name_is_kept(made: Callable[[], Path], number: int, folder: Path) -> None:
    batch = made()
    for sample in Variant.open(batch / "data").iterate():
        if json.loads(sample["json"])["source_id"] == NAMES[number]:
            if set(frame_numbers(sample["mp4"])) != {10 + number}:
                raise Broken(f"shows frame {set(frame_numbers(sample['mp4']))}")
            break
    else:
        raise Broken("nothing was made of it")
    if list(batch.rglob("ran")) or Path("ran").exists():
        raise Broken("a name was run")
