"""Source videos with unusual timelines, geometry, changes and tracks, in eight containers, drawn from a seed.

`draw_source` draws a `Source`, which says when each frame begins and what a player shows. `Source.write` writes its
file with PyAV, without code of the product. Headers that no muxer writes are written by `container_bytes`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np

from tests.torture import container_bytes
from tests.torture.numbered_pictures import MAX_NUMBER, draw_number

_SIZES = ((128, 96), (160, 96), (96, 128), (144, 112), (192, 112))
_RATES = ("10", "12", "15", "24000/1001", "25", "30", "30000/1001", "50", "60")
_MPEG_RATES = ("24000/1001", "25", "30000/1001", "30", "50")
_SAMPLES_PER_S = 48000
_LOUD_S = 1  # the sound of a source is loud and silent in turns of this length


@dataclass(frozen=True)
class Container:
    """A container, and what a source in it may have.

    Attributes:
        format: Name of libav's muxer.
        codecs: Video codecs.
        sound: Audio codec.
        traits: Names of `_TRAITS`.
        tick_s: Resolution of its timestamps in seconds.
    """

    format: str
    codecs: tuple[str, ...]
    sound: str
    traits: tuple[str, ...]
    tick_s: float
    rates: tuple[str, ...] = _RATES


_TIMED = ("offset", "gap", "vfr", "lead", "lag")
_EDITED = ("head", "tail", "mdhd", "fragments", "crop", "turn", "mirror", "aspect")
_TRACKS = ("two-videos", "default-second", "still-first")
CONTAINERS = {
    "mp4": Container(
        "mp4", ("libx264", "libx264", "mpeg4", "libvpx-vp9"), "aac", (*_TIMED, *_EDITED, *_TRACKS), 1 / 12800
    ),
    "mov": Container("mov", ("libx264", "mjpeg"), "aac", (*_TIMED, *_EDITED, *_TRACKS), 1 / 12800),
    "mkv": Container(
        "matroska",
        ("libx264", "libx264", "libvpx-vp9", "mpeg4"),
        "aac",
        (*_TIMED, "crop", "turn", "aspect", "size", *_TRACKS),
        1e-3,
    ),
    "webm": Container(
        "webm", ("libvpx", "libvpx-vp9"), "libopus", (*_TIMED, "restart", "size", "crop", "aspect"), 1e-3
    ),
    "ts": Container(
        "mpegts",
        ("libx264", "libx264", "mpeg2video"),
        "mp2",
        (*_TIMED, "restart", "aspect", "size", "change-aspect", "change-colors", "two-videos"),
        1 / 90000,
        _MPEG_RATES,
    ),
    "mpg": Container(
        "vob",
        ("mpeg2video", "mpeg1video"),
        "mp2",
        ("offset", "gap", "lead", "lag", "restart", "aspect", "size", "change-aspect"),
        1 / 90000,
        _MPEG_RATES,
    ),
    "avi": Container("avi", ("mpeg4", "mjpeg"), "mp2", ("vfr", "gap", "dropped-tail", "aspect"), 1e-6),
    "flv": Container("flv", ("libx264", "flv"), "libmp3lame", (*_TIMED, "restart", "aspect"), 1e-3),
}
# Traits of one group exclude each other, because one file cannot have both, or because a player's answer is unclear.
_GROUPS: dict[str, tuple[str, ...]] = {
    "clock": ("gap", "restart", "mdhd", "head", "dropped-tail"),
    "end": ("tail", "fragments", "mdhd", "restart"),
    "sound": ("lead", "lag", "restart", "head", "tail"),
    "picture": ("crop", "size", "change-aspect", "change-colors"),
    "pixels": ("aspect", "size", "change-aspect"),
    "direction": ("turn", "mirror"),
    "tracks": (*_TRACKS, "aspect", "head", "tail", "mdhd", "fragments", "crop", "restart", "size"),
    "changes": ("size", "change-aspect", "change-colors", "restart", "gap"),
}
_HOURS_S = 5000
TimedPacket = tuple[Fraction, Any]  # when it is decoded, in seconds, and the packet


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source video that can be written.

    Attributes:
        begins_s: When each frame begins to be shown, in seconds from the first frame; frames that an edit list hides
            begin before 0 or after `end_s`.
        end_s: When the last frame ends.
        width, height: Size of the coded picture before crop, in the direction in which it is shown.
        options: Parameters of the traits that the source has, by the name of the trait.
    """

    container: str
    codec: str
    fps: Fraction
    num_frames: int
    begins_s: tuple[Fraction, ...]
    width: int
    height: int
    num_reordered: int
    gop: int
    has_sound: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Container:
        return CONTAINERS[self.container]

    @property
    def name(self) -> str:
        """The traits with their parameters, as in the name of a case."""
        words = [f"{name}={_word(value)}" if value is not True else name for name, value in self.options.items()]
        return "+".join([f"{self.codec.removeprefix('lib')}@{_word(self.fps)}", *words])

    @property
    def end_s(self) -> Fraction:
        return self.begins_s[-1] + 1 / self.fps

    def shown_ratio(self, number: int) -> Fraction:
        """Return the width of a frame on the screen divided by its height."""
        aspect = self.options.get("aspect", Fraction(1))
        change = self.options.get("change-aspect")
        if change is not None:
            aspect = change["after"] if number >= change["frame"] else change["before"]
        width, height = self._size_of(number)
        return Fraction(width, height) * aspect

    @property
    def sound_begin_s(self) -> Fraction:
        """When the sound begins, in seconds from the first frame."""
        return self.options.get("lag", Fraction(0)) - self.options.get("lead", Fraction(0))

    def is_loud(self, time_s: float) -> bool:
        """Return True if the sound is loud at a time, in seconds from the first frame."""
        gap = self.options.get("gap")
        is_lost = gap is not None and self.begins_s[gap["frame"] - 1] < time_s < self.begins_s[gap["frame"]]
        return self.sound_begin_s <= time_s < self.end_s and not is_lost and bool(_is_loud(np.array(time_s)))

    def upright(self, picture: np.ndarray) -> np.ndarray:
        """Return what a player shows of a decoded picture: crop and display matrix are applied."""
        if crop := self.options.get("crop"):
            left, top, right, bottom = crop
            picture = picture[top : picture.shape[0] - bottom, left : picture.shape[1] - right]
        return self._turned(picture, is_back=True)

    def write(self, path: Path) -> None:
        """Write the file."""
        restart = self.options.get("restart")
        if restart is None:
            self._mux(path, range(self.num_frames))
        else:
            for number, frames in enumerate((range(restart), range(restart, self.num_frames))):
                self._mux(path.with_name(f"part-{number}"), frames)
            parts = [path.with_name(f"part-{number}") for number in range(2)]
            path.write_bytes(container_bytes.appended(self.container, *(part.read_bytes() for part in parts)))
            for part in parts:
                part.unlink()
        path.write_bytes(self._patched(path.read_bytes()))

    def _patched(self, content: bytes) -> bytes:
        """Write what no muxer writes into the headers."""
        options = self.options
        crop, aspect = options.get("crop"), options.get("aspect")
        if self.kind.format in ("matroska", "webm"):
            if crop or aspect:
                size = (round(self.width * (aspect or 1)), self.height)
                size = size[::-1] if options.get("turn", 0) % 180 else size
                content = container_bytes.with_display(content, crop=crop or (0, 0, 0, 0), size=size)
        elif crop:
            content = container_bytes.with_clean_aperture(content, crop)
        if "head" in options:
            content = container_bytes.with_edit(content, begin_s=options["head"])
        if "tail" in options:
            content = container_bytes.with_edit(content, end_s=options["tail"])
        if "mdhd" in options:
            content = container_bytes.with_media_length(content, share=options["mdhd"])
        if "dropped-tail" in options:
            content = container_bytes.with_dropped_frames(content, options["dropped-tail"])
        return content

    def _size_of(self, number: int) -> tuple[int, int]:
        """Return the size of a frame's visible part in pixels, in the direction in which it is shown."""
        change = self.options.get("size")
        if change is not None and number >= change["frame"]:
            width, height = change["size"]
            return int(width), int(height)
        return self.width, self.height

    def _coded(self, number: int) -> np.ndarray:
        width, height = self._size_of(number)
        picture = self._turned(draw_number(number, width=width, height=height), is_back=False)
        if crop := self.options.get("crop"):
            left, top, right, bottom = crop
            # A player that shows what lies outside the crop shows another edge than that of the picture.
            picture = np.pad(picture, ((top, bottom), (left, right), (0, 0)), constant_values=255)
        return np.ascontiguousarray(picture)

    def _turned(self, picture: np.ndarray, *, is_back: bool) -> np.ndarray:
        turn, mirror = self.options.get("turn", 0), self.options.get("mirror")
        picture = np.rot90(picture, -turn // 90 if is_back else turn // 90)
        if mirror == "hflip":
            picture = picture[:, ::-1]
        if mirror == "vflip":
            picture = picture[::-1]
        return picture

    def _encoders(self, frames: range) -> list[tuple[range, Fraction, str | None]]:
        """Return for each run of frames that one encoder makes: frames, pixel aspect and color matrix."""
        borders = {frames.start, frames.stop}
        aspect, colors = self.options.get("change-aspect"), self.options.get("change-colors")
        borders |= {change["frame"] for change in (self.options.get("size"), aspect, colors) if change is not None}
        inside = sorted(border for border in borders if frames.start <= border <= frames.stop)
        found = []
        for begin, end in pairwise(inside):
            pixel_aspect = self.options.get("aspect", Fraction(1))
            pixel_aspect = 1 / pixel_aspect if self.options.get("turn", 0) % 180 else pixel_aspect
            if aspect is not None:
                pixel_aspect = aspect["after" if begin >= aspect["frame"] else "before"]
            matrix = None if colors is None else ("smpte170m", "bt709")[begin >= colors["frame"]]
            found.append((range(begin, end), pixel_aspect, matrix))
        return found

    def _mux(self, path: Path, frames: range) -> None:
        options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"} if "fragments" in self.options else {}
        if self.container == "webm" and "restart" in self.options:
            options["live"] = "1"
        if self.kind.format in ("matroska", "webm"):
            options["write_crc32"] = "0"  # `_patched` changes the tracks
        offset_s = self.options.get("offset", Fraction(0))
        zero_s = self.begins_s[frames.start] + min(self.sound_begin_s, Fraction(0)) - offset_s
        begins_s = [self.begins_s[number] - zero_s for number in frames]
        with av.open(str(path), "w", format=self.kind.format, options=options) as file:
            tracks: list[list[TimedPacket]] = []
            if "still-first" in self.options:
                tracks.append(self._other_track(file, begins_s[:1]))
            if "default-second" in self.options:
                tracks.append(self._other_track(file, begins_s))
            video, packets = self._video_track(file, frames, begins_s)
            tracks.append(packets)
            if "two-videos" in self.options:
                tracks.append(self._other_track(file, begins_s))
            if "default-second" in self.options:
                video.disposition = av.stream.Disposition.default
            if self.has_sound:
                tracks.append(self._sound_track(file, frames, zero_s))
            for _, packet in sorted((item for track in tracks for item in track), key=lambda item: item[0]):
                file.mux(packet)

    def _video_track(self, file: Any, frames: range, begins_s: list[Fraction]) -> tuple[Any, list[TimedPacket]]:
        encoders = self._encoders(frames)
        stream = _add_video(file, self.codec, self.fps, self._coded(frames.start), encoders[0][1:], self._choices())
        if turn := self.options.get("turn"):
            stream.set_display_rotation(-turn)
        if mirror := self.options.get("mirror"):
            x, y = (-1, 1) if mirror == "hflip" else (1, -1)
            stream.set_display_matrix([x << 16, 0, 0, 0, y << 16, 0, 0, 0, 1 << 30])
        made = []
        for place, (numbers, aspect, matrix) in enumerate(encoders):
            if place == 0:
                context = stream.codec_context
            else:
                context = _context(self.codec, self.fps, self._coded(numbers.start), (aspect, matrix), self._choices())
            pictures = (self._coded(number) for number in numbers)
            here = begins_s[numbers.start - frames.start : numbers.stop - frames.start]
            made += _encoded(context, pictures, here, frame_s=1 / self.fps, matrix=matrix)
        for _, packet in made:
            packet.stream = stream
        return stream, made

    def _other_track(self, file: Any, begins_s: list[Fraction]) -> list[TimedPacket]:
        """Add a track of gray pictures, which nobody should see."""
        gray = np.full((96, 96, 3), 90, np.uint8)
        stream = _add_video(file, self.codec, self.fps, gray, (Fraction(1), None), self._choices())
        stream.disposition = 0
        made = _encoded(stream.codec_context, (gray for _ in begins_s), begins_s, frame_s=1 / self.fps, matrix=None)
        for _, packet in made:
            packet.stream = stream
        return made

    def _sound_track(self, file: Any, frames: range, zero_s: Fraction) -> list[TimedPacket]:
        stream = file.add_stream(self.kind.sound, rate=_SAMPLES_PER_S)
        stream.layout = "mono"
        begin_s = self.begins_s[frames.start] + self.sound_begin_s
        end_s = self.begins_s[frames.stop] if frames.stop < self.num_frames else self.end_s
        num = int((end_s - begin_s) * _SAMPLES_PER_S)
        times = float(begin_s) + np.arange(num) / _SAMPLES_PER_S
        wave = (0.5 * np.sin(2 * np.pi * 440 * times) * _is_loud(times) * 32767).astype(np.int16)
        made: list[TimedPacket] = []
        context, gap = stream.codec_context, self.options.get("gap")
        sample_format = context.codec.audio_formats[0].name
        resampler = av.AudioResampler(format=sample_format, layout="mono", rate=_SAMPLES_PER_S)
        size = 960
        pieces = [wave[at : at + size] for at in range(0, num - size + 1, size)]
        packets = []
        for place, piece in enumerate(pieces):
            frame = av.AudioFrame.from_ndarray(piece[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = _SAMPLES_PER_S, place * size, Fraction(1, _SAMPLES_PER_S)
            for resampled in resampler.resample(frame):
                packets += stream.encode(resampled)
        packets += stream.encode(None)
        for packet in packets:
            time_s = packet.pts * packet.time_base + begin_s
            if gap is not None and self.begins_s[gap["frame"] - 1] < time_s < self.begins_s[gap["frame"]]:
                continue  # reception was lost
            ticks = round((time_s - zero_s) / packet.time_base)
            packet.pts = packet.dts = ticks
            packet.stream = stream
            made.append((ticks * packet.time_base, packet))
        return made

    def _choices(self) -> dict[str, str]:
        choices = {"g": str(self.gop), "bf": str(self.num_reordered), "threads": "1"}
        if self.codec == "libx264":
            choices |= {"preset": "ultrafast", "crf": "16"}
        elif self.codec.startswith("libvpx"):
            choices |= {"deadline": "realtime", "cpu-used": "8", "crf": "10", "b": "1M", "lag-in-frames": "0"}
        else:
            choices |= {"q": "2", "qmin": "2", "b": "4M"}
        return choices


def _is_loud(times_s: np.ndarray) -> np.ndarray:
    return np.floor(times_s / _LOUD_S).astype(int) % 2 == 0


def draw_source(random: Random, container: str) -> Source:
    """Draw a source in a container, with one to three traits."""
    kind = CONTAINERS[container]
    fps = Fraction(random.choice(kind.rates))
    codec = random.choice(kind.codecs)
    traits = _draw_traits(random, kind, codec)
    num_frames = min(MAX_NUMBER, max(20, round(float(fps) * random.uniform(3, 5.5))))
    begins_s = [Fraction(number) / fps for number in range(num_frames)]
    options: dict[str, Any] = {}
    if "vfr" in traits:
        lengths = [Fraction(random.choice((1, 1, 1, 2, 3))) for _ in range(num_frames)]
        if container != "avi":
            lengths = [length * Fraction(random.choice(("1", "1", "1/2", "3/4"))) for length in lengths]
        begins_s = [begin / fps for begin in accumulate(lengths[:-1], initial=Fraction(0))]
        options["vfr"] = True
    width, height = random.choice(_SIZES)
    reordered = random.choice((0, 2)) if codec in ("libx264", "mpeg2video") and container != "flv" else 0
    gop = random.choice((5, 12, 25, 250))
    place = random.randrange(num_frames // 4, num_frames * 3 // 4)
    for trait in traits:
        if trait != "vfr":
            options[trait] = _PARAMETERS[trait](random, _Draft(codec, fps, begins_s, place, (width, height)))
    if gap := options.get("gap"):
        begins_s = [begin + (gap["seconds"] if number >= gap["frame"] else 0) for number, begin in enumerate(begins_s)]
    has_sound = bool({"lead", "lag"} & options.keys()) or random.random() < 0.5
    if container in ("avi",) and {"vfr", "gap"} & options.keys():
        has_sound = False
    return Source(
        container=container,
        codec=codec,
        fps=fps,
        num_frames=num_frames,
        begins_s=tuple(begins_s),
        width=width,
        height=height,
        # The decoding times of an encoder with B frames begin before the last ones of the encoder before it.
        num_reordered=0 if {"fragments", "size", "change-aspect", "change-colors"} & options.keys() else reordered,
        gop=gop,
        has_sound=has_sound,
        options=options,
    )


@dataclass(frozen=True)
class _Draft:
    """What is drawn before the parameters of a trait."""

    codec: str
    fps: Fraction
    begins_s: Sequence[Fraction]
    place: int
    size: tuple[int, int]


def _draw_traits(random: Random, kind: Container, codec: str) -> list[str]:
    possible = [trait for trait in kind.traits if _is_possible(trait, kind, codec)]
    drawn: list[str] = []
    for trait in random.sample(possible, len(possible)):
        excluded = {name for group in _GROUPS.values() if trait in group for name in group}
        if not excluded & set(drawn):
            drawn.append(trait)
    # Traits alone are as frequent as two and three of them together.
    return sorted(drawn[: random.choice((1, 2, 3))])


def _is_possible(trait: str, kind: Container, codec: str) -> bool:
    if trait == "size":
        return codec in ("libvpx", "libvpx-vp9", "mpeg2video", "mpeg1video") or kind.format == "mpegts"
    if trait in ("aspect", "change-aspect") and codec == "mpeg1video":
        return False  # it has few ratios
    if trait == "change-colors":
        return codec == "libx264"
    if trait == "aspect":
        return codec != "flv"
    return True


def _seconds(*choices: str) -> Callable[[Random, _Draft], Fraction]:
    return lambda random, _: Fraction(random.choice(choices))


def _aspects(random: Random, draft: _Draft) -> Fraction:
    if draft.codec == "mpeg2video":  # it has only the ratios of the screen 4:3 and 16:9
        return Fraction(random.choice(("4/3", "16/9"))) / Fraction(*draft.size)
    return Fraction(random.choice(("4/3", "2", "3/4", "16/11")))


def _change_of_aspect(random: Random, draft: _Draft) -> dict[str, Any]:
    size = Fraction(*draft.size)
    ratios = [Fraction(4, 3) / size, Fraction(16, 9) / size]
    random.shuffle(ratios)
    return {"frame": draft.place, "before": ratios[0], "after": ratios[1]}


def _change_of_size(random: Random, draft: _Draft) -> dict[str, Any]:
    sizes = [size for size in _SIZES if size != draft.size]
    return {"frame": draft.place, "size": random.choice(sizes)}


def _gap(random: Random, draft: _Draft) -> dict[str, Any]:
    seconds = Fraction(random.choice(("3/10", "3/2", "4", "11", "13")))
    # In whole frames, because an AVI has nothing else.
    return {"frame": draft.place, "seconds": Fraction(math.ceil(seconds * draft.fps)) / draft.fps}


def _crop(random: Random, draft: _Draft) -> tuple[int, int, int, int]:
    across = random.choice(((0, 0), (16, 32), (48, 16)))
    down = random.choice(((32, 32), (16, 48)) if across == (0, 0) else ((0, 0), (16, 16)))
    return across[0], down[0], across[1], down[1]


def _dropped(random: Random, draft: _Draft) -> int:
    return random.randrange(1, math.ceil(float(draft.fps)))


_PARAMETERS: dict[str, Callable[[Random, _Draft], Any]] = {
    "offset": _seconds("7/5", "37", str(_HOURS_S)),
    "gap": _gap,
    "lead": _seconds("3/100", "1/5", "1", "3/2"),
    "lag": _seconds("1/5", "1"),
    "restart": lambda _, draft: draft.place,
    "head": lambda _, draft: draft.begins_s[draft.place // 2],
    # Within a frame, because an edit is rounded to milliseconds.
    "tail": lambda _, draft: (draft.begins_s[draft.place] + draft.begins_s[draft.place + 1]) / 2,
    "mdhd": _seconds("1/3", "2/3"),
    "fragments": lambda *_: True,
    "crop": _crop,
    "turn": lambda random, _: random.choice((90, 180, 270)),
    "mirror": lambda random, _: random.choice(("hflip", "vflip")),
    "aspect": _aspects,
    "size": _change_of_size,
    "change-aspect": _change_of_aspect,
    "change-colors": lambda _, draft: {"frame": draft.place},
    "dropped-tail": _dropped,
    "two-videos": lambda *_: True,
    "default-second": lambda *_: True,
    "still-first": lambda *_: True,
}


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(_word(part) for part in value.values())
    if isinstance(value, tuple):
        return "x".join(map(_word, value))
    if isinstance(value, Fraction):
        return f"{value.numerator}:{value.denominator}" if value.denominator > 1 else str(value.numerator)
    return str(value)


def _add_video(
    file: Any,
    codec: str,
    fps: Fraction,
    picture: np.ndarray,
    form: tuple[Fraction, str | None],
    choices: dict[str, str],
) -> Any:
    stream = file.add_stream(codec, rate=fps, options=choices)
    _set_form(stream.codec_context, codec, fps, picture, form)
    # An AVI has a packet for each tick: an empty packet is a frame that was dropped.
    stream.time_base = 1 / fps if file.format.name == "avi" else Fraction(1, 90000)
    return stream


def _context(
    codec: str, fps: Fraction, picture: np.ndarray, form: tuple[Fraction, str | None], choices: dict[str, str]
) -> Any:
    context: Any = av.CodecContext.create(codec, "w")
    context.options = choices
    context.framerate = fps
    _set_form(context, codec, fps, picture, form)
    return context


def _set_form(context: Any, codec: str, fps: Fraction, picture: np.ndarray, form: tuple[Fraction, str | None]) -> None:
    context.height, context.width = picture.shape[:2]
    context.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    context.time_base = 1 / fps
    aspect, matrix = form
    context.sample_aspect_ratio = aspect
    if matrix is not None:
        number = {"smpte170m": 6, "bt709": 1}[matrix]
        context.colorspace = context.color_trc = context.color_primaries = number


def _encoded(
    context: Any, pictures: Iterator[np.ndarray], begins_s: list[Fraction], *, frame_s: Fraction, matrix: str | None
) -> list[TimedPacket]:
    """Return the packets of frames with their decoding times, whatever distances the encoder believes in."""
    packets: list[Any] = []
    space = 1 if matrix == "bt709" else 5  # ITU-R BT.709 or BT.601
    for number, picture in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame = frame.reformat(format=context.pix_fmt, dst_colorspace=space)
        frame.pts, frame.time_base = number, context.time_base
        packets += context.encode(frame)
    packets += context.encode(None)
    order = [round(packet.pts * packet.time_base / context.time_base) for packet in packets]
    num_late = max(0, *(place - number for place, number in enumerate(order))) if order else 0
    extended_s = [begins_s[0] - (num_late - number) * frame_s for number in range(num_late)] + begins_s
    ends_s = [*begins_s[1:], begins_s[-1] + frame_s]
    made = []
    base = Fraction(1, 90000)
    for place, (packet, number) in enumerate(zip(packets, order, strict=True)):
        decoded_s = min(extended_s[place], begins_s[number])
        packet.time_base = base
        packet.pts, packet.dts = round(begins_s[number] / base), round(decoded_s / base)
        packet.duration = round((ends_s[number] - begins_s[number]) / base)
        made.append((decoded_s, packet))
    return made
