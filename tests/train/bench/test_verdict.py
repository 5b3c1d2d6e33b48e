import pytest

from clipmill.train.bench.rates import Rounds, advice, judge, repeat

LINKS = {"read": 4000.0, "decode": 200.0, "crop": 1500.0, "tokens": 5000.0, "collate": 9000.0}


def test_a_loader_that_is_slower_than_the_model_is_what_holds_it_up() -> None:
    verdict = judge({**LINKS, "augment": 3000.0, "model": 600.0}, loader_items_per_s=125.0)
    assert (verdict.bound, verdict.slowest, verdict.cause) == ("data", "decode", "decode")
    assert verdict.compute_items_per_s == pytest.approx(500)
    assert verdict.expected_wait_share == pytest.approx(0.75)


def test_links_of_the_loader_add_up() -> None:
    # The model is the slowest link by itself, and still waits for what the loader's threads do one after the other.
    verdict = judge({**LINKS, "augment": 1e6, "model": 190.0}, loader_items_per_s=150.0)
    assert (verdict.bound, verdict.slowest, verdict.cause) == ("data", "model", "decode")


def test_a_model_that_is_slower_than_the_loader_waits_for_nothing() -> None:
    verdict = judge({**LINKS, "augment": 60.0, "model": 90.0}, loader_items_per_s=150.0)
    assert (verdict.bound, verdict.slowest, verdict.cause) == ("compute", "augment", "augment")
    assert verdict.expected_wait_share == 0


@pytest.mark.parametrize("cause", [*LINKS, "transfer", "augment", "model"])
def test_there_is_something_to_change_whatever_the_cause(cause: str) -> None:
    links = {**LINKS, "transfer": 8000.0, "augment": 9000.0, "model": 9000.0, cause: 1.0}
    loader = 1e6 if cause in ("augment", "model") else 0.5
    verdict = judge(links, loader_items_per_s=loader)
    assert verdict.cause == cause
    assert advice(verdict, workers=4, cores=4, decode="packets", samples_per_chunk=1)


def test_advice_names_only_what_is_not_done_already() -> None:
    verdict = judge({**LINKS, "augment": 9e3, "model": 9e3}, loader_items_per_s=100.0)
    wasteful = " ".join(advice(verdict, workers=2, cores=8, decode="plain", samples_per_chunk=1))
    thrifty = " ".join(advice(verdict, workers=8, cores=8, decode="packets", samples_per_chunk=4))
    for flag in ("--decode packets", "--workers", "--samples-per-chunk"):
        assert flag in wasteful and flag not in thrifty


def test_a_rate_is_the_median_and_the_first_round_does_not_count() -> None:
    rounds = Rounds()
    for seconds in (0.1, 0.1, 5.0):
        rounds.add(seconds, num_items=10)
    assert rounds.median_rate.items_per_s == pytest.approx(100)
    assert rounds.mean_rate.items_per_s == pytest.approx(30 / 5.2)
    calls: list[int] = []
    assert repeat(lambda: calls.append(1), num_items=1, seconds=1e-9).num_rounds == len(calls) - 1 == 1
