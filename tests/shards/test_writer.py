import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import textwrap
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st

from clipmill.shards.commits import ShardFiles
from clipmill.shards.index import open_index
from clipmill.shards.npy import data_offset, npy_bytes
from clipmill.shards.reader import Variant
from clipmill.shards.writer import Sample, ShardWriter

WriteShard = Callable[..., ShardFiles]
MakeSamples = Callable[..., list[Sample]]
REPOSITORY = Path(__file__).parents[2]


def test_the_webdataset_library_reads_every_sample(
    tmp_path: Path, samples: MakeSamples, write_shard: WriteShard
) -> None:
    written = samples(12)
    files = write_shard(tmp_path, written)

    pipeline = wds.WebDataset(str(tmp_path / files.tar), shardshuffle=False, nodesplitter=wds.split_by_node)
    read = list(pipeline)

    assert [sample["__key__"] for sample in read] == [sample.key for sample in written]
    for sample_read, sample_written in zip(read, written, strict=True):
        assert {name: sample_read[name] for name in sample_written.members} == sample_written.members


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program here")
def test_gnu_tar_lists_and_compares_the_members(tmp_path: Path, samples: MakeSamples, write_shard: WriteShard) -> None:
    written = samples()
    files = write_shard(tmp_path / "variant", written)
    tar = str(tmp_path / "variant" / files.tar)

    listing = subprocess.run(["tar", "-tvf", tar], capture_output=True, text=True, check=True, env={"TZ": "UTC"})
    assert listing.stderr == ""
    names = [f"{sample.key}.{extension}" for sample in written for extension in sample.members]
    lines = [line.split() for line in listing.stdout.splitlines()]
    assert [line[-1] for line in lines] == names
    assert {(line[0], line[1], line[3]) for line in lines} == {("-rw-r--r--", "0/0", "1970-01-01")}

    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", tar, "-C", str(tmp_path / "out")], check=True)
    for sample in written:
        for extension, payload in sample.members.items():
            assert (tmp_path / "out" / f"{sample.key}.{extension}").read_bytes() == payload


def test_tars_are_plain_ustar(tmp_path: Path, samples: MakeSamples, write_shard: WriteShard) -> None:
    files = write_shard(tmp_path, samples(7))
    content = (tmp_path / files.tar).read_bytes()
    assert len(content) == files.tar_bytes
    assert len(content) % tarfile.RECORDSIZE == 0
    with tarfile.open(tmp_path / files.tar, "r:") as tar:
        for member in tar:
            header = content[member.offset : member.offset + 512]
            assert header[257:265] == b"ustar\x0000"
            assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
            assert member.offset_data == member.offset + 512


def test_equal_samples_give_equal_bytes(tmp_path: Path, samples: MakeSamples, write_shard: WriteShard) -> None:
    for name in ("one", "two"):
        write_shard(tmp_path / name, samples(200))
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["000000-00000000.index.arrow", "000000-00000000.tar", "000000-00000000.tar.idx"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_index_tells_where_each_payload_is(tmp_path: Path, samples: MakeSamples, write_shard: WriteShard) -> None:
    written = samples(70)
    files = write_shard(tmp_path, written)
    content = (tmp_path / files.tar).read_bytes()
    rows = open_index(tmp_path / files.index).to_pylist()
    assert len(rows) == files.num_samples == 70
    for row, sample in zip(rows, written, strict=True):
        assert row["key"] == sample.key
        assert {name: row[name] for name in sample.fields} == sample.fields
        for extension, payload in sample.members.items():
            offset, size = row[f"{extension}_offset"], row[f"{extension}_size"]
            assert content[offset : offset + size] == payload


def test_energon_offsets_are_those_that_its_own_indexer_finds(
    tmp_path: Path, samples: MakeSamples, write_shard: WriteShard
) -> None:
    files = write_shard(tmp_path, samples(9))
    expected = []
    last_key = None
    with tarfile.open(tmp_path / files.tar, "r:*") as tar:
        for member in tar:
            key = member.name.split(".", 1)[0]
            if key != last_key:
                expected.append(member.offset)
                last_key = key
        expected.append(tar.offset)
    offsets = (tmp_path / f"{files.tar}.idx").read_bytes()
    assert list(struct.unpack(f"<{len(offsets) // 8}Q", offsets)) == expected
    assert len(expected) == 9 + 1


def test_arrays_can_be_gathered_from_a_map_of_the_tar(
    tmp_path: Path, samples: MakeSamples, write_shard: WriteShard
) -> None:
    files = write_shard(tmp_path, samples(6))
    mapped = np.memmap(tmp_path / files.tar, dtype=np.uint8, mode="r")
    for number, row in enumerate(open_index(tmp_path / files.index).to_pylist()):
        offset, size = row["latents.npy_offset"], row["latents.npy_size"]
        begin = offset + data_offset(bytes(mapped[offset : offset + size]))
        assert begin % 512 == 0
        assert (mapped[begin : begin + 12].view(np.float16) == number).all()


BAD_SAMPLES = {
    "dot in the key": ("a.b_000000000", ("mp4", "json")),
    "slash in the key": ("a/b_000000000", ("mp4", "json")),
    "no key": ("", ("mp4", "json")),
    "name over 100 bytes": ("k" * 96, ("mp4", "json")),
    "a member is missing": ("a_000000000", ("mp4",)),
    "another order": ("a_000000000", ("json", "mp4")),
    "one too many": ("a_000000000", ("mp4", "json", "txt")),
    "twice the same key": ("first_000000000", ("mp4", "json")),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_a_sample_that_breaks_the_format_is_refused_and_the_shard_stays_whole(tmp_path: Path, case: str) -> None:
    key, extensions = BAD_SAMPLES[case]
    with ShardWriter(tmp_path, shard_id=0, extensions=["mp4", "json"], fields=[]) as writer:
        writer.add(Sample("first_000000000", {"mp4": b"1", "json": b"{}"}, {}))
        with pytest.raises(ValueError, match=r"key|member|name"):
            writer.add(Sample(key, dict.fromkeys(extensions, b"x"), {}))
        writer.add(Sample("second_000000000", {"mp4": b"2", "json": b"{}"}, {}))
        assert writer.publish("0" * 8).num_samples == 2


def test_fields_that_are_not_the_columns_are_refused(tmp_path: Path) -> None:
    fields = [pa.field("start_ms", pa.int64(), nullable=False)]
    with ShardWriter(tmp_path, shard_id=0, extensions=["mp4"], fields=fields) as writer:
        for wrong in ({}, {"start_ms": None}, {"start_ms": 1, "more": 2}):
            with pytest.raises(ValueError, match="start_ms"):
                writer.add(Sample("a_000000000", {"mp4": b""}, wrong))
        assert writer.num_samples == 0


def test_an_array_that_is_not_on_a_block_is_refused(tmp_path: Path) -> None:
    plain = b"\x93NUMPY\x01\x00\x76\x00" + b" " * 117 + b"\n"
    with ShardWriter(tmp_path, shard_id=0, extensions=["text.npy"], fields=[]) as writer:
        with pytest.raises(ValueError, match="512-byte boundary"):
            writer.add(Sample("video", {"text.npy": plain}, {}))
        writer.add(Sample("video", {"text.npy": npy_bytes(np.zeros((3, 4), np.float16))}, {}))


def test_an_empty_shard_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="no samples"),
        ShardWriter(tmp_path, shard_id=0, extensions=["mp4"], fields=[]) as writer,
    ):
        writer.publish("0" * 8)
    assert list(tmp_path.iterdir()) == []


def test_a_block_left_without_publish_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, shard_id=0, extensions=["mp4"], fields=[]) as writer:
        writer.add(Sample("a_000000000", {"mp4": b"1"}, {}))
    with (
        pytest.raises(RuntimeError),
        ShardWriter(tmp_path, shard_id=0, extensions=["mp4"], fields=[]) as writer,
    ):
        writer.add(Sample("a_000000000", {"mp4": b"1"}, {}))
        raise RuntimeError("the encoder died")
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_change_before_they_are_read_again_stop_the_shard(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="a_000000000") as raised,
        ShardWriter(tmp_path, shard_id=0, extensions=["mp4"], fields=[]) as writer,
    ):
        # More than the write buffer holds, so that the file already contains the first bytes.
        writer.add(Sample("a_000000000", {"mp4": bytes(3 << 20)}, {}))
        (temporary,) = tmp_path.iterdir()
        with temporary.open("r+b") as file:
            file.seek(600)
            file.write(b"!")
        writer.publish("0" * 8)
    assert raised.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    payload = bytes(1 << 20)
    tracemalloc.start()
    try:
        with ShardWriter(tmp_path, shard_id=0, extensions=["mp4"], fields=[]) as writer:
            for number in range(64):
                writer.add(Sample(f"a_{number:09d}", {"mp4": payload}, {}))
            assert writer.publish("0" * 8).tar_bytes > 64 << 20
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


WRITE_FOR_EVER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from clipmill.shards.writer import Sample, ShardWriter

    with ShardWriter(Path(sys.argv[1]), shard_id=0, extensions=["mp4"], fields=[]) as writer:
        while True:
            writer.add(Sample(f"a_{writer.num_samples:09d}", {"mp4": bytes(1 << 20)}, {}))
            if writer.num_samples == 5:
                print("writing", flush=True)
                sys.stdin.read(1)
    """
)


def test_a_killed_writer_leaves_no_shard(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 1
    assert names[0].startswith(".tmp-")
    assert Variant(tmp_path).shards() == []


# The process itself lowers the limit. With SIGXFSZ ignored, a write beyond the limit fails as on a full disk.
WRITE_UP_TO_A_LIMIT = textwrap.dedent(
    """
    import os, resource, signal, sys
    from pathlib import Path
    from clipmill.shards.writer import Sample, ShardWriter

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    payload_bytes, num_samples = int(sys.argv[3]), int(sys.argv[4])
    try:
        with ShardWriter(Path(sys.argv[1]), shard_id=0, extensions=["mp4"], fields=[]) as writer:
            for number in range(num_samples):
                writer.add(Sample(f"a_{number:09d}", {"mp4": bytes(payload_bytes)}, {}))
            writer.publish("0" * 8)
    except OSError as error:
        print(error.errno, os.listdir(sys.argv[1]))
    """
)


@pytest.mark.parametrize(
    ("limit_bytes", "payload_bytes", "num_samples"),
    [
        pytest.param(2 << 20, 100_000, 100, id="while samples are added"),
        pytest.param(2 << 20, 100_000, 21, id="when the tar is closed"),
    ],
)
def test_a_write_that_the_system_refuses_leaves_nothing(
    tmp_path: Path, limit_bytes: int, payload_bytes: int, num_samples: int
) -> None:
    arguments = [str(tmp_path), str(limit_bytes), str(payload_bytes), str(num_samples)]
    done = subprocess.run(
        [sys.executable, "-c", WRITE_UP_TO_A_LIMIT, *arguments], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{errno.EFBIG} []\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("payload_bytes", "num_samples"),
    [
        pytest.param(10_000, 100, id="in the tar"),
        # The tar takes 200 of the 256 KiB; the index of 380 rows does not fit in the rest.
        pytest.param(0, 380, id="in the index"),
    ],
)
def test_a_full_disk_leaves_nothing(small_disk: Path, payload_bytes: int, num_samples: int) -> None:
    fields = [pa.field("extradata", pa.binary())]
    with (
        pytest.raises(OSError, match="No space left") as raised,
        ShardWriter(small_disk, shard_id=0, extensions=["mp4"], fields=fields) as writer,
    ):
        for number in range(num_samples):
            writer.add(Sample(f"a_{number:09d}", {"mp4": bytes(payload_bytes)}, {"extradata": bytes(500)}))
        writer.publish("0" * 8)
    assert raised.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []


KEYS = st.text(alphabet="abcXYZ019_-", min_size=1, max_size=74)
PAYLOADS = st.lists(st.binary(max_size=1100), min_size=2, max_size=2)


@settings(max_examples=40, deadline=None)
@given(content=st.dictionaries(KEYS, PAYLOADS, min_size=1, max_size=6))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, content: dict[str, list[bytes]]) -> None:
    directory = tmp_path_factory.mktemp("variant")
    with ShardWriter(directory, shard_id=3, extensions=["mp4", "a.txt"], fields=[]) as writer:
        for key, (video, text) in content.items():
            writer.add(Sample(key, {"mp4": video, "a.txt": text}, {}))
        files = writer.publish("f" * 64)
    with tarfile.open(directory / files.tar, "r:") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    expected = {
        f"{key}.{ext}": data for key, pair in content.items() for ext, data in zip(("mp4", "a.txt"), pair, strict=True)
    }
    assert list(members.items()) == list(expected.items())
