"""Mapping of ffmpeg's standard error to failure codes, with a one-line message that is the same in every run.

An exit status of 0 does not prove success: for a truncated Matroska file or GIF frame, ffmpeg prints one line and
encodes what it can read. Most lines at level `error` are harmless, however (for example when decoding starts in an open
GOP after a seek), so that only those in `_LOSSES` make a run with exit status 0 fail.
"""

import errno
import os
import re
import signal
from itertools import chain

from clipmill.prep.core.failures import FailureCode, SourceFailure, loss_code
from clipmill.prep.engines import CRASH_SIGNALS, exit_reason
from clipmill.prep.video.ffmpeg import Outcome

# Missing or unreadable data, whatever the exit status: pattern and code. The first match decides.
_LOSSES = (
    (r"File ended prematurely", FailureCode.SOURCE_TRUNCATED),
    (r"CRC mismatch!", FailureCode.DECODE_ERRORS),  # of an Ogg page, which is then skipped
    (r"exceeds containing master element", FailureCode.DECODE_ERRORS),  # Matroska: the rest of a cluster is skipped
    (r"invalid as first byte of an EBML number", FailureCode.DECODE_ERRORS),
    (r"corrupt input packet", FailureCode.DECODE_ERRORS),
    (r"Error during demuxing", FailureCode.DECODE_ERRORS),
    (r"LZW decode failed", FailureCode.DECODE_ERRORS),
    (r"corrupt decoded frame", FailureCode.DECODE_ERRORS),
)
# Errors of the operating system that make a run fail.
_REFUSALS = (
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
# Messages of ffmpeg's threads and files that only follow an earlier error.
_CONSEQUENCES = re.compile(
    r"Task finished with error code|Terminating thread with return code|Last message repeated|Conversion failed"
    r"|Error opening (in|out)put files?\b|Nothing was written|Error sending frames to consumers|Error while filtering"
    r"|Error processing packet in decoder|Error submitting packet to decoder|corrupt decoded frame"
    r"|Cannot determine format of input|Could not open encoder before EOF|Warning MVs not available"
)
_CONTEXTS = re.compile(r"^(?:\[[^\]]*\]\s*)+")
_CONTEXT_NAME = re.compile(r"\[(?:[^\]]*[/:])?([^\]/:@]*?)\s*(?:@ 0x[0-9a-f]+)?\]")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_LONGEST_MESSAGE = 300
_STOPPED = 255  # exit status of ffmpeg after SIGTERM, SIGINT or SIGHUP


def require_success(outcome: Outcome, *, limit_s: float) -> None:
    """Return if ffmpeg read all of its source and wrote its files.

    Args:
        limit_s: wall-clock limit of the run in seconds.

    Raises:
        SourceFailure: it did not; the message is the line that states the cause.
    """
    text = outcome.stderr
    if outcome.timed_out:
        raise SourceFailure(FailureCode.TIMEOUT, f"ffmpeg did not finish within {limit_s:.0f} s")
    if (killed_by := _signal(outcome)) is not None:
        raise SourceFailure(
            loss_code(crashed=killed_by in CRASH_SIGNALS), f"ffmpeg ended with {exit_reason(-killed_by)}"
        )
    marks = _LOSSES if outcome.return_code == 0 else (*_REFUSALS, *_DAMAGE)
    for mark, code in marks:
        if re.search(mark, text):
            raise SourceFailure(code, cause(text))
    if outcome.return_code:
        raise SourceFailure(FailureCode.ENCODE_FAILED, f"ffmpeg exited with {outcome.return_code}: {cause(text)}")


def _signal(outcome: Outcome) -> int | None:
    """Return the signal that ended ffmpeg, or a program that started it; None if it ended by itself.

    On SIGTERM, ffmpeg finishes its files and exits with 255.
    """
    if outcome.return_code < 0:
        return -outcome.return_code
    if outcome.return_code == _STOPPED and (not outcome.stderr or "Immediate exit requested" in outcome.stderr):
        return signal.SIGTERM
    return signal.SIGKILL if outcome.return_code == 128 + signal.SIGKILL else None


def cause(text: str) -> str:
    """Return the line of ffmpeg's standard error that states the cause, without parts that vary between runs.

    This is the first line about damage or an error of the operating system that is not merely a consequence of another,
    otherwise any line that is not a consequence, otherwise a consequence (a decoder may conceal damage without a word).
    Of several, it is the first one. Memory addresses are removed: `[in#0/mpegts @ 0x5616b5]` becomes `mpegts`.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no message"
    causes = [line for line in lines if not _CONSEQUENCES.search(line)]
    telling = re.compile("|".join(mark for mark, _ in (*_REFUSALS, *_DAMAGE)))
    return _plain(next(chain(filter(telling.search, causes), causes, filter(telling.search, lines), lines)))


def _plain(line: str) -> str:
    contexts = _CONTEXTS.match(line)
    message = _ADDRESS.sub("0x...", line[contexts.end() :] if contexts else line)
    names = _CONTEXT_NAME.findall(contexts.group()) if contexts else []
    text = f"{names[-1]}: {message}" if names and names[-1] else message
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 3]}..."
