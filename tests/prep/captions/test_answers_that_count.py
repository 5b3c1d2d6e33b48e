"""Server answers that become captions, the stored form of unusual answers, and retries after failures."""

import json
from pathlib import Path
from typing import Any

import pytest

from clipmill.prep.captions.answers import without_key
from tests.prep.captions.server import MODEL, Reply, Request, completion, describe_pictures, run_server
from tests.prep.captions.test_endpoint import NUM_CHUNKS, journal_answers, make, rows, variant_of
from tests.prep.running import prep_here
from tests.prep.sets import ShardSet


@pytest.mark.parametrize("key", ["sk-hidden\n", "sk-hidden-é"])
def test_a_key_that_no_header_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server = ("--endpoint", "http://localhost:1/v1", "--model", MODEL)
    ran = prep_here("captions", *server, "--data", tmp_path, status=2)
    assert ran.error.startswith("OPENAI_API_KEY contains a line feed or another") and "hidden" not in ran.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "text"), [("EMPTY", "an EMPTY street"), ("x", "a box of 4 x 5 eggs"), ("sk-0123456789", "sk-0123456789")]
)
def test_a_key_changes_no_caption_and_no_name_of_a_model(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch, key: str, text: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    data = shard_set.data
    with run_server(lambda request, number: completion(text, request)) as server:
        settings = ("--model", "qwen-xl", "--endpoint", server.address, "--frames", 1, "--size", 64)
        prep_here("captions", *settings, "--data", data, "--engine", "processes", "--workers", 1)
    assert {row["caption_text"] for row in rows(data).values()} == {text}
    assert {(answer.text, answer.model) for answer in journal_answers(data)} == {(text, "qwen-xl")}


@pytest.mark.parametrize(
    ("key", "message"), [("x", "no qwen-xl for ***"), ("sk-0123456789", "no qwen-xl for x, Bearer(***)")]
)
def test_a_key_is_hidden_in_messages_and_a_short_one_only_as_a_word(
    monkeypatch: pytest.MonkeyPatch, key: str, message: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert without_key(message.replace("***", key)) == message


REASONS = ["error", "abort", "tool_calls", "function_call", "repetition", "length ", "\u202eSTOPPED", "stop\ud800?"]


def test_only_an_answer_that_ended_by_itself_is_a_caption(shard_set: ShardSet) -> None:
    data, complete = shard_set.data, ["stop", "eos", "eos_token", "end_turn", "STOP"]
    given = iter([*REASONS[:NUM_CHUNKS], *REASONS[NUM_CHUNKS:], *complete])
    with run_server(
        lambda request, number: completion("a dog runs over the", request, finish_reason=next(given))
    ) as server:
        first = make(data, server, "--in-flight", 1, status=1).summary
        assert first["failures"] == {"answer_incomplete": NUM_CHUNKS} and not first["num_chunks"]
        listed = next(data.glob("captions/*/failures.jsonl")).read_text()
        assert all(f'finish_reason \\"{reason}\\"' in listed for reason in REASONS[:NUM_CHUNKS])
        assert make(data, server, status=1).summary["num_shards_made"] == 0 and len(server.log) == NUM_CHUNKS
        given = iter([*REASONS[NUM_CHUNKS:], *complete])
        others = make(data, server, "--in-flight", 1, "--prompt", "Other", status=1).summary
        assert others["failures"] == {"answer_incomplete": 3} and others["num_chunks"] == 2
        given = iter(complete)
        assert make(data, server, "--in-flight", 1, "--prompt", "Complete").summary["num_chunks"] == NUM_CHUNKS
    assert {row["finish_reason"] for row in rows(data).values()} == set(complete)
    assert "checked rows: OK" in prep_here("verify", "--deep", "--data", data).stdout


def strange(request: Request, number: int) -> Reply:
    """Return answers with parts that a file cannot store, or with missing parts."""
    usages: list[Any] = [
        {"prompt_tokens": True, "completion_tokens": False},
        {"prompt_tokens": 10**300, "completion_tokens": -1},
        {"prompt_tokens": 12.0, "completion_tokens": 1.5},
        ["three"],
        None,
    ]
    lone = "\ud83d"
    answer = completion(f"a dog{lone} \udc36", request, usage=usages[number % 5], model=f"{MODEL}{lone}")
    answer["choices"][0]["finish_reason"] = f"{lone}stop{lone}"
    return answer


def test_no_answer_blocks_its_shard_whatever_its_parts_are(shard_set: ShardSet) -> None:
    data = shard_set.data
    with run_server(strange) as server:
        assert make(data, server, "--in-flight", 1).summary["num_chunks"] == NUM_CHUNKS == len(server.log)
        assert {row["caption_text"] for row in rows(data).values()} == {"a dog"}
        assert {row["finish_reason"] for row in rows(data).values()} == {"stop"}
        assert {(row["tokens_in"], row["tokens_out"]) for row in rows(data).values()} == {(None, None), (12, None)}
        server.script = lambda request, number: completion(None, request, refusal="no \ud83d", usage=None)
        made = make(data, server, "--prompt", "Other", status=1).summary
        assert made["failures"] == {"answer_refused": NUM_CHUNKS}
    assert "checked rows: OK" in prep_here("verify", "--deep", "--data", data).stdout


def test_an_answer_without_a_reason_is_a_caption_and_an_invisible_one_is_none(shard_set: ShardSet) -> None:
    data = shard_set.data
    texts = ["a dog", "\u200b \ufeff", "\u3164\u2060\U000e0041", "a \u200b dog\ufe0f", "\U0001f415\u200d\u2764\ufe0f"]
    with run_server(lambda request, number: completion(texts[number], request, finish_reason=None)) as server:
        made = make(data, server, "--in-flight", 1, status=1).summary
        assert len(server.log) == NUM_CHUNKS and made["failures"] == {"answer_empty": 2}
    captions = {row["caption_text"]: (row["caption_words"], row["finish_reason"]) for row in rows(data).values()}
    assert captions == {"a dog": (2, None), "a dog\ufe0f": (2, None), texts[4]: (1, None)}
    with run_server(lambda request, number: completion("a dog runs over", request, finish_reason=None)) as server:
        cut = make(data, server, "--max-tokens", 4, status=1).summary
        assert cut["failures"] == {"answer_truncated": NUM_CHUNKS}


def test_retry_works_on_the_variant_that_failed_with_the_flags_of_its_run(shard_set: ShardSet) -> None:
    data = shard_set.data
    with run_server() as server:
        first = make(data, server).summary["variant"]
        server.script = lambda request, number: completion("", request)
        budget = ("--in-flight", 1, "--max-tokens-total", 10_000)
        ran = make(data, server, "--prompt", "Other", *budget, status=1).summary
        failed = ran["variant"]
        assert ran["failures"] == {"answer_empty": NUM_CHUNKS} and variant_of(data).directory.name == first
        assert "prep retry --column captions" in ran["next"]
        num_asked, server.script, server.seconds, server.most_at_once = len(server.log), describe_pictures, 0.05, 0
        retry = ("retry", "--column", "captions", "--engine", "processes", "--data", data, "--json")
        spent = prep_here(*retry, "--max-tokens-total", ran["answers"]["tokens_in"] + 1, status=1)
        assert "have used the" in spent.stderr + spent.stdout and len(server.log) == num_asked + 1
        assert f"retrying {failed}" in spent.stderr
        tried = prep_here(*retry, "--max-tokens-total", 10_000).summary
        assert (tried["variant"], tried["num_chunks"]) == (failed, NUM_CHUNKS)
        assert len(server.log) == num_asked + NUM_CHUNKS and server.most_at_once == 1
        assert variant_of(data).directory.name == failed
        asked = json.loads((data / "captions" / failed / "selection.json").read_text())
        assert asked["in_flight"] == "1" and asked["max_tokens_total"] == "10000"
        assert prep_here(*retry, "--variant", first).summary["num_shards_made"] == 0
        missing = prep_here(*retry, "--variant", "none", status=2)
        assert first in missing.stderr and failed in missing.stderr
