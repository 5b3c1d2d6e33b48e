"""Tests of how an error affects the exit status and the output."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from clipmill.manifests.errors import run_command


def test_a_disk_that_takes_no_more_is_failed_work_and_leaves_no_rest(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from clipmill.manifests.errors import run_command
from clipmill.manifests.publish import publish_bytes
run_command(lambda: publish_bytes(Path({str(tmp_path / "table")!r}), bytes(10_000)))
"""
    ran = subprocess.run(
        [sys.executable, "-B", "-c", program],  # do not write .pyc files, which the limit would truncate
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("failed: ") and "cannot be written: File too large" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_memory_that_does_not_suffice_is_failed_work() -> None:
    program = "from clipmill.manifests.errors import run_command; run_command(lambda: bytes(1 << 60))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and ran.stderr.startswith("failed: out of memory")


@pytest.mark.parametrize("how", [(), ("--resume goes on",)])
def test_an_interruption_says_how_to_go_on_where_that_is_known(
    how: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt(*how)

    with pytest.raises(SystemExit) as ended:
        run_command(interrupt)
    assert ended.value.code == 130
    added = "; --resume goes on" if how else ""
    assert capsys.readouterr().err == f"interrupted; finished work is kept{added}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("body", "status"), [("sys.stdout.isatty(); print(1)", 0), ("sys.stdin.read(); fail()", 2)])
def test_a_closed_stream_is_the_null_device(tmp_path: Path, closed: str, body: str, status: int) -> None:
    file = tmp_path / "written"
    program = f"""
import os, sys
from clipmill.manifests.errors import UserError, run_command
def fail():
    raise UserError("no", hint="none")
def command():
    with open({str(file)!r}, "w") as file:
        assert file.fileno() > 2
        os.system("echo of a program; echo of a program >&2")
        {body}
run_command(command)
"""
    script = f'exec "$0" -c "$1" {closed}'
    ran = subprocess.run(
        ["sh", "-c", script, sys.executable, program], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (ran.returncode, file.read_bytes()) == (status, b"")
    assert b"error: no" not in ran.stdout and b"Traceback" not in ran.stderr
