"""Samples of `captions`: the member and index row of a chunk, and their check by `prep verify --deep`."""

import json
from typing import Any

from clipmill.manifests.publish import parse_json
from clipmill.prep.captions.answers import Answer
from clipmill.prep.core.chunk_input import Chunk
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.shards.format import CAPTIONS_FIELDS
from clipmill.shards.writer import Sample

EXTENSION = "caption.json"


def caption_sample(chunk: Chunk, answer: Answer) -> Sample:
    """Return the sample of a chunk."""
    text = answer.caption
    fields = chunk.fields(
        {
            "caption_text": text,
            "caption_words": len(text.split()),
            "finish_reason": answer.finish_reason,
            "tokens_in": answer.tokens_in,
            "tokens_out": answer.tokens_out,
        }
    )
    member = json.dumps({"key": chunk.key, **fields}, ensure_ascii=False, separators=(",", ":"))
    return chunk.sample({EXTENSION: member.encode()}, fields)


def check_caption(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Compare the member of a sample with its index row, and the caption with its rules."""
    try:
        stated = parse_json(members[EXTENSION])
        found = {name: stated[name] for name in ("key", *(field.name for field in CAPTIONS_FIELDS))}
    except (ValueError, KeyError, TypeError) as error:
        return CheckedSample([(DeepCode.JSON_DIFFERS, f"the member cannot be read: {error!r}")], 0)
    differences = [
        (DeepCode.JSON_DIFFERS, f"{name}: {found[name]!r} in the member, {row[name]!r} in the index")
        for name in found
        if found[name] != row[name]
    ]
    text = row["caption_text"]
    if not text or text != " ".join(text.split()) or len(text.split()) != row["caption_words"]:
        differences.append((DeepCode.JSON_DIFFERS, "caption_text is not one line of caption_words words"))
    return CheckedSample(differences, 1)
