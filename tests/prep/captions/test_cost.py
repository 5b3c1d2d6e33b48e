"""Tests of `prep captions --endpoint`: estimates and limits of tokens and time."""

from tests.prep.captions.server import MODEL, Reply, Request, completion, run_server
from tests.prep.captions.test_endpoint import NUM_CHUNKS, flags, journal_answers, make, rows
from tests.prep.running import prep_here
from tests.prep.sets import ShardSet


def test_the_budget_ends_a_run_and_counts_the_answers_of_earlier_ones(shard_set: ShardSet) -> None:
    data = shard_set.data
    with run_server() as server:
        each = 0
        ran = make(data, server, "--in-flight", 1, "--max-tokens-total", 100, status=1)
        each = journal_answers(data)[0].tokens
        num_paid = -(-100 // each)
        assert len(server.log) == num_paid < NUM_CHUNKS
        assert "budget_spent" in ran.summary["failures"]
        make(data, server, "--in-flight", 1, "--max-tokens-total", 100, status=1)
        assert len(server.log) == num_paid
        assert make(data, server, "--max-tokens-total", each * NUM_CHUNKS).summary["num_chunks"] == NUM_CHUNKS
        assert len(server.log) == NUM_CHUNKS
        error = prep_here(*flags(data, server, "--max-tokens-total", 9, "--part", "1/2"), status=2).error
    assert "cannot be used with --part" in error


def test_a_plan_asks_only_on_request_and_the_run_keeps_what_it_got(shard_set: ShardSet) -> None:
    data = shard_set.data
    with run_server() as server:
        plan = ("plan", "captions", "--endpoint", server.address, "--model", MODEL, "--frames", 2, "--size", 64)
        assert "--trial 3" in prep_here(*plan, "--data", data).stdout and not server.log
        assert not (data / "captions").exists()
        planned = prep_here(*plan, "--data", data, "--trial", 3, "--json").summary
        assert len(server.log) == 3 and planned["answers"]["num_answers"] == 3
        tokens_in = sum(request.tokens for request in server.log) * NUM_CHUNKS / 3
        assert planned["estimate"]["tokens_in"] == round(tokens_in) and planned["estimate"]["answer_s"] > 0
        assert prep_here(*plan, "--data", data).stdout.count("\nanswer   2 frames of brightness ") == 3
        assert make(data, server).summary["num_chunks"] == NUM_CHUNKS and len(server.log) == NUM_CHUNKS


def test_counts_of_tokens_that_cannot_be_are_unknown_and_the_report_says_so(shard_set: ShardSet) -> None:
    def odd(request: Request, number: int) -> Reply:
        usage = {"prompt_tokens": 10**30, "completion_tokens": -1} if number else None
        return completion("a caption", request, usage=usage)

    with run_server(odd) as server:
        ran = prep_here(*flags(shard_set.data, server, "--max-tokens-total", 100), "--engine", "processes")
    assert "5 answers: 0 tokens in, 0 out, and an unknown number for 5 answers" in ran.stdout
    assert {(row["tokens_in"], row["tokens_out"]) for row in rows(shard_set.data).values()} == {(None, None)}


def test_an_estimate_is_scaled_from_the_answers_whose_tokens_are_known(shard_set: ShardSet) -> None:
    with run_server(
        lambda request, number: completion("a b", request, **({} if number else {"usage": None}))
    ) as server:
        plan = ("plan", "captions", "--endpoint", server.address, "--model", MODEL, "--frames", 2, "--size", 64)
        planned = prep_here(*plan, "--data", shard_set.data, "--trial", 1)
        assert "an unknown number of tokens; " in planned.stdout
        estimate = prep_here(*plan, "--data", shard_set.data, "--trial", 2, "--json").summary["estimate"]
    assert (estimate["tokens_in"], estimate["tokens_out"]) == (server.log[1].tokens * NUM_CHUNKS, 2 * NUM_CHUNKS)
