"""The table of pseudo-captions: `train caption-chunks` writes it, `prep manifest captions` reads it.

    OUT.parquet         one row per caption: video, begin_s, end_s, text, source, likelihood, sample
    OUT.failures.jsonl  the clips that could not be read or decoded; they have no row
    OUT.parts/          finished parts of unfinished work, and plan.json, which says what the work is

`source` is the name of the weights with the first 8 digits of their hash, `likelihood` the mean log probability per
token (clipmill.train.tasks.caption.decoding), and `sample` the number of the caption among those of its clip. The
schema metadata has a JSON object under `clipmill`: `kind`, `weights`, `weights_sha256`, `video_variant`,
`chunks_sha256`, `settings`, and the numbers of clips, captions, empty captions (which have no row) and failed clips.
The table is published last.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from clipmill.manifests.caption_table import METADATA_KEY, PSEUDO_CAPTIONS, SCHEMA, write_pseudo_captions
from clipmill.manifests.errors import FailedWork, UserError
from clipmill.manifests.formatting import count_noun
from clipmill.manifests.publish import parse_json, publish_atomically, publish_bytes
from clipmill.train.data.outcomes import FailedSample
from clipmill.train.run.parts import differences

_FAILED = b"failed"
_SUFFIX = ".parquet"
_ROWS_PER_GROUP = 1 << 16
_COUNTS = ("num_clips", "num_captions", "num_empty", "num_failed")


@dataclass(frozen=True)
class CaptionPart:
    """A range of clips that is captioned and published as one file."""

    begin: int
    end: int

    def path(self, out: Path) -> Path:
        """Its file once it is finished."""
        return parts_path(out) / f"{self.begin:012d}{_SUFFIX}"


def require_table_path(out: Path) -> None:
    """Raise a UserError if a table cannot have this path."""
    if out.suffix != _SUFFIX:
        raise UserError(
            f"--out {out} does not end in {_SUFFIX}", hint=f"name a Parquet file: {out}{_SUFFIX}", flags=("--out",)
        )


def parts_path(out: Path) -> Path:
    """The folder of unfinished work."""
    return out.with_suffix(".parts")


def failures_path(out: Path) -> Path:
    """The list of clips that failed."""
    return out.with_suffix(".failures.jsonl")


def read_record(out: Path) -> dict[str, Any] | None:
    """The metadata of a finished table, None if there is none.

    Raises:
        UserError: the file is something else.
    """
    if not out.exists():
        return None
    try:
        record = parse_json((pq.read_schema(out).metadata or {})[METADATA_KEY])
        if not isinstance(record, dict) or record["kind"] != PSEUDO_CAPTIONS:
            raise ValueError(f"not a table of {PSEUDO_CAPTIONS}")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{out} exists already, and is not a table of train caption-chunks", hint=_OTHER) from error
    return record


_OTHER = "use another --out"


def require_same_work(old: Mapping[str, Any], plan: Mapping[str, Any], *, path: Path) -> None:
    """Raise a UserError that names the differences between the captions in `path` and the requested ones."""
    if shown := differences(old, plan):
        raise UserError(
            f"{path} is stale, it has other captions: {shown}",
            hint="use another --out, or remove it first",
        )


def publish_part(path: Path, rows: pa.Table, *, failed: Sequence[FailedSample]) -> None:
    """Publish a finished part, with the clips that failed."""
    lines = json.dumps([one.as_json() for one in failed]).encode()
    with publish_atomically(path) as temporary:
        pq.write_table(rows.replace_schema_metadata({_FAILED: lines}), temporary)


def publish_table(out: Path, parts: Sequence[CaptionPart], *, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Join the parts and publish the failures and the table, in this order.

    Returns:
        The metadata of the table.

    Raises:
        FailedWork: no clip could be decoded.
    """
    failed: list[dict[str, Any]] = []
    num_captions = 0
    for part in parts:
        with pq.ParquetFile(part.path(out)) as file:
            failed += json.loads(file.schema_arrow.metadata[_FAILED])
            num_captions += file.metadata.num_rows
    num_clips = parts[-1].end
    if len(failed) == num_clips:
        raise FailedWork(f"none of {count_noun(num_clips, 'clip')} could be decoded; the first: {failed[0]['detail']}")
    if failed:
        publish_bytes(failures_path(out), "".join(json.dumps(one) + "\n" for one in failed).encode())
    num_empty = (num_clips - len(failed)) * plan["settings"].get("num_samples", 1) - num_captions
    counts = (num_clips, num_captions, num_empty, len(failed))
    record = {**plan, **dict(zip(_COUNTS, counts, strict=True))}
    write_pseudo_captions(out, _groups(parts, out), record=record)
    return record


def _groups(parts: Sequence[CaptionPart], out: Path) -> Iterator[pa.Table]:
    """The rows of all parts in tables of about the same size."""
    waiting: list[pa.Table] = []
    for part in parts:
        waiting.append(pq.read_table(part.path(out), schema=SCHEMA))
        if sum(map(len, waiting)) >= _ROWS_PER_GROUP or part is parts[-1]:
            yield pa.concat_tables(waiting)
            waiting = []
