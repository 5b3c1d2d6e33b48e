"""Layout of the embeddings folder that `train embed` writes and `train search` reads.

The arrays and tables are plain npy and Parquet files, which other programs can read:

    video.npy         embeddings of clips, float32 [N, E], unit length; or pooled features [N, D], or tokens [N, L, D]
    text.npy          embeddings of captions, float32 [M, E], unit length; present if the weights have a text tower and
                      the data have captions
    clips.parquet     one row per row of video.npy: row, key, video, path, begin_s, end_s, text; caption (row of the
                      text in captions.parquet)
    captions.parquet  one row per row of text.npy: row, key, video, path, begin_s, end_s, text; clip (row of the
                      clip in clips.parquet; null if the clip failed)
    failures.jsonl    clips that could not be read or decoded, and have no row
    embed.json        weights, data, features, and size and SHA-256 of each file; marks the folder as finished
    parts/            in an unfinished folder: finished parts, and plan.json, which describes the work

`key` is the key of the chunk in which the clip starts. `path` is the file or URL of the video in the manifest.
embed.json is written last, so a folder without it is unfinished; the same `train embed` command resumes the work.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from clipmill.manifests.errors import UserError
from clipmill.manifests.publish import read_checked_json
from clipmill.train.run.parts import PLAN, differences

RECORD = "embed.json"
VIDEO, TEXT = "video.npy", "text.npy"
CLIPS, CAPTIONS = "clips.parquet", "captions.parquet"
FAILURES = "failures.jsonl"
PARTS = "parts"
FORMAT = 1


_COLUMNS = [
    ("row", pa.int64()),
    ("key", pa.string()),
    ("video", pa.string()),
    ("path", pa.string()),
    ("begin_s", pa.float64()),
    ("end_s", pa.float64()),
    ("text", pa.string()),
]
CLIP_SCHEMA = pa.schema([*_COLUMNS, ("caption", pa.int64())])
CAPTION_SCHEMA = pa.schema([*_COLUMNS, ("clip", pa.int64())])

# Entries of a plan that may change without changing the work: locations, and descriptions of other entries.
_IGNORED_ENTRIES = frozenset(
    {"weights.source", "weights.description", "data.shards", "data.description", "clip.description"}
)
_IDENTITY = "weights.identity"
_DIFFERENT_RUN = "the weights of a different run"  # description of different weights with the same name
_MAX_LISTED = 6  # maximum number of clips in an error message
_NEW_FOLDER_HINT = "run train embed with a different --out"


@dataclass(frozen=True)
class EmbeddedClip:
    """A row of clips.parquet; `path` is None in folders from older versions, which did not record paths."""

    row: int
    key: str
    video: str
    begin_s: float
    end_s: float
    text: str | None
    path: str | None = None

    @property
    def file(self) -> str:
        """Path or URL to display, without the query string, which may contain a secret; empty if unknown."""
        path = self.path or ""
        return path.partition("?")[0] if "://" in path else path


@dataclass(frozen=True)
class EmbeddingFolder:
    """A finished folder of embeddings.

    Attributes:
        path: Path of the folder.
        record: Content of embed.json.
    """

    path: Path
    record: Mapping[str, Any]

    @property
    def num_clips(self) -> int:
        """Number of rows of video.npy."""
        return int(self.record["num_clips"])

    def clips(self, rows: Sequence[int]) -> list[EmbeddedClip]:
        """Return the given rows of clips.parquet, in this order; only the row groups that contain them are read."""
        clip_of_row: dict[int, EmbeddedClip] = {}
        with pq.ParquetFile(self.path / CLIPS) as file:
            begin = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                rows_of_group = sorted({row for row in rows if begin <= row < begin + count})
                if rows_of_group:
                    table = file.read_row_group(group, columns=[name for name, _ in _COLUMNS])
                    selection = table.take(pa.array([row - begin for row in rows_of_group]))
                    clip_of_row |= {values["row"]: EmbeddedClip(**values) for values in selection.to_pylist()}
                begin += count
        return [clip_of_row[row] for row in rows]

    def row_of(self, name: str) -> int:
        """Return the row of the clip that `name` identifies, by its row or by the key of its chunk.

        Raises:
            UserError: No clip matches, or several clips start in the chunk.
        """
        if name.isascii() and name.isdigit():
            rows = [int(name)] if int(name) < self.num_clips else []
        else:
            rows = []
            with pq.ParquetFile(self.path / CLIPS) as file:
                for batch in file.iter_batches(columns=["row", "key"]):
                    rows += batch["row"].filter(pc.equal(batch["key"], name)).to_pylist()
        if not rows:
            raise UserError(
                f"{self.path} has no clip {name!r} (--like)",
                hint=f"use a row from 0 to {self.num_clips - 1}, or a key such as {self.clips([0])[0].key}; "
                f"{self.path / CLIPS} lists all clips",
                flags=("--like",),
            )
        if len(rows) > 1:
            clip_list = ", ".join(
                f"{clip.row} ({clip.begin_s:.2f}-{clip.end_s:.2f} s)" for clip in self.clips(rows[:_MAX_LISTED])
            )
            raise UserError(
                f"{len(rows)} clips start in chunk {name} (--like)",
                hint=f"use the row of a clip instead of the key: {clip_list}",
                flags=("--like",),
            )
        return int(rows[0])

    def vector(self, row: int) -> NDArray[np.float32]:
        """Return the vector of a clip, scaled to unit length. Raise a UserError if the vector is not finite."""
        vector: NDArray[np.float32] = np.array(np.load(self.path / VIDEO, mmap_mode="r")[row])
        if not np.isfinite(vector).all():
            raise UserError(
                f"row {row} of {self.path / VIDEO} is not finite: the file is damaged", hint=_NEW_FOLDER_HINT
            )
        vector /= max(float(np.linalg.norm(vector)), float(np.finfo(np.float32).tiny))
        return vector


def open_embeddings(path: Path) -> EmbeddingFolder:
    """Open a finished folder of embeddings.

    Raises:
        UserError: The folder does not exist or is unfinished, or a file is missing or has a different size.
    """
    record = read_folder_record(path)
    if record is None:
        if (path / PARTS / PLAN).is_file():
            raise UserError(
                f"the embeddings in {path} are unfinished", hint="run the same train embed command again to resume"
            )
        problem = f"{path} holds no embeddings: {RECORD} is missing" if path.is_dir() else f"there is no folder {path}"
        out = shlex.quote(f"{path}-embedded" if path.is_dir() else str(path))
        raise UserError(problem, hint=f"run train embed WEIGHTS --shards DATA --out {out}")
    require_complete_files(path, record)
    return EmbeddingFolder(path, record)


def require_complete_files(path: Path, record: Mapping[str, Any]) -> None:
    """Raise a UserError if a file of a finished folder is missing, or its size differs from the recorded size."""
    for name, facts in record["files"].items():
        file = path / name
        size_bytes = file.stat().st_size if file.is_file() else None
        if size_bytes != facts["size_bytes"]:
            problem = "missing" if size_bytes is None else f"{size_bytes:,} bytes long, not {facts['size_bytes']:,}"
            raise UserError(
                f"{file} is {problem}",
                hint=f"remove {path} and run train embed again, or use a different --out: the embeddings are damaged",
            )


def read_folder_record(path: Path) -> dict[str, Any] | None:
    """Read embed.json; return None if it is missing. Raise a UserError if it is damaged or has a different format."""
    try:
        record = read_checked_json(path / RECORD)
        if record["format"] != FORMAT:
            raise UserError(
                f"{path} has format {record['format']}, but this version reads format {FORMAT}",
                hint="use the version of clipmill that wrote the folder",
            )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"the entry {error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path / RECORD} cannot be read: {reason}", hint=_NEW_FOLDER_HINT) from error
    return record


def require_same_work(stored_plan: Mapping[str, Any], requested_plan: Mapping[str, Any], *, path: Path) -> None:
    """Raise a UserError that lists the differences if the work in a folder differs from the requested work."""
    changes = [differences(stored_plan, requested_plan, ignored=_IGNORED_ENTRIES | {_IDENTITY})]
    if stored_plan["weights"]["identity"] != requested_plan["weights"]["identity"]:
        old_weights, new_weights = (
            "{description} ({source})".format(**plan["weights"]) for plan in (stored_plan, requested_plan)
        )
        changes.insert(
            0,
            f"the weights were {old_weights} and are {_DIFFERENT_RUN if new_weights == old_weights else new_weights}",
        )
    if any(changes):
        raise UserError(
            f"{path} holds other embeddings: {'; '.join(filter(None, changes))}",
            hint=f"use a different --out, such as a folder inside the folder of each run, or remove {path}",
        )
