import threading
from dataclasses import replace

import pytest

from clipmill.train.bench.run import advice, judge
from clipmill.train.bench.steps import Stopwatch
from clipmill.train.tasks.dual_encoder.spec import DualEncoderSettings

STAGES = {"read": 4000.0, "decode": 200.0, "crop": 1500.0, "tokens": 5000.0}
SETTINGS = DualEncoderSettings()


def test_a_loader_that_is_slower_than_the_model_is_what_holds_it_up() -> None:
    verdict = judge({**STAGES, "augment": 3000.0, "model": 600.0}, loader=125.0, compute=500.0)
    assert (verdict.bound, verdict.slowest, verdict.cause) == ("data", "decode", "decode")
    assert verdict.expected_wait_share == pytest.approx(0.75)


def test_stages_of_the_loader_add_up() -> None:
    # The model is the slowest single stage, but it still waits, because the loader's threads run several stages in
    # sequence.
    verdict = judge({**STAGES, "augment": 1e6, "model": 190.0}, loader=150.0, compute=190.0)
    assert (verdict.bound, verdict.slowest, verdict.cause) == ("data", "model", "decode")


def test_a_model_that_is_slower_than_the_loader_waits_for_nothing() -> None:
    verdict = judge({**STAGES, "augment": 60.0, "model": 90.0}, loader=150.0, compute=36.0)
    assert (verdict.bound, verdict.slowest, verdict.cause) == ("compute", "augment", "augment")
    assert verdict.expected_wait_share == 0


def test_a_loader_without_known_stages_is_named_as_a_whole() -> None:
    verdict = judge({"model": 600.0}, loader=100.0, compute=600.0)
    assert (verdict.bound, verdict.slowest, verdict.cause) == ("data", "loader", "loader")
    assert judge({"model": 60.0}, loader=100.0, compute=60.0).cause == "model"
    assert advice("loader", SETTINGS, cores=4)


@pytest.mark.parametrize("cause", [*STAGES, "transfer", "augment", "model"])
def test_there_is_something_to_change_whatever_the_cause(cause: str) -> None:
    stages = {**STAGES, "transfer": 8000.0, "augment": 9000.0, "model": 9000.0, cause: 1.0}
    verdict = judge(stages, loader=1e6 if cause in ("augment", "model") else 0.5, compute=1.0)
    assert verdict.cause == cause
    assert advice(verdict.cause, SETTINGS, cores=4)


def test_advice_names_only_what_is_not_done_already() -> None:
    wasteful = replace(SETTINGS, workers=2, decode="plain", samples_per_chunk=1)
    thrifty = replace(SETTINGS, workers=8, decode="packets", samples_per_chunk=4)
    before, after = (" ".join(advice("decode", settings, cores=8)) for settings in (wasteful, thrifty))
    for flag in ("--decode packets", "--workers", "--samples-per-chunk"):
        assert flag in before and flag not in after


def test_a_stage_within_another_one_counts_only_as_itself() -> None:
    now, waits = [0.0], list[int]()
    watch = Stopwatch(lambda: waits.append(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: now[0])

        def inner() -> None:
            now[0] += 2

        crop = watch.time_calls("crop", inner)

        def outer() -> None:
            now[0] += 3
            crop()
            crop()
            now[0] += 1

        decode = watch.time_calls("decode", outer, is_on_device=True)
        decode()
        assert not watch.times_s and not waits, "the watch is not running"
        watch.is_running = True
        decode()
        crop()
        thread = threading.Thread(target=crop)
        thread.start()
        thread.join()
    assert watch.times_s == {"decode": [4], "crop": [2, 2, 2, 2]}
    assert len(waits) == 2, "one wait before and one after the stage on the device"
