"""Malicious tars in a stream: they cannot make the reader open anything else, and memory use stays bounded."""

import bz2
import gzip
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from clipmill.manifests.errors import UserError
from clipmill.train.data.tar_members import MAX_HEADER_BYTES
from clipmill.train.data.tar_samples import MAX_TEXT_BYTES, expand
from tests.train.data.test_streams import SIZE_PX, open_stream
from tests.train.tiny_data import encode_chunk

LARGE_BYTES = 3 << 30


class Listener:
    """Server that counts the connections it receives."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.num_connections = 0
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        try:
            while True:
                connection, _ = self._socket.accept()
                self.num_connections += 1
                connection.close()
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def playlists(local: Path, port: int) -> dict[str, bytes]:
    """Return files that are not videos but make libav open other files or URLs."""
    address = f"http://127.0.0.1:{port}/x"
    dash = (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'mediaPresentationDuration="PT1S">'
        '<Period><AdaptationSet mimeType="video/mp4"><Representation id="0" bandwidth="1">'
        "<BaseURL>{}</BaseURL><SegmentList><SegmentURL media='{}'/></SegmentList>"
        "</Representation></AdaptationSet></Period></MPD>"
    )
    hls = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{}\n#EXT-X-ENDLIST\n"
    sdp = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    sdp += "m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
    return {
        "concat": f"ffconcat version 1.0\nfile '{local}'\n".encode(),
        "concat_address": f"ffconcat version 1.0\nfile '{address}.mp4'\n".encode(),
        "hls": hls.format(local).encode(),
        "hls_address": hls.format(f"{address}.ts").encode(),
        "dash": dash.format(f"file://{local.parent}/", local.name).encode(),
        "dash_address": dash.format(address, address).encode(),
        "sdp": sdp.encode(),
        "rtsp": f"rtsp://127.0.0.1:{port}/x".encode(),
    }


def test_playlists_among_the_videos_open_nothing(tmp_path: Path, listener: Listener) -> None:
    good = encode_chunk(0, 20, size_px=SIZE_PX)
    local = tmp_path / "local.mp4"
    local.write_bytes(encode_chunk(500, 20, size_px=SIZE_PX))
    hostile = playlists(local, listener.port)
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        for key, content in hostile.items():
            writer.write({"__key__": key, "mp4": content, "txt": "x"})
        writer.write({"__key__": "good", "mp4": good, "txt": "x"})
    batches = list(open_stream(tmp_path / "0.tar").evaluation_batches())
    failed = {failure.key: failure.reason for loaded in batches for failure in loaded.failed}
    assert failed == dict.fromkeys(hostile, "undecodable")
    assert [key for loaded in batches if loaded.batch for key in loaded.batch["key"]] == ["good"]
    assert listener.num_connections == 0


def test_a_committed_chunk_that_is_a_playlist_opens_nothing(tmp_path: Path) -> None:
    from clipmill.train.data.decoders import PlainVideo

    local = tmp_path / "local.mp4"
    local.write_bytes(encode_chunk(0, 20, size_px=SIZE_PX))
    with pytest.raises(ValueError, match="Invalid argument"):
        PlainVideo(f"ffconcat version 1.0\nfile '{local}'\n".encode())


def header(name: str, size_bytes: int, *, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size_bytes, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def member(name: str, content: bytes) -> bytes:
    return header(name, len(content)) + content + bytes(-len(content) % 512)


def sparse(name: str) -> bytes:
    """Return a member in the old GNU sparse format: 512 bytes that represent one terabyte, with a second header."""
    block = bytearray(header(name, 512, kind=tarfile.GNUTYPE_SPARSE))
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[482] = 1
    block[483:495] = (1 << 40).to_bytes(12, "big")
    block[483] |= 0x80
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(512) + bytes(512)


def pax_sparse(name: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo(name)
        info.size = 512
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
        tar.addfile(info, io.BytesIO(b"1\n0\n512\n".ljust(512, b"\0")))
        end = tar.offset
    return content.getvalue()[:end]


FIRST = member("a.mp4", b"a") + member("a.txt", b"a")
LAST = member("z.mp4", b"z") + member("z.txt", b"z")
END = bytes(1024)
_ZEROS = bytes(16 << 20)


def write_zeros(path: Path, name: str, *, kind: bytes = tarfile.REGTYPE) -> None:
    """Write a tar that contains a member, or a header, of 3 GB of zeros.

    The zeros are a hole in the file, so they take no disk space.
    """
    with path.open("wb") as file:
        file.write(FIRST + header(name, LARGE_BYTES, kind=kind))
        file.seek(LARGE_BYTES, os.SEEK_CUR)
        file.write(member("b.mp4", b"b") + LAST + END)


def write_packed(path: Path, compress: Callable[[bytes], bytes]) -> None:
    """Write a compressed tar of a few MB with three members of 0.8 GB."""
    bomb = compress(_ZEROS) * 48
    members = [compress(header(f"bomb{number}.mp4", 48 * len(_ZEROS))) + bomb for number in range(3)]
    path.write_bytes(compress(FIRST) + b"".join(members) + compress(LAST + END))


BOMBS: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    # Each row is a function that writes the tar, the expected message, and whether the rest of the tar is read.
    "gzip": (lambda path: write_packed(path, gzip.compress), "expands to more than 64 times its size", False),
    "bzip2": (lambda path: write_packed(path, bz2.compress), "expands to more than 64 times its size", False),
    "sparse": (lambda path: path.write_bytes(FIRST + sparse("bomb.mp4") + LAST + END), "is a sparse file", True),
    "pax_sparse": (lambda path: path.write_bytes(FIRST + pax_sparse("bomb.mp4") + LAST + END), "a sparse file", True),
    "member": (lambda path: write_zeros(path, "bomb.mp4"), "more than the limit of 1,073,741,824", True),
    "json": (lambda path: write_zeros(path, "bomb.json"), f"more than the limit of {MAX_TEXT_BYTES:,}", True),
    "long_name": (
        lambda path: write_zeros(path, "x", kind=tarfile.GNUTYPE_LONGNAME),
        f"a header declares 3,221,225,472 bytes, more than {MAX_HEADER_BYTES:,}",
        False,
    ),
    "pax": (lambda path: write_zeros(path, "x", kind=tarfile.XHDTYPE), "a header declares 3,221,225,472 bytes", False),
    "links": (
        lambda path: path.write_bytes(FIRST + header("bomb.mp4", 1 << 40, kind=tarfile.SYMTYPE) + LAST + END),
        "",
        True,
    ),
    "members": (
        lambda path: path.write_bytes(FIRST + b"".join(member(f"k.{n}", b"") for n in range(5000)) + LAST + END),
        "one of more than 1,000 members of its sample",
        True,
    ),
    "claim": (lambda path: path.write_bytes(FIRST + header("bomb.mp4", 1 << 33) + LAST + END), "was cut short", False),
    "negative": (lambda path: path.write_bytes(FIRST + header("bomb.mp4", -512) + LAST + END), "negative size", False),
    "pax_negative": (
        # The PAX header starts 1,536 bytes before the payload.
        lambda path: path.write_bytes(FIRST + pax(b"14 size=-1536\n") + header("bomb.mp4", 0) + LAST + END),
        "negative size",
        False,
    ),
    "pax_without_length": (
        lambda path: path.write_bytes(FIRST + pax(b"x" * 40) + member("bomb.mp4", b"") + LAST + END),
        "a PAX header is damaged",
        False,
    ),
    "name": (
        lambda path: path.write_bytes(FIRST + pax_named("n" * 100_000 + ".mp4") + LAST + END),
        "has a name of 100,004 characters",
        True,
    ),
}


def pax(payload: bytes) -> bytes:
    return header("x", len(payload), kind=tarfile.XHDTYPE) + payload.ljust(512, b"\0")


def pax_named(name: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(name))
        end = tar.offset
    return content.getvalue()[:end]


READ = """
import json, resource, sys
from pathlib import Path
from clipmill.train.data.tar_samples import items_in
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for tar in sys.argv[1:]:
    found = [(item.key, getattr(item, "detail", "")) for item in items_in([tar], cache=None)]
    print(json.dumps([tar, found]), flush=True)
[peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
print(json.dumps(["peak_mb", int(peak.split()[1]) / 1024]))
"""


def test_memory_stays_bounded_whatever_a_tar_claims(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.tar" for name in BOMBS}
    for name, path in paths.items():
        BOMBS[name][0](path)
    words = [sys.executable, "-c", READ, *map(str, paths.values())]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    results = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert results.pop("peak_mb") < 400
    for name, path in paths.items():
        _, message, goes_on = BOMBS[name]
        good = [key for key, detail in results[str(path)] if not detail]
        # If a tar ends between two members, it is unknown whether the previous sample is complete.
        assert good == ["a", "z"] if goes_on else good in (["a"], []), (name, results[str(path)])
        problems = [detail for _, detail in results[str(path)] if detail]
        assert (message in problems[0]) if message else not problems, (name, problems)


def test_compressed_tars_are_read_like_others(tmp_path: Path) -> None:
    good = encode_chunk(0, 20, size_px=SIZE_PX)
    modes: dict[str, Any] = {ending: f"w:{ending}" for ending in ("", "gz", "bz2", "xz")}
    for ending, mode in modes.items():
        with tarfile.open(tmp_path / f"0{ending}.tar", mode) as tar:
            for name, content in (("k.mp4", good), ("k.txt", b"x")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        [loaded] = open_stream(tmp_path / f"0{ending}.tar").evaluation_batches()
        assert loaded.batch["key"] == ["k"] and not loaded.failed


def test_names_cannot_act_on_a_terminal_or_leave_the_tar(tmp_path: Path) -> None:
    good = encode_chunk(0, 20, size_px=SIZE_PX)
    keys = ["../../up", "/abs", "esc\x1b[31m", "\udcff", "./here"]
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for key in keys:
            for name, content in ((f"{key}.mp4", good), (f"{key}.txt", b"x")):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    before = set(tmp_path.parent.rglob("*"))
    batches = list(open_stream(tmp_path / "0.tar").evaluation_batches())
    seen = [key for loaded in batches for key in loaded.batch["key"]]
    assert seen == ["../../up", "/abs", "esc\\x1b[31m", "\\udcff", "./here"]
    assert set(tmp_path.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("x/" + "{a,b}" * 20 + ".tar", "names 1,048,576 tars"),
        ("x/" + "{0..9}" * 7 + ".tar", "names 10,000,000 tars"),
        ("x/{a,{b,c}{d,e}}{00..99}{00..99}{00..99}.tar", "names 5,000,000 tars"),
        ("x/" + "{a..z}" * 4 + ".tar", "names 7,311,616 tars"),
        ("x/" + "{0..9}" * 400 + ".tar", "names very many tars"),
        ("x/" + "{" * 2000 + "a,b" + "}" * 2000 + ".tar", "deep"),
        ("x/{${NO_SUCH_NAME}}.tar", "missing environment variable"),
        ("x/{0..9999999999999999999999}.tar", "names very many tars"),
        ("x/{0..-9999999..-3}.tar", "names 3,333,334 tars"),
        ("x/}{.tar", "is not a pattern"),
    ],
)
def test_patterns_are_counted_before_they_are_expanded(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand(pattern)


def test_patterns_within_the_limit_name_what_they_named(tmp_path: Path) -> None:
    for name in ("a0.tar", "a1.tar", "b0.tar", "b1.tar", "c.tar"):
        (tmp_path / name).touch()
    paths = expand(f"{tmp_path}/{{a,b}}{{0..1}}.tar::{tmp_path}/c.tar")
    assert [Path(tar).name for tar in paths] == ["a0.tar", "a1.tar", "b0.tar", "b1.tar", "c.tar"]


def test_a_codec_that_nobody_knows_is_a_named_failure(tmp_path: Path) -> None:
    good = encode_chunk(0, 20, size_px=SIZE_PX)
    assert good.count(b"avc1") >= 1
    unknown = good.replace(b"avc1", b"zzz1").replace(b"avcC", b"zzzC")
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        for key, content in (("unknown", unknown), ("good", good)):
            writer.write({"__key__": key, "mp4": content, "txt": "x"})
    [loaded] = open_stream(tmp_path / "0.tar").evaluation_batches()
    assert loaded.batch["key"] == ["good"]
    [failed] = loaded.failed
    assert (failed.key, failed.reason) == ("unknown", "undecodable") and "no decoder" in failed.detail
