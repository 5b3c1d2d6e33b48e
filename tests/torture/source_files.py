"""Source videos with unusual timelines, geometry, changes and tracks.

A `Source` defines when each frame starts and what a player shows. `Source.write` writes its file with PyAV, without
code of the product. `container_bytes` writes headers that no muxer writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.torture import container_bytes
from tests.torture.numbered_pictures import draw_number
from tests.torture.source_containers import CONTAINERS, Container
from tests.torture.source_encoding import TimedPacket, add_video, encode_frames, open_encoder

_SAMPLES_PER_S = 48000
_LOUD_S = 1  # duration of the loud and silent parts, which alternate
_PACKET_S = 0.1  # duration of an audio packet in a program stream


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source video that can be written.

    Attributes:
        begins_s: Start of each frame, in seconds from the first shown frame; frames that an edit list hides start
            before 0 or after `end_s`.
        end_s: End of the last frame in seconds.
        width, height: Size of the coded picture before the crop, in the orientation in which it is shown.
        options: Parameters of the source's traits, by the name of the trait.
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
        """Traits with their parameters, as in the name of a case."""
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
        """Start of the audio, in seconds from the first frame."""
        return self.options.get("lag", Fraction(0)) - self.options.get("lead", Fraction(0))

    def sound_levels(self, time_s: float) -> set[bool]:
        """Return whether the audio is loud at a time in seconds from the first frame; both values if this is undefined.

        A packet of a program stream has one timestamp. Audio after a gap may be in a packet that begins before the gap.
        """
        is_loud = self.sound_begin_s <= time_s < self.end_s and bool(_is_loud(np.array(time_s)))
        if (gap := self.options.get("gap")) is not None:
            begin_s, end_s = self.begins_s[gap["frame"] - 1], self.begins_s[gap["frame"]]
            if self.container == "mpg" and 0 < time_s - begin_s < _PACKET_S:
                return {False, True}
            is_loud &= not begin_s < time_s < end_s
        return {is_loud}

    def crop_and_turn(self, picture: np.ndarray) -> np.ndarray:
        """Apply the crop and the display matrix to a decoded picture, as a player does."""
        if crop := self.options.get("crop"):
            left, top, right, bottom = crop
            picture = picture[top : picture.shape[0] - bottom, left : picture.shape[1] - right]
        return self._turn(picture, is_back=True)

    def write(self, path: Path) -> None:
        """Write the file."""
        restart = self.options.get("restart")
        if restart is None:
            self._mux(path, range(self.num_frames))
        else:
            for number, frames in enumerate((range(restart), range(restart, self.num_frames))):
                self._mux(path.with_name(f"part-{number}"), frames)
            parts = [path.with_name(f"part-{number}") for number in range(2)]
            path.write_bytes(container_bytes.append_files(self.container, *(part.read_bytes() for part in parts)))
            for part in parts:
                part.unlink()
        path.write_bytes(self._patch_headers(path.read_bytes()))

    def _patch_headers(self, content: bytes) -> bytes:
        """Return the content with header values that no muxer writes."""
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
        """Return the visible size of a frame in pixels, in the orientation in which it is shown."""
        change = self.options.get("size")
        if change is not None and number >= change["frame"]:
            width, height = change["size"]
            return int(width), int(height)
        return self.width, self.height

    def _draw_coded(self, number: int) -> np.ndarray:
        width, height = self._size_of(number)
        picture = self._turn(draw_number(number, width=width, height=height), is_back=False)
        if crop := self.options.get("crop"):
            left, top, right, bottom = crop
            # A player that ignores the crop shows this padding in place of the edge of the image.
            picture = np.pad(picture, ((top, bottom), (left, right), (0, 0)), constant_values=255)
        return np.ascontiguousarray(picture)

    def _turn(self, picture: np.ndarray, *, is_back: bool) -> np.ndarray:
        turn, mirror = self.options.get("turn", 0), self.options.get("mirror")
        picture = np.rot90(picture, -turn // 90 if is_back else turn // 90)
        if mirror == "hflip":
            picture = picture[:, ::-1]
        if mirror == "vflip":
            picture = picture[::-1]
        return picture

    def _encoders(self, frames: range) -> list[tuple[range, Fraction, str | None]]:
        """Return the frames, pixel aspect and color matrix of each run of frames that one encoder produces."""
        borders = {frames.start, frames.stop}
        aspect, colors = self.options.get("change-aspect"), self.options.get("change-colors")
        borders |= {change["frame"] for change in (self.options.get("size"), aspect, colors) if change is not None}
        inside = sorted(border for border in borders if frames.start <= border <= frames.stop)
        runs = []
        for begin, end in pairwise(inside):
            pixel_aspect = self.options.get("aspect", Fraction(1))
            pixel_aspect = 1 / pixel_aspect if self.options.get("turn", 0) % 180 else pixel_aspect
            if aspect is not None:
                pixel_aspect = aspect["after" if begin >= aspect["frame"] else "before"]
            matrix = None if colors is None else ("smpte170m", "bt709")[begin >= colors["frame"]]
            runs.append((range(begin, end), pixel_aspect, matrix))
        return runs

    def _mux(self, path: Path, frames: range) -> None:
        options = {"movflags": "frag_keyframe+delay_moov+default_base_moof"} if "fragments" in self.options else {}
        if self.container == "webm" and "restart" in self.options:
            options["live"] = "1"
        if self.kind.format in ("matroska", "webm"):
            options["write_crc32"] = "0"  # `_patch_headers` changes the tracks
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
        stream = add_video(file, self.codec, self.fps, self._draw_coded(frames.start), encoders[0][1:], self._choices())
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
                context = open_encoder(
                    self.codec, self.fps, self._draw_coded(numbers.start), (aspect, matrix), self._choices()
                )
            pictures = (self._draw_coded(number) for number in numbers)
            here = begins_s[numbers.start - frames.start : numbers.stop - frames.start]
            made += encode_frames(context, pictures, here, frame_s=1 / self.fps, matrix=matrix)
        for _, packet in made:
            packet.stream = stream
        return stream, made

    def _other_track(self, file: Any, begins_s: list[Fraction]) -> list[TimedPacket]:
        """Add a track of gray frames that must never be shown."""
        gray = np.full((96, 96, 3), 90, np.uint8)
        stream = add_video(file, self.codec, self.fps, gray, (Fraction(1), None), self._choices())
        stream.disposition = 0
        made = encode_frames(
            stream.codec_context, (gray for _ in begins_s), begins_s, frame_s=1 / self.fps, matrix=None
        )
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


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(_word(part) for part in value.values())
    if isinstance(value, tuple):
        return "x".join(map(_word, value))
    if isinstance(value, Fraction):
        return f"{value.numerator}:{value.denominator}" if value.denominator > 1 else str(value.numerator)
    return str(value)
