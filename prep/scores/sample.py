"""Samples of `scores`: the member and index row of a chunk, and their check by `prep verify --deep`."""

import json
from typing import Any

import pyarrow as pa

from clipmill.manifests.publish import parse_json
from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.scores.score import ChunkFile, score_chunk
from clipmill.shards.score_fields import SCORES, SCORES_FIELDS
from clipmill.shards.writer import Sample

EXTENSION = "scores.json"
_HASH_DIGITS = 16


def scores_sample(chunk: Chunk, *, cut_threshold: float) -> Sample:
    """Score a chunk and return its sample.

    Raises:
        SourceFailure: the chunk is damaged or cannot be decoded, or a value is not finite.
    """
    file = ChunkFile(
        content=chunk.read(),
        num_frames=chunk["num_frames"],
        fps=chunk.fps,
        packet_frame=chunk["packet_frame"],
        packet_flags=chunk["packet_flags"],
    )
    fields = chunk.fields(score_chunk(file, cut_threshold=cut_threshold))
    shown = {"key": chunk.key, **fields, "phash": f"{fields['phash']:0{_HASH_DIGITS}x}"}
    text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    return chunk.sample({EXTENSION: text.encode("utf-8", "replace")}, fields)


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
