"""Tests of answers and their journal."""

import json
import zlib
from dataclasses import replace
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


WHOLE = {"chunk_fingerprint": "a", "text": "a", "finish_reason": "stop", "seconds": 0.1, "model": "m"}


def write_lines(path: Path, lines: list[object]) -> None:
    texts = [json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(b"%08x %s" % (zlib.crc32(text), text) for text in [*texts, b"{"]))


def test_lines_that_cannot_be_answers_are_as_if_there_were_none(tmp_path: Path) -> None:
    path = tmp_path / "000000.jsonl"
    counts = {"tokens_in": 1, "tokens_out": 1}
    lines = [
        {**WHOLE, **counts, "mood": "good"},
        {**WHOLE, **counts, "text": 3},
        {**WHOLE, **counts, "finish_reason": ["stop"]},
        {"chunk_fingerprint": "a"},
        ["a"],
    ]
    write_lines(path, lines)
    assert not read_answers(path)


def test_an_answer_in_a_journal_is_used_whatever_its_server_counted_and_wrote(tmp_path: Path) -> None:
    path = tmp_path / "000000.jsonl"
    counts: list[tuple[object, object]] = [(True, 1), (1, 2.0), (10**30, 1), (-1, 1), ("7", None), (float("nan"), 3)]
    lines: list[object] = [
        {**WHOLE, "chunk_fingerprint": str(number), "tokens_in": tokens_in, "tokens_out": tokens_out}
        for number, (tokens_in, tokens_out) in enumerate(counts)
    ]
    lone = {"text": "a \ud83d\udc36\ud83d", "model": "m\udfff", "finish_reason": "stop\ud800", "refusal": "\ud800"}
    write_lines(path, [*lines, {**WHOLE, **lone, "tokens_in": 1, "tokens_out": 1}])
    answers = read_answers(path)
    token_counts = [(answer.tokens_in, answer.tokens_out) for answer in answers.values()]
    assert token_counts == [(None, 1), (1, 2), (None, 1), (None, 1), (None, None), (None, 3), (1, 1)]
    last = answers["a"]
    assert (last.text, last.model, last.finish_reason, last.refusal) == ("a \U0001f436", "m", "stop", None)
    assert all(answer.problem("m") is None for answer in answers.values())


def test_a_truncated_answer_states_its_tokens_if_they_are_known() -> None:
    answer = Answer(text="a", finish_reason="length", tokens_in=9, tokens_out=5, seconds=0.1, model="m")
    for counted, words in ((answer, "after 5 tokens"), (replace(answer, tokens_out=None), "an unknown number of")):
        problem = counted.problem("m")
        assert problem is not None and words in problem.message
