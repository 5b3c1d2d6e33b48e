"""Tests of journals: files that exist only on the machine that writes them."""

from clipmill.manifests.storage.working_copy import journal_owner


def test_a_journal_belongs_to_its_variant() -> None:
    assert journal_owner("captions/v-1/answers/000003.jsonl") == "captions/v-1"
    assert journal_owner("captions/v-1/answers/spent") == "captions/v-1"
    assert journal_owner("captions/v-1/failures.jsonl") is None
    assert journal_owner("captions/v-1/answers") is None
