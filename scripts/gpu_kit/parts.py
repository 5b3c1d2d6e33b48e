"""The parts of the kit: their commands, running each in its own process with a time limit, and their outcome."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 20.0  # after its time limit, for a measurement that takes longer than estimated
_INTERRUPTED_S = 10.0  # to write partial results after SIGINT
_KILLED_S = 5.0  # for the operating system to terminate the processes
_SHOW_EVERY_S = 30.0
_MAX_LOG_BYTES = 8_000_000
NO_TIME = "no time was left"  # the same reason as in tests/gpu
_MAX_LINES = 12  # of failures and skipped tests


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the kit.

    Attributes:
        letter: name on the command line.
        stem: file stem of its result and log.
        minutes: default time limit.
        suffix: file extension of its result.
    """

    letter: str
    stem: str
    minutes: float
    suffix: str

    @property
    def result(self) -> str:
        """File name of the result."""
        return f"{self.stem}{self.suffix}"


PARTS = (
    Part(letter="A", stem="correctness", minutes=4, suffix=".xml"),
    Part(letter="B", stem="speed", minutes=9, suffix=".json"),
    Part(letter="C", stem="feeding", minutes=9, suffix=".json"),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a part.

    Attributes:
        summary: one line.
        details: failures and skipped tests, one per line.
        seconds: duration.
    """

    letter: str
    has_passed: bool
    summary: str
    details: tuple[str, ...] = ()
    seconds: float = 0.0


def command_of(part: Part, *, out: Path, data: Path, minutes: float, is_dry_run: bool) -> list[str]:
    """Return the command of a part, whose time starts now; it runs in the root of the checkout."""
    result = str(out / part.result)
    if part.letter == "A":
        device = "cpu" if is_dry_run else "cuda"
        return [
            *(sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "--gpu-device", device, "--verbose"),
            *(f"--junitxml={result}", f"--gpu-until={time.time() + 60 * minutes:.0f}", "--durations=10"),
            *("-p", "no:cacheprovider", "--log-level=WARNING"),
        ]
    command = [sys.executable, "-m", f"benchmarks.gpu.{part.stem}", "--json", result, "--minutes", str(minutes)]
    return [*command, "--data", str(data), *(["--dry-run"] if is_dry_run else [])]


def run_part(
    part: Part,
    command: Sequence[str],
    *,
    out: Path,
    limit_s: float,
    folder: Path,
    environment: Mapping[str, str],
    show: Callable[[str], None],
) -> Verdict:
    """Run a part and read its result. All its processes are terminated, even if an exception is raised.

    Args:
        out: folder for the result and the log; those of an earlier run are removed first.
        limit_s: time limit, after which it is interrupted, and killed if it does not exit.
        show: callback for progress lines.
    """
    log, result = out / f"{part.stem}.log", out / part.result
    result.unlink(missing_ok=True)
    began_s = time.monotonic()
    is_late = is_stuck = False
    with log.open("wb") as file:
        # A new session, so that all its processes can be terminated together.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=folder, env=dict(environment), start_new_session=True
        )
        try:
            is_late = not _wait(process, limit_s=limit_s, show=lambda: show(f"part {part.letter}: {_last_line(log)}"))
            last_line = _last_line(log)
        finally:
            # For a part that exceeds its time, and for one that is abandoned because this program was told to stop.
            if process.poll() is None:
                _signal(process, signal.SIGINT)
                is_stuck = not _wait(process, limit_s=_INTERRUPTED_S, show=lambda: None)
            _end_group(process)
            code = process.wait()
    _shorten(log)
    seconds = time.monotonic() - began_s
    # A part stopped by its time limit exits with an error, which says nothing about what it has measured.
    verdict = _verdict(part, result, code=code, was_ended=is_late)
    summary, details = verdict.summary, verdict.details
    if is_late:
        end = f"did not respond to the interruption within {_INTERRUPTED_S:g} s and was killed" if is_stuck else ""
        end = end or "was interrupted"
        summary = f"did not finish within {limit_s:.0f} s and {end}; {summary}"
        details = (f"last output: {last_line}", *details)
    return Verdict(
        letter=part.letter,
        has_passed=verdict.has_passed,
        summary=summary,
        details=details or (() if verdict.has_passed else _tail(log)),
        seconds=seconds,
    )


def _verdict(part: Part, result: Path, *, code: int, was_ended: bool) -> Verdict:
    try:
        is_good, summary, details = (_of_tests if part.suffix == ".xml" else _of_measurements)(result)
    except FileNotFoundError:
        return Verdict(letter=part.letter, has_passed=False, summary=f"{_ending(code)}; no {result.name} was written")
    except (ValueError, KeyError, TypeError, ElementTree.ParseError) as error:
        summary = f"{_ending(code)}; {result.name} cannot be read: {error}"
        return Verdict(letter=part.letter, has_passed=False, summary=summary)
    if code != 0 and not was_ended:
        summary = f"{summary}; {_ending(code)}"
        is_good = False
    return Verdict(letter=part.letter, has_passed=is_good, summary=summary, details=details)


def _of_tests(path: Path) -> tuple[bool, str, tuple[str, ...]]:
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [(case, node) for case in cases for node in case if node.tag in ("failure", "error")]
    skipped = [(case, node) for case in cases for node in case if node.tag == "skipped"]
    num_passed = len(cases) - len({id(case) for case, _ in failed + skipped})
    lines = [f"failed: {_name(case)}: {_first_line(node.get('message', ''))}" for case, node in failed]
    reasons: dict[str, list[str]] = {}
    for case, node in skipped:
        reasons.setdefault(_first_line(node.get("message", "")), []).append(_name(case))
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        # Unsupported measurements are reported with their reason; those for which no time was left are listed by name.
        listed = f": {', '.join(_at_most(names))}" if NO_TIME in reason else ""
        lines.append(f"skipped: {_count(len(names), 'test')}: {reason}{listed}")
    summary = f"{_count(num_passed, 'test')} passed, {len(failed)} failed, {len(skipped)} skipped"
    return num_passed > 0 and not failed, summary, _at_most(lines)


def _of_measurements(path: Path) -> tuple[bool, str, tuple[str, ...]]:
    content = json.loads(path.read_text())
    records = content["measurements"]
    failed = [record for record in records if record["error"]]
    skipped = [record for record in records if record["skipped"]]
    num_done = len(records) - len(failed) - len(skipped)
    lines = [f"failed: {record['name']}: {record['error'].strip().splitlines()[-1]}" for record in failed]
    lines += [f"skipped: {record['name']}: {record['skipped']}" for record in skipped]
    if running := content.get("running"):
        lines.append(f"not finished: {running}")
    summary = f"{_count(num_done, 'measurement')} taken, {len(failed)} failed, {len(skipped)} skipped"
    return num_done > 0 and not failed, summary, _at_most(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]


def _at_most(lines: Sequence[str]) -> tuple[str, ...]:
    rest = len(lines) - _MAX_LINES
    return (*lines[:_MAX_LINES], f"and {rest} more") if rest > 0 else tuple(lines)


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def _wait(process: subprocess.Popen[bytes], *, limit_s: float, show: Callable[[], None]) -> bool:
    """Return True if the process has exited within the limit."""
    ends_s = time.monotonic() + limit_s
    while (left_s := ends_s - time.monotonic()) > 0:
        try:
            process.wait(min(_SHOW_EVERY_S, left_s))
            return True
        except subprocess.TimeoutExpired:
            if left_s > _SHOW_EVERY_S:
                show()
    return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes, and wait until their GPU memory is free for the next part."""
    ends_s = time.monotonic() + _KILLED_S
    while _signal(process, signal.SIGKILL) and time.monotonic() < ends_s:
        process.poll()
        time.sleep(0.05)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Send a signal to the process group, which may outlive its leader; return True if any process is left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _last_line(log: Path) -> str:
    return (_tail(log, num_lines=1) or ("no output yet",))[-1]


def _tail(log: Path, *, num_lines: int = 8) -> tuple[str, ...]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8000))
        return tuple(file.read().decode(errors="replace").strip().splitlines()[-num_lines:])


def _shorten(log: Path) -> None:
    """Keep only the beginning and the end of a log that has become too long to copy."""
    size_bytes = log.stat().st_size
    if size_bytes > _MAX_LOG_BYTES:
        with log.open("rb") as file:
            begin = file.read(_MAX_LOG_BYTES // 2)
            file.seek(size_bytes - _MAX_LOG_BYTES // 2)
            end = file.read()
        log.write_bytes(begin + f"\n[{size_bytes - _MAX_LOG_BYTES} bytes omitted]\n".encode() + end)
