"""Find the ffmpeg program, check its features, and run it safely. No other module starts ffmpeg.

The program is `$CLIPMILL_FFMPEG` if set, otherwise the `ffmpeg` on PATH if it is recent enough, otherwise the program
in the imageio-ffmpeg wheel.

`require_success` maps ffmpeg's standard error to failure codes, with a one-line message that is identical in every run.
An exit status of 0 does not prove success: for a truncated Matroska file or GIF frame, ffmpeg prints one line and
encodes the readable part. On the other hand, most lines at level `error` are harmless, for example when decoding starts
in an open GOP after a seek. Therefore a run with exit status 0 counts as failed only if ffmpeg prints a line that
matches `_LOSSES`.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from clipmill.manifests.errors import FailedWork, UserError
from clipmill.prep.core.failures import FailureCode, SourceFailure, loss_code
from clipmill.prep.engines import CRASH_SIGNALS, die_with_parent, exit_reason
from clipmill.prep.video.codecs import CODECS

PROGRAM_VARIABLE = "CLIPMILL_FFMPEG"
MIN_VERSION = (6, 1)  # first version with -stats_enc_pre, which reports the timestamp of every frame
_MIN_RELEASE = ".".join(map(str, MIN_VERSION))
_TRIES, _QUERY_LIMIT_S = 3, 30.0  # for queries that usually take hundredths of a second
_POLL_S = 0.1
_KILL_GRACE_S = 2.0
_STDERR_BYTES = 4000  # number of bytes to keep from the start of the output, and from its end

# Patterns and failure codes for missing or unreadable data, at any exit status. The first matching pattern wins.
_LOSSES = (
    (r"File ended prematurely", FailureCode.SOURCE_TRUNCATED),
    (r"CRC mismatch!", FailureCode.DECODE_ERRORS),  # ffmpeg skips this page of an Ogg file
    (r"exceeds containing master element", FailureCode.DECODE_ERRORS),  # ffmpeg skips the rest of a Matroska cluster
    (r"invalid as first byte of an EBML number", FailureCode.DECODE_ERRORS),
    (r"corrupt input packet", FailureCode.DECODE_ERRORS),
    (r"Error during demuxing", FailureCode.DECODE_ERRORS),
    (r"LZW decode failed", FailureCode.DECODE_ERRORS),
    (r"corrupt decoded frame", FailureCode.DECODE_ERRORS),
)
# Errors of the operating system that make a run fail.
_SYSTEM_ERRORS = (
    (os.strerror(errno.ENOSPC), FailureCode.DISK_FULL),
    (os.strerror(errno.EDQUOT), FailureCode.DISK_FULL),
    (os.strerror(errno.ENOMEM), FailureCode.OUT_OF_MEMORY),
    (os.strerror(errno.ENOENT), FailureCode.SOURCE_MISSING),
    (os.strerror(errno.EACCES), FailureCode.SOURCE_UNREADABLE),
    (os.strerror(errno.EIO), FailureCode.IO_ERROR),
)
# Damage that terminates a run.
_DAMAGE = (
    *_LOSSES,
    (r"error while decoding", FailureCode.DECODE_ERRORS),
    (r"Error submitting packet to decoder", FailureCode.DECODE_ERRORS),
    (r"Error processing packet in decoder", FailureCode.DECODE_ERRORS),
    (r"Invalid data found", FailureCode.DECODE_ERRORS),
    (r"corrupt", FailureCode.DECODE_ERRORS),
)
# Messages from ffmpeg's threads and files that are only consequences of an earlier error.
_CONSEQUENCES = re.compile(
    r"Task finished with error code|Terminating thread with return code|Last message repeated|Conversion failed"
    r"|Error opening (in|out)put files?\b|Nothing was written|Error sending frames to consumers|Error while filtering"
    r"|Error processing packet in decoder|Error submitting packet to decoder|corrupt decoded frame"
    r"|Cannot determine format of input|Could not open encoder before EOF|Warning MVs not available"
)
_CONTEXTS = re.compile(r"^(?:\[[^\]]*\]\s*)+")
_CONTEXT_NAME = re.compile(r"\[(?:[^\]]*[/:])?([^\]/:@]*?)\s*(?:@ 0x[0-9a-f]+)?\]")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_MAX_MESSAGE_CHARS = 300
_STOPPED_STATUS = 255  # exit status of ffmpeg after SIGTERM, SIGINT or SIGHUP


@dataclass(frozen=True)
class Ffmpeg:
    """A working ffmpeg program.

    Attributes:
        path: Path or name of the program.
        version: Version, such as "9.0.2", or the name of the build.
        outdated_program: Program on PATH that is too old, with its version; None if there is no such program.
    """

    path: str
    version: str
    outdated_program: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of an ffmpeg run.

    Attributes:
        return_code: Exit status, or the negative number of the signal that ended the process.
        stderr_head: Start of the standard error output, which contains the first error.
        stderr_tail: End of the standard error output.
        timed_out: True if the process was killed because it exceeded its wall-clock limit.
        cpu_s: User and system CPU time of the process in seconds.
    """

    return_code: int
    stderr_head: str
    stderr_tail: str
    timed_out: bool
    cpu_s: float

    @property
    def stderr(self) -> str:
        """Standard error output; if it is long, only its start and end."""
        return self.stderr_head if self.stderr_head == self.stderr_tail else f"{self.stderr_head}\n{self.stderr_tail}"


def find_ffmpeg() -> Ffmpeg:
    """Find the program, in the order described at the top of this module.

    Raises:
        UserError: No program was found, a program does not run, or the program that the user selected is too old.
        FailedWork: Every query for the version was killed or timed out.
    """
    selected_program = os.environ.get(PROGRAM_VARIABLE)
    if selected_program:
        version = _version(selected_program, where=f"${PROGRAM_VARIABLE}")
        if not has_version(version, MIN_VERSION):
            raise UserError(
                f'the ffmpeg program "{selected_program}" (${PROGRAM_VARIABLE}) has version {version}, but '
                f"{_MIN_RELEASE} or newer is required",
                hint=f"set ${PROGRAM_VARIABLE} to a newer program, or unset it to use the default program",
            )
        return Ffmpeg(path=selected_program, version=version)
    path, outdated_program = shutil.which("ffmpeg"), None
    if path:
        version = _version(path, where="PATH")
        if has_version(version, MIN_VERSION):
            return Ffmpeg(path=path, version=version)
        outdated_program = f"{path} {version}"
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UserError(
            "no ffmpeg program found",
            hint=f"install clipmill[prep], which includes one, or set ${PROGRAM_VARIABLE} to a program",
        ) from None
    # Look for the file in the package first: `get_ffmpeg_exe` runs this program and, if the run is killed, returns a
    # different program or none.
    bundled_path = next(map(str, Path(imageio_ffmpeg.__file__).parent.glob("binaries/ffmpeg-*")), None)
    if bundled_path is None:
        try:
            bundled_path = imageio_ffmpeg.get_ffmpeg_exe()
        except RuntimeError as error:
            raise UserError(
                f"the imageio-ffmpeg package does not contain an ffmpeg program: {error}",
                hint=f"install the wheel of the package, or set ${PROGRAM_VARIABLE} to a working program",
            ) from None
    return Ffmpeg(
        bundled_path, _version(bundled_path, where="the imageio-ffmpeg package"), outdated_program=outdated_program
    )


def version_mismatch(version: str) -> str | None:
    """Return the reason why this machine cannot execute a plan for ffmpeg `version`; None if it can."""
    try:
        available_version = find_ffmpeg().version
    except (UserError, FailedWork) as error:
        return str(error)
    return None if available_version == version else f"ffmpeg is {available_version}, but the plan requires {version}"


@cache
def _version(path: str, *, where: str) -> str:
    try:
        result = _query([path, "-version"], what=f'the ffmpeg program "{path}" ({where})')
        result.check_returncode()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f'the ffmpeg program "{path}" ({where}) does not run: {error}',
            hint=f"set ${PROGRAM_VARIABLE} to a working program",
        ) from None
    fields = result.stdout.split()
    if fields[:2] != ["ffmpeg", "version"] or len(fields) < 3:
        raise UserError(f'"{path}" ({where}) is not ffmpeg', hint=f"set ${PROGRAM_VARIABLE} to an ffmpeg program")
    return fields[2]


def _query(command: Sequence[str], *, what: str) -> "subprocess.CompletedProcess[str]":
    """Run a short ffmpeg command; retry it if it is killed or takes too long, for example because memory is short.

    Raises:
        OSError: The command cannot be started.
        FailedWork: Every attempt was killed or took too long; the message begins with `what`.
    """
    problem = ""
    for _ in range(_TRIES):
        try:
            result = subprocess.run(list(command), capture_output=True, text=True, timeout=_QUERY_LIMIT_S)
        except subprocess.TimeoutExpired:
            problem = f"did not respond within {_QUERY_LIMIT_S:.0f} s"
            continue
        if result.returncode >= 0:
            return result
        problem = f"was ended by {exit_reason(result.returncode)}"
    raise FailedWork(f"{what} {problem}, {_TRIES} times; run the same command again")


def has_version(version: str, minimum: tuple[int, int]) -> bool:
    """Return True if a version is `minimum` or newer. Git builds, such as N-12345-g..., count as new enough."""
    digits = version.lstrip("n").split("-")[0].split(".")
    return not digits[0].isdigit() or tuple(int(digit) for digit in digits[:2] if digit.isdigit()) >= minimum


@cache
def require_encoder(ffmpeg: Ffmpeg, codec_name: str) -> None:
    """Check that a program can encode with a codec, by encoding four frames.

    Raises:
        UserError: The program lacks the encoder, or the machine lacks the hardware that the encoder requires.
        FailedWork: Every run of the program was killed or took too long.
    """
    encoder = CODECS[codec_name].encoder
    encoder_text = f'"{encoder}" (required by --codec {codec_name})'
    what = f"the test of the encoder {encoder_text}"
    encoders = _query([ffmpeg.path, "-hide_banner", "-encoders"], what=what)
    if encoders.returncode == 0 and not any(line.split()[1:2] == [encoder] for line in encoders.stdout.splitlines()):
        raise UserError(
            f"ffmpeg {ffmpeg.version} has no encoder {encoder_text}",
            hint=f"use --codec h264, or set ${PROGRAM_VARIABLE} to an ffmpeg built with this encoder",
        )
    source = ["-f", "lavfi", "-i", "color=size=256x256:rate=30", "-frames:v", "4"]
    trial = _query(
        [ffmpeg.path, "-v", "error", "-nostdin", *source, "-c:v", encoder, "-f", "null", "-"],
        what=what,
    )
    if trial.returncode:
        reason = cause(trial.stderr) if trial.stderr.strip() else f"exit status {trial.returncode}"
        raise UserError(
            f"the encoder {encoder_text} does not work on this machine: {reason}",
            hint="use --codec h264, or a machine with the required hardware",
        )


def run(
    arguments: Sequence[str], *, folder: Path, limit_s: float, on_poll: Callable[[], None] = lambda: None
) -> Outcome:
    """Run ffmpeg until it ends, for at most `limit_s` seconds of wall-clock time.

    The process leads a process group, which is killed with all its members if the limit is exceeded or an exception is
    raised here. If the calling process itself is killed, the kernel terminates ffmpeg as well.

    Args:
        arguments: Program and arguments.
        folder: Working directory.
        limit_s: Wall-clock limit in seconds.
        on_poll: Function to call about ten times a second, for progress reports.
    """
    # Read the output from a pipe: a message about a full disk could not be written to a file.
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    try:
        process = subprocess.Popen(
            list(arguments),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=write_end,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        begin_s, timed_out, head, tail = time.monotonic(), False, b"", b""
        try:
            while (exit_state := _wait(process, _POLL_S)) is None:
                head, tail = _read_ends(read_end, head, tail)
                on_poll()
                if time.monotonic() - begin_s > limit_s:
                    timed_out = True
                    break
        finally:
            if process.returncode is None:
                exit_state = _kill_group(process)
        head, tail = _read_ends(read_end, head, tail)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert exit_state is not None
    return_code, cpu_s = exit_state
    head_text, tail_text = (content.decode("utf-8", "replace").strip() for content in (head, tail))
    return Outcome(return_code, stderr_head=head_text, stderr_tail=tail_text, timed_out=timed_out, cpu_s=cpu_s)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> tuple[int, float] | None:
    """Wait up to `seconds`; return (return code, CPU seconds) once the process has ended, otherwise None."""
    deadline_s = time.monotonic() + seconds
    pause_s = 0.002
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def _kill_group(process: "subprocess.Popen[bytes]") -> tuple[int, float] | None:
    for kill_signal in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kill_signal)
        except ProcessLookupError:
            pass
        if (exit_state := _wait(process, _KILL_GRACE_S)) is not None:
            return exit_state
    return -signal.SIGKILL, 0.0


def _read_ends(descriptor: int, head: bytes, tail: bytes) -> tuple[bytes, bytes]:
    """Empty a pipe without blocking; return the first and the last bytes of everything read so far."""
    while True:
        try:
            content = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return head, tail
        if not content:
            return head, tail
        head = (head + content)[:_STDERR_BYTES] if len(head) < _STDERR_BYTES else head
        tail = (tail + content)[-_STDERR_BYTES:]


def require_success(outcome: Outcome, *, limit_s: float) -> None:
    """Check that ffmpeg read the complete source and wrote its files.

    Args:
        limit_s: Wall-clock limit of the run in seconds.

    Raises:
        SourceFailure: ffmpeg failed. The message is the line that states the cause.
    """
    text = outcome.stderr
    if outcome.timed_out:
        raise SourceFailure(FailureCode.TIMEOUT, f"ffmpeg did not finish within {limit_s:.0f} s")
    # A signal may have ended ffmpeg or a wrapper script. On SIGTERM, ffmpeg completes its files and exits with 255.
    signal_number: int | None = None
    if outcome.return_code < 0:
        signal_number = -outcome.return_code
    elif outcome.return_code == _STOPPED_STATUS and (not text or "Immediate exit requested" in text):
        signal_number = signal.SIGTERM
    elif outcome.return_code == 128 + signal.SIGKILL:
        signal_number = signal.SIGKILL
    if signal_number is not None:
        raise SourceFailure(
            FailureCode.IO_ERROR  # a file reached its size limit
            if signal_number == signal.SIGXFSZ
            else loss_code(crashed=signal_number in CRASH_SIGNALS),
            f"ffmpeg ended with {exit_reason(-signal_number)}",
        )
    patterns = _LOSSES if outcome.return_code == 0 else (*_SYSTEM_ERRORS, *_DAMAGE)
    for pattern, code in patterns:
        if re.search(pattern, text):
            raise SourceFailure(code, cause(text))
    if outcome.return_code:
        raise SourceFailure(FailureCode.ENCODE_FAILED, f"ffmpeg exited with {outcome.return_code}: {cause(text)}")


def cause(text: str) -> str:
    """Return the line of ffmpeg's standard error that states the cause, without parts that vary between runs.

    This is the first line about damage or an operating system error that is not only a consequence of another error. If
    there is no such line, it is the first line that is not a consequence. If every line is a consequence, it is the
    first line about damage or a system error or, failing that, the first line. Memory addresses are removed:
    `[in#0/mpegts @ 0x5616b5]` becomes `mpegts`.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no message"
    causes = [line for line in lines if not _CONSEQUENCES.search(line)]
    cause_pattern = re.compile("|".join(pattern for pattern, _ in (*_SYSTEM_ERRORS, *_DAMAGE)))
    line = next(chain(filter(cause_pattern.search, causes), causes, filter(cause_pattern.search, lines), lines))
    contexts = _CONTEXTS.match(line)
    message = _ADDRESS.sub("0x...", line[contexts.end() :] if contexts else line)
    names = _CONTEXT_NAME.findall(contexts.group()) if contexts else []
    text = f"{names[-1]}: {message}" if names and names[-1] else message
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[: _MAX_MESSAGE_CHARS - 3]}..."
