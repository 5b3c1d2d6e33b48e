"""The journal of answers."""

import json
import zlib
from pathlib import Path

from clipmill.prep.captions.answers import Answer, Journal, read_answers


def test_a_damaged_journal_loses_only_the_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "answers" / "000000.jsonl"
    answer = Answer(text="a", finish_reason="stop", tokens_in=None, tokens_out=1, seconds=0.1, model="m")
    with Journal(path) as journal:
        for name in "abc":
            journal.add(name, answer)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"b"', b'"x"'))
    assert read_answers(path) == {"a": answer, "c": answer}


def test_lines_that_cannot_be_answers_are_as_if_there_were_none(tmp_path: Path) -> None:
    path = tmp_path / "000000.jsonl"
    whole = {"chunk_fingerprint": "a", "text": "a", "finish_reason": "stop", "seconds": 0.1, "model": "m"}
    lines = [
        {**whole, "tokens_in": 10**30, "tokens_out": 1},
        {**whole, "tokens_in": 1, "tokens_out": -1},
        {**whole, "tokens_in": 1, "tokens_out": 1, "mood": "good"},
        {"chunk_fingerprint": "a"},
        ["a"],
    ]
    texts = [json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(b"%08x %s" % (zlib.crc32(text), text) for text in [*texts, b"{"]))
    assert not read_answers(path)
