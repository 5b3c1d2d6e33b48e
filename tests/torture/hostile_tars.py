"""Malicious tars for streaming in `train`, and the required outcome of each.

Each tar has the samples `a`, `bad` and `z` in this order, with frames whose pixels encode their numbers. Outside the
tar are a video and a text that must never be read (the canaries), and a port that must not be contacted.
"""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import av

from tests.train.data.test_hostile_tars import END, header, member, pax_named, pax_sparse, playlists, sparse
from tests.train.data.test_streams import SIZE_PX
from tests.train.tiny_data import encode_chunk

NUM_FRAMES = 20
FIRST_NUMBERS = {"a": 0, "z": 200, "bad": 300, "good": 400}
CANARY_NUMBER = 900
CANARY_TEXT = "canary-4711"
_EXTENSIONS = ("mp4", "mkv", "webm", "mov", "avi")

# Outcome of the sample `bad`: shown exactly; reported by name; either of the two; shown with unpredictable content.
# Outcome of the tar: a failure from that sample on, or the tar is read and does not contain the sample `bad`.
Fate = Literal["shown", "named", "either", "changed", "broken", "absent"]


@dataclass(frozen=True)
class HostileTar:
    """Tar and its required outcome."""

    name: str
    fault: str
    content: Callable[["Outside"], bytes]
    fate: Fate


@dataclass(frozen=True)
class Outside:
    """Resources outside the tar."""

    canary: Path  # video, with a text file of the same name next to it
    port: int


@cache
def video(key: str) -> bytes:
    """Encode 20 frames whose numbers start at `FIRST_NUMBERS` of the key."""
    return encode_chunk(FIRST_NUMBERS[key], NUM_FRAMES, size_px=SIZE_PX)


def sample(key: str, content: bytes | None = None, *, extension: str = "mp4", text: bytes = b"x") -> bytes:
    """Return the members of a sample."""
    content = video(key) if content is None else content
    return member(f"{key}.{extension}", content) + member(f"{key}.txt", text)


def around(middle: bytes) -> bytes:
    """Return a tar with the samples a and z and the given bytes between them."""
    return sample("a") + middle + sample("z") + END


def hostile_tars(seed: str) -> Iterator[HostileTar]:
    """Yield all tars; truncations, bit flips and member names are drawn with `seed`."""
    random = Random(seed)
    yield from _members(random)
    yield from _descriptions()
    yield from _structures(random)
    yield from _compress(random)


def _members(random: Random) -> Iterator[HostileTar]:
    """Yield tars with members whose content does not match their extension."""
    for kind in playlists(Path("/x"), 1):
        for extension in random.sample(_EXTENSIONS, 2):

            def playlist(outside: Outside, kind: str = kind, extension: str = extension) -> bytes:
                content = playlists(outside.canary, outside.port)[kind]
                return around(sample("bad", content, extension=extension))

            yield HostileTar(f"{kind}.{extension}", "playlist", playlist, "named")
    texts = {
        "relative": b"ffconcat version 1.0\nfile canary.mp4\n",
        "webvtt": b"WEBVTT\n\n00:00.000 --> 00:01.000\nx\n",
        "html": b"<html><video src='file:///etc/passwd'></video></html>",
        "empty": b"",
        "zeros": bytes(5000),
        "noise": random.randbytes(5000),
        "png": b"\x89PNG\r\n\x1a\n" + random.randbytes(300),
        "wav": b"RIFF\x24\x10\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x44\xac\0\0\x88\x58\1\0\2\0\x10\0data\0\x10\0\0"
        + bytes(4096),
        "metadata": b";FFMETADATA1\ntitle=x\n",
        "raw": b"YUV4MPEG2 W64 H64 F10:1 Ip A1:1 C420\n" + (b"FRAME\n" + bytes(6144)) * 20,
        "tar": around(b""),
    }
    for name, content in texts.items():
        yield HostileTar(name, "no video", _always(around(sample("bad", content))), "named")
    for format_name in ("matroska", "mpegts", "mov", "flv"):

        def mislabel(_: Outside, format_name: str = format_name) -> bytes:
            return around(sample("bad", _remux(video("bad"), format_name)))

        # libav may seek past a frame in a packet stream without a container; the frame is then reported as a failure.
        fate: Fate = "either" if format_name == "mpegts" else "shown"
        yield HostileTar(f"mislabelled-{format_name}", "mislabelled", mislabel, fate)
    for number in range(10):
        part, format_name = random.random(), random.choice(("mp4", "matroska", "mpegts"))

        def cut(_: Outside, part: float = part, format_name: str = format_name) -> bytes:
            content = _remux(video("bad"), format_name)
            return around(sample("bad", content[: int(len(content) * part)]))

        # A packet stream does not record its length; a truncated mp4 has lost its index.
        fate = "named" if format_name == "mp4" else "changed"
        yield HostileTar(f"cut-{number}", "cut member", cut, fate)
    for number in range(16):
        places = [(random.random(), 1 << random.randrange(8)) for _ in range(random.choice((1, 3, 30)))]

        def flip(_: Outside, places: list[tuple[float, int]] = places) -> bytes:
            content = bytearray(video("bad"))
            for place, bit in places:
                content[int(place * len(content))] ^= bit
            return around(sample("bad", bytes(content)))

        yield HostileTar(f"flipped-{number}", "flipped member", flip, "changed")


def _descriptions() -> Iterator[HostileTar]:
    """Yield tars with malformed sample metadata."""
    ours = {"span_fingerprint": "x", "begin_s": [0, 1], "end_s": [2, 1]}
    caption = {"caption_id": 1, "text": "x", "begin_s": 0.0, "end_s": 2.0}
    jsons: dict[str, tuple[object, Fate]] = {
        "nested": (b"[" * 100_000, "named"),
        "nested-objects": (b'{"a":' * 100_000, "named"),
        "many": (b"[" + b"[]," * 2_000_000 + b"[]]", "named"),
        "large": (b'"' + b"x" * (9 << 20) + b'"', "named"),
        "digits": (b'{"caption": ' + b"9" * 10_000 + b"}", "named"),
        "utf16": ('{"caption": "x"}'.encode("utf-16"), "shown"),
        "bytes": (b"\xff\xfe\xfd", "named"),
        "captions": ({**ours, "captions": {"a": 1}}, "named"),
        "captions-number": ({**ours, "captions": 5}, "named"),
        "no-time": ({**ours, "begin_s": [0, 0], "captions": [caption]}, "named"),
        "infinite": ({**ours, "captions": [{**caption, "begin_s": float("inf")}]}, "named"),
        "nan": ({**ours, "captions": [{**caption, "begin_s": float("nan")}]}, "named"),
        "nan-end": ({**ours, "captions": [{**caption, "end_s": float("nan")}]}, "shown"),
        "huge": ({**ours, "end_s": [10**300, 1], "captions": [{**caption, "end_s": 1e300}]}, "shown"),
        "backwards": ({**ours, "captions": [{**caption, "begin_s": 2.0, "end_s": 0.0}]}, "named"),
        "id": ({**ours, "captions": [{**caption, "caption_id": "x"}]}, "named"),
        "surrogate": ({**ours, "captions": [{**caption, "text": "\ud800 x"}]}, "either"),
        "text-list": ({**ours, "captions": [{**caption, "text": [1, [2]]}]}, "shown"),
    }
    for name, (content, fate) in jsons.items():
        encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
        middle = member("bad.json", encoded)

        def describe(_: Outside, middle: bytes = middle) -> bytes:
            text = b"" if b"caption" in middle else member("bad.txt", b"x")
            return around(member("bad.mp4", video("bad")) + middle + text)

        yield HostileTar(f"json-{name}", "description", describe, fate)
    texts: dict[str, tuple[bytes, Fate]] = {
        "bytes": (b"\xff\0\x1b[2J", "shown"),
        "long": (b"word " * 1_000_000, "shown"),
        "too-long": (b"x" * (9 << 20), "named"),
    }
    for name, (text, fate) in texts.items():
        yield HostileTar(f"text-{name}", "description", _always(around(sample("bad", text=text))), fate)


def _structures(random: Random) -> Iterator[HostileTar]:
    """Yield tars whose headers contradict their content."""
    whole = around(sample("bad"))
    links = {"sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
    for name, kind in links.items():
        for target in ("/proc/self/environ", "canary"):

            def link(outside: Outside, kind: bytes = kind, target: str = target) -> bytes:
                info = tarfile.TarInfo("bad.mp4")
                info.type, info.linkname = kind, str(outside.canary) if target == "canary" else target
                return around(info.tobuf(tarfile.GNU_FORMAT) + member("bad.txt", b"x"))

            yield HostileTar(f"{name}link-{target.rpartition('/')[2]}", "link", link, "named")
    for name, kind in (("fifo", tarfile.FIFOTYPE), ("device", tarfile.CHRTYPE), ("folder", tarfile.DIRTYPE)):
        middle = header("bad.mp4", 0, kind=kind) + member("bad.txt", b"x")
        yield HostileTar(name, "link", _always(around(middle)), "named")
    middles: dict[str, tuple[bytes, Fate]] = {
        "sparse": (sparse("bad.mp4"), "named"),
        "pax-sparse": (pax_sparse("bad.mp4"), "named"),
        "claim": (header("bad.mp4", 1 << 40) + video("bad"), "broken"),
        "claim-exact": (header("bad.mp4", 1 << 33) + video("bad"), "broken"),
        "negative": (header("bad.mp4", -1), "broken"),
        "long-name": (header("x", 1 << 33, kind=tarfile.GNUTYPE_LONGNAME), "broken"),
        "pax": (header("x", 1 << 33, kind=tarfile.XHDTYPE), "broken"),
        "pax-global": (header("x", 1 << 33, kind=tarfile.XGLTYPE), "broken"),
        "pax-damaged": (header("x", 12, kind=tarfile.XHDTYPE) + b"99999 path=x".ljust(512, b"\0"), "broken"),
        "pax-endless": (header("x", 5, kind=tarfile.XHDTYPE) + b"0 a=b".ljust(512, b"\0"), "broken"),
        "pax-name": (pax_named("n" * 100_000 + ".mp4"), "absent"),
        "slashes": (pax_named("/" * 100_000 + "x.mp4"), "absent"),
        "twice": (member("bad.mp4", video("bad")) * 2 + member("bad.txt", b"x"), "named"),
        "members": (b"".join(member(f"bad.x{number}", b"") for number in range(3000)) + sample("bad"), "named"),
        "no-video": (member("bad.txt", b"x"), "named"),
        "no-caption": (member("bad.mp4", video("bad")), "named"),
        "meta": (member("__bad__/x.mp4", video("bad")), "absent"),
        "no-key": (member(".mp4", video("bad")) + member("noextension", b"x"), "absent"),
        "link-with-size": (header("bad.mp4", 1 << 40, kind=tarfile.SYMTYPE), "absent"),
        "unknown": (header("bad.mp4", 512, kind=b"Z") + bytes(512), "absent"),
        "no-header": (random.randbytes(512), "broken"),
        "end": (END, "absent"),
    }
    for name, (middle, fate) in middles.items():
        yield HostileTar(name, "header", _always(around(middle)), fate)
    for number in range(12):
        end = random.randrange(len(whole) - len(END) - 1)
        yield HostileTar(f"breaks-off-{number}", "cut tar", _always(whole[:end]), "broken")
    for number in range(16):
        place = _header_place(whole, random)

        def damage(_: Outside, place: int = place) -> bytes:
            content = bytearray(whole)
            content[place] ^= 1 << (place % 8)
            return bytes(content)

        yield HostileTar(f"header-{number}", "flipped tar", damage, "broken")
    yield HostileTar("garbage-behind", "header", _always(whole + random.randbytes(2000)), "shown")
    yield HostileTar("page", "no tar", _always(b"<html>404</html>" * 100), "broken")
    yield HostileTar("nothing", "no tar", _always(b""), "broken")


def _header_place(tar: bytes, random: Random) -> int:
    """Return the offset of a random header byte that is covered by the checksum."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        offset = random.choice([info.offset for info in opened])
    return offset + random.choice([*range(100), *range(124, 136), 156])


def _compress(random: Random) -> Iterator[HostileTar]:
    whole, zeros = around(sample("bad")), bytes(16 << 20)
    for name, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        packed = compress(whole)
        yield HostileTar(name, "compressed", _always(packed), "shown")
        end = random.randrange(100, len(packed) - 100)
        yield HostileTar(f"{name}-cut", "compressed", _always(packed[:end]), "broken")
        if name != "xz":

            def bomb(_: Outside, compress: Callable[[bytes], bytes] = compress) -> bytes:
                head = compress(sample("a") + header("bad.mp4", 40 * len(zeros)))
                return head + compress(zeros) * 40 + compress(sample("z") + END)

            yield HostileTar(f"{name}-bomb", "bomb", bomb, "broken")


def _always(content: bytes) -> Callable[[Outside], bytes]:
    """Return a function that ignores the outside resources and returns the bytes of a tar."""
    return lambda _: content


@cache
def _remux(content: bytes, format_name: str) -> bytes:
    """Remux the packets into another container."""
    target = io.BytesIO()
    with av.open(io.BytesIO(content), "r") as source, av.open(target, "w", format=format_name) as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    return target.getvalue()
