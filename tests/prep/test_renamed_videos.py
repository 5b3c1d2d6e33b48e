"""A renamed or moved video keeps what was made of its chunks, under its new name, with the bytes of a new run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from clipmill.prep.core.chunk_columns import Holders
from clipmill.shards.reader import Variant
from tests.prep.captions.server import Server, served
from tests.prep.latents.conftest import make as make_latents
from tests.prep.running import chunk, contents, manifest, prep_here
from tests.prep.sets import LEN, make_set

CROPS: dict[str, Any] = {"crop": "random", "posterior": "sample", "fps": "2", "segment": "1s"}
PROCESSES = ("--engine", "processes", "--workers", 1)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two videos, and `data` with captions, scores and latents of their chunks."""
    folder = tmp_path_factory.mktemp("named")
    data = make_set(folder)
    (folder / "videos" / "text.mp4").unlink()
    with served() as server:
        caption(data, server)
    prep_here("scores", "--data", data, *PROCESSES)
    make_latents(data, **CROPS)
    return folder


@pytest.fixture
def renamed(before: Path, tmp_path: Path) -> Path:
    """The folder after one video got another name and another split, and the other one another name."""
    folder = tmp_path / "named"
    shutil.copytree(before, folder)
    videos = folder / "videos"
    (videos / "moved").mkdir()
    (videos / "short.mp4").rename(videos / "moved" / "brief.mp4")
    (videos / "long.mp4").rename(videos / "aaa.mp4")
    captions = folder / "captions.csv"
    text = captions.read_text().replace("long,", "aaa,").replace("short,all,0,3,val", "moved/brief,all,0,3,train")
    captions.write_text(text)
    manifest(folder / "data", videos, "--captions", captions)
    assert chunk(folder / "data", *LEN)["num_encoded"] == 0
    return folder


def caption(data: Path, server: Server, *flags: object) -> dict[str, Any]:
    asked = ("--endpoint", server.address, "--model", "stub-vl", "--frames", 2, "--size", 64)
    return prep_here("captions", *asked, "--data", data, *PROCESSES, "--json", *flags).summary


def keys(data: Path, column: str) -> list[str]:
    return sorted(key for shard in Variant.open(data, column=column).shards() for key in shard.index["key"].to_pylist())


def shards(folder: Path) -> dict[str, str]:
    names = (".tar", ".index.arrow", ".idx", ".json", ".txt")
    return {name: one for name, one in contents(folder).items() if name.endswith(names)}


def test_captions_scores_and_latents_are_kept_with_the_bytes_of_a_new_run(renamed: Path, tmp_path: Path) -> None:
    data, new = renamed / "data", tmp_path / "new"
    shutil.copytree(data, new)
    for column in ("captions", "scores", "latents"):
        shutil.rmtree(new / column)
    with served() as server:
        kept = caption(data, server)
        assert not server.log, "every answer has been paid for"
        assert (kept["num_chunks"], kept["num_reused"]) == (5, 5)
        caption(new, server)
    for folder in (data, new):
        scored = prep_here("scores", "--data", folder, *PROCESSES, "--json").summary
        assert (scored["num_chunks"], scored["num_reused"]) == (5, 5 if folder == data else 0)
        encoded = make_latents(folder, **CROPS)
        assert (encoded.num_chunks, encoded.num_reused) == (5, 5 if folder == data else 0)
    for column in ("captions", "scores", "latents"):
        assert keys(data, column) == keys(data, "video") == keys(new, column)
        (variant,) = (data / column).glob("*-*")
        for folder in (data, new):
            prep_here("gc", "--data", folder)
        assert shards(variant) == shards(new / column / variant.name), column
    assert "OK" in prep_here("verify", "--deep", "--data", data).stdout


def test_answers_are_found_by_content_when_their_shard_was_never_made(renamed: Path) -> None:
    data = renamed / "data"
    (variant,) = (data / "captions").glob("stub-*")
    shutil.rmtree(variant / "commits")
    for name in ("contents.json", "commits.arrow"):
        (variant / name).unlink()
    with served() as server:
        assert caption(data, server)["num_chunks"] == 5 and not server.log
    key = keys(data, "captions")[0]
    shown = prep_here("inspect", key, "--column", "captions", "--data", data, "--json").summary
    assert shown["answered_by"] == "stub-vl" and shown["video_id"] == "aaa"


def test_holders_are_found_by_any_of_their_chunks() -> None:
    names = [f"{number:032x}" for number in range(6)]
    holders = Holders([(7, names[:2]), (2, [names[3].encode()]), (3, []), (9, [names[0], names[5]])])
    assert len(holders) == 5 and not Holders([])
    assert (holders.of(names), holders.of(names[:1]), holders.of(names[3:5]), holders.of([names[4]])) == (
        [2, 7, 9],
        [7, 9],
        [2],
        [],
    )
