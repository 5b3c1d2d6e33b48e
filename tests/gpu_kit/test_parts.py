"""How a part ends, however it ends."""

import fcntl
import json
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from manifests.errors import Stopped
from scripts.gpu_kit import parts
from scripts.gpu_kit.parts import PARTS, Verdict, command_of, run_part
from scripts.gpu_kit.signals import stopping

CORRECTNESS, SPEED, _ = PARTS
DONE = {"name": "vit", "error": None, "skipped": None}
BROKEN = {"name": "losses", "error": "Traceback\n  in loss\nRuntimeError: no kernel\n", "skipped": None}
LATE = {"name": "beam", "error": None, "skipped": "takes about 60 s, and 5 s were left"}


def run(out: Path, program: str, *, part: parts.Part = SPEED, limit_s: float = 60) -> Verdict:
    """Runs a Python program as that part; `RESULT` in it is the file that it should write."""
    program = program.replace("RESULT", repr(str(out / part.result)))
    return run_part(
        part,
        [sys.executable, "-c", program],
        out=out,
        limit_s=limit_s,
        folder=out,
        environment=os.environ,
        show=lambda line: None,
    )


def writing(*records: dict[str, str | None]) -> str:
    return f"open(RESULT, 'w').write({json.dumps({'measurements': records})!r}); "


def test_a_part_that_did_all_it_should_has_passed(tmp_path: Path) -> None:
    verdict = run(tmp_path, writing(DONE, LATE))
    assert verdict.has_passed
    assert verdict.summary == "1 measurement taken, 0 failed, 1 skipped"
    assert verdict.details == ("skipped: beam: takes about 60 s, and 5 s were left",)


def test_a_failed_measurement_fails_the_part_and_is_named(tmp_path: Path) -> None:
    verdict = run(tmp_path, writing(DONE, BROKEN))
    assert not verdict.has_passed
    assert verdict.details == ("failed: losses: RuntimeError: no kernel",)


def test_nothing_measured_is_no_success(tmp_path: Path) -> None:
    assert not run(tmp_path, writing(LATE)).has_passed


def test_an_exit_status_fails_the_part(tmp_path: Path) -> None:
    verdict = run(tmp_path, writing(DONE) + "import sys; sys.exit(3)")
    assert not verdict.has_passed
    assert "exit status 3" in verdict.summary


def test_a_part_that_leaves_no_result_fails_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / SPEED.result).write_text("of an earlier run")
    verdict = run(tmp_path, "raise RuntimeError('the driver is gone')")
    assert not verdict.has_passed
    assert verdict.summary == "exit status 1; no speed.json was written"
    assert verdict.details[-1] == "RuntimeError: the driver is gone"


def test_a_part_that_is_killed_says_by_what(tmp_path: Path) -> None:
    verdict = run(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert verdict.summary == "killed by signal 9; no speed.json was written"


def test_a_result_that_cannot_be_read_fails_the_part(tmp_path: Path) -> None:
    verdict = run(tmp_path, "open(RESULT, 'w').write('{\"measure')")
    assert not verdict.has_passed
    assert "speed.json cannot be read" in verdict.summary


def test_what_is_running_when_time_is_over_is_interrupted_and_named_and_no_failure(tmp_path: Path) -> None:
    content = json.dumps({"measurements": [DONE], "running": "beam"})
    program = f"open(RESULT, 'w').write({content!r}); import time; print('at the beam', flush=True); time.sleep(600)"
    verdict = run(tmp_path, program, limit_s=1)
    assert verdict.has_passed
    assert verdict.summary == "did not finish within 1 s and was interrupted; 1 measurement taken, 0 failed, 0 skipped"
    assert verdict.details == ("last output: at the beam", "not finished: beam")


def test_a_part_that_is_interrupted_before_anything_is_measured_has_failed(tmp_path: Path) -> None:
    verdict = run(tmp_path, writing(LATE) + "import time; time.sleep(600)", limit_s=1)
    assert not verdict.has_passed


def test_a_part_ends_with_what_it_has_started_when_its_caller_is_told_to_stop(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    child = f"import fcntl, time; file = open({str(lock)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); time.sleep(600)"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"

    def tell() -> None:
        wait_for(lock)
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)  # Ray leaves its own in a process that has been its driver
    telling = threading.Thread(target=tell)
    telling.start()
    with pytest.raises(Stopped, match="SIGTERM; the running part was terminated"), stopping():
        run(tmp_path, program)
    telling.join()
    assert signal.getsignal(signal.SIGTERM) == handler
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child would still hold it


def wait_for(path: Path) -> None:
    ends_s = time.monotonic() + 60
    while not path.exists() and time.monotonic() < ends_s:
        time.sleep(0.05)


def test_tests_without_time_are_skipped_by_name_and_fail_nothing(tmp_path: Path, repository: Path) -> None:
    folder = tmp_path / "tests/gpu"
    folder.mkdir(parents=True)
    for name in ("conftest.py", "gpu/conftest.py"):
        (tmp_path / "tests" / name).write_text((repository / "tests" / name).read_text())
    program = """
        import os, signal, time
        def test_first(): pass
        def test_long(pytestconfig):
            pytestconfig.option.gpu_until = time.time() - 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(600)
        def test_last(): pass
    """
    (folder / "test_three.py").write_text(textwrap.dedent(program))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = command_of(CORRECTNESS, out=tmp_path, data=tmp_path, minutes=5, is_dry_run=True)
    command[command.index("gpu")] = ""  # every test
    verdict = run_part(
        CORRECTNESS,
        command,
        out=tmp_path,
        limit_s=300,
        folder=tmp_path,
        environment={**os.environ, "PYTHONPATH": str(repository)},
        show=lambda line: None,
    )
    assert verdict.has_passed, (tmp_path / "correctness.log").read_text()
    assert verdict.summary == "1 test passed, 0 failed, 2 skipped"
    assert verdict.details == (
        "skipped: 1 test: no time was left to finish it: test_three::test_long",
        "skipped: 1 test: no time was left: test_three::test_last",
    )


def test_a_part_that_does_not_listen_is_killed_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_INTERRUPTED_S", 0.2)
    lock = tmp_path / "lock"
    child = f"import fcntl, time; file = open({str(lock)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); time.sleep(600)"
    program = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    )
    verdict = run(tmp_path, program, limit_s=2)
    assert not verdict.has_passed
    assert "was killed; killed by signal 9" in verdict.summary
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child would still hold it


def test_tests_are_counted_and_those_that_failed_or_were_skipped_are_named(tmp_path: Path) -> None:
    case = '<testcase classname="tests.gpu.test_attention" name="{}">{}</testcase>'
    cases = case.format("test_a", "") + case.format("test_b", '<failure message="assert 1 == 2&#10;more"/>')
    cases += "".join(case.format(name, '<skipped message="needs CUDA by nature"/>') for name in ("test_c", "test_d"))
    verdict = run(tmp_path, f"open(RESULT, 'w').write({f'<testsuites>{cases}</testsuites>'!r})", part=CORRECTNESS)
    assert not verdict.has_passed
    assert verdict.summary == "1 test passed, 1 failed, 2 skipped"
    assert verdict.details == (
        "failed: test_attention::test_b: assert 1 == 2",
        "skipped: 2 tests: needs CUDA by nature",
    )


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_MAX_LOG_BYTES", 200)
    run(tmp_path, writing(DONE) + "print('first'); print('x' * 5000); print('last')")
    log = (tmp_path / "speed.log").read_text()
    assert len(log) < 300
    assert log.startswith("first\n")
    assert "bytes omitted" in log
    assert log.endswith("last\n")


def test_a_dry_run_is_told_to_every_part(tmp_path: Path) -> None:
    for part in PARTS:
        words = {
            is_dry_run: command_of(part, out=tmp_path, data=tmp_path, minutes=1, is_dry_run=is_dry_run)
            for is_dry_run in (False, True)
        }
        assert words[True] != words[False], part.letter
        assert str(tmp_path / part.result) in " ".join(words[True])
