"""Deep check of a `video` sample: decode every frame and compare the JSON member with the index row."""

from dataclasses import asdict
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import av.error

from clipmill.manifests.formatting import count_noun
from clipmill.manifests.keys import chunk_key
from clipmill.manifests.publish import parse_json
from clipmill.prep.core.column import CheckedSample, DeepCode
from clipmill.prep.core.failures import SourceFailure
from clipmill.prep.video.span_task import check_chunk, read_chunk


def check_video(row: dict[str, Any], members: dict[str, bytes], split: str) -> CheckedSample:
    """Compare a chunk with its index row; only one frame is in memory at a time."""
    found, num_decoded = _check_video(members["mp4"], row)
    return CheckedSample([*found, *check_description(row, members, split=split)], num_decoded)


def check_description(row: dict[str, Any], members: dict[str, bytes], *, split: str) -> list[tuple[DeepCode, str]]:
    """Compare the JSON member of a chunk, and its txt member if it has one, with the index row."""
    try:
        description = parse_json(members["json"])
        captions = [caption["text"] for caption in description["captions"]]
        fps, begin_s, end_s = (Fraction(*description[name]) for name in ("fps", "begin_s", "end_s"))
        stated = {
            name: description[name]
            for name in ("key", "video_id", "split", "num_frames", "width", "height", "codec", "span_fingerprint")
        }
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        return [(DeepCode.JSON_DIFFERS, f"the json member cannot be read: {error!r}")]
    start_ms = round(begin_s * 1000)
    stated |= {"start_ms": start_ms, "fps_num": fps.numerator, "fps_den": fps.denominator}
    expected = {name: split if name == "split" else row[name] for name in stated}
    expected["key"] = chunk_key(row["video_id"], row["start_ms"])
    differences = [
        (DeepCode.JSON_DIFFERS, f"{name}: {stated[name]!r} in the json member, {expected[name]!r} in the index")
        for name in stated
        if stated[name] != expected[name]
    ]
    if expected["key"] != row["key"]:
        differences.append((DeepCode.JSON_DIFFERS, f"key: {row['key']!r} in the index, expected {expected['key']!r}"))
    if (end_s - begin_s) * fps != row["num_frames"]:
        message = f"begin_s and end_s do not match {count_noun(row['num_frames'], 'frame')}"
        differences.append((DeepCode.JSON_DIFFERS, message))
    if "txt" in members and members["txt"] != "\n".join(captions).encode("utf-8", "replace"):
        differences.append((DeepCode.JSON_DIFFERS, "the txt member differs from the captions in the json member"))
    return differences


def _check_video(content: bytes, row: dict[str, Any]) -> tuple[list[tuple[DeepCode, str]], int]:
    """Return the problems of the video stream and the number of frames decoded."""
    try:
        facts = read_chunk(content, fps=Fraction(row["fps_num"], row["fps_den"]))
        check_chunk(
            facts,
            num_frames=row["num_frames"],
            size=(row["width"], row["height"]),
            codec=row["codec"],
            size_bytes=len(content),
        )
    except SourceFailure as failure:
        return [(DeepCode.PACKETS_DIFFER, failure.message)], 0
    found = [
        (DeepCode.PACKETS_DIFFER, f"{name} in the index differs from the demuxed packets")
        for name, value in asdict(facts).items()
        if row[name] != value
    ]
    try:
        num_decoded, difference = _decode(content, row)
    except av.error.FFmpegError as error:
        return [*found, (DeepCode.DECODE_ERRORS, str(error))], 0
    if difference is not None:
        found.append(difference)
    return found, num_decoded


def _decode(content: bytes, row: dict[str, Any]) -> tuple[int, tuple[DeepCode, str] | None]:
    fps, size = Fraction(row["fps_num"], row["fps_den"]), (row["width"], row["height"])
    num_decoded = 0
    with av.open(BytesIO(content), "r", format="mp4") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        # Fail instead of concealing errors: not every decoder marks the frames in which it concealed an error.
        stream.codec_context.options = {"err_detect": "explode"}
        for frame in container.decode(stream):
            if frame.is_corrupt:
                return num_decoded, (DeepCode.DECODE_ERRORS, f"frame {num_decoded} is damaged")
            if frame.pts is None or frame.time_base is None or frame.pts * frame.time_base * fps != num_decoded:
                return num_decoded, (DeepCode.FRAMES_DIFFER, f"frame {num_decoded} has unexpected pts {frame.pts}")
            if (frame.width, frame.height) != size:
                found = f"frame {num_decoded} has {frame.width}x{frame.height} pixels, expected {size[0]}x{size[1]}"
                return num_decoded, (DeepCode.FRAMES_DIFFER, found)
            num_decoded += 1
    if num_decoded != row["num_frames"]:
        return num_decoded, (DeepCode.FRAMES_DIFFER, f"{num_decoded} frames decoded, expected {row['num_frames']}")
    return num_decoded, None
