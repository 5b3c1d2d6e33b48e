"""Columns that the tests of this folder run on, one row per column, and the data folder that has all of them."""

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.prep.core.column import ColumnSpec
from clipmill.prep.registry import column_named
from clipmill.prep.synthetic import FrameNumberVideo
from clipmill.prep.text.tower import Tower
from clipmill.shards.columns import VIDEO, command_for
from clipmill.shards.dataset import current_variant
from clipmill.shards.reader import Variant
from tests.prep.captions.server import MODEL, Server
from tests.prep.running import Ran, contents, manifest, prep_here
from tests.tiers import nightly_beyond

SERVER = "SERVER"  # in flags: placeholder for the URL of the caption server
ROWS = ("long,begins,0,1,train", "long,ends,4,5,train", "short,all of it,0,3,val")


@dataclass(frozen=True)
class Case:
    """Column, and the facts about it that the tests need.

    Attributes:
        flags: Settings with which the column is made quickly.
        other: Setting that makes a different variant, as flag and value; empty if none of them is quick.
        difference: Name of that setting in plans.
        bad: Flag and value that are rejected.
        refusal: First words of that error.
        code: Failure code of the chunk that `Folder.break_chunk` breaks.
        num_failed: Number of samples that this failure costs.
        is_of_chunks: True if the column has one sample for each chunk of `video`.
        where: Condition that selects the samples of one video; empty if the column has no `--where`.
        kept: Flags of its request that a retry repeats.
    """

    name: str
    flags: tuple[object, ...]
    bad: tuple[object, ...]
    refusal: str
    other: tuple[object, ...] = ()
    difference: str = ""
    code: str = "chunk_damaged"
    num_failed: int = 1
    is_of_chunks: bool = True
    where: str = ""
    kept: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> ColumnSpec:
        return column_named(self.name)

    @property
    def command(self) -> str:
        return command_for(self.name)

    @property
    def num_samples(self) -> int:
        """Number of samples: one per chunk, or one per video if each video is a shard."""
        return 2 if self.name == "text" else 5


CASES = (
    Case(
        "video",
        ("--len", "2s", "--preset", "ultrafast", "--short-side", 32),
        ("--crf", 99),
        "--crf is 99",
        other=("--crf", 40),
        difference="crf: 24 → 40",
        code="decode_errors",
        num_failed=2,  # complete span
        is_of_chunks=False,
        kept=frozenset({"scratch_size"}),
    ),
    Case(
        "latents",
        ("--vae", "tiny", "--size", 32),
        ("--fps", 0),
        "--fps is 0",
        other=("--fps", 2),
        difference="fps: 4 → 2",
        where="video = 'short'",
        kept=frozenset({"batch"}),
    ),
    Case(
        "text",
        ("--clip", "tiny"),
        ("--max-tokens", 1),
        "--max-tokens is 1",
        code="not_finite",
        is_of_chunks=False,
        where="video = 'short'",
        kept=frozenset({"batch"}),
    ),
    Case(
        "scores",
        (),
        ("--cut-threshold", 0),
        "--cut-threshold is 0",
        other=("--cut-threshold", 40),
        difference="cut_threshold: 27.0 → 40.0",
    ),
    Case(
        "captions",
        ("--model", MODEL, "--endpoint", SERVER, "--frames", 2, "--size", 64),
        ("--frames", 0),
        "--frames is 0",
        other=("--prompt", "Other"),
        difference="→ Other",
        where="video = 'short'",
        kept=frozenset({"batch", "in_flight", "retries", "timeout", "max_tokens_total"}),
    ),
    Case(
        "brightness",
        ("--every", 2),
        ("--every", 0),
        "--every is 0",
        other=("--every", 3),
        difference="every: 2 → 3",
    ),
)
# Columns of chunks, like `brightness`; the packages of these columns test their contents.
NIGHTLY = ("scores", "captions", "latents", "text")
OF_CHUNKS = [case for case in CASES if case.is_of_chunks]


def with_tiers(cases: Iterable[Case]) -> list[Any]:
    """Return the cases for `parametrize`; only `make nightly` runs the columns in `NIGHTLY`."""
    cases = list(cases)
    return nightly_beyond([case.name for case in cases if case.name not in NIGHTLY], cases, key=str)


@dataclass(frozen=True)
class Folder:
    """Folder with `data`, which has all columns, `videos` and `captions.csv`; and one column under test."""

    root: Path
    case: Case
    server: Server

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def column(self) -> Path:
        """Folder of the column."""
        return self.data / self.case.name

    @property
    def current_name(self) -> str:
        """Name of the current variant of the column."""
        return str(current_variant(self.data, self.case.name))

    @property
    def variant(self) -> Variant:
        return Variant.open(self.data, column=self.case.name)

    def prep(self, *words: object, status: int | None = 0) -> Ran:
        """Run a command on the data folder."""
        filled = [self.server.address if word == SERVER else word for word in words]
        return prep_here(*filled, "--data", self.data, status=status)

    def make(self, *flags: object, status: int | None = 0, settings: Sequence[object] | None = None) -> dict[str, Any]:
        """Make the column with its command; return the summary."""
        words = (self.case.command, *(self.case.flags if settings is None else settings), *flags, "--json")
        return self.prep(*words, "--engine", "processes", status=status).summary

    def plan(self, *flags: object, settings: Sequence[object] | None = None) -> Ran:
        """Plan the column with its command."""
        name = () if self.case.name == VIDEO else (self.case.name,)
        return self.prep("plan", *name, *(self.case.flags if settings is None else settings), *flags)

    def retry(self, *flags: object, status: int | None = 0) -> dict[str, Any]:
        """Run `prep retry` on the column; return the summary."""
        words = ("retry", "--column", self.case.name, "--engine", "processes", "--json", *flags)
        return self.prep(*words, status=status).summary

    def status(self, status: int | None = 0) -> dict[str, Any]:
        """Return the part of `prep status --json` about the column."""
        return dict(self.prep("status", "--json", status=status).summary["columns"][self.case.name])

    def run_printed(self, text: str) -> dict[str, Any]:
        """Run the command at the end of the last line of a text; return its summary."""
        words = shlex.split(text.strip().splitlines()[-1].rpartition("prep ")[2])
        return prep_here(*words, "--engine", "processes", "--json").summary

    def digests(self) -> dict[str, str]:
        """Return the digests of the column's files by path, without answers, which contain times."""
        return {name: digest for name, digest in contents(self.column).items() if "/answers/" not in name}

    def of(self, name: str) -> "Folder":
        """Return the same folder with a different column under test."""
        return replace(self, case=next(case for case in CASES if case.name == name))

    def forget_column(self) -> None:
        """Delete the column, as if it had never been made; the layout keeps the chunks in their shards."""
        shutil.rmtree(self.column)

    def read_manifest(self, *rows: str) -> None:
        """Create the manifest again from the videos and the captions in `rows`."""
        table = self.root / "captions.csv"
        table.write_text("\n".join(["video,text,begin_s,end_s,split", *(rows or ROWS)]) + "\n")
        manifest(self.data, self.root / "videos", "--captions", table)

    @contextmanager
    def broken_chunk(self) -> Iterator[None]:
        """Let one sample fail within the block, through its chunk, its source, or the text tower."""
        if self.case.name == "text":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Tower, "encode", _spoil(Tower.encode))
                yield
            return
        if self.case.name == "video":
            path = self.root / "videos" / "short.mp4"
            place = path.read_bytes().index(b"mdat") + 3000
            with bytes_replaced(path, place, bytes(1500)):
                yield
            path.touch()  # as if a user had replaced the file
            return
        shard = self.of("video").variant.shards()[1]
        place = shard.index["mp4_offset"][0].as_py() + 500
        with bytes_replaced(shard.tar_path, place, b"\xff\x00\xff"):
            yield


def _spoil(encode: Any) -> Any:
    """Return a method that replaces the tower's embeddings of the video `short` with NaN."""

    def encode_and_spoil(tower: Tower, texts: Sequence[str], *, batch: int) -> Any:
        encoded = encode(tower, texts, batch=batch)
        lost = [text == "all of it" for text in texts]
        return replace(encoded, rows=np.where(np.array(lost)[:, None], np.nan, encoded.rows).astype(np.float16))

    return encode_and_spoil


@contextmanager
def bytes_replaced(path: Path, place: int, content: bytes) -> Iterator[None]:
    """Replace bytes of a file within the block, as decay does: the modification time does not change."""
    state, before = path.stat(), path.read_bytes()
    for changed in (before[:place] + content + before[place + len(content) :], before):
        path.unlink()  # do not write in place: other folders link to the file
        path.write_bytes(changed)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        if changed is not before:
            yield


def write_video(path: Path, *, num_frames: int, first_number: int = 0) -> None:
    """Write a small video whose frames are numbered from `first_number`, without changing other links to the file."""
    path.unlink(missing_ok=True)
    FrameNumberVideo(num_frames=num_frames, fps=Fraction(30), width=160, height=120, first_number=first_number).write(
        path
    )


def copy_folder(folder: Path, to: Path) -> Path:
    """Copy a folder.

    Shards and videos, which are never written in place, become hard links.
    """

    def copy(source: str, target: str) -> str:
        if source.endswith((".tar", ".idx", ".index.arrow", ".mp4")):
            os.link(source, target)
            return target
        return shutil.copy2(source, target)

    return Path(shutil.copytree(folder, to, copy_function=copy))
