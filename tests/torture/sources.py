"""Sources with unusual timelines, geometry, changes and tracks: chunks show what a player shows, or do not exist.

Each case writes one source (`source_draws`, `source_files`), chunks it into short chunks, and compares every frame of
every chunk with an independent decode (`players`). A source may be rejected only with a failure that is listed in
`REFUSALS` for one of its traits; then none of its chunks may exist.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.torture import bases
from tests.torture.cases import Broken, Case
from tests.torture.checks import ended_well, no_litter, nothing_in
from tests.torture.commands import Ran
from tests.torture.numbered_pictures import color_error
from tests.torture.players import Chunk, Showing, decode, read_chunks
from tests.torture.source_containers import CONTAINERS
from tests.torture.source_draws import draw_source
from tests.torture.source_files import Source
from tests.torture.workspace import Workspace

PART = "sources"
_NUM_CASES = 200  # cases per container
_FLAGS = ("chunk", "--len", "200ms", "--preset", "ultrafast", "--short-side", 64, "--crf", 18)
_RATES = (30, 30, 25, 10)
# Failures with which a source may be rejected, by trait, each with a word for the true reason that the message must
# contain.
REFUSALS: dict[str, dict[str, str]] = {}
_MAX_RATIO_ERROR = 0.07  # for an image of 64 pixels with even side lengths
_SOUND_MARGIN_S = 0.3  # the audio of a source changes at full seconds
_MAX_COLOR_ERROR = 14  # after two encodes; a wrong matrix causes an error of 25 or more


def cases(seed: int, workspace: Workspace) -> dict[str, Callable[[], Iterator[Case]]]:
    """Return the cases for each container, which are drawn from `seed`."""
    return {name: partial(_cases, seed, workspace, name) for name in CONTAINERS}


def _cases(seed: int, workspace: Workspace, container: str) -> Iterator[Case]:
    for number in range(_NUM_CASES):
        random = Random(f"{seed}/{PART}/{container}/{number}")
        source = draw_source(random, container)
        fps = random.choice(_RATES)
        audio = random.choice(("drop", "keep"))
        kind = "+".join(source.options) or "plain"
        name = f"{PART}/{container}/{number:03d}-{source.name}-{audio}-{fps}"
        yield Case(name, kind, partial(_try, workspace, source, fps=fps, audio=audio))


def _try(workspace: Workspace, source: Source, folder: Path, *, fps: int, audio: str) -> None:
    videos = folder / "videos"
    videos.mkdir()
    path = videos / f"video.{source.container}"
    source.write(path)
    showing = decode(path, source)
    _require_as_drawn(source, showing)
    bases.prep(workspace, folder, "manifest", "folder", videos)
    arguments = (*_FLAGS, *bases.ENGINE, "--fps", fps, "--audio", audio, "--data", folder / "data")
    ran = ended_well(workspace.commands.run("prep", arguments, scratch=folder / "tmp"), status={0, 1})
    chunks, failures = read_chunks(folder / "data"), _failures(folder / "data")
    if chunks and (failures or ran.status):
        raise Broken(f"taken in part: {len(chunks)} chunks, failures {failures}: {ran.describe()}")
    if not chunks:
        _require_reason(source, failures, ran)
        return
    try:
        _require_timeline(chunks, showing, source, fps=fps)
        _require_pictures(chunks, source)
        if audio == "keep" and source.has_sound and not {"head", "tail"} & source.options.keys():
            _require_sound(chunks, showing, source)
    except Broken as broken:
        raise Broken(f"{broken}\n{ran.describe()}") from None
    no_litter(folder / "data")
    nothing_in(folder / "tmp")


def _require_as_drawn(source: Source, showing: Showing) -> None:
    """Check the case itself: the file contains the drawn frames in order, and a player can read them."""
    hidden = [number for number in range(source.num_frames) if _is_hidden(source, number)]
    drawn = [number for number in range(source.num_frames) if number not in hidden]
    lost = set(drawn) - set(showing.numbers)
    if "size" in source.options and source.codec.startswith("mpeg"):
        lost -= {source.options["size"]["frame"] - 1}  # libav's decoder drops the frame before a change of size
    expected = float(source.shown_ratio(showing.numbers[0]))
    if abs(showing.ratio / expected - 1) > 0.01:
        raise AssertionError(f"the file is {showing.ratio:.3f} times as wide as high, not {expected:.3f} as drawn")
    if lost or sorted(showing.numbers) != list(showing.numbers) or set(showing.numbers) - set(drawn):
        raise AssertionError(f"the file differs from what was drawn: {showing.numbers}, without {sorted(lost)}")


def _is_hidden(source: Source, number: int) -> bool:
    begin_s, options = source.begins_s[number], source.options
    return bool(begin_s < options.get("head", 0) or begin_s >= options.get("tail", source.end_s))


def _failures(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in data.glob("video/*/failures.jsonl") for line in path.read_text().splitlines()]


def _require_reason(source: Source, failures: list[dict[str, Any]], ran: Ran) -> None:
    """Check that a rejection is legitimate, states the true reason, and sets the exit status of the command."""
    if len(failures) != 1 or ran.status != 1:
        raise Broken(f"neither chunks nor a failure: {failures}: {ran.describe()}")
    (failure,) = failures
    legitimate = [refusals for trait, refusals in REFUSALS.items() if trait in source.options]
    if not any(refusals.get(failure["code"], "no such word") in failure["message"] for refusals in legitimate):
        raise Broken(f"refused without a legitimate reason: {failure['code']}: {failure['message']}")
    if "video" not in ran.output:
        raise Broken(f"refused, but not named: {ran.describe()}")


def _require_timeline(chunks: list[Chunk], showing: Showing, source: Source, *, fps: int) -> None:
    """Check that each output frame shows the source frame of its time, and that nothing is missing."""
    num_frames = 0
    shown: set[int] = set()
    for chunk in chunks:
        if chunk.begin_s * fps != num_frames:
            raise Broken(f"a chunk begins at {float(chunk.begin_s):.3f} s, the one before ends at frame {num_frames}")
        for number, reading in enumerate(chunk.readings, num_frames):
            due = showing.due(number / fps, (number + 0.5) / fps)
            if reading.number not in due:
                raise Broken(
                    f"output frame {number} ({number / fps:.3f} s) shows {_describe(reading.number)}; on show is"
                    f" {' or '.join(map(str, sorted(due)))}"
                )
            shown.add(reading.number)
        num_frames += len(chunk.readings)
        if chunk.end_s * fps != num_frames:
            raise Broken(f"a chunk ends at {float(chunk.end_s):.3f} s, and its last frame is {num_frames - 1}")
    end_s, slack_s = num_frames / fps, showing.border_s + 1 / fps + 1 / float(source.fps)
    beyond_s = source.options.get("dropped-tail", 0) / source.fps
    if not showing.end_s - slack_s <= end_s <= showing.end_s + slack_s + beyond_s:
        raise Broken(f"the chunks end at {end_s:.3f} s, the source at {showing.end_s:.3f} s")
    last = min(showing.due(showing.end_s - 1 / fps, showing.end_s - 0.5 / fps))
    if max(shown) < last:
        raise Broken(f"the last frame of the chunks is {max(shown)}, that of the source {showing.numbers[-1]}")


def _require_pictures(chunks: list[Chunk], source: Source) -> None:
    """Check the shape of every frame, and its colors if the color description changes."""
    for chunk in chunks:
        for reading in chunk.readings:
            expected, ratio = float(source.shown_ratio(reading.number)), reading.width / reading.height
            if abs(ratio / expected - 1) > _MAX_RATIO_ERROR:
                raise Broken(
                    f"squeezed: frame {reading.number} is {ratio:.3f} times as wide as high, not {expected:.3f}"
                )
            if "change-colors" in source.options and color_error(reading) > _MAX_COLOR_ERROR:
                raise Broken(f"other colors: frame {reading.number} differs by {color_error(reading):.0f} levels")


def _require_sound(chunks: list[Chunk], showing: Showing, source: Source) -> None:
    """Check that the audio of each chunk is loud or silent at the right times, where these are unambiguous."""
    zero_s = showing.begins_s[0] - float(source.begins_s[showing.numbers[0]])
    for chunk in chunks:
        middle_s = float(chunk.begin_s + chunk.end_s) / 2 - zero_s
        around_s = np.linspace(middle_s - _SOUND_MARGIN_S, middle_s + _SOUND_MARGIN_S, 61)
        expected = {level for time_s in around_s for level in source.sound_levels(time_s)}
        if len(expected) > 1 or chunk.end_s - chunk.begin_s < _SOUND_MARGIN_S / 2:
            continue
        sound = np.zeros(1) if chunk.sound is None else chunk.sound
        middle = sound[len(sound) // 4 : len(sound) * 3 // 4 + 1]
        is_loud = bool(np.sqrt((middle**2).mean()) > 0.1) if len(middle) else False
        if {is_loud} != expected:
            word = "loud" if is_loud else "silent"
            raise Broken(f"the sound at {float(chunk.begin_s):.2f} s is {word}, but not that of the source")


def _describe(number: int) -> str:
    return "an unreadable picture" if number < 0 else f"frame {number}"
