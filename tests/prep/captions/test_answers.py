"""The journal of answers."""

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
