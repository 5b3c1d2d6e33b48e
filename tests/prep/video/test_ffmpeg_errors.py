"""Tests of ffmpeg's messages on damaged files, and the failures that they stand for."""

import pytest

from clipmill.prep.core.failures import FailureCode, SourceFailure
from clipmill.prep.video.ffmpeg import Outcome, cause, require_success

CUT_MPEG = """
[in#0/mpeg @ 0x564d041c2e40] corrupt input packet in stream 0
[in#0/mpeg @ 0x564d041c2e40] Task finished with error code: -1094995529 (Invalid data found when processing input)
[in#0/mpeg @ 0x564d041c2e40] Terminating thread with return code -1094995529 (Invalid data found when processing input)
"""
CUT_WMV = """
[wmv2 @ 0x561f795f3080] Error at MB: 59
[vist#0:0/wmv2 @ 0x561f795bbdc0] [dec:wmv2 @ 0x561f795f24c0] corrupt decoded frame
[vist#0:0/wmv2 @ 0x561f795bbdc0] [dec:wmv2 @ 0x561f795f24c0] Error processing packet in decoder: Invalid data found
[vist#0:0/wmv2 @ 0x561f795bbdc0] [dec:wmv2 @ 0x561f795f24c0] Terminating thread with return code -1094995529
"""
CONCEALED_MPEG4 = """
[vist#0:0/mpeg4 @ 0x56157588f900] [dec:mpeg4 @ 0x56157586fe40] corrupt decoded frame
[vist#0:0/mpeg4 @ 0x56157588f900] [dec:mpeg4 @ 0x56157586fe40] Error processing packet in decoder: Invalid data found
[vist#0:0/mpeg4 @ 0x56157588f900] [dec:mpeg4 @ 0x56157586fe40] Task finished with error code: -1094995529 (Invalid data)
[vist#0:0/mpeg4 @ 0x56157588f900] [dec:mpeg4 @ 0x56157586fe40] Terminating thread with return code -1094995529
"""
CUT_FLV = """
[in#0/flv @ 0x56105d3cf180] Attempted to read next track in single-track mode.
[h264 @ 0x56105d3d05c0] Invalid NAL unit size (92 > 87).
[h264 @ 0x56105d3d05c0] missing picture in access unit with size 91
[in#0/flv @ 0x56105d3cee40] corrupt input packet in stream 0
[in#0/flv @ 0x56105d3cee40] Task finished with error code: -1094995529 (Invalid data found when processing input)
"""
CUT_RM = """
Truncating packet of size 1112 to 839
[in#0/rm @ 0x5581b64bd180] Impossibly sized packet
[in#0/rm @ 0x5581b64bce00] Error during demuxing: Invalid data found when processing input
[in#0/rm @ 0x5581b64bce00] Task finished with error code: -1094995529 (Invalid data found when processing input)
"""
GONE = """
[in#0 @ 0x564331532e00] Error opening input: No such file or directory
Error opening input file gone.mp4.
Error opening input files: No such file or directory
"""
FULL = """
[out#0/mp4 @ 0x5635fb63e640] Could not write header (incorrect codec parameters ?): No space left on device
[vf#0:0 @ 0x5635fb59d400] Error sending frames to consumers: No space left on device
[out#0/mp4 @ 0x5635fb63e640] Nothing was written into output file, because at least one of its streams got no packets.
"""
DAMAGED_MKV = """
[in#0/matroska,webm @ 0x559418acf200] 0x00 at pos 7030 (0x1b76) invalid as first byte of an EBML number
[h264 @ 0x559418b64340] error while decoding MB 6 6, bytestream -5
[vist#0:0/h264 @ 0x559418af6380] [dec:h264 @ 0x559418afc740] corrupt decoded frame
"""
OLDER = """
[matroska,webm @ 0x5581] File ended prematurely
"""
JOINED_LATE = """
[h264 @ 0x55c0a8] co located POCs unavailable
[h264 @ 0x55c0a8] mmco: unref short failure
[null @ 0x55c0a8] Application provided invalid, non monotonically increasing dts to muxer in stream 0: 5 >= 5
"""


@pytest.mark.parametrize(
    ("return_code", "stderr", "code", "message"),
    [
        (183, CUT_MPEG, FailureCode.DECODE_ERRORS, "mpeg: corrupt input packet in stream 0"),
        (183, CUT_WMV, FailureCode.DECODE_ERRORS, "wmv2: Error at MB: 59"),
        (183, CONCEALED_MPEG4, FailureCode.DECODE_ERRORS, "mpeg4: corrupt decoded frame"),
        (183, CUT_FLV, FailureCode.DECODE_ERRORS, "flv: corrupt input packet in stream 0"),
        (183, CUT_RM, FailureCode.DECODE_ERRORS, "rm: Error during demuxing: Invalid data found when processing input"),
        (254, GONE, FailureCode.SOURCE_MISSING, "in#0: Error opening input: No such file or directory"),
        (
            228,
            FULL,
            FailureCode.DISK_FULL,
            "mp4: Could not write header (incorrect codec parameters ?): No space left on device",
        ),
        (
            183,
            DAMAGED_MKV,
            FailureCode.DECODE_ERRORS,
            "matroska,webm: 0x00 at pos 7030 (0x1b76) invalid as first byte of an EBML number",
        ),
        (0, "[gif @ 0x55b54a5af9c0] LZW decode failed", FailureCode.DECODE_ERRORS, "gif: LZW decode failed"),
        (0, OLDER, FailureCode.SOURCE_TRUNCATED, "matroska,webm: File ended prematurely"),
        (0, "[in#0/ogg @ 0x55] CRC mismatch!", FailureCode.DECODE_ERRORS, "ogg: CRC mismatch!"),
        (1, "Segmentation\nfault at 0x7f00deadbeef", FailureCode.ENCODE_FAILED, "ffmpeg exited with 1: Segmentation"),
        (1, "at 0x7f00deadbeef", FailureCode.ENCODE_FAILED, "ffmpeg exited with 1: at 0x..."),
        (1, "", FailureCode.ENCODE_FAILED, "ffmpeg exited with 1: no message"),
        (-9, "", FailureCode.WORKER_LOST, "ffmpeg ended with signal 9 (out of memory?)"),
        (137, "", FailureCode.WORKER_LOST, "ffmpeg ended with signal 9 (out of memory?)"),
        (-15, "", FailureCode.WORKER_LOST, "ffmpeg ended with signal 15 (SIGTERM)"),
        (
            -25,
            "",
            FailureCode.IO_ERROR,
            "ffmpeg ended with signal 25 (SIGXFSZ: the file size limit of the shell, see `ulimit -f`)",
        ),
        (-60, "", FailureCode.WORKER_LOST, "ffmpeg ended with signal 60 (no name)"),
        (-11, "", FailureCode.WORKER_CRASHED, "ffmpeg ended with signal 11 (SIGSEGV)"),
        (-6, "", FailureCode.WORKER_CRASHED, "ffmpeg ended with signal 6 (SIGABRT)"),
        (0, JOINED_LATE, None, ""),
        (0, "", None, ""),
    ],
)
def test_the_line_that_states_the_cause_is_told_and_nothing_that_differs_from_run_to_run(
    return_code: int, stderr: str, code: FailureCode | None, message: str
) -> None:
    stderr = stderr.strip()
    outcome = Outcome(return_code=return_code, stderr_head=stderr, stderr_tail=stderr, timed_out=False, cpu_s=0.0)
    if code is None:
        return require_success(outcome, limit_s=60)
    with pytest.raises(SourceFailure) as caught:
        require_success(outcome, limit_s=60)
    assert (caught.value.code, caught.value.message) == (code, message)
    return None


def test_a_cause_that_stood_first_is_found_though_much_was_said_after_it() -> None:
    first = "[mpeg2video @ 0x5571083b74c0] ac-tex damaged at 6 1"
    head, tail = f"{first}\n[h264 @ 0x1] cut in the mid", "dle of a line\n[vist#0:0 @ 0x5571] Conversion failed!"
    outcome = Outcome(return_code=183, stderr_head=head, stderr_tail=tail, timed_out=False, cpu_s=0.0)
    assert cause(outcome.stderr) == "mpeg2video: ac-tex damaged at 6 1"
