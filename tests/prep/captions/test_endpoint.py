"""Tests of `prep captions --endpoint`: the requests, the stored answers, and the effects of server faults."""

import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipmill.prep.captions.answers import Answer, answers_in, decode_pictures
from clipmill.prep.core.chunk_content import read_chunk
from clipmill.prep.core.data_folder import column_lock
from clipmill.shards.pages.figures import middle_items
from clipmill.shards.reader import Variant
from tests.prep.captions.server import MODEL, Reply, Request, Server, completion, describe_pictures, run_server
from tests.prep.running import MARK, Ran, contents, prep_here, processes, start, wait_until
from tests.prep.sets import ShardSet

NUM_CHUNKS = 5
Make = Callable[..., Ran]


def flags(data: Path, server: Server, *settings: object) -> tuple[object, ...]:
    asked = ("--frames", 2, "--size", 64, "--retries", 1) if "--frames" not in settings else ("--retries", 1)
    return ("captions", "--endpoint", server.address, "--model", MODEL, "--data", data, *asked, *settings)


def make(data: Path, server: Server, *settings: object, status: int = 0, workers: int = 1) -> Ran:
    engine = ("--engine", "processes", "--workers", workers)
    return prep_here(*flags(data, server, *settings), *engine, "--json", status=status)


def variant_of(data: Path) -> Variant:
    return Variant.open(data, column="captions")


def rows(data: Path) -> dict[str, dict[str, Any]]:
    shards = (shard.index.to_pylist() for shard in variant_of(data).shards())
    return {row["key"]: row for of_shard in shards for row in of_shard}


def journal_answers(data: Path) -> list[Answer]:
    return [answer for folder in (data / "captions").glob("*/answers") for answer in answers_in(folder)]


def test_the_server_is_sent_the_frames_that_are_decoded_and_its_log_equals_the_column(shard_set: ShardSet) -> None:
    data = shard_set.data
    with run_server() as server:
        made = make(data, server, "--prompt", "What\nhappens?", "--max-tokens", 99, workers=2).summary
    assert (made["num_chunks"], made["num_encoded"], made["failures"]) == (NUM_CHUNKS, NUM_CHUNKS, {})
    assert len(server.log) == NUM_CHUNKS
    body = server.log[0].body
    assert (server.log[0].prompt, body["model"], body["max_tokens"]) == ("What\nhappens?", MODEL, 99)
    assert body["temperature"] == 0 and "seed" not in body
    stored = rows(data)
    assert sum(row["tokens_in"] for row in stored.values()) == sum(request.tokens for request in server.log)
    assert made["answers"]["tokens_out"] == sum(row["tokens_out"] for row in stored.values()) == 5 * NUM_CHUNKS
    sent = [np.stack(request.pictures) for request in server.log]
    for shard in Variant.open(data).shards():
        for row in range(shard.num_samples):
            pictures = decode_pictures(read_chunk(shard, row), count=2, size=64)
            frames = np.stack([picture[..., ::-1] for picture in pictures])
            assert frames.shape == (2, 48, 64, 3)
            differences = [np.abs(picture.astype(int) - frames).mean() for picture in sent]
            nearest = int(np.argmin(differences))
            assert differences[nearest] < 3, "JPEG at quality 90 changes images by less than this"
            (reply,) = (describe_pictures(server.log[nearest], 0),)
            assert isinstance(reply, dict)
            key = shard.index["key"][row].as_py()
            assert stored[key]["caption_text"] == reply["choices"][0]["message"]["content"]
            del sent[nearest]  # each request was sent once
            del server.log[nearest]


def test_frames_are_in_the_middle_of_equal_parts() -> None:
    assert middle_items(range(450), at_most=3) == [75, 225, 375]
    assert middle_items(range(2), at_most=8) == [0, 1]


def test_another_prompt_makes_another_variant_and_another_address_does_not(shard_set: ShardSet, tmp_path: Path) -> None:
    data = shard_set.data
    with run_server() as server:
        first = make(data, server).summary["variant"]
        with run_server() as elsewhere:
            assert make(data, elsewhere).summary["variant"] == first and not elsewhere.log
        words = tmp_path / "prompt.txt"
        words.write_text("Describe the light.\r\n")
        second = make(data, server, "--prompt-file", words).summary["variant"]
        assert second != first and len(server.log) == 2 * NUM_CHUNKS and server.log[-1].prompt == "Describe the light."
        assert make(data, server, "--prompt", "Describe the light.").summary["num_shards_made"] == 0
        line = prep_here("inspect", "--column", "captions", "--data", data).stdout
        assert 'prompt="Describe the light."' in line and "endpoint=" not in line
    prep_here("gc", "--data", data)
    assert not (data / "captions" / first).exists() and (data / "captions" / second / "answers").is_dir()


def test_answers_that_are_no_captions_fail_by_name_and_are_asked_again_on_request(shard_set: ShardSet) -> None:
    data = shard_set.data

    def bad(request: Request, number: int) -> Reply:
        kinds: list[dict[str, Any]] = [
            completion(" \x00\n", request),
            completion("I cannot", request, refusal="I cannot help with that"),
            completion("cut", request, finish_reason="length"),
            completion("", request, finish_reason="content_filter"),
        ]
        return kinds[number] if number < 4 else completion("two\nlines\ud800 \x07here", request)

    with run_server(bad) as server:
        made = make(data, server, "--in-flight", 1, status=1).summary
        assert made["failures"] == {"answer_refused": 2, "answer_empty": 1, "answer_truncated": 1}
        assert [row["caption_text"] for row in rows(data).values()] == ["two lines here"]
        assert make(data, server).summary["num_shards_made"] == 0 and len(server.log) == NUM_CHUNKS
        retry = ("retry", "--column", "captions", "--engine", "processes", "--data", data, "--json")
        retried = prep_here(*retry, "--only", "answer_truncated", status=1).summary
        assert len(server.log) == NUM_CHUNKS + 1 and retried["num_chunks"] == 2
        assert prep_here(*retry).summary["num_chunks"] == NUM_CHUNKS
        assert len(server.log) == NUM_CHUNKS + 4, "a chunk with a caption must not be requested again"
    assert len(journal_answers(data)) == NUM_CHUNKS + 4
    assert "checked rows: OK" in prep_here("verify", "--deep", "--data", data).stdout


FAULTS: tuple[Reply, ...] = (429, 500, b'{"choices": [', b"", None, {"choices": None}, {"object": "error"})


def test_faults_of_the_server_are_tried_again(shard_set: ShardSet) -> None:
    faulty: list[int] = []

    def sometimes(request: Request, number: int) -> Reply:
        if number % 3:
            faulty.append(number)
            return FAULTS[len(faulty) % len(FAULTS)]
        return describe_pictures(request, number)

    with run_server(sometimes) as server:
        made = make(shard_set.data, server, "--in-flight", 1, "--retries", 3).summary
    assert (made["num_chunks"], made["failures"]) == (NUM_CHUNKS, {})
    assert len(faulty) > len(FAULTS) and len(server.log) - len(faulty) == NUM_CHUNKS == len(
        journal_answers(shard_set.data)
    )


def test_a_server_that_stays_away_fails_by_name_and_the_rerun_asks_only_for_the_rest(shard_set: ShardSet) -> None:
    data = shard_set.data
    with run_server(lambda request, number: describe_pictures(request, number) if number < 2 else 500) as server:
        made = make(data, server, "--in-flight", 1, "--retries", 0, status=1).summary
        assert made["failures"] == {"endpoint_failed": 3} and made["num_chunks"] == 2
        server.script = describe_pictures
        again = make(data, server).summary
        assert (again["num_chunks"], again["num_reused"]) == (NUM_CHUNKS, 2) and len(server.log) == 2 + 3 + 3
    with run_server(seconds=1) as server:
        made = make(data, server, "--prompt", "Slow", "--retries", 0, "--timeout", 0.2, status=1).summary
    assert made["failures"] == {"endpoint_failed": NUM_CHUNKS} and not made["answers"]["num_answers"]
    http = Server().begin()
    away = Server(address=f"http://127.0.0.1:{http.server_port}/v1")
    http.shutdown()  # otherwise its thread would poll the closed socket until the process exits
    http.server_close()
    made = make(data, away, "--prompt", "Other", "--retries", 0, status=1).summary
    assert made["failures"] == {"endpoint_failed": NUM_CHUNKS}
    listed = [path.read_text() for path in data.glob("captions/*/failures.jsonl")]
    assert [text for text in listed if "Cannot connect to host 127.0.0.1" in text], "the message reports a timeout"
    port = int(away.address.split(":")[2].removesuffix("/v1"))
    back = Server()
    http = back.begin(port)
    try:
        assert make(data, back, "--prompt", "Other").summary["num_chunks"] == NUM_CHUNKS
    finally:
        http.shutdown()
        http.server_close()


@pytest.mark.parametrize(
    ("status", "failures"),
    [(402, {"endpoint_refused": 1, "shard_missing": 1}), (408, {"endpoint_failed": NUM_CHUNKS - 1})],
)
def test_spent_credit_and_a_proxy_without_patience_leave_no_chunk_behind(
    shard_set: ShardSet, status: int, failures: dict[str, int]
) -> None:
    with run_server(lambda request, number: status if number else describe_pictures(request, number)) as server:
        ran = make(shard_set.data, server, "--in-flight", 1, "--retries", 0, status=1)
        assert ran.summary["failures"] == failures
        server.script = describe_pictures
        assert make(shard_set.data, server).summary["num_chunks"] == NUM_CHUNKS, "a rerun must ask again"


def test_a_key_is_sent_and_shown_nowhere(shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    data, key = shard_set.data, f"sk-{secrets.token_hex(8)}"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    seen: list[str] = []

    def refuses(request: Request, number: int) -> Reply:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with_arguments = folder / "cmdline"
                try:
                    seen.append(with_arguments.read_text(errors="replace"))
                except OSError:
                    pass
        return 401 if number else completion("a dog", request, finish_reason=f"error: your key is {key}")

    with run_server(refuses) as server:
        ran = make(data, server, "--in-flight", 1, status=1)
        assert server.log[0].key == key and len(server.log) == 2, "no request may follow the refusal"
    assert ran.summary["gave_up"].startswith("stopped: ") and "for the key Bearer ***" in ran.summary["gave_up"]
    assert ran.summary["failures"] == {"endpoint_refused": 1, "shard_missing": 1}
    texts = [ran.stdout, ran.stderr, *seen, prep_here("status", "--data", data, status=None).stdout]
    assert not [text for text in texts if key in text]
    listed = [path for path in data.rglob("*") if path.is_file() and path.parent.name != "answers"]
    assert not [path for path in listed if key.encode() in path.read_bytes()]
    with run_server() as server:
        failed = make(data, server, status=1)
        assert failed.summary["num_chunks"] == NUM_CHUNKS - 1 == len(server.log)
    assert failed.summary["failures"] == {"answer_incomplete": 1}
    assert "error: your key is ***" in next(data.glob("captions/*/failures.jsonl")).read_text()
    assert not [path for path in listed if key.encode() in path.read_bytes()]


def test_answers_on_their_way_are_kept_when_another_worker_is_refused(shard_set: ShardSet) -> None:
    both_asked = threading.Event()

    def refuses_the_first(request: Request, number: int) -> Reply:
        if number:
            both_asked.set()
            time.sleep(0.5)
            return describe_pictures(request, number)
        assert both_asked.wait(60)
        return 401

    with run_server(refuses_the_first) as server:
        ran = make(shard_set.data, server, "--in-flight", 2, workers=2, status=1)
    assert ran.summary["gave_up"].startswith("stopped: ") and "endpoint_refused" in ran.summary["failures"]
    assert len(journal_answers(shard_set.data)) == len(server.log) - 1 >= 2


def test_another_model_is_refused_and_a_dated_one_is_the_same(shard_set: ShardSet) -> None:
    data = shard_set.data
    with run_server(lambda request, number: completion("a dog", request, model=f"{MODEL}-mini")) as server:
        ran = make(data, server, "--in-flight", 1, status=1)
        assert f'answered with the model "{MODEL}-mini"' in ran.summary["gave_up"] and len(server.log) == 1
        server.script = lambda request, number: completion("a dog", request, model=f"{MODEL}-2026-05-13")
        assert make(data, server).summary["num_chunks"] == NUM_CHUNKS
    shown = prep_here("inspect", next(iter(rows(data))), "--column", "captions", "--data", data, "--json").summary
    assert shown["answered_by"] == f"{MODEL}-2026-05-13" and shown["seconds"] >= 0


def is_worker(arguments: list[str]) -> bool:
    return "multiprocessing.spawn" in " ".join(arguments)


def test_a_killed_run_is_finished_by_the_next_with_the_same_bytes(shard_set: ShardSet, tmp_path: Path) -> None:
    data, mark = shard_set.data, secrets.token_hex(8)
    with run_server() as server:
        other = tmp_path / "whole"
        subprocess.run(["cp", "-r", data, other], check=True)
        make(other, server)
        server.log.clear()
        server.seconds = 0.2
        engine = ("--engine", "processes", "--workers", 1, "--in-flight", 1)
        killed = start(*flags(data, server), *engine, **{MARK: mark})
        wait_until(lambda: len(journal_answers(data)) >= 2 or killed.poll() is not None, seconds=120)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=60)
        assert killed.returncode == -signal.SIGKILL
        wait_until(lambda: not [process for process in processes(mark) if is_worker(process.arguments)])
        assert not list(data.glob("captions/*/commits/*.json"))
        num_kept, num_asked = len(journal_answers(data)), len(server.log)
        assert num_asked - num_kept <= 1, "more than the request in flight is missing"
        (journal,) = data.glob("captions/*/answers/000000.jsonl")
        with journal.open("ab") as file:
            file.write(b"\n0123abcd {cut sho")  # partial line, as after a kill
        server.seconds = 0.0
        assert make(data, server).summary["num_chunks"] == NUM_CHUNKS
        assert len(server.log) == num_asked + NUM_CHUNKS - num_kept, "no chunk may be requested twice"
    assert shards(data) == shards(other)


def shards(data: Path) -> dict[str, str]:
    """Return the digests of the column without its journals, which contain times."""
    return {name: digest for name, digest in contents(data / "captions").items() if "/answers/" not in name}


def test_a_trial_beside_a_run_is_refused(shard_set: ShardSet) -> None:
    with run_server() as server:
        with column_lock(shard_set.data, column="captions"):
            plan = ("plan", "captions", "--endpoint", server.address, "--model", MODEL, "--trial", 1)
            assert "another command is writing" in prep_here(*plan, "--data", shard_set.data, status=2).stderr
        assert not server.log


def test_requests_are_sent_at_once_up_to_the_limit_and_one_that_is_rejected_is_no_other(shard_set: ShardSet) -> None:
    with run_server(
        lambda request, number: describe_pictures(request, number) if number else 400, seconds=0.3
    ) as server:
        made = make(shard_set.data, server, "--in-flight", 2, status=1).summary
    assert server.most_at_once == 2
    assert made["failures"] == {"request_invalid": 1} and made["num_chunks"] == NUM_CHUNKS - 1 == len(server.log) - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--prompt", "a\x1bb"), "--prompt contains a control character: character 2 is U+001B"),
        (("--prompt", "  "), "--prompt is empty"),
        (("--prompt-file", "/nowhere/x"), "--prompt-file /nowhere/x cannot be read"),
        (("--seed", "1"), "--seed 1 has no effect with --temperature 0.0"),
        (("--in-flight", "0"), "--in-flight is 0"),
        (("--endpoint", "http://me:secret@host/v1"), "--endpoint contains a user name, a password"),
        (("--endpoint", "localhost:8000"), "--endpoint is not a valid URL"),
    ],
)
def test_bad_requests_name_the_flag(given: tuple[str, ...], message: str, tmp_path: Path) -> None:
    server = ("--endpoint", "http://localhost:1/v1")
    ran = prep_here("captions", "--model", MODEL, *server, *given, "--data", tmp_path, status=2)
    assert message in ran.error and "secret" not in ran.stderr
