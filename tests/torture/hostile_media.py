"""Malicious source videos, derived from small videos whose pixels encode their frame numbers.

Each one replaces a valid file after `prep manifest`, like a source that is corrupted or replaced later.
"""

import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from clipmill.prep.video.ffmpeg import find_ffmpeg
from tests.torture.cases import draw

NUM_FRAMES, FPS = 40, 10  # of every valid video
_COPY = ("-c", "copy")
_MPEG2 = ("-c:v", "mpeg2video", "-q:v", "2", "-r", "25")
CONTAINERS: dict[str, tuple[str, ...]] = {
    "mp4": _COPY,
    "mov": (*_COPY, "-movflags", "+faststart"),
    "fragments.mp4": (*_COPY, "-movflags", "frag_keyframe+empty_moov"),
    "mkv": _COPY,
    "live.mkv": (*_COPY, "-live", "1"),
    "webm": ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8"),
    "avi": ("-c:v", "mpeg4", "-q:v", "2"),
    "wmv": ("-c:v", "wmv2", "-q:v", "2"),
    "ogv": ("-c:v", "libtheora", "-q:v", "8"),
    "ts": _COPY,
    "mpg": _MPEG2,
    "flv": _COPY,
    "mxf": _MPEG2,
    "gif": (),
}
SUFFIXES = ("mp4", "mov", "mkv", "webm", "avi", "mpg", "ts", "flv", "wmv")


@dataclass(frozen=True)
class HostileSource:
    """One malicious source.

    Attributes:
        name: Unique name `kind/what`.
        suffix: File extension without the dot.
        put: Function that writes the source to a path; its second argument is the folder with resources that the source
            may try to access.
        is_whole: True if the frames are intact, so that chunks made from it must show them in order, from the first.
    """

    name: str
    suffix: str
    put: Callable[[Path, "Outside"], None]
    is_whole: bool = True

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]


@dataclass(frozen=True)
class Outside:
    """Resources that no source may access: a video under a file lease, and a port with a listener."""

    video: Path
    port: int


def write_containers(video: Path, folder: Path) -> None:
    """Write `video` in each container of CONTAINERS, and as whole.mp4."""
    for name, options in CONTAINERS.items():
        subprocess.run([find_ffmpeg().path, "-v", "error", "-i", video, *options, folder / f"a.{name}"], check=True)


def hostile_sources(seed: int, containers: Path) -> list[HostileSource]:
    """Return all sources, in an order determined by `seed`."""
    every = [*_damage(seed, containers), *_scripts(), *_no_files(), *_claims(containers)]
    return list(draw(every, seed=f"{seed}/hostile", kinds=[lambda case: case.kind]))


def _damage(seed: int, containers: Path) -> Iterator[HostileSource]:
    for container in CONTAINERS:
        path = containers / f"a.{container}"
        for damage, (change, is_whole) in _DAMAGES.items():
            random = Random(f"{seed}/{container}/{damage}")

            def put(
                target: Path, _: Outside, path: Path = path, change: _Change = change, random: Random = random
            ) -> None:
                target.write_bytes(change(path.read_bytes(), random))

            suffix = container.rpartition(".")[2]
            suffix = suffix if suffix in SUFFIXES else "mp4"
            if damage == "mislabelled":
                suffix = random.choice([other for other in SUFFIXES if other != suffix])
            yield HostileSource(f"{damage}/{container}", suffix, put, is_whole)


_Change = Callable[[bytes, Random], bytes]


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(1, len(content))]


def _cut_late(content: bytes, random: Random) -> bytes:
    return content[: len(content) - random.randrange(1, max(2, len(content) // 10))]


def _flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(8):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _head_flipped(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(4):
        changed[random.randrange(min(600, len(changed)))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _make_hole(content: bytes, random: Random) -> bytes:
    begin = random.randrange(len(content) * 3 // 4)
    length = len(content) // 10
    return content[:begin] + bytes(length) + content[begin + length :]


def _huge_numbers(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(3):
        begin = random.randrange(min(2000, len(changed) - 4))
        changed[begin : begin + 4] = random.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"))
    return bytes(changed)


def _swap(content: bytes, random: Random) -> bytes:
    third = len(content) // 3
    return content[:third] + content[2 * third :] + content[third : 2 * third]


_DAMAGES: dict[str, tuple[_Change, bool]] = {
    "cut": (_cut, True),
    "cut-late": (_cut_late, True),
    "mislabelled": (lambda content, _: content, True),
    "with-more": (lambda content, random: content + random.randbytes(5000), True),
    "headless": (lambda content, random: content[random.randrange(1, 500) :], False),
    "flipped": (_flip, False),
    "head-flipped": (_head_flipped, False),
    "hole": (_make_hole, False),
    "huge-numbers": (_huge_numbers, False),
    "swapped": (_swap, False),
}


def _scripts() -> Iterator[HostileSource]:
    """Yield text files that make their reader open another resource: a local video or a URL."""
    texts = {
        "ffconcat": ("mp4", "ffconcat version 1.0\nfile '{video}'\n"),
        "ffconcat-http": ("mkv", "ffconcat version 1.0\nfile 'http://127.0.0.1:{port}/v.mp4'\n"),
        "m3u8": ("ts", "#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\n{video}\n#EXT-X-ENDLIST\n"),
        "m3u8-http": ("mp4", "#EXTM3U\n#EXT-X-TARGETDURATION:4\n#EXTINF:4,\nhttp://127.0.0.1:{port}/v.ts\n"),
        "m3u8-key": ("ts", '#EXTM3U\n#EXT-X-KEY:METHOD=AES-128,URI="http://127.0.0.1:{port}/k"\n#EXTINF:4,\n{video}\n'),
        "sdp": ("mp4", "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 96\n"),
        "dash": (
            "mp4",
            '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet>'
            '<Representation id="0" bandwidth="1"><BaseURL>http://127.0.0.1:{port}/v.mp4</BaseURL></Representation>'
            "</AdaptationSet></Period></MPD>",
        ),
        "asx": ("wmv", '<asx version="3.0"><entry><ref href="http://127.0.0.1:{port}/v.wmv"/></entry></asx>'),
        "rtsp": ("mov", "RTSPtext\nrtsp://127.0.0.1:{port}/v\n"),
        "ram": ("flv", "http://127.0.0.1:{port}/v.rm\n"),
        "edl": ("mkv", "# mpv EDL v0\n{video},0,4\n"),
        "xspf": ("webm", "<playlist><trackList><track><location>{video}</location></track></trackList></playlist>"),
        "html": ("mp4", "<html><video src='http://127.0.0.1:{port}/v.mp4'></video></html>"),
        "script": ("avi", "#!/bin/sh\ntouch '{video}.ran'\n"),
    }
    for name, (suffix, text) in texts.items():

        def put(target: Path, outside: Outside, text: str = text) -> None:
            target.write_text(text.format(video=outside.video, port=outside.port))

        yield HostileSource(f"script/{name}", suffix, put)


def _no_files() -> Iterator[HostileSource]:
    def socket_at(target: Path, _: Outside) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(target.parent, os.O_RDONLY)  # the full path may exceed the length limit of a socket address
            try:
                made.bind(f"/proc/self/fd/{here}/{target.name}")
            finally:
                os.close(here)

    kinds: dict[str, Callable[[Path, Outside], None]] = {
        "fifo": lambda target, _: os.mkfifo(target),
        "socket": socket_at,
        "folder": lambda target, _: target.mkdir(),
        "broken-link": lambda target, _: target.symlink_to("nowhere.mp4"),
        "link-loop": lambda target, _: target.symlink_to(target.name),
        "zeros-device": lambda target, _: target.symlink_to("/dev/zero"),
        "standard-input": lambda target, _: target.symlink_to("/dev/stdin"),
        "process-memory": lambda target, _: target.symlink_to("/proc/self/mem"),
        "process-status": lambda target, _: target.symlink_to("/proc/self/status"),
        "nothing": lambda target, _: None,
        "empty": lambda target, _: target.touch(),
        "one-byte": lambda target, _: _write(target, b"\0"),
        "zeros": lambda target, _: _write(target, bytes(100_000)),
        "sparse": lambda target, _: _sparse(target, 1 << 40),
        "password-file": lambda target, _: target.symlink_to("/etc/passwd"),
    }
    for name, put in kinds.items():
        yield HostileSource(f"no-file/{name}", "mp4", put)


def _write(target: Path, content: bytes) -> None:
    target.write_bytes(content)


def _sparse(target: Path, size_bytes: int) -> None:
    with target.open("wb") as file:
        file.truncate(size_bytes)


def _claims(containers: Path) -> Iterator[HostileSource]:
    """Yield videos whose headers contradict the content: sizes, durations, rates, and offsets outside the file."""
    mp4, avi, gif = (containers / f"a.{name}" for name in ("mp4", "avi", "gif"))
    huge, large = b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"
    claims: dict[str, tuple[Path, bytes, int, bytes]] = {
        # file, a word in it, offset from the word, and new value
        "duration-of-header": (mp4, b"mvhd", 20, huge),
        "duration-of-track": (mp4, b"mdhd", 20, huge),
        "ticks-a-second": (mp4, b"mdhd", 16, b"\0\0\0\1"),
        "no-ticks": (mp4, b"mdhd", 16, b"\0\0\0\0"),
        "frame-of-years": (mp4, b"stts", 16, large),
        "frames": (mp4, b"stts", 12, large),
        "sizes": (mp4, b"stsz", 12, huge),
        "size-of-all": (mp4, b"stsz", 8, large),
        "chunks": (mp4, b"stco", 8, large),
        "place-of-frames": (mp4, b"stco", 12, huge),
        "edit-list": (mp4, b"elst", 12, huge),
        "reference-outside": (mp4, b"url ", 4, b"\0\0\0\0"),
        "width": (mp4, b"avc1", 28, b"\xff\xff\xff\xff"),
        "size-of-avi": (avi, b"strf", 12, b"\xff\xff\0\0\xff\xff\0\0"),
        "rate-of-avi": (avi, b"vids", 20, b"\1\0\0\0\xff\xff\xff\xff"),
        "frames-of-avi": (avi, b"avih", 24, huge),
        "canvas": (gif, b"GIF89a", 6, struct.pack("<HH", 65535, 65535)),
        "wide-canvas": (gif, b"GIF89a", 6, struct.pack("<HH", 30000, 6000)),
    }
    for name, (path, word, offset, value) in claims.items():

        def put(
            target: Path, _: Outside, path: Path = path, word: bytes = word, offset: int = offset, value: bytes = value
        ) -> None:
            content = bytearray(path.read_bytes())
            begin = content.index(word) + offset
            content[begin : begin + len(value)] = value
            target.write_bytes(content)

        yield HostileSource(f"claim/{name}", path.suffix.removeprefix(".").replace("gif", "mp4"), put, is_whole=False)


NAMES = (
    "new\nline",
    "two\n\nlines\r",
    "tab\tbell\a",
    "\x1b[31mred\x1b[0m",
    "\u202egpj.evil",
    "e\u0301 in two signs",
    "-i",
    "--help",
    "-",
    "%06d",
    "%s%n",
    "concat:a|b",
    "pipe:0",
    "http:\u2215\u2215127.0.0.1",
    "file:x",
    "$(touch ran)",
    "`touch ran`",
    "; touch ran",
    "'quoted\"",
    "back\\slash",
    "* ? [a]",
    "{0..9}",
    " spaces ",
    "dots..",
    "n" * 251,
    "\U0001f3ac" * 62,
    "a.mp4",
    "CON",
    "NUL",
    "nul\u2400",
    "#hash",
    "a,b;c",
    "0",
    "null",
    "nan",
    "__key__",
)
"""Names of the valid videos, without the extension."""
