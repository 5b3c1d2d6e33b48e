import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

from manifests.errors import UserError
from shards.reader import Variant
from tests.train import tiny_data
from tests.train.latents.written import Caption, Chunk, Written, write_all, write_latents
from train.data.batch import Batch
from train.data.latents.stream import LatentStream


def plain_tar(path: Path, arrays: dict[str, np.ndarray], *, extension: str = "latents.npy") -> Path:
    """A tar as any other tool would write it."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for key, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            for name, payload in ((f"{key}.json", b"{}"), (f"{key}.{extension}", content.getvalue())):
                info = tarfile.TarInfo(name)
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    return path


def random_arrays(num: int, *, num_frames: int = 6) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(2)
    return {f"k{number}": noise.standard_normal((num_frames, 2, 3, 3)).astype(np.float16) for number in range(num)}


def rows(batches: list[Batch], name: str) -> list[Any]:
    return [row for batch in batches for row in batch[name]]  # type: ignore[literal-required]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_together_give_every_segment_of_plain_tars_once(tmp_path: Path, num_ranks: int) -> None:
    arrays = random_arrays(5)
    plain_tar(tmp_path / "part-0.tar", dict(list(arrays.items())[:3]))
    plain_tar(tmp_path / "part-1.tar", dict(list(arrays.items())[3:]))
    pattern = f"{tmp_path}/part-{{0..1}}.tar"
    batches = [
        batch
        for rank in range(num_ranks)
        for batch in LatentStream([pattern], num_frames=2, batch=2, rank=rank, num_ranks=num_ranks)
    ]
    expected = [(key, array[begin : begin + 2]) for key, array in arrays.items() for begin in (0, 2, 4)]
    got = dict(
        zip(
            [int(place) for place in torch.cat([one["position"] for one in batches])],
            zip(rows(batches, "key"), rows(batches, "latents"), strict=True),
            strict=True,
        )
    )
    assert sorted(got) == list(range(len(expected)))
    for number, (key, array) in enumerate(expected):
        assert got[number][0] == key and np.array_equal(got[number][1], array)
    assert {batch["input"] for batch in batches} == {"latents"}


def test_our_own_tars_stream_too(written: Written) -> None:
    tars = [shard.tar_path for shard in Variant.open(written.data_dir, column="latents").shards()]
    stream = LatentStream(tars, num_frames=20)
    batches = list(stream)
    expected = [
        (key, bits[begin : begin + 20])
        for key, bits in written.latents.items()
        for begin in range(0, len(bits) - 19, 20)
    ]
    assert rows(batches, "key") == [key for key, _ in expected]
    for got, (_, wanted) in zip(rows(batches, "latents"), expected, strict=True):
        assert np.array_equal(got.view(torch.int16).numpy().view(np.uint16), wanted)
    assert stream.num_tails == 2


def test_bfloat16_comes_as_such(tmp_path: Path) -> None:
    written = write_all(tmp_path / "data", [[Chunk("a", 0, 20, dtype="bfloat16")]], [Caption("a", 0, 1, "a")])
    (batch,) = LatentStream(list(written.latents_dir.glob("*.tar")))
    assert batch["latents"].dtype == torch.bfloat16
    assert np.array_equal(batch["latents"][0].view(torch.int16).numpy().view(np.uint16), written.latents["a_000000000"])


def test_bad_tars_are_named(tmp_path: Path) -> None:
    good = plain_tar(tmp_path / "good.tar", random_arrays(2))
    with pytest.raises(UserError, match="no member npy"):
        list(LatentStream([good], extension="npy"))
    with pytest.raises(UserError, match=r"latents differ: k0 has float16 .* k1 has"):
        arrays = random_arrays(1) | {"k1": np.zeros((5, 2, 3, 3), np.float16)}
        list(LatentStream([plain_tar(tmp_path / "mixed.tar", arrays)]))
    with pytest.raises(UserError, match=r"k0 has float32 \[1, 2, 3, 4\]"):
        list(LatentStream([plain_tar(tmp_path / "float.tar", {"k0": np.zeros((1, 2, 3, 4), np.float32)})]))
    with pytest.raises(UserError, match=r"absent\.tar"):
        list(LatentStream([tmp_path / "absent.tar"]))
    os.truncate(good, 1300)
    with pytest.raises(UserError, match=r"good\.tar"):
        list(LatentStream([good]))


def test_a_member_that_needs_unpickling_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    objects = np.array([[[[Trap()]]]], dtype=object)
    with pytest.raises(UserError, match="allow_pickle"):
        list(LatentStream([plain_tar(tmp_path / "trap.tar", {"k0": objects})]))
    assert not (tmp_path / "sprung").exists()


def test_webdataset_zips_the_columns_by_key(tmp_path: Path) -> None:
    keys = ["a_000000000", "a_000002000", "b_000000000"]
    samples = [*tiny_data.chunks_of("a", 40), *tiny_data.chunks_of("b", 20)]
    tiny_data.write_captions(tmp_path, {"a": "train", "b": "train"}, [])
    tiny_data.write_shard(tmp_path, 0, samples, split="train")
    written = Written(tmp_path)
    write_latents(written, [[Chunk("a", 0, 8), Chunk("a", 2000, 8), Chunk("b", 0, 8)]])
    readers = [
        wds.WebDataset(str(Variant.open(tmp_path, column=column).shards()[0].tar_path), shardshuffle=False)
        for column in ("video", "latents")
    ]
    zipped = list(zip(*readers, strict=True))
    assert [video["__key__"] for video, _ in zipped] == [latents["__key__"] for _, latents in zipped] == keys
    for (video, latents), sample in zip(zipped, samples, strict=True):
        assert video["mp4"] == sample.members["mp4"]
        array = np.load(io.BytesIO(latents["latents.npy"]), allow_pickle=False)
        assert np.array_equal(array.view(np.uint16), written.latents[sample.key])
