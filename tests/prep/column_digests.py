"""Digests of a small data folder with all columns and the plug-in's: `python -m tests.prep.column_digests OUT.json`.

Two commits whose columns have the same bytes write the same file:

    python -m tests.prep.column_digests before.json
    python -m tests.prep.column_digests after.json --engine ray     # or --part, or --bucket; --compare before.json

The file contains the SHA-256 of every shard, index, commit, recipe, list and merged table by its path in the data
folder, and the SHA-256 of the members of each sample, which show whether a column with a changed index still stores the
same content. Models are tiny and random, captions come from a server in this process, and the commands run as for a
user.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from tests.plugins import example_installed
from tests.prep.captions.server import run_server
from tests.prep.running import contents

LEN = ("--len", "2s", "--preset", "ultrafast", "--short-side", "96")
COLUMNS = ("video", "latents", "text", "scores", "captions", "brightness")
# Records that contain a time of the run, or paths of the videos.
_OF_A_RUN = ("manifest/", "/answers/", "probes.", "dataset.json", "selection.json", ".lock")


def commands(videos: Path, server: str, captions: Path) -> list[tuple[str | Path, ...]]:
    """Return the command lines that make all columns, without the flags for data folder, engine and part."""
    return [
        ("manifest", "folder", videos, "--captions", captions, "--yes"),
        ("chunk", *LEN),
        ("scores",),
        ("latents", "--vae", "tiny", "--size", "64", "--fps", "2", "--crop", "random", "--segment", "1s"),
        ("text", "--clip", "tiny"),
        ("captions", "--endpoint", server, "--model", "stub-vl", "--frames", "2", "--size", "64"),
        ("brightness", "--every", "2"),
    ]


def write_videos(folder: Path) -> tuple[Path, Path]:
    """Write two videos and their captions; return the folder of the videos and the table of the captions."""
    videos = folder / "videos"
    videos.mkdir(parents=True)
    for name, num_frames in (("long", 150), ("short", 90)):
        path = videos / f"{name}.mp4"
        FrameNumberVideo(num_frames=num_frames, fps=Fraction(30), width=160, height=120).write(path)
        os.utime(path, (1_700_000_000, 1_700_000_000))
    captions = folder / "captions.csv"
    rows = ("long,a title,0,1,train", "long,the end,4,5,train", "short,all,0,3,val")
    captions.write_text("\n".join(["video,text,begin_s,end_s,split", *rows]) + "\n")
    return videos, captions


def run(environment: dict[str, str], *arguments: object) -> None:
    """Run `prep` as a program, with the example package installed."""
    command = [sys.executable, "-P", "-m", "clipmill.prep.cli", *map(str, arguments)]
    ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))}: status {ran.returncode}\n{ran.stdout}\n{ran.stderr}")


def make_columns(folder: Path, data: str, environment: dict[str, str], *, engine: str, parts: Sequence[str]) -> None:
    """Make all columns in `data`, which is a folder or the URL of a folder in a bucket."""
    videos, captions = write_videos(folder)
    with run_server() as server:
        for words in commands(videos, server.address, captions):
            if words[0] == "manifest":
                run(environment, *words, "--data", data)
                continue
            flags = ("--data", data, "--engine", engine, "--workers", 1)
            for part in parts:
                run(environment, *words, *flags, *(("--part", part) if part else ()))


def digests(data: Path) -> dict[str, Any]:
    """Return the digests of the files in a data folder, and of the members of each sample of each column."""
    files = {name: digest for name, digest in contents(data).items() if not any(word in name for word in _OF_A_RUN)}
    members: dict[str, dict[str, str]] = {}
    for column in COLUMNS:
        if current_variant(data, column) is None:
            continue
        for sample in Variant.open(data, column=column).iterate():
            values = {name: value for name, value in sample.items() if isinstance(value, bytes)}
            key = f"{column}/{sample['__key__']}"
            members[key] = {name: hashlib.sha256(value).hexdigest() for name, value in sorted(values.items())}
    return {"files": files, "members": members}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names whose digests differ or exist on one side only."""
    return [
        f"{kind}: {name}"
        for kind in ("files", "members")
        for name in sorted({*before[kind], *after[kind]})
        if before[kind].get(name) != after[kind].get(name)
    ]


def main() -> None:
    """Write the digests, and compare them with the digests in another file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the files in this new folder")
    parser.add_argument("--engine", choices=("processes", "ray"), default="processes")
    parser.add_argument("--part", action="store_true", help="make each column in two parts")
    parser.add_argument("--bucket", action="store_true", help="make the columns in a bucket of a local S3 server")
    parser.add_argument("--compare", type=Path, help="file to compare with; exit with 1 if a digest differs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "folder"
        environment = example_installed(folder / "installed")
        parts = ("2/2", "1/2") if given.part else ("",)
        if given.bucket:
            all_digests = _digests_in_bucket(folder, environment, engine=given.engine, parts=parts)
        else:
            make_columns(folder, str(folder / "data"), environment, engine=given.engine, parts=parts)
            all_digests = digests(folder / "data")
    given.out.write_text(json.dumps(all_digests, indent=1, sort_keys=True) + "\n")
    if given.compare is not None:
        differing = differences(json.loads(given.compare.read_text()), all_digests)
        print("\n".join([*differing, f"{len(differing)} differences"]))
        raise SystemExit(bool(differing))


def _digests_in_bucket(
    folder: Path, environment: dict[str, str], *, engine: str, parts: Sequence[str]
) -> dict[str, Any]:
    """Make the columns in a bucket, and return the digests of a local copy of its objects."""
    from clipmill.manifests.storage.objects import open_objects
    from tests.object_storage.server import s3_server

    with s3_server() as server:
        environment |= server.environment()
        os.environ.update(server.environment())
        address = f"{server.make_bucket('columns')}/data"
        make_columns(folder, address, environment, engine=engine, parts=parts)
        objects, copy = open_objects(address), folder / "copy"
        for info in list(objects.list()):
            path = copy / info.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(objects.read(info.key))
    return digests(copy)


if __name__ == "__main__":
    main()
