"""Samples of `scores`: the member and index row of a chunk, and their check by `prep verify --deep`."""

import json
import math
from typing import Any

import pyarrow as pa

from clipmill.manifests.checked_json import parse_json
from clipmill.prep.core.chunk_shards import frame_rate, read_chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.scores.score import ChunkFile, score_chunk
from clipmill.shards.reader import CommittedShard
from clipmill.shards.score_fields import SCORES, SCORES_FIELDS
from clipmill.shards.writer import Sample

EXTENSION = "scores.json"
_HASH_DIGITS = 16


def scores_sample(video: CommittedShard, row: int, *, fingerprint: str, cut_threshold: float) -> Sample:
    """Score a chunk and return its sample.

    Raises:
        SourceFailure: the chunk is damaged or cannot be decoded, or a value is not finite.
    """
    index = video.index
    chunk = ChunkFile(
        content=read_chunk(video, row),
        num_frames=index["num_frames"][row].as_py(),
        fps=frame_rate(index, row),
        packet_frame=index["packet_frame"][row].as_py(),
        packet_flags=index["packet_flags"][row].as_py(),
    )
    key = index["key"][row].as_py()
    fields = {
        "video_id": index["video_id"][row].as_py(),
        "start_ms": index["start_ms"][row].as_py(),
        **score_chunk(chunk, cut_threshold=cut_threshold),
        "chunk_fingerprint": fingerprint,
    }
    if wrong := [name for name, value in fields.items() if isinstance(value, float) and not math.isfinite(value)]:
        raise SourceFailure(FailureCode.NOT_FINITE, f"{', '.join(wrong)}: not a finite number")
    return Sample(key=key, members={EXTENSION: _member(key, fields)}, fields=fields)


def _member(key: str, fields: dict[str, Any]) -> bytes:
    values = {"key": key, **fields, "phash": f"{fields['phash']:0{_HASH_DIGITS}x}"}
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def check_scores(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Compare the member of a sample with its index row, and its values with their ranges."""
    try:
        stated = parse_json(members[EXTENSION])
        rounded = pa.Table.from_pylist([{**stated, "phash": _hash(stated["phash"])}], pa.schema(SCORES_FIELDS))
        found = {"key": stated["key"], **rounded.to_pylist()[0]}
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        return CheckedSample([(DeepCode.JSON_DIFFERS, f"the member cannot be read: {error!r}")], 0)
    differences = [
        (DeepCode.JSON_DIFFERS, f"{name}: {found[name]!r} in the member, {row[name]!r} in the index")
        for name in found
        if found[name] != row[name]
    ]
    differences += [
        (DeepCode.JSON_DIFFERS, f"{score.name}: {row[score.name]!r} is out of range")
        for score in SCORES
        if score.is_number and row[score.name] is not None and not 0 <= row[score.name] <= score.most
    ]
    if row["cuts"] != len(row["cut_times_s"] or ()):
        message = f"cuts: {row['cuts']!r}, but {len(row['cut_times_s'] or ())} cut_times_s"
        differences.append((DeepCode.JSON_DIFFERS, message))
    return CheckedSample(differences, 1)


def _hash(digits: str | None) -> int | None:
    return None if digits is None else int(digits, 16)
