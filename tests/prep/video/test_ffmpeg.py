import os
import signal
import sys
import time
from pathlib import Path

import pytest

from clipmill.manifests.errors import FailedWork
from clipmill.prep.core.failures import TRANSIENT, SourceFailure
from clipmill.prep.video import ffmpeg
from clipmill.prep.video.ffmpeg import Ffmpeg, find_ffmpeg, require_encoder, require_success, run

TALKS = "import sys\nfor n in range(20000): print('line', n, 'x' * 20, file=sys.stderr)\nsys.exit(3)"
STAYS = "import subprocess, time\nsubprocess.Popen(['sleep', '99'])\ntime.sleep(99)"


def test_a_talkative_program_does_not_block_and_its_last_words_are_kept(tmp_path: Path) -> None:
    outcome = run([sys.executable, "-c", TALKS], folder=tmp_path, limit_s=60)
    assert outcome.return_code == 3 and not outcome.timed_out
    assert outcome.stderr_tail.splitlines()[-1] == f"line 19999 {'x' * 20}"
    assert len(outcome.stderr_tail) <= 4000
    assert outcome.cpu_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    polls: list[float] = []
    outcome = run(
        [sys.executable, "-c", STAYS], folder=tmp_path, limit_s=1, on_poll=lambda: polls.append(time.monotonic())
    )
    assert outcome.timed_out and outcome.return_code < 0
    assert len(polls) > 1
    # A killed process takes a moment to disappear on a busy machine; a process that was not killed stays.
    until = time.monotonic() + 10
    while any(_is_in(path, tmp_path) for path in Path("/proc").glob("[0-9]*/cwd")):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_trial_that_is_killed_says_nothing_about_encoder_and_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    killed = r"was ended by signal 9 \(out of memory\?\).*run the same command again"
    with pytest.raises(FailedWork, match=killed):
        require_encoder(Ffmpeg(path=str(program), version="8.0"), "h264")
    (tmp_path / "binaries").mkdir()
    program.rename(tmp_path / "binaries/ffmpeg-linux")
    monkeypatch.setattr("imageio_ffmpeg.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CLIPMILL_FFMPEG")
    with pytest.raises(FailedWork, match=killed):
        find_ffmpeg()


@pytest.mark.parametrize("first", ["kill -9 $$", "exec sleep 99"])
def test_a_program_that_is_killed_or_slow_once_is_asked_again(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, program = find_ffmpeg(), tmp_path / "ffmpeg"
    once = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; {first}; }}"
    program.write_text(f'#!/bin/sh\n{once}\nexec {real.path} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CLIPMILL_FFMPEG", str(program))
    if "sleep" in first:
        monkeypatch.setattr(ffmpeg, "_QUERY_LIMIT_S", 5.0)
    found_program = find_ffmpeg()
    assert found_program == Ffmpeg(path=str(program), version=real.version) and (tmp_path / "asked").exists()
    require_encoder(found_program, "h264")


@pytest.mark.parametrize("killed_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_ffmpeg_that_is_killed_is_a_failure_that_is_tried_again(killed_by: signal.Signals, tmp_path: Path) -> None:
    endless = "-v error -nostdin -f lavfi -i color=size=16x16 -progress made -f null -"

    killed: list[int] = []

    def poll() -> None:
        running = (tmp_path / "made").exists() and not killed
        killed.extend(
            int(link.parent.name) for link in Path("/proc").glob("[0-9]*/cwd") if running and _is_in(link, tmp_path)
        )
        if running:
            os.kill(killed[0], killed_by)

    outcome = run([find_ffmpeg().path, *endless.split()], folder=tmp_path, limit_s=60, on_poll=poll)
    with pytest.raises(SourceFailure, match=f"signal {killed_by}") as caught:
        require_success(outcome, limit_s=60)
    assert caught.value.code in TRANSIENT and not outcome.timed_out


def test_a_file_that_reaches_the_size_limit_of_the_shell_is_named_so(tmp_path: Path) -> None:
    noise = f"{find_ffmpeg().path} -v error -f lavfi -i testsrc=duration=9 -c:v mjpeg made.mp4"
    outcome = run(["sh", "-c", f"ulimit -f 8; exec {noise}"], folder=tmp_path, limit_s=60)
    with pytest.raises(SourceFailure, match="SIGXFSZ: the file size limit of the shell, see `ulimit -f`") as caught:
        require_success(outcome, limit_s=60)
    assert caught.value.code == "io_error"


def _is_in(link: Path, folder: Path) -> bool:
    try:
        return link.readlink() == folder
    except OSError:
        return False
