"""Minimal data folders and training runs created without faults, once per workspace.

Each folder contains `data`, and `run` if a model was trained. The videos are in the folder `videos`; copies of a folder
refer to the same videos.
"""

import os
import shutil
from fractions import Fraction
from functools import cache
from pathlib import Path

from clipmill.prep.synthetic import FrameNumberVideo
from tests.prep.captions.server import MODEL, Server
from tests.torture.checks import ended_well
from tests.torture.commands import Ran
from tests.torture.workspace import Workspace, copy

ENGINE = ("--engine", "processes", "--workers", 1)
RAY = ("--engine", "ray", "--workers", 1)
CHUNK = ("chunk", "--len", "500ms", "--preset", "ultrafast", "--short-side", 32)
SHOTS = (*CHUNK, "--cut", "shots")
LATENTS = ("latents", "--vae", "tiny", "--size", 32, "--num-gpus", 0)
TEXT = ("text", "--clip", "tiny", "--num-gpus", 0)
# Train without a text tower: its token embedding would add 90 MB to each checkpoint.
TRAIN = (
    *("dual-encoder", "--model", "tiny", "--num-frames", 2, "--size-px", 32, "--batch", 2, "--warmup-steps", 1),
    *(
        "--text-tower",
        "frozen",
        "--steps",
        6,
        "--checkpoint-every",
        2,
        "--keep-checkpoints",
        1,
        "--workers",
        1,
        "--device",
        "cpu",
    ),
)
_CAPTIONS = (("a", "one", 0, 1, "train"), ("a", "two", 1, 2, "train"), ("b", "three", 0, 1, "val"))
_LATER_CAPTIONS = (*_CAPTIONS[:1], ("a", "another", 1, 2, "train"), ("c", "four", 0, 1, "val"))


def video_latents(workspace: Workspace) -> tuple[object, ...]:
    """Return the arguments of `prep latents` for a video VAE: one segment per chunk, overlapping the next chunk."""

    def save(folder: Path) -> None:
        from tests.prep.latents.video_vaes import save_model

        save_model("AutoencoderKLWan", folder / "vae")

    vae = workspace.made("video-vae", save) / "vae"
    return ("latents", "--vae", vae, "--fps", 8, "--segment", "500ms", "--size", 32, "--num-gpus", 0)


def prep(workspace: Workspace, folder: Path, *arguments: object, status: int = 0) -> Ran:
    """Run `prep ... --data FOLDER/data` without faults."""
    scratch = folder / "tmp"
    ran = workspace.commands.run("prep", [*arguments, "--data", folder / "data"], scratch=scratch)
    scratch.rmdir()
    return ended_well(ran, status=status)


def videos(workspace: Workspace) -> Path:
    """Create `first`: videos a and b of 2 s and 1 s with captions; and `later`: a and c with different captions."""
    return workspace.made("videos", _write_videos)


def _write_videos(folder: Path) -> None:
    for number, (name, seconds) in enumerate((("first/a", 2), ("first/b", 1), ("later/c", 1))):
        path = folder / f"{name}.mp4"
        path.parent.mkdir(exist_ok=True)
        FrameNumberVideo(
            num_frames=10 * seconds, fps=Fraction(10), width=64, height=64, first_number=100 * number
        ).write(path)
    shutil.copy2(folder / "first/a.mp4", folder / "later/a.mp4")
    for name, rows in (("first", _CAPTIONS), ("later", _LATER_CAPTIONS)):
        lines = ["video,text,begin_s,end_s,split", *(",".join(map(str, row)) for row in rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "further.csv").write_text("video,text,likelihood\na,a model's words,-0.5\nb,other words,-1.5\n")
    (folder / "first" / "a.srt").write_text("1\n00:00:00,500 --> 00:00:01,000\na word\n")


def manifest_arguments(workspace: Workspace, *, which: str = "first") -> tuple[object, ...]:
    """Return the arguments of `prep manifest folder` for the first or the later videos."""
    folder = videos(workspace)
    return ("manifest", "folder", folder / which, "--captions", folder / f"{which}.csv", "--yes")


def captions_arguments(workspace: Workspace) -> tuple[object, ...]:
    """Return the arguments of `prep manifest captions` for captions from an additional source."""
    return ("manifest", "captions", videos(workspace) / "further.csv", "--source", "model")


@cache
def vlm_arguments() -> tuple[object, ...]:
    """Return the arguments of `prep captions` for a server with short answers, which runs until this process exits."""
    server = Server()
    server.begin()
    asked = ("--frames", 1, "--size", 32, "--in-flight", 1, "--retries", 0)
    return ("captions", "--endpoint", server.address, "--model", MODEL, *asked)


def with_manifest(workspace: Workspace) -> Path:
    """Create a data folder that holds only a manifest."""
    return workspace.made("manifest", lambda folder: _then(workspace, folder, *manifest_arguments(workspace)))


def with_chunks(workspace: Workspace) -> Path:
    """Create a data folder with a manifest and six chunks in two shards."""
    return workspace.made("chunks", lambda folder: _then(workspace, folder, *CHUNK, *ENGINE, after=with_manifest))


def with_mjpeg(workspace: Workspace) -> Path:
    """Create a data folder with a manifest and six MJPEG chunks in two shards."""
    chunk = ("chunk", "--len", "500ms", "--recipe", "fast", "--short-side", 32)
    return workspace.made("mjpeg", lambda folder: _then(workspace, folder, *chunk, *ENGINE, after=with_manifest))


def with_other_part(workspace: Workspace) -> Path:
    """Create a data folder with a manifest, and the chunks of the second of two parts."""
    part = (*CHUNK, *ENGINE, "--part", "2/2")
    return workspace.made("other-part", lambda folder: _then(workspace, folder, *part, after=with_manifest))


def with_scores(workspace: Workspace) -> Path:
    """Create a data folder with captions from two sources, chunks cut at shots, and scores of the chunks."""

    def make(folder: Path) -> None:
        _then(workspace, folder, *captions_arguments(workspace), after=with_manifest)
        prep(workspace, folder, *SHOTS, *ENGINE)
        prep(workspace, folder, "scores", *ENGINE)

    return workspace.made("scores", make)


def with_page_folder(workspace: Workspace) -> Path:
    """Create a data folder with chunks, and an empty folder for a page."""

    def make(folder: Path) -> None:
        copy(with_chunks(workspace), folder)
        (folder / "run").mkdir()

    return workspace.made("page-folder", make)


def with_columns(workspace: Workspace) -> Path:
    """Create a data folder with chunks, latents and text."""

    def make(folder: Path) -> None:
        _then(workspace, folder, *LATENTS, *ENGINE, after=with_chunks)
        _then(workspace, folder, *TEXT, *ENGINE)

    return workspace.made("columns", make)


def with_run(workspace: Workspace) -> Path:
    """Create a data folder with all columns, and train a dual encoder on them in `run`."""

    def make(folder: Path) -> None:
        copy(with_columns(workspace), folder)
        scratch = folder / "tmp"
        where = ("--shards", folder / "data", "--out", folder / "run")
        ended_well(workspace.commands.run("train", [*TRAIN, *where], scratch=scratch), status=0)
        scratch.rmdir()

    return workspace.made("run", make)


def _then(workspace: Workspace, folder: Path, *arguments: object, after: object = None) -> None:
    if callable(after):
        copy(after(workspace), folder)
    prep(workspace, folder, *arguments)


def with_later_manifest(workspace: Workspace) -> Path:
    """Create the chunks and columns of the first videos, then replace the manifest with the one of the later videos."""

    def make(folder: Path) -> None:
        _then(workspace, folder, *manifest_arguments(workspace, which="later"), after=with_columns)

    return workspace.made("later-manifest", make)


def with_garbage(workspace: Workspace) -> Path:
    """Create two variants of chunks and of latents, with leftovers of killed commands."""

    def make(folder: Path) -> None:
        copy(with_columns(workspace), folder)
        for arguments in ((*CHUNK, "--crf", 30), LATENTS):
            prep(workspace, folder, *arguments, *ENGINE)
        data = folder / "data"
        current = max(data.glob("video/*"), key=lambda path: path.stat().st_mtime_ns)
        tar = next(current.glob("000000-*.tar"))
        shutil.copy2(tar, tar.with_name("000007-0123abcd.tar"))
        names = ("manifest/{}videos.parquet", "layout/{}500ms-keep.parquet", "{}dataset.json", "{}probes.parquet")
        of_variant = (f"video/{current.name}/{name}" for name in ("{}shards.txt", "commits/{}000000.json"))
        for name in (*names, *of_variant):
            (data / name.format(".tmp-0123456789ab-")).write_text("half of it")

    return workspace.made("garbage", make)


def with_failure(workspace: Workspace) -> Path:
    """Create chunks of two videos. One video cannot be decoded at first; `prep retry` encodes it later.

    The intact file has the size and modification time of the undecodable one, as after a temporary disk failure.
    """

    def make(folder: Path) -> None:
        copy(videos(workspace) / "first", folder / "videos")
        source = folder / "videos" / "b.mp4"
        whole, state = source.read_bytes(), source.stat()
        begin = whole.index(b"mdat") + 4
        source.write_bytes(whole[:begin] + bytes(300) + whole[begin + 300 :])
        os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
        prep(workspace, folder, "manifest", "folder", folder / "videos")
        prep(workspace, folder, *CHUNK, *ENGINE, status=1)
        source.write_bytes(whole)
        os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))

    return workspace.made("failure", make)
